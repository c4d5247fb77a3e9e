"""The choice of [fsdp] accumulate: what a rank keeps of its gradients between the microbatches of a step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal

import torch
from torch import nn

from dtmega import config, families
from dtmega.pipelining.split import plan_stages

Accumulation = Literal["whole", "sharded"]
SHARE = 10  # "auto" adds up whole gradients if they take at most 1 / SHARE of a device's memory


def accumulates(cfg: config.Config, sizes: Mapping[str, int], memory_bytes: int | None) -> Accumulation:
    """What gradients add up in between microbatches: whole gradients on each rank, or shards.

    *The rule of 'auto':* sharded if the whole gradients of the fullest rank (`whole_gradient_bytes`) take more than a
    tenth of a device's memory. On CPUs, and where nothing is sharded, whole. Sharded gradients cost one reduce-scatter
    of all gradients per microbatch instead of one per step, so they must be worth it. The number of microbatches is not
    in the rule: with a single one, both ways are the same.

    Every rank gets the same answer, if all have the same arguments.

    Args:
        cfg: the run's configuration.
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
    """Bytes of all gradients of the pipeline rank that has most, in [precision] reduce, before they are sharded.

    Frozen parameters have no gradient. Copies of a tied parameter on several stages count once per stage. Vectors that
    every tp rank holds whole count as if tp cut them, as it cuts the matrices.
    """
    with torch.device("meta"):
        whole = families.build(cfg)
    if sizes["pp"] == 1:
        most = _n_trained(whole.parameters())
    else:
        cut = plan_stages(cfg, families.of(cfg.model).pieces(whole), sizes["pp"])
        parts = whole.parts()
        of_stage = []
        for pieces in cut.pieces:
            modules = [module for piece in pieces for module in parts[piece]]
            of_stage.append(_n_trained(p for module in modules for p in module.parameters(recurse=False)))
        most = max(sum(of_stage[number] for number in stages) for stages in cut.ranks)
    return -(-most // sizes["tp"]) * getattr(torch, cfg.precision.reduce).itemsize


def _n_trained(parameters: Iterable[nn.Parameter]) -> int:
    """Number of elements of these parameters, each parameter once, without frozen parameters."""
    return sum(parameter.numel() for parameter in set(parameters) if parameter.requires_grad)


def with_accumulation(cfg: config.Config, sizes: Mapping[str, int], memory_bytes: int | None) -> config.Config:
    """Copy the configuration, with [fsdp] accumulate set to what `accumulates` says."""
    chosen = accumulates(cfg, sizes, memory_bytes)
    return cfg.model_copy(update={"fsdp": cfg.fsdp.model_copy(update={"accumulate": chosen})})


def note(cfg: config.Config, sizes: Mapping[str, int], memory_bytes: int | None) -> list[str]:
    """The line that a start prints about [fsdp] accumulate; none for the default.

    Args:
        cfg: the run's configuration, with `accumulate` as the user wrote it.
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
