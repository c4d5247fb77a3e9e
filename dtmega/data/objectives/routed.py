"""An objective together with the losses of routers, which mixtures of experts return beside the objective's sums."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from torch import Tensor

from dtmega.config import MoE
from dtmega.data.objectives.objective import Objective, labelled
from dtmega.data.objectives.sums import Sum


@dataclass(frozen=True)
class _Routed:
    """An objective with further sums, each divided by the number of labels times the number of layers with experts."""

    objective: Objective
    further: tuple[Sum, ...]
    n_layers: int

    @property
    def sums(self) -> tuple[Sum, ...]:
        return (*self.objective.sums, *self.further)

    def counts(self, microbatch: Mapping[str, Tensor]) -> dict[str, float]:
        return {**self.objective.counts(microbatch), "routed": self.n_layers * labelled(microbatch)}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.objective, name)


def with_router_losses(model: MoE, objective: Objective) -> Objective:
    """The objective with the router losses that have a weight.

    Each is reported as a mean over the layers, and the loss has the sum over the layers.
    """
    further = []
    for name, weight in (("balance", model.balance_loss), ("router_z", model.router_z_loss)):
        if weight:
            further.append(Sum(name, "routed", weight * model.n_mixtures, trains_only=True))
    return cast(Objective, _Routed(objective, tuple(further), model.n_mixtures)) if further else objective
