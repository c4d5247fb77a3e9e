"""The loss scale for float16: a factor on the loss, so that gradients smaller than 6e-8 are not rounded to zero.

The scale starts high and adapts. A step with a non-finite gradient (an overflow) is skipped. By default, each overflow
after the first also halves the scale, and a thousand steps without an overflow double the scale. The algorithm, BACKOFF
and GROWTH are the same as in Megatron-LM's `DynamicGradScaler` (optimizer/grad_scaler.py). All other settings are keys
of [precision].

The scale is applied at the start of backward: for each sum, `Tally.factors` holds the gradient that backward begins
with (scale x weight / count). A head that computes its gradients in forward gets this factor in advance
(`Model.expect`). From then on all gradients are scaled, both in float16 and while they are summed over microbatches and
ranks in the dtype of [precision] reduce. `optim.unscale` divides the fp32 gradients by the scale. Norm, clipping and
update then work as in any other precision.
"""

from __future__ import annotations

from dtmega import config
from dtmega.checkpoint.state import ScaleState

BACKOFF = 0.5
GROWTH = 2.0


class LossScale:
    """The loss scale of a run, updated after each step. All ranks agree on overflows, and therefore on the scale.

    Args:
        precision: section [precision] of the run's configuration.
        state: state in the checkpoint from which the run resumes; None for the initial state.
    """

    def __init__(self, precision: config.Precision, state: ScaleState | None = None) -> None:
        self._precision = precision
        self.state = state or ScaleState(precision.initial_loss_scale, 0, precision.hysteresis)

    @property
    def scale(self) -> float:
        return self.state.scale

    def update(self, overflowed: bool) -> None:
        """Update the scale after a step.

        Only a doubling restores the hysteresis; a shorter series of steps without an overflow does not.

        Args:
            overflowed: whether a gradient was not finite in this step.
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
