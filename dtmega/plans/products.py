"""The matrix product for all styles: it saves no gathered input, and overlaps computation with communication.

Memory. A region's input is gathered once, [B, S/tp, D] -> [B, S, D], and all products of the region read the gathered
input. At tp 4, the gathered input would take a quarter of the memory that a layer saves for backward (docs/design.md).
Therefore, no product saves the gathered input. Backward gathers the input again from the ranks' slices [B, S/tp, D]:

1. In forward, each product returns its output and a *ticket*, which is a tensor of zeros that takes no memory.
2. `again`, which is called at the end of the region, consumes the tickets. Autograd therefore runs the backward of
   `again` before the backward of any product, and the backward of `again` starts the gather.
3. Each product waits for the gathered input when its backward needs the input. In a compiled block no Python object can
   carry the input from `again` to the products, so the products receive the input as the gradient of their tickets.

Dynamo may compile only some parts of a region: a graph that breaks inside of the region (at the exchange of experts'
rows) makes each part a frame of its own, and Dynamo never compiles a frame in which it once found nothing to compute,
as `again` is without gradients. A part therefore never concludes from its own mode how the others were run.

Time. The gradient of the input must be reduced over the ranks. During this reduction, each rank computes the gradient
of a weight. For this overlap, the products of a region form a chain. In backward, each product adds its term to the
input's gradient and passes the sum to the product before it. The region's first product is therefore last in backward.
It starts the reduction, computes the gradient of its own weight, and then waits for the reduction. Inductor cannot
follow the chain, so in a compiled block only regions with a single product overlap communication and computation.

Megatron's `LinearWithGradAccumulationAndAsyncCommunication` saves memory and time in the same way
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
    """Compute x W^T + b, [..., in] -> [..., out]. All styles multiply matrices with this function.

    Args:
        x: this rank's activation, [..., in]. If `enter` has gathered the activation, it is not saved for backward.
        weight: this rank's shard of the weight, [out, in].
        bias: this rank's shard of the bias, [out]; None for no bias.
    """
    region = getattr(x, "region", None)
    # Autocast would cast x and the weight in forward, but the backward below would use them without the cast.
    if region is None or torch.is_autocast_enabled(x.device.type):
        return F.linear(x, weight, bias)
    if torch.compiler.is_compiling() and not region.has_one_product and not region.cut:
        return F.linear(x, weight, bias)
    return region.product(x, weight, bias)


class Region:
    """The state that the products of one region share.

    Args:
        part: this rank's slice of the region's input, [B, S/tp, D] if `cut`; if not, the full input, [B, S, D].

    Attributes:
        group: process group of the tp ranks.
        cut: whether the input is sharded along the sequence before the region.
        has_one_product: whether only one product reads the input.
        tickets: tickets of the products so far; empty if the input is not sharded.
        feeds: whether a product was compiled, so that its ticket's gradient must be the gathered input.
    """

    def __init__(self, part: Tensor, group: dist.ProcessGroup, cut: bool, has_one_product: bool) -> None:
        self.group, self.cut, self.has_one_product = group, cut, has_one_product
        self.tickets: list[Tensor] = []
        self.feeds = False
        self._part: Tensor | None = part.detach()
        # For autograd, this tensor is the next product's input. The tensor's gradient goes to the previous product.
        self._link: Tensor | None = part
        self._is_first = True  # whether the next product is the first product of the chain
        self._gather: Started | None = None
        self._gathered: Tensor | None = None
        self._n_tickets = 0
        self._n_waiting = 0  # number of products that still need the gathered input in this backward

    def product(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Compute x W^T + b for the region's input x, as the next product of the chain."""
        compiled = torch.compiler.is_compiling()
        if compiled and not self.has_one_product:
            # Without the chain, autograd adds up the gradients of x, and the backward of `mappings.gather` reduces
            # the result over the ranks.
            link, sums = x, False
        else:
            link, sums = self._link, self._is_first
            self._is_first = False
        state = None if compiled else self
        out, ticket, next_link = _Product.apply(link, x.detach(), weight, bias, self.group, self.cut, sums, state)
        if ticket is not None:
            self.tickets.append(ticket)
            self.feeds |= compiled
        if next_link is not None:
            self._link = next_link
        return out

    def close(self) -> tuple[Tensor | None, list[Tensor]]:
        """End the region and return `part` and the tickets. A closed region accepts no more products.

        `close` also drops the region's references to tensors. The graph's nodes refer to the region, so references to
        tensors of the graph would form a cycle, and the region's input would live until the whole graph is freed.
        """
        part, tickets = self._part, self.tickets
        self.tickets = []
        self._part = self._link = None
        self._n_tickets = len(tickets)
        return part, tickets

    def start(self, part: Tensor) -> None:
        """Start gathering the input again for backward, from this rank's slice of it, [B, S/tp, D]."""
        self._gather = mappings.start_gathered(part, self.group)
        self._n_waiting = self._n_tickets

    def fetch(self) -> Tensor:
        """Wait for the gathered input. Each product calls `fetch` once in backward; the last call frees the input."""
        assert self._gather is not None
        if self._gathered is None:
            self._gathered = mappings.by_row(self._gather.wait(), self.group)
        gathered = self._gathered
        self._n_waiting -= 1
        if self._n_waiting == 0:
            self._gather = self._gathered = None
        return gathered


