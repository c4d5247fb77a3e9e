"""The communication of tensor parallelism, forward and backward (Megatron's `mpu/mappings.py`; arXiv:2205.05198).

{U_tp} marks an unreduced tensor: its sum over the tp ranks is the real value (`Partial` in DTensor).

    forward                                          backward
    copy     [B, S, D] -> [B, S, D]                  all-reduce
    add_up   [B, S, D] {U_tp} -> [B, S, D]           no communication: each rank has the complete gradient
    gather   [B, S/tp, D] -> [B, S, D]               reduce-scatter
    scatter  [B, S, D] {U_tp} -> [B, S/tp, D]        all-gather
    split    [B, S, D] -> [B, S/tp, D]               all-gather
    join     [B, S/tp, D] -> [B, S, D]               no communication: each rank takes its slice of the gradient

`copy` begins a region, in which each rank computes its own features from an input that all ranks share, and `add_up`
ends the region. With sequence parallelism, regions begin with `gather` and end with `scatter`, and between regions each
rank keeps only its slice of the sequence.

`split` slices a tensor that every rank has, and `join` is the inverse of `split`. Both functions are for code in which
every rank repeats the computation of a single process. In such code, each gradient is complete on its rank, so
backward gathers or slices gradients but never adds them up.

A tensor of rows, [N/tp, D], is gathered and scattered along N. The rows of the gathered tensor may be in a different
order than the tokens, because `scatter` restores the order.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor

# torch 2.13 renamed these two functions and warns about the old names. torch 2.11 has only the old names.
_all_gather_into = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_into = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def copy(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Begin a region with an input that every rank has in full."""
    return cast(Tensor, _Copy.apply(x, group))


