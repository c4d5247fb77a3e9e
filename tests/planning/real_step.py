"""A real step on CPU ranks, measured without touching it: every allocation and free, and every message.

A Python mode would change what it measures: autograd adds gradients out of place where Python holds them. So memory is
read from torch's allocator, by torch's profiler, and messages are counted in another step. The profiler sees what
this thread allocates and frees. A tensor that a thread of gloo lets go of, some time after its message, counts until
its memory is used again.
"""

from __future__ import annotations

import gc
import time
import warnings
from collections import Counter
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.pipelining  # pyright: ignore[reportUnusedImport]  # it holds a number, which is none of a step's
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dtmega import config, families, mesh
from dtmega.data.loader import StepBatch
from dtmega.ops.optim import build_optimizer
from dtmega.planning.counting.role import Role, plan_role
from dtmega.training import checks, choices, parallelize, sharded_model
from dtmega.training.loss_scale import LossScale
from dtmega.training.step import train_step
from tests.traffic import KINDS

STEP = "a later step"
SETTLED_S = 0.1  # in which gloo's threads let go of tensors
STEPS = 3  # whose lowest peak counts, because of gloo's threads
Messages = Counter[tuple[str, int, int]]  # (kind, ranks of the group, bytes of the largest buffer) -> number


class Measured(NamedTuple):
    """Measurements of one rank.

    Attributes:
        held_bytes: bytes of all storages between two steps.
        peak_bytes: the most bytes at one time during a later step.
        messages: messages of a step.
    """

    held_bytes: int
    peak_bytes: int
    messages: Messages


def nested(keys: dict[str, Any]) -> dict[str, Any]:
    """Configuration keys with dots, as sections."""
    sections: dict[str, Any] = {}
    for key, value in keys.items():
        section, _, name = key.partition(".")
        sections.setdefault(section, {})[name] = value
    return sections


class Parts(NamedTuple):
    """The parts of a run that a step uses."""

    cfg: config.Config
    world: mesh.World
    model: sharded_model.ShardedModel
    optimizer: torch.optim.Optimizer
    phases: Any
    loss_scale: LossScale | None
    spikes: None = None


class _Silent:
    """A listener that ignores the phases of a step."""

    def enter(self, name: str) -> None:
        pass


