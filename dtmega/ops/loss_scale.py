"""The loss scale of float16: a factor of the loss, without which gradients below 6e-8 would be rounded to zero.

The scale starts high and adapts. A step with a gradient that is not finite is skipped, and from the second such step on
the scale is halved. After a thousand steps without one it is doubled. This is Megatron-LM's `DynamicGradScaler`
(optimizer/grad_scaler.py) with its factors; its four numbers are keys of [precision].

Where the scale enters: `Tally.factors` has scale x weight / count for each sum, the gradient that backward begins with.
A head that computes its gradients in forward gets this number in advance (`Model.expect`). From there on all gradients
are scaled: in float16, and where they are summed over microbatches and ranks, in the dtype of [precision] reduce.
`optim.unscale` divides the fp32 gradients, so that norm, clipping and update are those of any other precision.
"""

from __future__ import annotations

from typing import Annotated, NamedTuple

from pydantic import Field

from dtmega import config

BACKOFF = 0.5
GROWTH = 2.0


class ScaleState(NamedTuple):
    """The state of a loss scale, as a checkpoint stores it.

    Attributes:
        scale: factor of the loss.
        growth: steps since the last overflow, or since the scale was doubled.
        hysteresis: number of overflows until the scale is halved, that one included. At 0 each overflow halves it,
            until a doubling restores the number.
    """

    scale: Annotated[float, Field(gt=0)]
    growth: Annotated[int, Field(ge=0)]
    hysteresis: Annotated[int, Field(ge=0)]


class LossScale:
    """The loss scale of a run, changed after each step. It is the same on all ranks, because they agree on overflows.

    Args:
        precision: the run's section [precision].
        state: state in the checkpoint that the run resumes from; None: the initial one.
    """

    def __init__(self, precision: config.Precision, state: ScaleState | None = None) -> None:
        self._precision = precision
        self.state = state or ScaleState(precision.initial_loss_scale, 0, precision.hysteresis)

    @property
    def scale(self) -> float:
        return self.state.scale

    def update(self, overflowed: bool) -> None:
        """Change the scale after a step.

        Only a doubling restores the hysteresis. It does not recover between two overflows, however far apart they are.

        Args:
            overflowed: True if a gradient was not finite in this step.
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
