"""An objective with the sums that mixtures of experts add: router losses, and the number of dropped pairs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from torch import Tensor

from dtmega.config.families.moe import MoEKeys
from dtmega.data.objectives.objective import Objective, labelled
from dtmega.data.objectives.sums import Sum


@dataclass(frozen=True)
class _Routed:
    """An objective with additional sums over the layers with experts.

    A router loss is divided by the number of labels times the number of layers with experts. The number of dropped
    (token, expert) pairs is divided by the number of pairs of tokens with a label, over all these layers.
    """

    objective: Objective
    further: tuple[Sum, ...]
    n_layers: int
    experts_per_token: int

    @property
    def sums(self) -> tuple[Sum, ...]:
        return (*self.objective.sums, *self.further)

    def counts(self, microbatch: Mapping[str, Tensor]) -> dict[str, float]:
        routed = self.n_layers * labelled(microbatch)
        counts = {"routed": routed, "pairs": self.experts_per_token * routed}
        return {**self.objective.counts(microbatch), **counts}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.objective, name)


def with_router_losses(model: MoEKeys, objective: Objective) -> Objective:
    """Add the router losses with non-zero weights, and the share of dropped (token, expert) pairs, to an objective.

    Each of these numbers is reported as a mean over the layers. The training loss contains the sum of each router loss
    over the layers.
    """
    further = []
    for name, weight in (("balance", model.balance_loss), ("router_z", model.router_z_loss)):
        if weight:
            further.append(Sum(name, "routed", weight * model.n_mixtures, trains_only=True))
    if model.capacity_factor:
        further.append(Sum("dropped", "pairs", weight=0))
    if not further:
        return objective
    return cast(Objective, _Routed(objective, tuple(further), model.n_mixtures, model.experts_per_token))
