"""The rules of [run] exact: what may run with it, and what may not change when a run resumes.

    record.py     the digests of each step, which the run writes down
    recorded.py   the digests that a run has written down, compared with those of `dtmega replay`

Every combination is refused unless a list below allows it: the lists hold what benchmarks/exact.py has proved to the
bit. `fsdp/exact.py` adds the gradients, `ops/fixed_point.py` does the arithmetic.
"""

from __future__ import annotations

import math
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from dtmega import config, families
from dtmega.fsdp.exact import ExactSums, Groups, StageSums
from dtmega.mesh import World
from dtmega.models.model import Model
from dtmega.ops import fixed_point
from dtmega.ops.fixed_point import ExactState
from dtmega.ops.shards import local

DEVICES = ("cpu",)
OPTIMIZERS = ("adamw", "adam", "sgd", "muon")
OBJECTIVES = ("auto", "conversations")
MACHINE = ("torch's version", "the kind of processor")
_told: list[Callable[[str], object]] = []  # by `another_machine_allowed`


def check(cfg: config.Config, sizes: Mapping[str, int], device: torch.device) -> None:
    """Refuse what is not proved to keep every bit on all layouts.

    Args:
        cfg: the run's configuration.
        sizes: resolved size of each mesh axis.
        device: device that the rank computes on.

    Raises:
        ValueError: the configuration asks for [run] exact together with something outside the lists.
    """
    if not cfg.run.exact:
        return
    # Each row: the value that is asked for, the values that are allowed, the key, and the reason.
    rows: list[tuple[Any, tuple[Any, ...], str, str]] = [
        (cfg.model.name, proved("eager"), "[model] name", "other families are not proved"),
        (device.type, DEVICES, "[run] device", "no kernel of another device is proved to repeat its bits"),
        (cfg.optim.name, OPTIMIZERS, "[optim] name", "no other update is proved"),
        (cfg.data.objective, OBJECTIVES, "[data] objective", "other objectives are not proved"),
        (cfg.precision.reduce, ("float32",), "[precision] reduce", "gradients are added as integers"),
        (cfg.lora.rank, (0,), "[lora] rank", "gradients of adapters are not proved"),
        (cfg.train.freeze, ([],), "[train] freeze", "a backward that leaves out weights is not proved"),
        (cfg.mesh.ep, (1,), "[mesh] ep", "an expert would add tokens of several ranks in floating point"),
        (cfg.fsdp.cpu_offload, (False,), "[fsdp] cpu_offload", "offloaded shards are not proved"),
    ]
    if sizes["tp"] > 1 and sizes["pp"] > 1:
        why = "each stage gathers what an encoder hands on, and sums its gradient over tp, by itself"
        rows.append((cfg.model.name, proved("tp with pp"), "[model] name for [mesh] tp > 1 with pp > 1", why))
    compiled = proved("compiled")
    if cfg.model.name not in compiled:
        rows.append((cfg.compile.enable, (False, "auto"), "[compile] enable", f"proved for {', '.join(compiled)} only"))
    if getattr(cfg.model, "qk_norm", False) or getattr(cfg.model, "window", 0):
        why = "not proved with norms of heads or with windows"
        rows.append((cfg.compile.enable, (False, "auto"), "[compile] enable", why))
    for asked, allowed, key, why in rows:
        if asked not in allowed:
            expected = ", ".join(map(repr, allowed))
            raise ValueError(f"[run] exact needs {key} in ({expected}), got {asked!r}: {why} ({key}, [run] exact)")


def proved(way: str) -> tuple[Any, ...]:
    """Names of the families that keep every bit in this way of running, one of the words of `Family.exact`."""
    return tuple(name for name, family in families.FAMILIES.items() if way in family.exact)


def sums(world: World, whole: Model, stages: Mapping[int, Model], partial: Mapping[int, Sequence[str]]) -> ExactSums:
    """Make the integer sums of this rank's stages.

    Args:
        world: the processes and the mesh.
        whole: the whole model.
        stages: this rank's stages, by number.
        partial: names of the parameters whose gradients must be summed over tp, by stage.
    """
    sizes = {whole.full_name(name): parameter.numel() for name, parameter in whole.named_parameters()}
    n_readers = len(whole.blocks()) if whole.read_by_layers else 1
    n_places = max([n_readers, *(len(names) for names in whole.ties)])
    everyone = dist.group.WORLD
    assert everyone is not None
    groups = Groups(everyone, world.groups["fsdp"], world.groups["dp_replicate"], world.groups["tp"])
    n_parts = n_places * world.sizes["tp"] * world.sizes["cp"]
    # The digests of the tp and cp ranks differ also where their gradients are equal.
    share = f"tp {world.coordinate('tp')}, cp {world.coordinate('cp')}"
    found = ExactSums(sizes, n_parts, groups, world.device, share)
    for number, stage in stages.items():
        stage.layers_apart = True
        further = stage.ties, stage.read_by_layers
        found.of_stage[number] = StageSums(stage, stage.full_name, *further, partial[number], found)
    return found


