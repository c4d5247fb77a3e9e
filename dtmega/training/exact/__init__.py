"""The rules of [run] exact: the settings that it supports, and the settings that must not change when a run resumes.

    machine.py    describes what decides the bits of a product on this machine
    record.py     writes the digests of each step
    recorded.py   reads the digests of a run, and compares them with the digests of `dtmega replay`

Every setting is refused unless a list below allows it. The lists contain the settings that benchmarks/exact.py has
proved to give identical bits on all layouts. `fsdp/exact.py` adds up the gradients, and `ops/fixed_point.py` does the
arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from dtmega import config, families
from dtmega.checkpoint.state import ExactState
from dtmega.fsdp.exact import ExactSums, Groups, StageSums
from dtmega.mesh import World
from dtmega.models.model import Model

DEVICES = ("cpu",)
OPTIMIZERS = ("adamw", "adam", "sgd", "muon")
OBJECTIVES = ("auto", "conversations")
_told: list[Callable[[str], object]] = []  # functions that `another_machine_allowed` has registered


def check(cfg: config.Config, sizes: Mapping[str, int], device: torch.device) -> None:
    """Refuse settings that are not proved to give identical bits on all layouts.

    Args:
        cfg: configuration of a run with [run] exact.
        sizes: resolved size of each mesh axis.
        device: device on which the rank computes.

    Raises:
        ValueError: the configuration combines [run] exact with a setting that is not proved.
    """
    # Each row: the configured value, the allowed values, the key, and the reason.
    rows: list[tuple[Any, tuple[Any, ...], str, str]] = [
        (cfg.model.name, proved(cfg, "eager"), "[model] name", "other families are not proved"),
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
        rows.append((cfg.model.name, proved(cfg, "tp with pp"), "[model] name for [mesh] tp > 1 with pp > 1", why))
    compiled = proved(cfg, "compiled")
    if cfg.model.name not in compiled:
        rows.append((cfg.compile.enable, (False, "auto"), "[compile] enable", f"proved for {', '.join(compiled)} only"))
    if getattr(cfg.model, "qk_norm", False) or getattr(cfg.model, "window", 0):
        why = "not proved with norms of heads or with windows"
        rows.append((cfg.compile.enable, (False, "auto"), "[compile] enable", why))
    latent = getattr(cfg.model, "kv_latent_size", 0)
    rows.append((latent, (0,), "[model] kv_latent_size", "latent attention is not proved"))
    for asked, allowed, key, why in rows:
        if asked not in allowed:
            expected = ", ".join(map(repr, allowed))
            raise ValueError(f"[run] exact needs {key} in ({expected}), got {asked!r}: {why} ({key}, [run] exact)")


def proved(cfg: config.Config, way: str) -> tuple[str, ...]:
    """The names of the model families that provably give identical bits when run in the given way (`Family.exact`).

    If the run's family is one of them, it is the only one in the result, and no other family is opened.
    """
    if way in families.of(cfg.model).exact:
        return (cfg.model.name,)
    return tuple(name for name in families.names() if way in families.named(name).exact)


def sums(world: World, whole: Model, stages: Mapping[int, Model], partial: Mapping[int, Sequence[str]]) -> ExactSums:
    """Make the object that adds up the gradients of this rank's stages as fixed-point integers.

    Args:
        world: processes and mesh of the run.
        whole: whole model.
        stages: stage number -> stage, for each of this rank's stages.
        partial: stage number -> names of the parameters whose gradients must be all-reduced over tp.
    """
    sizes = {whole.full_name(name): parameter.numel() for name, parameter in whole.named_parameters()}
    n_readers = len(whole.blocks()) if whole.read_by_layers else 1
    n_places = max([n_readers, *(len(names) for names in whole.ties)])
    everyone = dist.group.WORLD
    assert everyone is not None
    groups = Groups(everyone, world.groups["fsdp"], world.groups["dp_replicate"], world.groups["tp"])
    n_parts = n_places * world.sizes["tp"] * world.sizes["cp"]
    # `share` is hashed too, so that the digests of tp and cp ranks differ even if the ranks' gradients are equal.
    share = f"tp {world.coordinate('tp')}, cp {world.coordinate('cp')}"
    found = ExactSums(sizes, n_parts, groups, world.device, share)
    for number, stage in stages.items():
        stage.layers_apart = True
        further = stage.ties, stage.read_by_layers
        found.of_stage[number] = StageSums(stage, stage.full_name, *further, partial[number], found)
    return found


def grid_overflow(step: int, names: Sequence[str]) -> str:
    """A line for the user about a step that is skipped because gradients were too large for their fixed-point format.

    Args:
        step: number of the step.
        names: names of the parameters with such gradients.
    """
    others = f" and of {len(names) - 1} more tensors" if len(names) > 1 else ""
    return (
        f"step {step}: a gradient of {names[0]}{others} is over 1,000 times the last step's largest, so the step is "
        f"skipped and the grid made coarser ([run] exact)"
    )


def fixed(cfg: config.Config, sizes: Mapping[str, int], machine: Mapping[str, Any], compiled: bool) -> dict[str, Any]:
    """The settings that determine the bits of one microbatch, and therefore must not change within a run.

    Args:
        cfg: configuration of the run, with all open values filled in.
        sizes: resolved size of each mesh axis.
        machine: description of this machine, from `machine.prepare`.
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
        **machine,
    }