def add_up(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """End a region: sum the outputs of all ranks. Every rank gets the whole sum."""
    return cast(Tensor, _AddUp.apply(x, group))


def gather(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Begin a region with an input that is sharded along the sequence."""
    return cast(Tensor, _Gather.apply(x, group))


def scatter(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """End a region: sum the outputs of all ranks. Each rank gets its slice of the sequence."""
    return cast(Tensor, _Scatter.apply(x, group))


def split(x: Tensor, group: dist.ProcessGroup, dim: int = 1) -> Tensor:
    """Split x with `x.chunk` and return this rank's chunk. `dim` must be large enough for one chunk per rank."""
    return cast(Tensor, _Split.apply(x, group, dim))


def join(x: Tensor, group: dist.ProcessGroup, dim: int, size: int) -> Tensor:
    """Undo `split`. The whole tensor has `size` entries along `dim`."""
    return cast(Tensor, _Join.apply(x, group, dim, size))


def gathered(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The result of `gather`, but without autograd."""
    return by_row(_all_gather(x, group), group)


def _scattered(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    return _reduce_scatter(_by_rank(x, group), group)


def _by_rank(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Reorder a tensor so that each rank's slice of S is contiguous along dim 0: [B, S, D] -> [tp B, S/tp, D].

    Collectives split and join tensors only along dim 0. Rows [N, D] are already in the right order. With B = 1 nothing
    is copied.
    """
    if x.ndim == 2:
        return x
    return x.unflatten(1, (group.size(), -1)).transpose(0, 1).flatten(0, 1)


def by_row(parts: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The inverse of `_by_rank`."""
    if parts.ndim == 2:
        return parts
    return parts.unflatten(0, (group.size(), -1)).transpose(0, 1).flatten(1, 2)


def _mine(x: Tensor, group: dist.ProcessGroup, dim: int) -> Tensor:
    return x.chunk(group.size(), dim)[group.rank()].contiguous()


def _joined(x: Tensor, group: dist.ProcessGroup, dim: int, size: int) -> Tensor:
    rows = x.movedim(dim, 0)
    # An all-gather needs chunks of equal size, so the last rank's smaller chunk is padded. The padding is removed after
    # the all-gather.
    most = -(-size // group.size())
    padded = rows if len(rows) == most else torch.cat([rows, rows.new_zeros(most - len(rows), *rows.shape[1:])])
    parts = _all_gather(padded, group)
    # Return a copy, because FSDP2 warns if the output of a block is a view.
    return parts[:size].movedim(0, dim).clone(memory_format=torch.contiguous_format)


# The collectives below return their results in new memory. Compiled blocks use functional collectives. torch 2.11 can
# also compile collectives that write to a given tensor, but then loses the gradient of that tensor.


def _all_reduce(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    if torch.compiler.is_compiling():
        return functional.all_reduce(x, "sum", group)
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


def _all_gather(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Join the ranks' tensors [n, ...] along dim 0: [tp n, ...]."""
    x = x.contiguous()
    if torch.compiler.is_compiling():
        return functional.all_gather_tensor(x, 0, group)
    parts = x.new_empty(group.size() * x.shape[0], *x.shape[1:])
    _all_gather_into(parts, x, group=group)
    return parts


def _reduce_scatter(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Sum the ranks' tensors [tp n, ...] and return this rank's rows of the sum, [n, ...]."""
    x = x.contiguous()
    if torch.compiler.is_compiling():
        return functional.reduce_scatter_tensor(x, "sum", 0, group)
    mine = x.new_empty(x.shape[0] // group.size(), *x.shape[1:])
    _reduce_scatter_into(mine, x, group=group)
    return mine


class Started:
    """A running collective. Do not read the result until `wait` returns it."""

    def __init__(self, result: Tensor, work: dist.Work | None) -> None:
        self._result, self._work = result, work

    def wait(self) -> Tensor:
        if torch.compiler.is_compiling():
            return functional.wait_tensor(self._result)
        if self._work is not None:
            self._work.wait()
        return self._result


def start_gradient(x: Tensor, group: dist.ProcessGroup, cut: bool) -> Started:
    """Start to reduce the gradient x, as the backward of `gather` (if `cut`) or of `copy`. May overwrite x's memory."""
    if cut:
        parts = _by_rank(x, group).contiguous()
        if torch.compiler.is_compiling():
            name = group.group_name
            return Started(torch.ops._c10d_functional.reduce_scatter_tensor(parts, "sum", group.size(), name), None)
        mine = parts.new_empty(parts.shape[0] // group.size(), *parts.shape[1:])
        return Started(mine, _reduce_scatter_into(mine, parts, group=group, async_op=True))
    if torch.compiler.is_compiling():
        return Started(torch.ops._c10d_functional.all_reduce(x, "sum", group.group_name), None)
    return Started(x, dist.all_reduce(x, group=group, async_op=True))


def start_gathered(x: Tensor, group: dist.ProcessGroup) -> Started:
    """Start the all-gather of `gathered`. The caller must apply `by_row` to the result of `wait`.

    Compiled blocks must not call this function.
    """
    x = x.contiguous()
    parts = x.new_empty(group.size() * x.shape[0], *x.shape[1:])
    return Started(parts, _all_gather_into(parts, x, group=group, async_op=True))


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:
        return _all_reduce(grad_outputs[0], ctx.group), None


class _AddUp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        return _all_reduce(x, group)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:
        return grad_outputs[0], None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return gathered(x, group)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:
        return _scattered(grad_outputs[0], ctx.group), None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _scattered(x, group)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:
        return gathered(grad_outputs[0], ctx.group), None


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, dim: int) -> Tensor:
        ctx.group, ctx.dim, ctx.size = group, dim, x.shape[dim]
        return _mine(x, group, dim)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None]:
        return _joined(grad_outputs[0], ctx.group, ctx.dim, ctx.size), None, None


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, dim: int, size: int) -> Tensor:
        ctx.group, ctx.dim = group, dim
        return _joined(x, group, dim, size)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None, None]:
        return _mine(grad_outputs[0], ctx.group, ctx.dim), None, None, None
