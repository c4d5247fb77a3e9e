"""FSDP2: parameters, gradients and optimizer state cut over the data ranks; mixed precision with fp32 masters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from dtmega import config
from dtmega.fsdp.masters import Masters
from dtmega.fsdp.sends import Gathers, ReducesAndScatters
from dtmega.ops.shards import dim_to_cut


def wraps(cfg: config.Config, sizes: Mapping[str, int], splits_backward: bool) -> bool:
    """Tell whether FSDP2 holds the weights: they are cut, cast or offloaded, or their gradients' sums are cast.

    Where it does not, gradients stay where backward puts them, and are summed there (`replicas.py`); a rank that has
    the whole model casts what it has (`masters.py`).

    Args:
        sizes: the resolved ones.
        splits_backward: a schedule runs backward in two parts. torch's weight part goes more than once through what
            weights of one graph share, and frees it the first time (`stage_backward_weight`). FSDP's own nodes keep the
            weights of a graph apart.
    """
    if splits_backward:
        return True
    if keeps_masters(cfg, sizes):
        return False
    casts = cfg.precision.params != "float32" or (cfg.precision.reduce != "float32" and sizes["dp_replicate"] > 1)
    return sizes["dp_shard"] > 1 or casts or cfg.fsdp.cpu_offload


def keeps_masters(cfg: config.Config, sizes: Mapping[str, int]) -> bool:
    """Tell whether casts are all that is to be done to weights: each rank has the whole model, and sums are fp32."""
    whole = all(size == 1 for axis, size in sizes.items() if axis != "dp_replicate") and not cfg.fsdp.cpu_offload
    return whole and cfg.precision.params != "float32" and cfg.precision.reduce == "float32"


def reshards(cfg: config.Config, pp: int, dp_shard: int) -> bool:
    """Tell whether a block's weights are freed after its forward. `pp` and `dp_shard` are the resolved sizes."""
    if cfg.fsdp.reshard_after_forward == "auto":
        # Under pp each microbatch would gather the weights again; with one shard there is nothing to free.
        return pp == 1 and dp_shard > 1
    return cfg.fsdp.reshard_after_forward


def apply_fsdp(
    model: nn.Module, blocks: list[nn.Module], mesh: DeviceMesh, cfg: config.Config, *, reshard: bool
) -> None:
    """Wrap each block, then the root with all that is left (so tied weights are in one group).

    Parameters stay fp32 shards; forward and backward see them in `precision.params`; gradients are summed, not
    averaged, in `precision.reduce` (the loss is already divided by the tokens of the global batch).

    Args:
        mesh: 1-D (dp_shard), or 2-D (dp_replicate, dp_shard): HSDP, and with dp_shard = 1 what DDP does.
        reshard: free each block's weights after its forward; never the root's, which backward needs first and last, nor
            the last block's, which it needs next.
    """
    precision = MixedPrecisionPolicy(
        param_dtype=getattr(torch, cfg.precision.params),
        reduce_dtype=getattr(torch, cfg.precision.reduce),
        # The ALiBi bias enters a block as an input and must stay fp32.
        cast_forward_inputs=False,
    )
    n_ranks = mesh.size()
    # On a CPU mesh the shards are in host memory anyway.
    offload = cfg.fsdp.cpu_offload and mesh.device_type != "cpu"
    for module in (*blocks, model):
        fully_shard(
            module,
            mesh=mesh,
            reshard_after_forward=reshard and module not in (model, *blocks[-1:]),
            mp_policy=precision,
            offload_policy=CPUOffloadPolicy() if offload else OffloadPolicy(),
            shard_placement_fn=dim_to_cut,
        )
        assert isinstance(module, FSDPModule)
        if n_ranks > 1:
            module.set_gradient_divide_factor(1.0)
            if mesh.device_type == "cpu":
                module.set_custom_all_gather(Gathers())  # pyright: ignore[reportArgumentType]
                module.set_custom_reduce_scatter(ReducesAndScatters())  # pyright: ignore[reportArgumentType]
        else:
            # There is nothing to divide by, and torch would divide by 1.0 into another copy (2.13).
            module.set_custom_reduce_scatter(_NothingToReduce())  # pyright: ignore[reportArgumentType]
        if hasattr(module, "set_reduce_scatter_unused_params"):  # not in torch 2.11
            # A parameter that only some data ranks have used: the others reduce a zero, and do not leave it out.
            module.set_reduce_scatter_unused_params(True)
        module.set_force_sum_reduction_for_comms(True)  # a plain sum, not one multiplied by 1.0, which gloo lacks


class _NothingToReduce:
    """A reduce-scatter among one rank: the gradients that go in, cast, come out of the same memory."""

    def __init__(self) -> None:
        self._put_in: Tensor | None = None

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """FSDP asks for what goes in, and then for what comes out, which it copies unless it is the same."""
        found, self._put_in = self._put_in, None
        if found is None:
            found = self._put_in = torch.empty(*size, dtype=dtype, device=device)
        return found

    def __call__(self, *_: Any, **__: Any) -> NoReturn:
        raise AssertionError("one rank has nothing to reduce")


def keep_masters(model: nn.Module, cfg: config.Config) -> None:
    """Let a model that is whole on this rank compute in `precision.params`; its parameters stay fp32."""
    model.masters = Masters(model, getattr(torch, cfg.precision.params))  # pyright: ignore[reportArgumentType]


def _masters(model: nn.Module) -> Masters | None:
    return getattr(model, "masters", None)


def release(model: nn.Module) -> None:
    """Put the fp32 parameters back where forward did not end in backward; optimizer and checkpoint know only these."""
    masters = _masters(model)
    if masters is not None:
        masters.release()
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def sync_gradients(model: nn.Module, last_microbatch: bool, *, reshard: bool) -> None:
    """Reduce gradients only after the last microbatch of a step; before it they add up unreduced on each rank.

    Until then the root's weights stay gathered too, and the blocks' unless `reshard` trades traffic for memory.
    """
    masters = _masters(model)
    if masters is not None:
        masters.last = last_microbatch
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(last_microbatch)
        model.set_reshard_after_backward(last_microbatch, recurse=not reshard)
