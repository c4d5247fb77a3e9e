"""The numbers of a step: sums over a batch, each divided by a count of the global batch, and the loss that they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

NO_COUNTS: Mapping[str, float] = MappingProxyType({})


class Sum(NamedTuple):
    """One number of a step: a model gives its sum over a microbatch, a step reports its mean over the global batch.

    Attributes:
        name: in what the model returns, and in the metrics.
        per: the count that divides it.
        weight: of the mean in the loss; 0 for what is only reported and has no gradient, like an accuracy.
    """

    name: str
    per: str
    weight: float = 1.0


class Tally:
    """The sums that this rank finds in a step or an evaluation.

    Args:
        counts: of the global batch, from `divisors`; an evaluation needs none.
        scale: of the loss, by which backward multiplies all gradients.

    Attributes:
        totals: [sums] fp64; the totals of all ranks of the `loss` group add up to those of the global batch.
    """

    def __init__(
        self, sums: Sequence[Sum], device: torch.device, counts: Mapping[str, float] = NO_COUNTS, scale: float = 1.0
    ) -> None:
        self.totals = torch.zeros(len(sums), dtype=torch.float64, device=device)
        self._sums, self._counts, self._scale = sums, counts, scale

    def factors(self) -> dict[str, float]:
        """The derivative of the scaled loss by each sum, by name: scale x weight / count."""
        return {one.name: self._scale * one.weight / self._counts[one.per] for one in self._sums}

    def add_all(self, found: Mapping[str, Tensor]) -> list[tuple[Tensor, float]]:
        """`add` what a whole model has returned: it has every sum."""
        return self.add({one.name: found[one.name] for one in self._sums})

    def add(self, found: Mapping[str, Tensor]) -> list[tuple[Tensor, float]]:
        """Add the sums among what a stage has returned for a microbatch.

        Returns:
            Those of them that are in the loss and have a gradient, each with its factor.
        """
        factors = self.factors() if self._counts else {}
        in_loss = []
        for i, one in enumerate(self._sums):
            if one.name in found:
                self.totals[i] += found[one.name].detach()
                if one.weight and found[one.name].requires_grad:
                    in_loss.append((found[one.name], factors[one.name]))
        return in_loss


def divisors(counts: Mapping[str, float]) -> dict[str, float]:
    """Numbers to divide sums by: the counts, and 1 in place of a count of 0, whose sum is 0 too.

    Args:
        counts: count by name over the whole step or evaluation. Batches are added up before: one without labels adds 0.
    """
    return {name: n or 1 for name, n in counts.items()}


def means_of(sums: Sequence[Sum], totals: Tensor, counts: Mapping[str, float]) -> dict[str, float]:
    """Each sum over the global batch by its count.

    Args:
        totals: [sums], over the global batch.
        counts: of the global batch, from `divisors`.
    """
    return {one.name: total / counts[one.per] for one, total in zip(sums, totals.tolist(), strict=True)}


def loss_of(sums: Sequence[Sum], by_name: Mapping[str, float]) -> float:
    """The weighted sum of the means; what is only reported may be any number."""
    return sum(one.weight * by_name[one.name] for one in sums if one.weight)
