"""THE order: build on meta -> compile -> fsdp -> materialise -> init. The only file that joins models with layouts."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from dtmega import config, keyed, models
from dtmega.fsdp import apply_fsdp
from dtmega.mesh import World
from dtmega.models.bloom import Bloom, init_std


def parallelize(cfg: config.Config, world: World) -> Bloom:
    """The model of the configuration on this rank, with its initial values, ready to train."""
    with torch.device("meta"):
        model = models.build(cfg.model)
    blocks: list[nn.Module] = list(model.layers.values())
    if cfg.compile.enable is True or (cfg.compile.enable == "auto" and world.device.type == "cuda"):
        for block in blocks:
            block.compile()
    if world.size > 1 or cfg.precision.params != "float32":
        apply_fsdp(model, blocks, world.data, cfg.precision)
    materialise(model, world.device)
    init_weights(model, cfg.run.seed)
    return model


def materialise(model: Bloom, device: torch.device) -> None:
    """Memory for a meta model; `to_empty` gives each owner of a tied parameter its own, so they are tied again."""
    model.to_empty(device=device)
    model.tie()


@torch.no_grad()
def init_weights(model: Bloom, seed: int) -> None:
    """Initial values as a function of (seed, parameter name, global index): the same bits on every layout."""
    for name, parameter in model.named_parameters():
        std = init_std(model.cfg, name)
        local, offsets = _local_shard(parameter)
        if std is None:
            local.fill_(1.0 if name.endswith("weight") else 0.0)
            continue
        columns = torch.arange(local.shape[1], device=local.device) + offsets[1]
        # Some rows at a time: the fp64 temporaries of `normal` take ten times the memory of its result.
        step = max(1, 2**20 // local.shape[1])
        for start in range(0, local.shape[0], step):
            piece = local[start : start + step]
            rows = torch.arange(piece.shape[0], device=local.device) + (offsets[0] + start)
            piece.copy_(keyed.normal(seed, name, rows[:, None] * parameter.shape[1] + columns) * std)
    model.init_buffers(seed)


def _local_shard(parameter: torch.Tensor) -> tuple[torch.Tensor, tuple[int, ...]]:
    """What this rank holds of a parameter, and where in the whole it starts."""
    if not isinstance(parameter, DTensor):
        return parameter, (0,) * parameter.ndim
    local = parameter.to_local()
    if local.numel() == 0:
        return local, (0,) * local.ndim
    (chunk,) = parameter.__create_chunk_list__()
    return local, tuple(chunk.offsets)