class Wire(TorchDispatchMode):
    """Counts what is handed to groups of several ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: Messages = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        sends = "c10d" in func.namespace and not any(word in func.name() for word in ("wait", "wrap"))
        if func.name() in KINDS or sends:
            named = {**dict(zip((a.name for a in func._schema.arguments), args, strict=False)), **kwargs}
            group = named.get("process_group", named.get("group_name"))
            if isinstance(group, str):
                group = dist.distributed_c10d._resolve_process_group(group)  # pyright: ignore
            elif isinstance(group, torch.ScriptObject):
                group = dist.ProcessGroup.unbox(group)
            assert group is not None
            sizes = [sum(t.nbytes for t in tree_leaves(x) if isinstance(t, Tensor)) for x in (*args, out)]
            kind = KINDS[func.name()]
            n_ranks = 2 if kind in ("send", "receive") else group.size()
            if group.size() > 1:
                self.messages[kind, n_ranks, max(sizes)] += 1
        return out


def settled(values: dict[str, Any], world_size: int) -> tuple[config.Config, dict[str, int]]:
    """The complete configuration and the sizes of the mesh, as a run would have them."""
    cfg = families.resolve(config.validate(values, "test"))
    sizes = mesh.resolve(cfg.mesh, world_size)
    cfg = choices.with_micro_batch_size(cfg, sizes)
    checks.check(cfg, sizes, torch.device("cpu"))
    return cfg, sizes


def n_microbatches(cfg: config.Config, sizes: dict[str, int]) -> int:
    """Number of microbatches of a step on each rank."""
    return cfg.batch.global_batch_size // (sizes["dp_replicate"] * sizes["dp_shard"] * cfg.batch.micro_batch_size)


def built(values: dict[str, Any]) -> Parts:
    """The parts of a run on this rank, before its first step."""
    cfg, sizes = settled(values, dist.get_world_size())
    world = mesh.start(torch.device("cpu"), sizes, ep=cfg.mesh.ep)
    model = parallelize.parallelize(cfg, world)
    model.draw(cfg.run.seed)
    optimizer = build_optimizer(model.named_parameters(), cfg.optim, cfg.run.exact, model.matrices)
    loss_scale = LossScale(cfg.precision, None) if cfg.precision.params == "float16" else None
    return Parts(cfg, world, model, optimizer, _Silent(), loss_scale)


def measured(values: dict[str, Any]) -> Measured:
    """Train for some steps on this rank. The first sets up, later ones count memory, the last one messages."""
    before = living_storages()
    # Told to keep older events, of which there are none, torch would make Python objects of all: most of the time here.
    warnings.filterwarnings("ignore", "Warning: Profiler clears events")  # torch 2.11
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        parts = built(values)

        def step() -> None:
            train_step(parts, batch_of(parts))

        with record_function("the first step"):
            step()
        for _ in range(STEPS):
            gc.collect()
            time.sleep(SETTLED_S)
            with record_function(STEP):
                step()
        gc.collect()
        time.sleep(SETTLED_S)
        held_bytes = sum(n_bytes for key, n_bytes in living_storages().items() if key not in before)
    wire = Wire()
    with wire:
        step()
    return _read(profiled, wire.messages, held_bytes)


def batch_of(parts: Parts) -> StepBatch:
    """A batch of rows without text."""
    cfg, n = parts.cfg, n_microbatches(parts.cfg, parts.world.sizes)
    rows = families.objective(cfg).blank(cfg.data, cfg.batch.micro_batch_size)
    microbatches = [{name: tensor.clone() for name, tensor in rows.items()} for _ in range(n)]
    return StepBatch(0, cfg.batch.global_batch_size, microbatches)


def _read(profiled: Any, messages: Messages, held_bytes: int) -> Measured:
    """Add up the allocations and frees in their order."""
    events: list[tuple[int, int, int]] = []  # (time, address, bytes)
    windows: list[tuple[int, int]] = []

    def walk(nodes: Any) -> None:
        for node in nodes:
            if node.name == STEP:
                windows.append((node.start_time_ns, node.end_time_ns))
            elif node.name == "[memory]":
                events.append((node.start_time_ns, node.extra_fields.ptr, node.extra_fields.alloc_size))
            walk(node.children)

    walk(profiled.profiler.kineto_results.experimental_event_tree())
    living: dict[int, int] = {}
    peaks = [0] * len(windows)
    now = 0
    for time_ns, pointer, n_bytes in sorted(events, key=lambda event: event[0]):
        # Memory that is allocated again was freed, if not seen by the profiler, then by a thread of gloo.
        now -= living.pop(pointer, 0)
        if n_bytes > 0:
            living[pointer] = n_bytes
            now += n_bytes
        for i, (begin, end) in enumerate(windows):
            if begin <= time_ns <= end:
                peaks[i] = max(peaks[i], now)
    return Measured(held_bytes, min(peaks), messages)


def living_storages() -> dict[int, int]:
    """The bytes of all storages whose tensors Python knows, by address."""
    found: dict[int, int] = {}
    for each in gc.get_objects():
        if issubclass(type(each), Tensor):
            gradient = each.grad if each.is_leaf else None
            for tensor in (each,) if gradient is None else (each, gradient):
                part = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
                if part.device.type == "cpu":
                    found[part.untyped_storage()._cdata] = part.untyped_storage().nbytes()
    return found


def planned(values: dict[str, Any], device: torch.device, imbalance: float = 1.0) -> Role:
    """The plan of this rank, without the group of real ranks. A process can plan one rank only.

    Args:
        values: the configuration.
        device: the fake device.
        imbalance: load of this rank's experts, as a multiple of the mean of its ep group.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    dist.barrier()
    dist.destroy_process_group()
    cfg, sizes = settled(values, world_size)
    return plan_role(cfg, sizes, rank, device, [n_microbatches(cfg, sizes)], imbalance)
