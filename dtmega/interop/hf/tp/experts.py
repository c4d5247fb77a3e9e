"""Tensor parallelism for mixtures of experts: each rank holds some of the experts, and each expert is on one rank.

Every rank has all tokens and routes them identically. Each rank computes the tokens routed to its own experts, and the
ranks' results are summed. So the collectives are the same as for a feed-forward that is sharded by features.

transformers' own code computes the experts. If a token's expert is on another rank, the routing weight becomes 0, and
the expert's number becomes E / tp, one more than the last local number, as in
`transformers.distributed.expert_parallel.AllReduceEP`. Every implementation in transformers skips this number.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.placement_types import Placement

from dtmega.interop.hf.tp.styles import Stack
from dtmega.plans import mappings
from dtmega.plans.base import Style, computing_on, local_part


class Experts(Style):
    """Style of a module with E experts and parameters [E, ...]. Each rank gets E / tp experts.

    The module's inputs are tokens [N, D], each token's expert indices [N, k], and the experts' routing weights [N, k].
    """

    cost = ("all-reduce, backward two all-reduces", "")

    def __init__(self) -> None:
        super().__init__(Stack())

    def placement(self, name: str, tp: int) -> Placement | None:
        return Shard(0)

    def check(self, module: Any, tp: int) -> None:
        self.check_class(module)
        if module.num_experts % tp:
            raise ValueError(
                f"tp={tp} does not divide num_experts={module.num_experts}: {module.num_experts} % {tp} = "
                f"{module.num_experts % tp}, and a rank has whole experts ([mesh] tp)"
            )
        super().check(module, tp)

    def check_class(self, module: nn.Module) -> None:
        """Check that the module is a transformers experts module that supports experts on other ranks.

        Raises:
            ValueError: the class does not support experts on other ranks, or a parameter's first dim does not index
                the experts.
        """
        n_experts = getattr(module, "num_experts", None)
        shapes = {name: list(p.shape) for name, p in module.named_parameters()}
        are_stacked = all("." not in name and shape[:1] == [n_experts] for name, shape in shapes.items())
        if not hasattr(module, "_is_expert_parallel") or not are_stacked:
            raise ValueError(
                f"Experts is for modules of transformers whose parameters are all [num_experts, ...] and which allow "
                f"experts on other ranks: {type(module).__name__} has num_experts={n_experts} and {shapes}"
            )

    def _apply(self, module: Any, device_mesh: DeviceMesh) -> nn.Module:
        super()._apply(module, device_mesh)
        module.num_experts //= device_mesh.size()
        module._is_expert_parallel = True
        return module

    def forward(self, module: Any, x: Tensor, *routing: Tensor) -> Tensor:
        numbers, weights = routing
        # `_apply` has set `num_experts` to the number of experts on each rank.
        n_local = module.num_experts
        numbers = numbers - self.group.rank() * n_local
        elsewhere = (numbers < 0) | (numbers >= n_local)
        # A rank's experts contribute only a part of the gradients for tokens and weights, so `copy` sums both gradients
        # in backward.
        x = mappings.copy(x, self.group)
        weights = mappings.copy(weights, self.group).masked_fill(elsewhere, 0.0)
        with computing_on(module, local_part):
            out = type(module).forward(module, x, numbers.masked_fill(elsewhere, n_local), weights)
        return mappings.add_up(out, self.group)
