"""Context parallelism: each sequence is split over the cp ranks, and attention exchanges keys and values, or heads.

Each rank holds S / cp tokens of each sequence. Under a causal mask, rank r holds slices r and 2 cp - 1 - r of 2 cp
slices, so that all ranks compute the same number of token pairs (Llama 3, arXiv:2407.21783, section 3.3.2). With
attention in both directions, rank r holds slice r of cp slices. Everything outside attention works on single tokens
and needs no communication, because the batch contains the tokens' global positions.

Attention has two forms:

    gather   each rank has the keys and values of all tokens    [B, G, S/cp, K] -> [B, G, S, K]
    heads    each rank has all tokens, for a part of the heads  [B, H, S/cp, K] -> [B, H/cp, S, K]

In backward, the gradients of gathered keys and values are summed over the ranks. The terms are added in rank order, so
that the bits do not depend on the order in which messages arrive.

The memory for gathered keys and values does not shrink as cp grows. Autograd therefore keeps only the rank's own keys
and values, and backward gathers the rest again, as in TransformerEngine
(attention/dot_product_attention/context_parallel.py, AttnFuncWithCPAndKVAllGather). In recomputed blocks, the
recomputation just before backward has already gathered the keys and values again, so backward does not gather a third
time.
"""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

# torch 2.13 renamed this function and warns about the old name. torch 2.11 has only the old name.
_all_gather_into = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class ContextParallel(NamedTuple):
    """The cp ranks, over which each sequence is split, and the form of their attention.

    Attributes:
        group: process group of the cp ranks.
        by_heads: whether attention has the form `heads`; if False, attention has the form `gather`.
        keeps_gathered: whether to keep gathered keys and values for backward, as in recomputed blocks; if False,
            backward gathers them again.
    """

    group: dist.ProcessGroup
    by_heads: bool = False
    keeps_gathered: bool = False

    def slice(self, row: Tensor, balanced: bool) -> Tensor:
        """This rank's part, [B, S / cp, ...], of a tensor with one entry per token, [B, S, ...].

        Args:
            row: tensor of the whole sequences, [B, S, ...].
            balanced: whether the part consists of two slices, one from each half of the sequence; if False, the part is
                a single slice.
        """
        return _part(row, self.group.rank(), self.group.size(), dim=1, balanced=balanced).contiguous()

    def whole(self, part: Tensor, balanced: bool) -> Tensor:
        """Join the ranks' parts into one tensor of whole sequences, [B, S, ...], which carries no gradient."""
        # gloo cannot gather bools.
        numbers = part.to(torch.uint8) if part.dtype == torch.bool else part
        return _in_order(_all_gather(numbers, self.group), dim=1, balanced=balanced).to(part.dtype)

    def runs(self, length: int, balanced: bool) -> list[Run]:
        """The runs of consecutive tokens that this rank holds.

        Args:
            length: S / cp, the number of tokens that this rank holds.
            balanced: whether this rank holds two slices instead of one, as in `slice`.
        """
        n, rank = self.group.size(), self.group.rank()
        if not balanced:
            return [Run(0, length, rank * length)]
        half = length // 2
        return [Run(0, half, rank * half), Run(half, length, (2 * n - 1 - rank) * half)]

    def gather(self, keys: Tensor, balanced: bool) -> Tensor:
        """Gather the ranks' keys or values [B, G, S / cp, K] into [B, G, S, K], in the order of the sequence."""
        return cast(Tensor, _Gather.apply(keys, self.group, balanced))

    def gathering_again(self, gathered: Tensor, parts: list[Tensor], balanced: bool) -> saved_tensors_hooks:
        """In the `with` block, make autograd keep `parts` for backward instead of views of `gathered`.

        Args:
            gathered: result of `gather`.
            parts: tensors whose concatenation along the last dim was passed to `gather`.
            balanced: value of `balanced` that was passed to `gather`.
        """
        again = _GatheredAgain(gathered, parts, self.group, balanced)
        return saved_tensors_hooks(again.pack, again.unpack)

    def to_heads(self, x: Tensor, balanced: bool) -> Tensor:
        """Turn all heads of this rank's tokens, [B, H, S / cp, K], into some heads of all tokens, [B, H / cp, S, K]."""
        return cast(Tensor, _Redistribute.apply(x, self.group, balanced, True))

    def to_tokens(self, x: Tensor, balanced: bool) -> Tensor:
        """Undo `to_heads`."""
        return cast(Tensor, _Redistribute.apply(x, self.group, balanced, False))

    def own_heads(self, per_head: Tensor) -> Tensor:
        """This rank's rows of a tensor [H, ...] with one row per head, for attention in the form `heads`."""
        return per_head.chunk(self.group.size())[self.group.rank()]


