"""The parameters that a run trains: all, or only the parameters that [train] freeze and [lora] leave trainable."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from torch import nn

from dtmega.models.model import Model
from dtmega.ops.optim.build import matching


class Elements(NamedTuple):
    """The element counts of a whole model's parameters. A tied parameter counts once.

    Attributes:
        trained: number of elements in the parameters that the optimizer updates.
        frozen: number of elements in all other parameters.
    """

    trained: int
    frozen: int

    @property
    def notes(self) -> list[str]:
        """A list with one line about frozen parameters, for runs and plans to print; [] if no parameters are frozen."""
        return [f"trained: {self.trained:,} parameters; frozen: {self.frozen:,}"] if self.frozen else []


def freeze(model: Model, patterns: Sequence[str]) -> None:
    """Freeze each parameter of a whole model in place if the parameter's name in checkpoints matches a pattern.

    Args:
        model: whole model.
        patterns: value of [train] freeze, a list of patterns; `*` stands for any characters.

    Raises:
        ValueError: a pattern matches no parameter, or no parameter is left to train.
    """
    parameters = {model.full_name(name): parameter for name, parameter in model.named_parameters()}
    for pattern in patterns:
        for name in matching([*parameters], pattern, "[train] freeze"):
            parameters[name].requires_grad_(False)
    if not any(parameter.requires_grad for parameter in parameters.values()):
        n = len(parameters)
        raise ValueError(f"nothing is left to train: {n} of {n} parameters match ([train] freeze)")


def elements(parameters: Iterable[nn.Parameter]) -> Elements:
    """Count the elements of trained and of frozen parameters."""
    counts = {True: 0, False: 0}
    for parameter in parameters:
        counts[parameter.requires_grad] += parameter.numel()
    return Elements(counts[True], counts[False])
