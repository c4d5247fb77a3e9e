"""A real step on CPU ranks, measured without touching it: every allocation and free, and every message.

A Python mode would change what it measures: autograd adds gradients out of place where Python holds them. So memory is
read from torch's allocator, by torch's profiler, and messages are counted in another step. gloo's threads let go of a
tensor some time after its message; the profiler sees only this thread's allocations, but the allocator's total.
"""

from __future__ import annotations

import contextlib
import gc
import math
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dtmega import config, families, mesh
from dtmega.data.loader import StepBatch
from dtmega.ops.loss_scale import LossScale
from dtmega.ops.optim import Spikes, build_optimizer
from dtmega.training import parallelize
from dtmega.training.step import train_step

STEP, BETWEEN = "the second step", "between steps"
# torch's operations, in place and functional. One that is not here ends the test with a KeyError.
KINDS = {
    "c10d::allreduce_": "all-reduce",
    "c10d::allgather_": "all-gather",
    "c10d::_allgather_base_": "all-gather",
    "c10d::_reduce_scatter_base_": "reduce-scatter",
    "c10d::alltoall_base_": "all-to-all",
    "c10d::send": "send",
    "c10d::recv_": "receive",
    "_c10d_functional::all_reduce": "all-reduce",
    "_c10d_functional::all_gather_into_tensor": "all-gather",
    "_c10d_functional::reduce_scatter_tensor": "reduce-scatter",
    "_c10d_functional::all_to_all_single": "all-to-all",
}
Messages = Counter[tuple[str, int, int]]  # (kind, ranks of the group, bytes of the largest buffer) -> number


class Measured(NamedTuple):
    """Measurements of one rank.

    Attributes:
        held_bytes: bytes of all storages between two steps.
        peak_bytes: the most bytes at one time during the second step.
        messages: messages of a step.
        at_peak: bytes that live at the peak, by the operators around their allocation.
    """

    held_bytes: int
    peak_bytes: int
    messages: Messages
    at_peak: Counter[str]


class _Parts(NamedTuple):
    """The parts of a run that a step uses."""

    cfg: config.Config
    world: mesh.World
    model: parallelize.ShardedModel
    optimizer: torch.optim.Optimizer
    spikes: Spikes
    phases: Any
    loss_scale: LossScale | None


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
        if func.name() in KINDS or ("c10d" in func.namespace and "wait" not in func.name()):
            named = {**dict(zip((a.name for a in func._schema.arguments), args, strict=False)), **kwargs}
            group = named.get("process_group", named.get("group_name"))
            if isinstance(group, str):
                group = dist.distributed_c10d._resolve_process_group(group)
            elif isinstance(group, torch.ScriptObject):
                group = dist.ProcessGroup.unbox(group)
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
    cfg = parallelize.with_micro_batch_size(cfg, sizes)
    parallelize.check(cfg, sizes, torch.device("cpu"))
    return cfg, sizes


def n_microbatches(cfg: config.Config, sizes: dict[str, int]) -> int:
    """Number of microbatches of a step on each rank."""
    return cfg.batch.global_batch_size // (sizes["dp_replicate"] * sizes["dp_shard"] * cfg.batch.micro_batch_size)


def measured(values: dict[str, Any]) -> Measured:
    """Train for three steps on this rank. The first sets up, the second counts memory, the third messages."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        cfg, sizes = settled(values, dist.get_world_size())
        world = mesh.start(torch.device("cpu"), sizes)
        model = parallelize.parallelize(cfg, world)
        model.draw(cfg.run.seed)
        optimizer = build_optimizer(model.named_parameters(), cfg.optim)
        loss_scale = LossScale(cfg.precision, None) if cfg.precision.params == "float16" else None
        run = _Parts(cfg, world, model, optimizer, Spikes(0), _Silent(), loss_scale)

        def step() -> None:
            train_step(run, batch_of(cfg, sizes))

        with record_function("the first step"):
            step()
        gc.collect()
        with record_function(STEP):
            step()
        gc.collect()
        time.sleep(0.2)
        with record_function(BETWEEN):
            torch.empty(1)
    wire = Wire()
    with wire:
        step()
    return _read(profiled, wire.messages)


def batch_of(cfg: config.Config, sizes: dict[str, int]) -> StepBatch:
    """A batch of rows without text."""
    rows = families.objective(cfg).blank(cfg.data, cfg.batch.micro_batch_size)
    microbatches = [{name: tensor.clone() for name, tensor in rows.items()} for _ in range(n_microbatches(cfg, sizes))]
    return StepBatch(0, cfg.batch.global_batch_size, microbatches)


def _read(profiled: Any, messages: Messages) -> Measured:
    """Add up the allocations and frees in their order."""
    events = []
    window = (0, 0)
    end = math.inf

    def walk(nodes: Any, around: str) -> None:
        nonlocal window, end
        for node in nodes:
            if node.name == STEP:
                window = node.start_time_ns, node.end_time_ns
            if node.name == BETWEEN:
                end = node.start_time_ns
            if node.name == "[memory]":
                fields = node.extra_fields
                events.append((node.start_time_ns, fields.ptr, fields.alloc_size, fields.total_allocated, around))
            walk(node.children, f"{around}/{node.name}")

    walk(profiled.profiler.kineto_results.experimental_event_tree(), "")
    living: dict[int, tuple[int, str]] = {}
    peak = held = 0
    at_peak: Counter[str] = Counter()
    for time_ns, pointer, n_bytes, now, around in sorted(events, key=lambda event: event[0]):
        if n_bytes > 0:
            living[pointer] = n_bytes, around
        else:
            living.pop(pointer, None)
        if window[0] <= time_ns <= window[1] and now > peak:
            peak = now
            at_peak = Counter()
            for size, where in living.values():
                at_peak[where] += size
        if time_ns > end:
            held = now - n_bytes
            break
    return Measured(held, peak, messages, at_peak)