class Run(NamedTuple):
    """A run of consecutive tokens.

    Attributes:
        start, stop: bounds of the run among the tokens that the rank holds.
        place: index of the run's first token in the whole sequence.
    """

    start: int
    stop: int
    place: int


def _in_order(parts: Tensor, dim: int, balanced: bool) -> Tensor:
    """Join the ranks' parts [cp, ...] in the order of the sequence. `dim` is a dim of a single part."""
    pieces = list(parts.unbind())
    if balanced:
        halves = [part.chunk(2, dim) for part in pieces]
        # Each rank's second slice lies in the second half of the sequence, in reverse rank order.
        pieces = [first for first, _ in halves] + [second for _, second in reversed(halves)]
    return torch.cat(pieces, dim)


def _part(x: Tensor, rank: int, n: int, dim: int, balanced: bool) -> Tensor:
    """Split x along `dim` over `n` ranks and return the part that belongs to `rank`."""
    if not balanced:
        return x.chunk(n, dim)[rank]
    slices = x.chunk(2 * n, dim)
    return torch.cat([slices[rank], slices[2 * n - 1 - rank]], dim)


def _by_rank(x: Tensor, n: int, dim: int, balanced: bool) -> Tensor:
    """The inverse of `_in_order`: the parts of all ranks, stacked as [n, ...]."""
    return torch.stack([_part(x, rank, n, dim, balanced) for rank in range(n)])


def _all_gather(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Gather the ranks' tensors into [cp, ...]."""
    x = x.contiguous()
    if torch.compiler.is_compiling():
        return functional.all_gather_tensor(x[None], 0, group)
    parts = x.new_empty(group.size(), *x.shape)
    _all_gather_into(parts.flatten(0, 1) if x.ndim else parts, x, group=group)
    return parts


def _exchange(parts: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Send parts[r] to each rank r and return the parts received from all ranks: [cp, ...] -> [cp, ...]."""
    parts = parts.contiguous()
    if torch.compiler.is_compiling():
        return functional.all_to_all_single(parts, None, None, group)
    received = torch.empty_like(parts)
    dist.all_to_all_single(received, parts, group=group)
    return received


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, balanced: bool) -> Tensor:
        ctx.group, ctx.balanced = group, balanced
        return _in_order(_all_gather(x, group), dim=2, balanced=balanced)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None]:
        parts = _exchange(_by_rank(grad_outputs[0], ctx.group.size(), 2, ctx.balanced), ctx.group)
        total = parts[0].clone()
        for part in parts[1:]:
            total += part
        return total, None, None


class _View(NamedTuple):
    """The shape, strides and offset with which a tensor views the memory of the gathered keys and values."""

    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class _GatheredAgain:
    """Gathered keys and values that are freed after forward and gathered again when backward needs them.

    Args:
        gathered: keys and values of all tokens.
        parts: keys and values of this rank's tokens; usually views of tensors that autograd keeps anyway.
        group, balanced: arguments of the `_Gather` call that returned `gathered`.
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
            self._again = _in_order(_all_gather(part, self._group), dim=2, balanced=self._balanced)
            self._n_waiting = self._n_views
        view = self._again.as_strided(*kept)
        self._n_waiting -= 1
        if self._n_waiting == 0:
            self._again = None
        return view


def _to_heads(x: Tensor, group: dist.ProcessGroup, balanced: bool) -> Tensor:
    return _in_order(_exchange(torch.stack(x.chunk(group.size(), dim=1)), group), dim=2, balanced=balanced)


def _to_tokens(x: Tensor, group: dist.ProcessGroup, balanced: bool) -> Tensor:
    return torch.cat(_exchange(_by_rank(x, group.size(), 2, balanced), group).unbind(), dim=1)


class _Redistribute(torch.autograd.Function):
    """Exchange tokens for heads, or heads for tokens. Backward runs the opposite exchange."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, balanced: bool, to_heads: bool) -> Tensor:
        ctx.group, ctx.balanced, ctx.to_heads = group, balanced, to_heads
        exchange = _to_heads if to_heads else _to_tokens
        return exchange(x, group, balanced)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None, None]:
        exchange = _to_tokens if ctx.to_heads else _to_heads
        return exchange(grad_outputs[0], ctx.group, ctx.balanced), None, None, None
