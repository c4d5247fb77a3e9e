"""Choose what a configuration leaves open: accumulation, how weights are kept, compilation, microbatch size, dtype."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal

import torch
from torch import nn

from dtmega import config, families, rooms
from dtmega.mesh import World
from dtmega.ops.cpu import features

Accumulation = Literal["whole", "sharded"]
SHARE = 10  # "auto" keeps unsharded gradients if they take at most 1 / SHARE of a device's memory
LARGEST_FITTED = 4  # largest microbatch size, in sequences, that is chosen automatically


def accumulates(cfg: config.Config, sizes: Mapping[str, int], memory_bytes: int | None) -> Accumulation:
    """Choose how each rank accumulates gradients between microbatches: "whole" (unsharded) or "sharded".

    *The rule for 'auto':* accumulate shards if the unsharded gradients of the fullest rank (`whole_gradient_bytes`)
    take more than a tenth of a device's memory. On CPUs, and if nothing is sharded, accumulate unsharded gradients.
    Shards need one reduce-scatter of all gradients per microbatch instead of one per step, so they are worth this cost
    only if they save much memory. The rule ignores the number of microbatches: with one microbatch, both choices cost
    the same.

    All ranks make the same choice if they pass equal arguments.

    Args:
        cfg: configuration of the run.
        sizes: size of each mesh axis.
        memory_bytes: memory of a device (`mesh.memory_bytes`); None for CPUs.
    """
    if sizes["dp_shard"] * sizes["cp"] == 1:
        return "whole"
    if cfg.fsdp.accumulate != "auto":
        return cfg.fsdp.accumulate
    if memory_bytes is None:
        return "whole"
    return "sharded" if whole_gradient_bytes(cfg, sizes) * SHARE > memory_bytes else "whole"


def whole_gradient_bytes(cfg: config.Config, sizes: Mapping[str, int]) -> int:
    """The bytes of unsharded gradients in the [precision] reduce dtype, on the pipeline rank with the most gradients.

    Frozen parameters have no gradient. Copies of a tied parameter on several stages count once per stage. With ep, a
    rank has 1 / ep of each expert module. Some vectors are replicated over tp, but this estimate divides all parameters
    by tp.
    """
    with torch.device("meta"):
        whole = families.build(cfg)
    of_experts = {parameter for module in whole.experts() for parameter in module.parameters()}

    def n_trained(parameters: Iterable[nn.Parameter]) -> int:
        """Count the elements that a rank trains, before division by tp. A parameter that appears twice counts once."""
        trained = {parameter for parameter in parameters if parameter.requires_grad}
        n_divided = sum(parameter.numel() for parameter in trained & of_experts)
        n_whole = sum(parameter.numel() for parameter in trained - of_experts)
        return n_whole + n_divided // cfg.mesh.ep

    if sizes["pp"] == 1:
        most = n_trained(whole.parameters())
    else:
        cut = rooms.pipelined().cut(cfg, whole, sizes["pp"])
        parts = whole.parts()
        of_stage = []
        for pieces in cut.pieces:
            modules = [module for piece in pieces for module in parts[piece]]
            of_stage.append(n_trained(p for module in modules for p in module.parameters(recurse=False)))
        most = max(sum(of_stage[number] for number in stages) for stages in cut.ranks)
    return -(-most // sizes["tp"]) * getattr(torch, cfg.precision.reduce).itemsize


def with_accumulation(cfg: config.Config, sizes: Mapping[str, int], memory_bytes: int | None) -> config.Config:
    """Return a copy of the configuration in which [fsdp] accumulate is the result of `accumulates`."""
    chosen = accumulates(cfg, sizes, memory_bytes)
    return cfg.model_copy(update={"fsdp": cfg.fsdp.model_copy(update={"accumulate": chosen})})


def accumulation_note(cfg: config.Config, sizes: Mapping[str, int], memory_bytes: int | None) -> list[str]:
    """The line about [fsdp] accumulate that a run prints when it starts; [] for the default.

    Args:
        cfg: configuration of the run, with `accumulate` as the user wrote it.
        sizes: size of each mesh axis.
        memory_bytes: memory of a device; None for CPUs.
    """
    asked = cfg.fsdp.accumulate
    if asked == "whole":
        return []
    key = f"[fsdp] accumulate = '{asked}'"
    dp_shard, cp = sizes["dp_shard"], sizes["cp"]
    if dp_shard * cp == 1:
        return [f"nothing is sharded (dp_shard x cp = {dp_shard} x {cp} = 1), so {key} changes nothing"]
    if asked == "sharded":
        return [f"gradients add up in shards, and are summed over ranks after each microbatch ({key})"]
    if memory_bytes is None:
        return [f"gradients add up whole between microbatches, as always on CPUs ({key})"]
    chosen = "whole" if accumulates(cfg, sizes, memory_bytes) == "whole" else "in shards"
    least, there = whole_gradient_bytes(cfg, sizes) / 2**30, memory_bytes / 2**30
    relation = "at most" if chosen == "whole" else "more than"
    return [
        f"gradients add up {chosen} between microbatches: whole ones take {least:.3g} GiB of a device's {there:.3g} "
        f"GiB, {relation} 1/{SHARE} ({key})"
    ]


def wraps(cfg: config.Config, sizes: Mapping[str, int], splits_backward: bool) -> bool:
    """Return True if shards, casts, CPU offload, or a split backward require FSDP2 (`fsdp/wrapped.py`).

    Without FSDP2, gradients are all-reduced in place (`fsdp/replicas.py`). If each rank holds the whole model and only
    casts its weights, `fsdp/masters.py` does the casts. Both copy fewer tensors than FSDP2.

    Args:
        cfg: configuration of the run.
        sizes: resolved size of each mesh axis.
        splits_backward: whether the schedule splits the backward pass in two.
    """
    # In a split backward, torch's pass for the weights (`stage_backward_weight`) frees an autograd node at its first
    # visit, but visits the node once for every weight that uses it. FSDP's own nodes in the graph separate the weights.
    if splits_backward:
        return True
    if keeps_masters(cfg, sizes):
        return False
    casts = cfg.precision.params != "float32" or (cfg.precision.reduce != "float32" and sizes["dp_replicate"] > 1)
    return sizes["dp_shard"] * sizes["cp"] > 1 or casts or cfg.fsdp.cpu_offload


def keeps_masters(cfg: config.Config, sizes: Mapping[str, int]) -> bool:
    """Return True if weights need only casts: each rank holds the whole model, and gradients are reduced in fp32."""
    whole = all(size == 1 for axis, size in sizes.items() if axis != "dp_replicate") and not cfg.fsdp.cpu_offload
    return whole and cfg.precision.params != "float32" and cfg.precision.reduce == "float32"


def reshards(cfg: config.Config, pp: int, n_shards: int) -> bool:
    """Return True if FSDP frees a block's gathered weights after the block's forward.

    Args:
        cfg: configuration of the run.
        pp: number of pipeline ranks.
        n_shards: number of ranks over which parameters are sharded.
    """
    if cfg.fsdp.reshard_after_forward == "auto":
        # In a pipeline, each microbatch would gather the weights again. With one shard, there is nothing to free.
        return pp == 1 and n_shards > 1
    return cfg.fsdp.reshard_after_forward


def multiplies_on_amx(cfg: config.Config, world: World) -> bool:
    """True if linear layers use the faster bfloat16 products of a CPU with AMX."""
    on_cpu = world.device.type == "cpu" and features.HAS_TILES
    return keeps_masters(cfg, world.sizes) and on_cpu and not cfg.run.exact


def compiling(cfg: config.Config, device: torch.device) -> bool:
    """True if blocks are compiled; 'auto' compiles on GPUs."""
    return cfg.compile.enable is True or (cfg.compile.enable == "auto" and device.type == "cuda")


def with_micro_batch_size(cfg: config.Config, sizes: Mapping[str, int]) -> config.Config:
    """Choose a microbatch size for this layout if the configuration leaves it open ([batch] micro_batch_size = 0).

    The chosen size is the largest size up to LARGEST_FITTED that divides a rank's share of every global batch and gives
    a pipeline the number of microbatches that its schedule needs. If not even size 1 fits, the chosen size is 1, and
    `check` and the loader report the reason.
    """
    if cfg.batch.micro_batch_size:
        return cfg
    data_size = sizes["dp_replicate"] * sizes["dp_shard"]

    def fits(micro_batch_size: int) -> bool:
        unit = data_size * micro_batch_size
        for batch_size in cfg.batch.sizes:
            if batch_size % unit:
                return False
            if sizes["pp"] > 1 and rooms.schedule().broken_rule(cfg.pipeline, sizes["pp"], batch_size // unit):
                return False
        return True

    largest = next((size for size in range(LARGEST_FITTED, 1, -1) if fits(size)), 1)
    return cfg.model_copy(update={"batch": cfg.batch.model_copy(update={"micro_batch_size": largest})})


def with_params_dtype(cfg: config.Config, params: str) -> config.Config:
    """Return a copy of the configuration with [precision] params set to `params`."""
    return cfg.model_copy(update={"precision": cfg.precision.model_copy(update={"params": params})})
