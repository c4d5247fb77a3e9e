"""The messages of context parallelism: the ranks gather the parts of sequences, or exchange tokens for heads.

In backward, the gradients of gathered keys and values are summed over the ranks. The terms are added in rank order, so
that the bits do not depend on the order in which messages arrive.

The memory for gathered keys and values does not shrink as cp grows. Autograd therefore keeps only the rank's own keys
and values, and backward gathers the rest again, as in TransformerEngine
(attention/dot_product_attention/context_parallel.py, AttnFuncWithCPAndKVAllGather).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

# torch 2.13 renamed this function and warns about the old name. torch 2.11 has only the old name.
_all_gather_into = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def in_order(parts: Tensor, dim: int, balanced: bool) -> Tensor:
    """Join the ranks' parts [cp, ...] in the order of the sequence. `dim` is a dim of a single part."""
    pieces = list(parts.unbind())
    if balanced:
        halves = [part.chunk(2, dim) for part in pieces]
        # Each rank's second slice lies in the second half of the sequence, in reverse rank order.
        pieces = [first for first, _ in halves] + [second for _, second in reversed(halves)]
    return torch.cat(pieces, dim)


def part_of_rank(x: Tensor, rank: int, n: int, dim: int, balanced: bool) -> Tensor:
    """Split x along `dim` over `n` ranks and return the part that belongs to `rank`."""
    if not balanced:
        return x.chunk(n, dim)[rank]
    slices = x.chunk(2 * n, dim)
    return torch.cat([slices[rank], slices[2 * n - 1 - rank]], dim)


def by_rank(x: Tensor, n: int, dim: int, balanced: bool) -> Tensor:
    """The inverse of `in_order`: the parts of all ranks, stacked as [n, ...]."""
    return torch.stack([part_of_rank(x, rank, n, dim, balanced) for rank in range(n)])


def all_gather(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Gather the ranks' tensors into [cp, ...]."""
    x = x.contiguous()
    if torch.compiler.is_compiling():
        return functional.all_gather_tensor(x[None], 0, group)
    parts = x.new_empty(group.size(), *x.shape)
    _all_gather_into(parts.flatten(0, 1) if x.ndim else parts, x, group=group)
    return parts


def exchange(parts: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Send parts[r] to each rank r and return the parts received from all ranks: [cp, ...] -> [cp, ...]."""
    parts = parts.contiguous()
    if torch.compiler.is_compiling():
        return functional.all_to_all_single(parts, None, None, group)
    received = torch.empty_like(parts)
    dist.all_to_all_single(received, parts, group=group)
    return received


class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, balanced: bool) -> Tensor:
        ctx.group, ctx.balanced = group, balanced
        return in_order(all_gather(x, group), dim=2, balanced=balanced)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None]:
        parts = exchange(by_rank(grad_outputs[0], ctx.group.size(), 2, ctx.balanced), ctx.group)
        total = parts[0].clone()
        for part in parts[1:]:
            total += part
        return total, None, None


class _View(NamedTuple):
    """The shape, strides and offset with which a tensor views the memory of the gathered keys and values."""

    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class GatheredAgain:
    """Gathered keys and values that are freed after forward and gathered again when backward needs them.

    Args:
        gathered: keys and values of all tokens.
        parts: keys and values of this rank's tokens; usually views of tensors that autograd keeps anyway.
        group, balanced: arguments of the `Gather` call that returned `gathered`.
    """

    def __init__(self, gathered: Tensor, parts: list[Tensor], group: dist.ProcessGroup, balanced: bool) -> None:
        self._storage = StorageWeakRef(gathered.untyped_storage())
        self._parts, self._group, self._balanced = [part.detach() for part in parts], group, balanced
        self._n_views = self._n_waiting = 0
        self._again: Tensor | None = None

    def pack(self, tensor: Tensor) -> Tensor | _View:
        """Return what autograd keeps for a tensor: a `_View` if the tensor is a view of `gathered`, or the tensor."""
        if StorageWeakRef(tensor.untyped_storage()) != self._storage:
            return tensor
        self._n_views += 1
        return _View(tensor.shape, tensor.stride(), int(tensor.storage_offset()))

    def unpack(self, kept: Tensor | _View) -> Tensor:
        """Return the tensor that was packed as `kept`. The last view in a backward pass frees the gathered tensor."""
        if isinstance(kept, Tensor):
            return kept
        if self._again is None:
            part = torch.cat(self._parts, dim=-1)
            self._again = in_order(all_gather(part, self._group), dim=2, balanced=self._balanced)
            self._n_waiting = self._n_views
        view = self._again.as_strided(*kept)
        self._n_waiting -= 1
        if self._n_waiting == 0:
            self._again = None
        return view


def _to_heads(x: Tensor, group: dist.ProcessGroup, balanced: bool) -> Tensor:
    return in_order(exchange(torch.stack(x.chunk(group.size(), dim=1)), group), dim=2, balanced=balanced)


def _to_tokens(x: Tensor, group: dist.ProcessGroup, balanced: bool) -> Tensor:
    return torch.cat(exchange(by_rank(x, group.size(), 2, balanced), group).unbind(), dim=1)


class Redistribute(torch.autograd.Function):
    """Exchange tokens for heads, or heads for tokens. Backward runs the opposite exchange."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, balanced: bool, to_heads: bool) -> Tensor:
        ctx.group, ctx.balanced, ctx.to_heads = group, balanced, to_heads
        redistribute = _to_heads if to_heads else _to_tokens
        return redistribute(x, group, balanced)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None, None]:
        redistribute = _to_tokens if ctx.to_heads else _to_heads
        return redistribute(grad_outputs[0], ctx.group, ctx.balanced), None, None, None
