"""The matrix product of every style, and how a gathered input is gathered again for backward instead of being kept.

A region's input is gathered once, [B, S/tp, D] -> [B, S, D], and all products of the region read it. If they kept it
for backward, these inputs were a quarter of what a layer keeps at tp 4 (docs/decisions.md). So a product keeps nothing
of it: it hands out a ticket. Where the region ends, `again` takes the tickets back. Backward comes by there first: it
gathers the input once more, from this rank's part, and sends it to the products, as the gradients of their tickets.
Megatron's `LinearWithGradAccumulationAndAsyncCommunication` gathers again too (core/tensor_parallel/layers.py).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from dtmega.plans import mappings


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x W^T + b, [..., in] -> [..., out]: the one place where the styles multiply matrices.

    Args:
        x: an activation of this rank; what `gather` made is not kept for backward.
        weight: [out, in], this rank's part.
        bias: [out].
    """
    region = getattr(x, "region", None)
    # Autocast makes other tensors of both factors, and backward would have to know which.
    if region is None or not weight.requires_grad or torch.is_autocast_enabled(x.device.type):
        return F.linear(x, weight, bias)
    out, ticket = _Product.apply(x, weight, bias)
    region.tickets.append(ticket)
    return out


class Region:
    """The state that the products of one region share.

    Attributes:
        part: the input as this rank has it, [B, S/tp, D].
        tickets: one of each product.
    """

    def __init__(self, part: Tensor, group: dist.ProcessGroup) -> None:
        self.part = part
        self.group = group
        self.tickets: list[Tensor] = []


def gather(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """`mappings.gather` of a region's input, which no product keeps; `again` must follow where the region ends."""
    whole = mappings.gather(x, group)
    whole.region = Region(x.detach(), group)  # pyright: ignore[reportAttributeAccessIssue]
    return whole


def again(out: Any, whole: Tensor) -> Any:
    """The end of a region: what comes out of it, and with its gradient the input for the products.

    Args:
        out: a tensor, or a tuple whose first one is what the region computes.
        whole: the region's input; if `gather` did not make it, nothing is done.
    """
    region = getattr(whole, "region", None)
    if region is None or not region.tickets:
        return out
    if isinstance(out, tuple):
        return (again(out[0], whole), *out[1:])
    return _Again.apply(out, region.part, region.group, *region.tickets)


class _Product(torch.autograd.Function):
    """x W^T + b and a ticket, zeros in the shape of x that take no memory. Backward gets x as the ticket's gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(weight)
        return F.linear(x, weight, bias), x.new_zeros(()).expand(x.shape)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, Tensor, Tensor | None]:
        (weight,) = ctx.saved_tensors
        needs_x, _, needs_bias = ctx.needs_input_grad
        x = grad_outputs[1]
        rows = grad_outputs[0].flatten(0, -2)
        of_x = (rows @ weight).view(x.shape) if needs_x else None
        of_weight = rows.t() @ x.flatten(0, -2)
        of_bias = rows.sum(0) if needs_bias else None
        return of_x, of_weight, of_bias


class _Again(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, out: Tensor, part: Tensor, group: dist.ProcessGroup, *tickets: Tensor) -> Tensor:
        ctx.save_for_backward(part)
        ctx.group, ctx.n_tickets = group, len(tickets)
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (part,) = ctx.saved_tensors
        grad = grad_outputs[0]
        if torch.compiler.is_compiling():
            # The compiler sees that forward gathered the same, and would keep that result. Chosen by a number of the
            # gradient, which of two equal tensors is gathered can be known in backward only.
            part = torch.where(grad[(0,) * grad.ndim] > 0, part, part)
        whole = mappings.gathered(part, ctx.group)
        return grad, None, None, *[whole] * ctx.n_tickets
