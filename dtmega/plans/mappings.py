"""The moves of tensor parallelism, each with its gradient (Megatron's `mpu/mappings.py`; arXiv:2205.05198).

    forward                                          backward
    copy     [B, S, D] -> [B, S, D]                  all-reduce
    add_up   [B, S, D] {U_tp} -> [B, S, D]           nothing: each rank has the whole gradient
    gather   [B, S/tp, D] -> [B, S, D]               reduce-scatter
    scatter  [B, S, D] {U_tp} -> [B, S/tp, D]        all-gather
    part     [B, S, D] -> [B, S/tp, D]               all-gather
    whole    [B, S/tp, D] -> [B, S, D]               nothing: this rank's part of the whole gradient

`copy` and `add_up` open and close a region where each rank computes its part from the same input; with sequence
parallelism `gather` and `scatter` do, and between regions each rank keeps its part of the sequence. `part` and `whole`
go between what every rank has and what each has a part of, where both sides compute the same as one process. Rows
[N/tp, D] are gathered and scattered along N: any order of tokens is good that comes back the same.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor

# torch 2.13 renamed these two; the old names warn there, the new ones are unknown to 2.11.
_all_gather_into = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_into = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def copy(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    return cast(Tensor, _Copy.apply(x, group))


def add_up(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    return cast(Tensor, _AddUp.apply(x, group))


def gather(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    return cast(Tensor, _Gather.apply(x, group))


def scatter(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    return cast(Tensor, _Scatter.apply(x, group))


def part(x: Tensor, group: dist.ProcessGroup, dim: int = 1) -> Tensor:
    """This rank's chunk of x, as `x.chunk` cuts it; x may have any size along `dim` that leaves no rank without."""
    return cast(Tensor, _Part.apply(x, group, dim))


def whole(x: Tensor, group: dist.ProcessGroup, dim: int, size: int) -> Tensor:
    """The inverse of `part`: x has `size` along `dim` once it is whole."""
    return cast(Tensor, _Whole.apply(x, group, dim, size))


def gathered(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The result of `gather`, without a gradient."""
    return by_row(_all_gather(x, group), group)


def _scattered(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    return _reduce_scatter(_by_rank(x, group), group)


def _by_rank(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[B, S, D] -> [tp B, S/tp, D], what is one rank's together; rows are so already. No copy if B = 1."""
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
    most = -(-size // group.size())  # all but the last rank have so many
    padded = rows if len(rows) == most else torch.cat([rows, rows.new_zeros(most - len(rows), *rows.shape[1:])])
    parts = _all_gather(padded, group)
    # Never a view, which FSDP2 warns of at the end of a block.
    return parts[:size].movedim(0, dim).clone(memory_format=torch.contiguous_format)


# The collectives, each with its result in memory of its own. In a compiled block they are the functional ones: torch
# 2.11 compiles those that write to a given tensor too, but then loses the gradient of what they wrote.


def _all_reduce(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    if torch.compiler.is_compiling():
        return functional.all_reduce(x, "sum", group)
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


def _all_gather(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[n, ...] of each rank -> [tp n, ...]"""
    x = x.contiguous()
    if torch.compiler.is_compiling():
        return functional.all_gather_tensor(x, 0, group)
    parts = x.new_empty(group.size() * x.shape[0], *x.shape[1:])
    _all_gather_into(parts, x, group=group)
    return parts


def _reduce_scatter(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[tp n, ...] -> [n, ...]"""
    x = x.contiguous()
    if torch.compiler.is_compiling():
        return functional.reduce_scatter_tensor(x, "sum", 0, group)
    mine = x.new_empty(x.shape[0] // group.size(), *x.shape[1:])
    _reduce_scatter_into(mine, x, group=group)
    return mine


class Started:
    """A collective that is under way: its result is there once `wait` was called."""

    def __init__(self, result: Tensor, work: dist.Work | None) -> None:
        self._result, self._work = result, work

    def wait(self) -> Tensor:
        if torch.compiler.is_compiling():
            return functional.wait_tensor(self._result)
        if self._work is not None:
            self._work.wait()
        return self._result


def start_gradient(x: Tensor, group: dist.ProcessGroup, cut: bool) -> Started:
    """Begin what `gather` (`cut`) or `copy` does in backward with the gradient x, whose memory is used up by it."""
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
    """Begin `gathered`; of the result `wait` gives what `_by_row` must put in order. Not in a compiled block."""
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


class _Part(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, dim: int) -> Tensor:
        ctx.group, ctx.dim, ctx.size = group, dim, x.shape[dim]
        return _mine(x, group, dim)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None]:
        return _joined(grad_outputs[0], ctx.group, ctx.dim, ctx.size), None, None


class _Whole(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, dim: int, size: int) -> Tensor:
        ctx.group, ctx.dim = group, dim
        return _joined(x, group, dim, size)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None, None]:
        return _mine(grad_outputs[0], ctx.group, ctx.dim), None, None, None
