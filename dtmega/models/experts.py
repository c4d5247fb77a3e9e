"""Routed experts with stacked weights: sort the tokens by expert, multiply each group, and restore the tokens' order.

A *pair* is a token together with one of the token's k experts. The pairs of N tokens are numbered token by token, from
0 to N k - 1. A stable sort orders the pairs by expert, so each expert's tokens keep their order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import register_flop_formula

from dtmega.ops.shards import local


class Order(NamedTuple):
    """The pairs, sorted by expert.

    Attributes:
        pairs: pair number at each sorted position, [N k].
        place: sorted position of each pair, [N k]; the inverse of `pairs`.
        ends: exclusive end position of each expert's pairs, [E] int32; the last end is below N k if pairs are dropped.
    """

    pairs: Tensor
    place: Tensor
    ends: Tensor

    @property
    def n_rows(self) -> Tensor:
        """The number of pairs for each expert, [E] int64."""
        return self.ends.long().diff(prepend=self.ends.new_zeros(1))


def order_by_expert(experts: Tensor, n_experts: int) -> Order:
    """Sort the pairs by expert.

    Args:
        experts: expert numbers, [N, k] int64 for N tokens or [N k] for their pairs. A pair with the expert number E
            has no expert and is sorted last.
        n_experts: E, the number of experts.
    """
    flat = experts.flatten()
    in_order, pairs = flat.sort(stable=True)
    place = torch.empty_like(pairs)
    place[pairs] = torch.arange(len(pairs), device=pairs.device)
    numbers = torch.arange(n_experts, device=flat.device)
    ends = torch.searchsorted(in_order, numbers, right=True, out_int32=True)
    return Order(pairs, place, ends)


class Experts(nn.Module):
    """E gated feed-forward layers, down(silu(gate x) * up x), with their weights stacked along the first dim.

    tp shards each expert's width F, ep divides the experts among ranks, and FSDP2 shards the experts that a rank has.
    Each pair costs one row of a matrix product, even if its expert gets no other pair.

    Args:
        n_experts: E, the number of experts.
        hidden_size: D, the width of the hidden state.
        ffn: F, the width inside an expert.

    Attributes:
        exchange: function that sends rows to the ranks that hold their experts (`ops/expert_parallel.py`); None if
            this rank holds all experts.
    """

    exchange: Callable[[Tensor, Tensor], Any] | None = None

    def __init__(self, n_experts: int, hidden_size: int, ffn: int) -> None:
        super().__init__()
        self.n_experts = n_experts
        self.gate = nn.Parameter(torch.empty(n_experts, ffn, hidden_size))
        self.up = nn.Parameter(torch.empty(n_experts, ffn, hidden_size))
        self.down = nn.Parameter(torch.empty(n_experts, hidden_size, ffn))

    def forward(self, x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        """Apply each token's experts to the token and return the weighted sum of the experts' results.

        Args:
            x: activations, [B, S, D].
            experts: expert number of each pair, [B S, k] int64; E for a pair without an expert.
            weights: weight of each pair, [B S, k] fp32; 0 for a pair without an expert.
        """
        return self.compute(x, experts, weights, local(self.gate), local(self.up), local(self.down))

    def compute(self, x: Tensor, experts: Tensor, weights: Tensor, *matrices: Tensor) -> Tensor:
        """Compute `forward` with this rank's gate, up and down matrices, which may be sharded along F."""
        k = experts.shape[1]
        order = order_by_expert(experts, self.n_experts)
        rows = dispatch(x.flatten(0, 1), order, k)  # [N k, D]
        if self.exchange is None:
            results = feed_forward(rows, order.ends, *matrices)
        else:
            arrived = self.exchange(rows, order.n_rows)
            here = order_by_expert(arrived.experts, matrices[0].shape[0])
            by_expert = permute(arrived.rows, here.pairs, here.place)
            results = feed_forward(by_expert, here.ends, *matrices)
            results = arrived.give_back(permute(results, here.place, here.pairs))
        by_token = permute(results, order.place, order.pairs).view(*x.shape[:-1], k, -1)  # [B, S, k, D]
        # The results of a token's experts are added in a fixed order, and the sum is rounded once.
        return (by_token * weights.view(*x.shape[:-1], k, 1)).sum(2).to(x.dtype)


