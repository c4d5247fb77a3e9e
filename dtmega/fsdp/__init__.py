"""FSDP2: parameters, gradients and optimizer state cut over the data ranks; mixed precision with fp32 masters."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from dtmega import config


def apply_fsdp(model: nn.Module, blocks: list[nn.Module], mesh: DeviceMesh, precision: config.Precision) -> None:
    """Wrap each block, then the root with all that is left (so tied weights are in one group).

    Parameters stay fp32 shards; forward and backward see them in `precision.params`; gradients are summed, not
    averaged, in `precision.reduce` (the loss is already divided by the tokens of the global batch).
    """
    policy = MixedPrecisionPolicy(
        param_dtype=getattr(torch, precision.params),
        reduce_dtype=getattr(torch, precision.reduce),
        # The ALiBi bias enters a block as an input and must stay fp32.
        cast_forward_inputs=False,
    )
    for block in blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    for module in (model, *blocks):
        assert isinstance(module, FSDPModule)
        module.set_gradient_divide_factor(1.0)


def sync_gradients(model: nn.Module, last_microbatch: bool) -> None:
    """Reduce gradients only after the last microbatch of a step; before it they add up unreduced on each rank."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(last_microbatch)
