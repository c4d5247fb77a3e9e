"""FSDP2 shards parameters, gradients and optimizer state over the data ranks, and keeps fp32 master weights."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from dtmega import config
from dtmega.fsdp.sends import Gathers, ReducesAndScatters
from dtmega.ops.shards import dim_of_experts, dim_to_cut


def apply_fsdp(
    model: nn.Module,
    blocks: list[nn.Module],
    mesh: DeviceMesh,
    cfg: config.Config,
    *,
    reshard: bool,
    experts: Sequence[nn.Module] = (),
    of_experts: DeviceMesh | None = None,
) -> None:
    """Wrap each block, then the root. The root takes the remaining parameters, so that tied weights are in one group.

    If experts are divided over ep, they are wrapped first, because they are sharded over fewer ranks than the remaining
    parameters.

    Parameters stay fp32 shards; forward and backward use copies in `precision.params`. Gradients are summed, not
    averaged, in `precision.reduce`, because the loss is already divided by the counts of the global batch.

    Args:
        model: root module.
        blocks: blocks of the model, in order.
        mesh: mesh of the data ranks, either 1-D (fsdp) or, for HSDP, 2-D (dp_replicate, fsdp). HSDP with one shard
            is equivalent to DDP.
        cfg: configuration of the run.
        reshard: whether to free each block's gathered weights after the block's forward. The root and the last block
            keep their gathered weights, because backward starts with these modules and ends with the root.
        experts: modules that are divided over ep; [] if ep is 1.
        of_experts: mesh of the ranks with the same experts as this rank, 1-D or 2-D like `mesh`; None if ep is 1.
    """
    precision = MixedPrecisionPolicy(
        param_dtype=getattr(torch, cfg.precision.params),
        reduce_dtype=getattr(torch, cfg.precision.reduce),
        # The ALiBi bias enters a block as an input and must stay fp32.
        cast_forward_inputs=False,
    )
    # On a CPU mesh, the shards are already in host memory.
    offload = cfg.fsdp.cpu_offload and mesh.device_type != "cpu"
    stay_gathered = {model}
    for block in blocks[-1:]:
        stay_gathered.update(block.modules())
    for module in (*experts, *blocks, model):
        ranks, dim = mesh, dim_to_cut
        if of_experts is not None and module in experts:
            ranks, dim = of_experts, functools.partial(dim_of_experts, n_shards=of_experts.size(-1))
        fully_shard(
            module,
            mesh=ranks,
            reshard_after_forward=reshard and module not in stay_gathered,
            mp_policy=precision,
            offload_policy=CPUOffloadPolicy() if offload else OffloadPolicy(),
            shard_placement_fn=dim,
        )
        assert isinstance(module, FSDPModule)
        _set_collectives(module, ranks)


def _set_collectives(module: FSDPModule, mesh: DeviceMesh) -> None:
    """Make a wrapped module sum gradients instead of averaging them. On a CPU, use the collectives in `sends.py`."""
    if mesh.size() > 1:
        module.set_gradient_divide_factor(1.0)
        if mesh.device_type == "cpu":
            module.set_custom_all_gather(Gathers())  # pyright: ignore[reportArgumentType]
            module.set_custom_reduce_scatter(ReducesAndScatters())  # pyright: ignore[reportArgumentType]
    else:
        # With a single rank, torch 2.13 would divide the gradients by 1.0, which would copy the gradients again.
        module.set_custom_reduce_scatter(_NothingToReduce())  # pyright: ignore[reportArgumentType]
    if hasattr(module, "set_reduce_scatter_unused_params"):  # not in torch 2.11
        # Ranks that have not used a parameter contribute zeros to the sum of the parameter's gradients.
        module.set_reduce_scatter_unused_params(True)
    # Without this call, FSDP would request a sum that is scaled by a factor (here 1.0), which gloo does not support.
    module.set_force_sum_reduction_for_comms(True)


class _NothingToReduce:
    """A reduce-scatter over one rank: output and input share memory, so nothing is copied."""

    def __init__(self) -> None:
        self._input: Tensor | None = None

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a buffer for the input on FSDP's first call, and the same buffer for the output on the second call."""
        buffer, self._input = self._input, None
        if buffer is None:
            buffer = self._input = torch.empty(*size, dtype=dtype, device=device)
        return buffer

    def __call__(self, *_: Any, **__: Any) -> NoReturn:
        # With a single rank, FSDP itself copies the input to the output, unless input and output share memory.
        raise AssertionError("one rank has nothing to reduce")


class Gathered:
    """The gathered weights of a stage that FSDP2 wraps, and the sums of its gradients, in a run without a pipeline.

    Until the last microbatch of a step, the root's weights stay gathered. The blocks' weights stay gathered too, unless
    `reshard` is True, which saves the memory of the blocks' weights but causes more traffic.

    Args:
        stage: model of the stage, wrapped by `apply_fsdp`.
        reshard: whether to free each block's gathered weights after each backward.
    """

    def __init__(self, stage: nn.Module, reshard: bool) -> None:
        assert isinstance(stage, FSDPModule)
        self._stage, self._reshard = stage, reshard
        self._wrapped = [module for module in stage.modules() if isinstance(module, FSDPModule)]

    def expect(self, last: bool, reduces: bool) -> None:
        """Prepare the next backward.

        Args:
            last: whether it is a step's last backward: with HSDP, only this one all-reduces over dp_replicate.
            reduces: whether its gradients are reduce-scattered and added to the sharded gradients. If False, each rank
                accumulates unsharded gradients.
        """
        self._stage.set_requires_gradient_sync(reduces)
        self._stage.set_requires_all_reduce(last)
        self._stage.set_reshard_after_backward(last, recurse=not self._reshard)

    def release(self) -> None:
        """Free the gathered weights, so that the modules hold their shards again."""
        for module in self._wrapped:
            module.reshard()
