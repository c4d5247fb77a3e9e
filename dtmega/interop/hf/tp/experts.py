"""The experts of a mixture over tp: whole ones, each rank its own, for the tokens that are routed to them.

Every rank has all tokens and routes them alike. In the experts a rank computes what its own are to see, and the ranks'
results are summed: the forward of a feed-forward that is cut by features, with the same collectives. transformers' own
code does the work. Where experts are apart it gives those of other ranks the number behind the last one here, and the
weight 0, which each of its implementations leaves out (`transformers.distributed.expert_parallel.AllReduceEP`).
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
    """A module of E experts, whose parameters are [E, ...]: a rank has E / tp of them.

    It is called with tokens [N, D], the numbers of the experts of each [N, k], and their weights [N, k].
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
        """Refuse a class whose experts cannot be on several ranks.

        Raises:
            ValueError: not a module of transformers whose experts may be on several ranks.
        """
        n_experts = getattr(module, "num_experts", None)
        shapes = {name: list(p.shape) for name, p in module.named_parameters()}
        of_experts = all("." not in name and shape[:1] == [n_experts] for name, shape in shapes.items())
        if not hasattr(module, "_is_expert_parallel") or not of_experts:
            raise ValueError(
                f"Experts is for modules of transformers whose parameters are all [num_experts, ...], and which know "
                f"that some are elsewhere: {type(module).__name__} has num_experts={n_experts} and {shapes}"
            )

    def _apply(self, module: Any, device_mesh: DeviceMesh) -> nn.Module:
        super()._apply(module, device_mesh)
        module.num_experts //= device_mesh.size()
        module._is_expert_parallel = True
        return module

    def forward(self, module: Any, x: Tensor, *routing: Tensor) -> Tensor:
        numbers, weights = routing
        here = module.num_experts
        numbers = numbers - self.group.rank() * here
        elsewhere = (numbers < 0) | (numbers >= here)
        x = mappings.copy(x, self.group)
        weights = mappings.copy(weights, self.group).masked_fill(elsewhere, 0.0)
        with computing_on(module, local_part):
            out = type(module).forward(module, x, numbers.masked_fill(elsewhere, here), weights)
        return mappings.add_up(out, self.group)
