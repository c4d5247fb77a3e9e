"""Styles for mixtures of experts: `ExpertRows` shards the experts, and `TokenRouter` replicates the router."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import Shard
from torch.distributed.tensor.placement_types import Placement

from dtmega.plans.base import Style, local_part
from dtmega.plans.styles import Whole


class ExpertRows(Style):
    """Stacked experts, each sharded along its inner dim F, inside an Enter: [B, S, D] -> [B, S/tp, D].

    The module's parameters are gate and up, [E, F, D], and down, [E, D, F]. The module's method `compute` takes this
    rank's shards of these parameters. Each rank computes its slice of F for all tokens, and the results are reduced.
    """

    placements: ClassVar[Mapping[str, Placement]] = {"gate": Shard(1), "up": Shard(1), "down": Shard(2)}
    inside = True
    cost = ("all-reduce", "reduce-scatter, backward all-gather")

    def check_class(self, module: nn.Module) -> None:
        stacked = {name for name, parameter in module.named_parameters() if parameter.ndim == 3}
        if stacked != {*self.placements} or not hasattr(module, "compute"):
            raise ValueError(
                f"ExpertRows is for modules with stacked {', '.join(self.placements)} and compute(), not "
                f"{type(module).__name__}"
            )

    def forward(self, module: Any, x: Tensor, *routing: Tensor) -> Tensor:
        experts, weights = routing
        gate, up, down = local_part(module.gate), local_part(module.up), local_part(module.down)
        return self.stack.leave(module.compute(x, experts, weights, gate, up, down), self.group)


class TokenRouter(Whole):
    """A replicated router inside an Enter. Every rank routes all tokens, [B, S, D].

    Each rank has only a shard of each expert, so its gradient for the tokens' expert weights is partial. The router's
    gradients are therefore all-reduced over tp. The gradient of the router's losses, however, is already complete on
    every rank, so each rank divides it by tp before this all-reduce (`share_gradient`).
    """

    def __init__(self, stack: Any = True) -> None:
        super().__init__(stack, of_heads=True)

    def check_class(self, module: nn.Module) -> None:
        if not hasattr(module, "route"):
            raise ValueError(f"TokenRouter is for modules with route(), not {type(module).__name__}")

    def forward(self, module: Any, x: Tensor) -> Any:
        routing = module.route(x, self.stack.shared(module.weight, self.group, of_heads=True))
        return routing._replace(
            probabilities=share_gradient(routing.probabilities, self.group),
            log_z=share_gradient(routing.log_z, self.group),
        )


def share_gradient(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return x unchanged. In backward, divide the gradient, which is complete on every rank, by the number of ranks."""
    return cast(Tensor, _ShareGradient.apply(x, group.size()))


class _ShareGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, n_ranks: int) -> Tensor:
        ctx.n_ranks = n_ranks
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:
        return grad_outputs[0] / ctx.n_ranks, None