def feed_forward(rows: Tensor, ends: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """Apply each expert to its group of rows, [n, D]: down(silu(gate x) * up x).

    Args:
        rows: rows of all experts, grouped by expert.
        ends: exclusive end index of each expert's rows.
        gate: gate matrices of the experts, [E, F, D].
        up: up matrices of the experts, [E, F, D].
        down: down matrices of the experts, [E, D, F].
    """
    inner = F.silu(grouped_product(rows, gate, ends)) * grouped_product(rows, up, ends)
    return grouped_product(inner, down, ends)


def dispatch(x: Tensor, order: Order, k: int) -> Tensor:
    """Gather each pair's token, with the pairs sorted by expert: [N, D] -> [N k, D]."""
    return cast(Tensor, _Dispatch.apply(x, order.pairs, order.place, k))


class _Dispatch(torch.autograd.Function):
    """Indexing whose backward adds up the gradients of a token's pairs in a fixed order.

    On a GPU, the backward of torch's own indexing would add the gradients with atomic operations, in any order.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, pairs: Tensor, place: Tensor, k: int) -> Tensor:
        ctx.save_for_backward(place)
        ctx.k = k
        return x[pairs // k]

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None, None]:
        (place,) = ctx.saved_tensors
        return grad_outputs[0][place].unflatten(0, (-1, ctx.k)).sum(1), None, None, None


def permute(rows: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
    """Reorder rows, [n, D]: row order[i] becomes row i. `inverse` is the inverse of `order`."""
    return cast(Tensor, _Permute.apply(rows, order, inverse))


class _Permute(torch.autograd.Function):
    """A permutation of rows. Backward applies the inverse permutation by indexing, so no sums are needed."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return rows[order]

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None]:
        (inverse,) = ctx.saved_tensors
        return grad_outputs[0][inverse], None, None


def grouped_product(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Multiply each group of rows by the group's matrix, x W^T: [n, in] -> [n, out].

    Args:
        rows: rows of all groups, one group after another, [n, in]. Rows after the last group belong to no group; the
            caller gives the results of these rows the weight 0, so that the rows' gradients are 0.
        weight: one matrix for each group, [E, out, in].
        ends: exclusive end index of each group's rows, [E] int32.
    """
    if rows.is_cuda and rows.dtype == torch.bfloat16:
        # For rows in no group, `grouped_mm` would leave the results undefined, and 0 times NaN is NaN. So multiply
        # these rows by the last matrix.
        all_rows = ends.new_full((1,), rows.shape[0])
        return F.grouped_mm(rows, weight.transpose(-2, -1), offs=torch.cat([ends[:-1], all_rows]))
    return _grouped(rows, weight, ends)


@torch.library.custom_op("dtmega::grouped_product", mutates_args=())
def _grouped(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Compute `grouped_product` group by group, with zeros for rows in no group.

    The function is a custom operator, so that it can read the values of `ends` in compiled blocks too.
    """
    out = rows.new_empty(rows.shape[0], weight.shape[1])
    first = 0
    for matrix, end in zip(weight, ends.tolist(), strict=True):
        torch.mm(rows[first:end], matrix.t(), out=out[first:end])
        first = end
    out[first:] = 0
    return out


@_grouped.register_fake
def _(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    return rows.new_empty(rows.shape[0], weight.shape[1])


@torch.library.custom_op("dtmega::grouped_gradient", mutates_args=())
def _grouped_gradient(gradient: Tensor, rows: Tensor, ends: Tensor) -> Tensor:
    """Compute the matrices' gradient, [E, out, in]: gradient^T @ rows for each group, zeros for an empty group."""
    out = rows.new_empty(ends.shape[0], gradient.shape[1], rows.shape[1])
    first = 0
    for matrix, end in zip(out, ends.tolist(), strict=True):
        torch.mm(gradient[first:end].t(), rows[first:end], out=matrix)
        first = end
    return out


@_grouped_gradient.register_fake
def _(gradient: Tensor, rows: Tensor, ends: Tensor) -> Tensor:
    return rows.new_empty(ends.shape[0], gradient.shape[1], rows.shape[1])


def _keep(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    rows, weight, ends = ctx.saved_tensors
    gradient = gradient.contiguous()
    needs_rows, needs_weight, _ = ctx.needs_input_grad
    d_rows = grouped_product(gradient, weight.transpose(-2, -1), ends) if needs_rows else None
    d_weight = _grouped_gradient(gradient, rows, ends) if needs_weight else None
    return d_rows, d_weight, None


_grouped.register_autograd(_backward, setup_context=_keep)


@register_flop_formula(torch.ops.dtmega.grouped_product)
def _flops(rows: Any, weight: Any, *_: Any, **__: Any) -> int:
    """Count the FLOPs of all groups. The arguments are shapes."""
    return 2 * rows[0] * weight[1] * weight[2]


@register_flop_formula(torch.ops.dtmega.grouped_gradient)
def _flops_of_gradient(gradient: Any, rows: Any, *_: Any, **__: Any) -> int:
    return 2 * rows[0] * gradient[1] * rows[1]