def enter(x: Tensor, group: dist.ProcessGroup, cut: bool, has_one_product: bool) -> Tensor:
    """Begin a region. Return the input of the region's matrix products.

    The input is the result of `mappings.gather` if `cut`, otherwise of `mappings.copy`. The caller must call `again` at
    the end of the region.
    """
    entered = mappings.gather(x, group) if cut else mappings.copy(x, group)
    entered.region = Region(x, group, cut, has_one_product)  # pyright: ignore[reportAttributeAccessIssue]
    return entered


def again(out: Any, entered: Tensor) -> Any:
    """End a region and return its output unchanged. The backward of `again` starts gathering the region's input again.

    Args:
        out: output of the region, either a tensor or a tuple whose first item is the output tensor.
        entered: input of the region. If the input does not come from `enter`, `again` only returns `out`.
    """
    region = getattr(entered, "region", None)
    if region is None:
        return out
    part, tickets = region.close()
    if not tickets:
        return out
    first, *others = out if isinstance(out, tuple) else (out,)
    state = None if region.feeds or torch.compiler.is_compiling() else region
    first = _Again.apply(first, part, region.group, state, *tickets)
    return (first, *others) if isinstance(out, tuple) else first


class _Product(torch.autograd.Function):
    """The product x W^T + b as a node of the chain, with three outputs:

    - x W^T + b;
    - a ticket: a tensor of zeros in the shape of x, which takes no memory. The ticket's gradient is x, or None if
      `region` has x. The ticket is None if x is saved or the weight is frozen, because backward then does not gather x;
    - the link for the next product: zeros like the ticket. The link's gradient is the sum of the later products' terms
      in the gradient of x.

    Args:
        link: input of the region, or the link from the previous product. Backward returns the gradient of x as the
            link's gradient.
        x: input of the region, detached.
        cut: whether x was gathered and is therefore not saved.
        sums: whether this is the first product of the chain, which reduces the gradient of x over the ranks.
        region: region of the product; None in a compiled block.
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
        learns = ctx.needs_input_grad[2]
        ctx.save_for_backward(*([weight, x] if learns and not cut else [weight]))
        ctx.group, ctx.cut, ctx.sums, ctx.region = group, cut, sums, region
        if region is not None:
            ctx.set_materialize_grads(False)
        ticket = x.new_zeros(()).expand(x.shape) if learns and cut else None
        chained = region is not None and ctx.needs_input_grad[0]
        next_link = x.new_zeros(()).expand(x.shape) if chained else None
        return F.linear(x, weight, bias), ticket, next_link

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        weight = ctx.saved_tensors[0]
        needs_x, _, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        dout, ticket_gradient, dx_of_later_products = grad_outputs
        rows = dout.flatten(0, -2)
        dx = None
        started = None
        # The gradient of x comes first, so that its reduction runs while the weight's gradient is computed.
        if needs_x:
            dx = (rows @ weight).view(*dout.shape[:-1], weight.shape[1])
            if dx_of_later_products is not None:
                dx += dx_of_later_products
            if ctx.sums:
                started = mappings.start_gradient(dx, ctx.group, ctx.cut)
        dweight = None
        if needs_weight:
            if not ctx.cut:
                x = ctx.saved_tensors[1]
            else:
                x = ctx.region.fetch() if ticket_gradient is None else ticket_gradient
            dweight = rows.t() @ x.flatten(0, -2)
        dbias = rows.sum(0) if needs_bias else None
        if started is not None:
            dx = started.wait()
        return dx, None, dweight, dbias, None, None, None, None


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
            ctx.region.start(part)
            return grad, None, None, None, *[None] * ctx.n_tickets
        # The compiler would see that forward has already gathered `part`, and would save the result for backward. To
        # prevent this reuse, `where` selects between equal tensors, so that `part` depends on the gradient.
        part = torch.where(grad[(0,) * grad.ndim] > 0, part, part)
        gathered = mappings.gathered(part, ctx.group)
        return grad, None, None, None, *[gathered] * ctx.n_tickets
