"""The rules of [run] exact: what may run with it, and what may not change when a run resumes.

Every combination is refused unless a list below allows it: the lists hold what benchmarks/exact.py has proved to the
bit. `fsdp/exact.py` adds the gradients, `ops/fixed_point.py` does the arithmetic.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from dtmega import config
from dtmega.ops.fixed_point import ExactState

FAMILIES = ("bloom", "gpt", "llama", "bert")
DEVICES = ("cpu",)
OPTIMIZERS = ("adamw", "adam", "sgd")
OBJECTIVES = ("auto",)


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
    # Each row: what is asked for, what is allowed, the key, and why nothing else is.
    rows: list[tuple[Any, tuple[Any, ...], str, str]] = [
        (cfg.model.name, FAMILIES, "[model] name", "other families add gradients of shared tables inside autograd"),
        (device.type, DEVICES, "[run] device", "no kernel of another device is proved to repeat its bits"),
        (cfg.optim.name, OPTIMIZERS, "[optim] name", "the update must be elementwise"),
        (cfg.data.objective, OBJECTIVES, "[data] objective", "other objectives are not proved"),
        (cfg.precision.reduce, ("float32",), "[precision] reduce", "gradients are added as integers"),
        (cfg.fsdp.cpu_offload, (False,), "[fsdp] cpu_offload", "offloaded shards are not proved"),
        (sizes["cp"], (1,), "[mesh] cp", "divided sequences are not proved"),
    ]
    for asked, allowed, key, why in rows:
        if asked not in allowed:
            expected = ", ".join(map(repr, allowed))
            raise ValueError(f"[run] exact needs {key} in ({expected}), got {asked!r}: {why} ({key}, [run] exact)")


def fixed(cfg: config.Config, sizes: Mapping[str, int], device: torch.device, compiled: bool) -> dict[str, Any]:
    """What changes the bits of one microbatch, and therefore may not change within a run.

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
        was: what the checkpoint stores; None for a new run.
        now: what `fixed` returns for this start.

    Raises:
        ValueError: a value differs.
    """
    if was is None:
        return
    changed = [
        f"{key} was {was.fixed.get(key)!r}, is {value!r}" for key, value in now.items() if was.fixed.get(key) != value
    ]
    if changed:
        raise ValueError(
            f"the bits of this run would change: {'; '.join(changed)} ([run] exact keeps them as they began)"
        )


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


def prepare(cfg: config.Config) -> None:
    """Give this process one thread: how many threads share a product changes its bits."""
    if cfg.run.exact:
        torch.set_num_threads(1)
