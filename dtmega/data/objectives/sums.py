"""The numbers that a step reports: the loss, and means over the global batch. Each mean is a sum divided by a count.

No single rank can compute a mean over the global batch, because ranks and microbatches have different numbers of
labels. So models return sums, and each sum is divided by a count over the whole global batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

NO_COUNTS: Mapping[str, float] = MappingProxyType({})


class Sum(NamedTuple):
    """One number that a step reports: a mean over the global batch. Models return the sum over each microbatch.

    Attributes:
        name: key of the number in the model's outputs and in the metrics.
        per: name of the count that divides the sum.
        weight: factor of the mean in the loss; 0 for a number that is only reported and has no gradient, such as an
            accuracy.
        trains_only: whether the mean is left out of the evaluation loss, so that evaluations of runs with different
            weights can be compared.
    """

    name: str
    per: str
    weight: float = 1.0
    trains_only: bool = False


class Tally:
    """Running totals of this rank's sums in a step or an evaluation.

    Args:
        sums: the numbers that the objective reports.
        device: device of the totals.
        counts: counts of the global batch, from `divisors`; not needed in an evaluation, which has no backward pass.
        scale: loss scale; the backward pass multiplies all gradients by this factor.
        rounded: function that rounds each sum so that the order of addition cannot change any bit of the totals
            (`ops/fixed_point.py`); None to add the sums as they are.

    Attributes:
        totals: this rank's total of each sum, fp64 [sums]. The totals of all ranks of the `loss` group add up to the
            sums over the global batch.
    """

    def __init__(
        self,
        sums: Sequence[Sum],
        device: torch.device,
        counts: Mapping[str, float] = NO_COUNTS,
        scale: float = 1.0,
        rounded: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self.totals = torch.zeros(len(sums), dtype=torch.float64, device=device)
        self._sums = sums
        self._counts = counts
        self._scale = scale
        self._rounded = rounded

    def factors(self) -> dict[str, float]:
        """Derivatives of the scaled loss with respect to the sums, keyed by sum name: `scale * weight / count`."""
        return {term.name: self._scale * term.weight / self._counts[term.per] for term in self._sums}

    def add_all(self, outputs: Mapping[str, Tensor]) -> list[tuple[Tensor, float]]:
        """Add every sum in the outputs of a whole model to the totals; see `add`.

        Raises:
            KeyError: a sum is missing from the outputs.
        """
        return self.add({term.name: outputs[term.name] for term in self._sums})

    def add(self, outputs: Mapping[str, Tensor]) -> list[tuple[Tensor, float]]:
        """Add one microbatch's sums, found among a pipeline stage's outputs, to the totals; ignore all other outputs.

        A sum is a scalar, or a tensor of numbers to add up. `rounded` is called with all of them.

        Returns:
            The sums that belong to the loss and have a gradient, each with its factor.
        """
        factors = self.factors() if self._counts else {}
        in_loss = []
        for i, term in enumerate(self._sums):
            if term.name in outputs:
                found = outputs[term.name].detach()
                self.totals[i] += (found if self._rounded is None else self._rounded(found)).sum()
                if term.weight and outputs[term.name].requires_grad:
                    in_loss.append((outputs[term.name], factors[term.name]))
        return in_loss


def divisors(counts: Mapping[str, float]) -> dict[str, float]:
    """Replace counts of 0 with 1. If a count is 0, its sum is 0 too, so the mean becomes 0 instead of 0 / 0.

    Args:
        counts: counts, keyed by name, already added up over the whole step or evaluation; a batch without labels
            adds 0.
    """
    return {name: n or 1 for name, n in counts.items()}


def means_of(sums: Sequence[Sum], totals: Tensor, counts: Mapping[str, float]) -> dict[str, float]:
    """Means over the global batch, keyed by name; a mean is a total divided by its count.

    Args:
        sums: the numbers that the objective reports.
        totals: totals over the global batch, [sums].
        counts: counts of the global batch, from `divisors`.
    """
    return {term.name: total / counts[term.per] for term, total in zip(sums, totals.tolist(), strict=True)}


def loss_of(sums: Sequence[Sum], means: Mapping[str, float], evaluates: bool = False) -> float:
    """The loss: the weighted sum of the means.

    Means with weight 0 are left out, not multiplied by 0, because 0 times a NaN accuracy would make the loss NaN.

    Args:
        sums: the numbers that the objective reports.
        means: means, keyed by name, from `means_of`.
        evaluates: whether the loss is for an evaluation.
    """
    loss = 0.0
    for term in sums:
        if term.weight and not (evaluates and term.trains_only):
            loss += term.weight * means[term.name]
    return loss