def squared_norm(sums: ExactSums, counted: Mapping[str, nn.Parameter], group: dist.ProcessGroup) -> float:
    """The square of the gradient's norm; infinity if the step has no gradient, because it failed.

    Args:
        sums: the sums of the step.
        counted: this rank's part of the parameters, by name. Each element is on one rank of the group only.
        group: the ranks that hold the model once.
    """
    if not sums.succeeded:
        return math.inf
    parts = {name: local(p.grad) for name, p in counted.items() if p.grad is not None}
    return fixed_point.squared_norm(parts, sums.sizes, group)


def weights_norm(sums: ExactSums, counted: Mapping[str, nn.Parameter], group: dist.ProcessGroup) -> float:
    """The norm of all weights; the arguments are those of `squared_norm`."""
    parts = {name: local(parameter.detach()) for name, parameter in counted.items()}
    return math.sqrt(fixed_point.squared_norm(parts, sums.sizes, group))


def grid_overflow(step: int, names: Sequence[str]) -> str:
    """The line about a step that is skipped because gradients exceeded their grid.

    Args:
        step: number of the step.
        names: names of the tensors.
    """
    others = f" and of {len(names) - 1} more tensors" if len(names) > 1 else ""
    return (
        f"step {step}: a gradient of {names[0]}{others} is over 1,000 times the last step's largest, so the step is "
        f"skipped and the grid made coarser ([run] exact)"
    )


def fixed(cfg: config.Config, sizes: Mapping[str, int], device: torch.device, compiled: bool) -> dict[str, Any]:
    """The settings that decide the bits of one microbatch, and therefore may not change within a run.

    Args:
        cfg: the run's configuration, with all open values filled in.
        sizes: resolved size of each mesh axis.
        device: device that the rank computes on.
        compiled: whether blocks are compiled.
    """
    return {
        "[batch] micro_batch_size": cfg.batch.micro_batch_size,
        "[precision] params": cfg.precision.params,
        "[mesh] tp": sizes["tp"],
        "[mesh] cp": sizes["cp"],
        "[mesh] cp_form = 'heads'": sizes["cp"] > 1 and families.of(cfg.model).attends_by_heads(cfg, sizes),
        "[mesh] sequence_parallel": sizes["tp"] > 1 and cfg.mesh.sequence_parallel,
        "[compile] enable": compiled,
        "[recompute] mode": cfg.recompute.mode,
        "[recompute] method": cfg.recompute.method,
        "[recompute] layers": cfg.recompute.layers,
        "torch's version": torch.__version__,
        "the kind of processor": kind_of_processor(device),
    }


def check_fixed(was: ExactState | None, now: Mapping[str, Any]) -> None:
    """Refuse to go on with other bits than those that the run began with.

    Args:
        was: state that the checkpoint stores; None for a new run.
        now: settings of this start, from `fixed`.

    Raises:
        ValueError: a value differs.
    """
    if was is None:
        return
    changed: list[str] = []
    for key, value in now.items():
        before = was.fixed.get(key)
        if before == value:
            continue
        change = f"{key} was {before!r}, is {value!r}"
        if key in MACHINE and _told:
            _told[-1](change)
        else:
            changed.append(change)
    if changed:
        raise ValueError(
            f"the bits of this run would change: {'; '.join(changed)} ([run] exact; to start anew: another [run] dir)"
        )


@contextmanager
def another_machine_allowed(tell: Callable[[str], object]) -> Iterator[None]:
    """Inside the `with` block, allow another version of torch or kind of processor than the run began with.

    Args:
        tell: function that gets each such change in words.
    """
    _told.append(tell)
    try:
        yield
    finally:
        _told.pop()


def kind_of_processor(device: torch.device) -> str:
    """The name of the GPU, or the name of the CPU with the instructions that torch uses on it."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    name = platform.machine()
    info = Path("/proc/cpuinfo")
    for line in info.read_text().splitlines() if info.exists() else ():
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            name = value.strip()
            break
    return f"{name}, {torch.backends.cpu.get_cpu_capability()}"


def begin(
    sums: ExactSums | None,
    cfg: config.Config,
    sizes: Mapping[str, int],
    device: torch.device,
    compiled: bool,
    was: ExactState | None,
) -> None:
    """Record what may not change in a new run, or go on with the grids of a resumed one. Without [run] exact: nothing.

    Args:
        sums: the run's sums; None without [run] exact.
        cfg: the run's configuration, with all open values filled in.
        sizes: resolved size of each mesh axis.
        device: device that the rank computes on.
        compiled: whether blocks are compiled.
        was: state that the checkpoint stores; None for a new run.

    Raises:
        ValueError: the run began with other bits.
    """
    if sums is None:
        return
    now = fixed(cfg, sizes, device, compiled)
    check_fixed(was, now)
    sums.state = ExactState(dict(was.maxima) if was else {}, now)


def prepare(cfg: config.Config) -> None:
    """Give this process one thread: how many threads share a product changes its bits."""
    if cfg.run.exact:
        torch.set_num_threads(1)
