"""float16's loss scale: gradients below 6e-8 would be rounded to zero, so the loss, and they with it, are multiplied.

The scale starts high and finds its place by itself. Where a gradient is not finite, the step is skipped and the scale
is halved, after the second time; after a thousand steps without it is doubled. Megatron-LM's `DynamicGradScaler`
(optimizer/grad_scaler.py), with its factors; the four numbers are keys of [precision].

Where the scale enters: `Tally.factors` is scale x weight / count of each sum, the number that backward begins with. A
head that computes its gradient in forward is told it before (`Model.expect`); from there on all gradients are scaled
in float16, their sums over microbatches and ranks in [precision] reduce. `optim.unscale` divides the fp32 gradients,
so norm, clipping and update see what they see in another precision.
"""

from __future__ import annotations

from typing import Annotated, NamedTuple

from pydantic import Field

from dtmega import config

BACKOFF = 0.5
GROWTH = 2.0


class ScaleState(NamedTuple):
    """The state of a scale, as a checkpoint keeps it.

    Attributes:
        growth: steps without an overflow since the last one, or since the scale was doubled.
        hysteresis: overflows that are left before the scale is halved; 0: each one halves it.
    """

    scale: Annotated[float, Field(gt=0)]
    growth: Annotated[int, Field(ge=0)]
    hysteresis: Annotated[int, Field(ge=0)]


class LossScale:
    """The scale of a run, changed after each step; the same on all ranks, because they agree in what overflows.

    Args:
        state: of the checkpoint that the run goes on from; None: a new one.
    """

    def __init__(self, precision: config.Precision, state: ScaleState | None = None) -> None:
        self._precision = precision
        self.state = state or ScaleState(precision.initial_loss_scale, 0, precision.hysteresis)

    @property
    def scale(self) -> float:
        return self.state.scale

    def update(self, overflowed: bool) -> None:
        """Change the scale after a step, in which a gradient was not finite or all were.

        Only a doubling gives the hysteresis back: between two overflows that are far apart it does not recover.
        """
        scale, growth, hysteresis = self.state
        if overflowed:
            hysteresis = max(0, hysteresis - 1)
            if hysteresis == 0:
                scale = max(scale * BACKOFF, self._precision.min_loss_scale)
            self.state = ScaleState(scale, 0, hysteresis)
        elif growth + 1 >= self._precision.loss_scale_window:
            self.state = ScaleState(scale * GROWTH, 0, self._precision.hysteresis)
        else:
            self.state = ScaleState(scale, growth + 1, hysteresis)