def check_fixed(was: ExactState | None, now: Mapping[str, Any]) -> None:
    """Refuse settings that would change the bits of a resumed run. `not_recorded` names those that cannot be compared.

    Args:
        was: state that the checkpoint stores; None for a new run.
        now: settings of this start, from `fixed`.

    Raises:
        ValueError: a setting differs from the checkpoint's setting.
    """
    if was is None:
        return
    changed: list[str] = []
    for key, value in now.items():
        if was.fixed.get(key, value) == value:
            continue
        change = f"{key} was {was.fixed[key]!r}, is {value!r}"
        # Only the names of configuration keys begin with a bracket; the others describe the machine.
        if _told and not key.startswith("["):
            _told[-1](change)
        else:
            changed.append(change)
    if changed:
        raise ValueError(
            f"the bits of this run would change: {'; '.join(changed)} ([run] exact; to start anew: another [run] dir)"
        )


def not_recorded(was: ExactState | None, machine: Mapping[str, Any]) -> list[str]:
    """A line about what an older dtmega did not record of the machine; no line if it recorded everything.

    Args:
        was: state that the checkpoint stores; None for a new run.
        machine: description of this machine, from `machine.prepare`.
    """
    missing = [name for name in machine if was and name not in was.fixed]
    if not missing:
        return []
    return [f"recorded from now on, because the checkpoint's dtmega did not: {', '.join(missing)} ([run] exact)"]


@contextmanager
def another_machine_allowed(tell: Callable[[str], object]) -> Iterator[None]:
    """Inside the `with` block, allow this machine and its libraries to differ from the checkpoint's.

    Args:
        tell: callback that receives a description of each change.
    """
    _told.append(tell)
    try:
        yield
    finally:
        _told.pop()


def begin(
    sums: ExactSums,
    cfg: config.Config,
    sizes: Mapping[str, int],
    machine: Mapping[str, Any],
    compiled: bool,
    was: ExactState | None,
) -> None:
    """Record the fixed settings of a run, and restore the largest gradients, which determine the fixed-point grids.

    Args:
        sums: object that adds up the run's gradients as fixed-point integers.
        cfg: configuration of the run, with all open values filled in.
        sizes: resolved size of each mesh axis.
        machine: description of this machine, from `machine.prepare`.
        compiled: whether blocks are compiled.
        was: state that the checkpoint stores; None for a new run.

    Raises:
        ValueError: a fixed setting differs from the checkpoint's setting.
    """
    now = fixed(cfg, sizes, machine, compiled)
    check_fixed(was, now)
    sums.state = ExactState(dict(was.maxima) if was else {}, now)
