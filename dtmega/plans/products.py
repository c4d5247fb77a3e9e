"""The matrix product of every style, and what a region of them does while its gradients travel.

A region's input is gathered once, [B, S/tp, D] -> [B, S, D], and all products of the region read it. If they kept it
for backward, these inputs were a quarter of what a layer keeps at tp 4 (docs/decisions.md). So a product keeps nothing
of it: it hands out a ticket. Where the region ends, `again` takes the tickets back. Backward comes by there first: it
gathers the input once more, from this rank's part, for the products. In a compiled block they get it as the gradients
of their tickets; else the gather is only begun there, and the products wait for it when they need it.

The gradient of the input is summed over the ranks, and while it travels the gradient of a weight is computed: the
products of a region stand in a chain, in which each adds its own part, and the first one, which is the last in
backward, begins the sum, computes its weight's gradient, and waits. Inductor cannot follow the chain, so in a compiled
block this holds for regions of one product. Megatron's `LinearWithGradAccumulationAndAsyncCommunication` does both
(core/tensor_parallel/layers.py).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from dtmega.plans import mappings
from dtmega.plans.mappings import Started


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x W^T + b, [..., in] -> [..., out]: the one place where the styles multiply matrices.

    Args:
        x: an activation of this rank; what `enter` has gathered is not kept for backward.
        weight: [out, in], this rank's part.
        bias: [out].
    """
    region = getattr(x, "region", None)
    # Autocast makes other tensors of both factors, and backward would have to know which.
    if region is None or not weight.requires_grad or torch.is_autocast_enabled(x.device.type):
        return F.linear(x, weight, bias)
    if torch.compiler.is_compiling() and not region.alone and not region.cut:
        return F.linear(x, weight, bias)
    return region.product(x, weight, bias)


class Region:
    """The state that the products of one region share.

    Attributes:
        part: the input as this rank has it, [B, S/tp, D] if it is `cut`, else [B, S, D].
        alone: there is one product in it.
        tickets: one of each product, if it is cut.
    """

    def __init__(self, part: Tensor, group: dist.ProcessGroup, cut: bool, alone: bool) -> None:
        self.part = part.detach()
        self.group, self.cut, self.alone = group, cut, alone
        self.tickets: list[Tensor] = []
        # What the next product of the chain takes, so that its part of the gradient comes back to this one.
        self._link: Tensor | None = part
        self._first = True
        self._started: Started | None = None
        self._whole: Tensor | None = None
        self._n_tickets = self._n_left = 0

    def product(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """`product` of x, the region's input."""
        compiled = torch.compiler.is_compiling()
        if compiled and not self.alone:
            link, sums = x, False  # autograd adds up, and `mappings.gather` sums over the ranks
        else:
            link, sums = self._link, self._first
        state = None if compiled else self
        out, ticket, following = _Product.apply(link, x.detach(), weight, bias, self.group, self.cut, sums, state)
        if ticket is not None:
            self.tickets.append(ticket)
        if following is not None:
            self._link = following
        self._first = False
        return out

    def close(self) -> list[Tensor]:
        """The tickets; there are no more products. Their nodes know the region, which must not know them."""
        tickets, self.tickets, self._link = self.tickets, [], None
        self._n_tickets = len(tickets)
        return tickets

    def start(self) -> None:
        """Begin to gather the input once more, in backward."""
        self._started, self._n_left = mappings.start_gathered(self.part, self.group), self._n_tickets

    def fetch(self) -> Tensor:
        """Wait for what `start` has begun, for one of the products; after the last one nothing of it is kept."""
        assert self._started is not None
        if self._whole is None:
            self._whole = mappings.by_row(self._started.wait(), self.group)
        whole = self._whole
        self._n_left -= 1
        if self._n_left == 0:
            self._started = self._whole = None
        return whole


def enter(x: Tensor, group: dist.ProcessGroup, cut: bool, alone: bool) -> Tensor:
    """`mappings.gather` (`cut`) or `copy` of a region's input for its products; `again` must follow where it ends."""
    whole = mappings.gather(x, group) if cut else mappings.copy(x, group)
    whole.region = Region(x, group, cut, alone)  # pyright: ignore[reportAttributeAccessIssue]
    return whole


def again(out: Any, whole: Tensor) -> Any:
    """The end of a region: what comes out of it, and with its gradient the input for the products.

    Args:
        out: a tensor, or a tuple whose first one is what the region computes.
        whole: the region's input; if `enter` did not gather it, nothing is done.
    """
    region = getattr(whole, "region", None)
    if region is None:
        return out
    tickets = region.close()
    if not tickets:
        return out
    first, *others = out if isinstance(out, tuple) else (out,)
    state = None if torch.compiler.is_compiling() else region
    first = _Again.apply(first, region.part, region.group, state, *tickets)
    return (first, *others) if isinstance(out, tuple) else first


class _Product(torch.autograd.Function):
    """x W^T + b; a ticket, zeros in the shape of x that take no memory; and the same for the next one of the chain.

    Backward gets x as the ticket's gradient or from the region, and what later products add to the gradient of x as
    that of the third. Where it `sums`, its own gradient of x is the ranks' sum, or this rank's part of that.
    """

    @staticmethod
    def forward(
        ctx: Any,
        link: Tensor,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        group: dist.ProcessGroup,
        cut: bool,
        sums: bool,
        region: Region | None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        ctx.save_for_backward(*([weight] if cut else [weight, x]))
        ctx.group, ctx.cut, ctx.sums, ctx.region = group, cut, sums, region
        if region is not None:
            ctx.set_materialize_grads(False)
        ticket = x.new_zeros(()).expand(x.shape) if cut else None
        chained = region is not None and ctx.needs_input_grad[0]
        following = x.new_zeros(()).expand(x.shape) if chained else None
        return F.linear(x, weight, bias), ticket, following

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        weight = ctx.saved_tensors[0]
        needs_x, _, _, needs_bias, *_ = ctx.needs_input_grad
        grad, ticket, of_later_ones = grad_outputs
        rows = grad.flatten(0, -2)
        of_x = None
        started = None
        if needs_x:
            of_x = (rows @ weight).view(*grad.shape[:-1], weight.shape[1])
            if of_later_ones is not None:
                of_x += of_later_ones
            if ctx.sums:
                started = mappings.start_gradient(of_x, ctx.group, ctx.cut)
        if not ctx.cut:
            x = ctx.saved_tensors[1]
        elif ctx.region is None:
            x = ticket
        else:
            x = ctx.region.fetch()
        of_weight = rows.t() @ x.flatten(0, -2)
        of_bias = rows.sum(0) if needs_bias else None
        if started is not None:
            of_x = started.wait()
        return of_x, None, of_weight, of_bias, None, None, None, None


class _Again(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, out: Tensor, part: Tensor, group: dist.ProcessGroup, region: Region | None, *tickets: Tensor
    ) -> Tensor:
        ctx.save_for_backward(part)
        ctx.group, ctx.region, ctx.n_tickets = group, region, len(tickets)
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (part,) = ctx.saved_tensors
        grad = grad_outputs[0]
        if ctx.region is not None:
            ctx.region.start()
            return grad, None, None, None, *[None] * ctx.n_tickets
        # The compiler sees that forward gathered the same, and would keep that result. Chosen by a number of the
        # gradient, which of two equal tensors is gathered can be known in backward only.
        part = torch.where(grad[(0,) * grad.ndim] > 0, part, part)
        whole = mappings.gathered(part, ctx.group)
        return grad, None, None, None, *[whole] * ctx.n_tickets
