"""Detect steps whose loss or gradient norm is far above the values of recent steps."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterable, Sequence


class Spikes:
    """Detector of steps whose loss or gradient norm is far above recent values (OLMo-core's `SkipStepOptimizer`).

    Args:
        sigmas: number of standard deviations above the mean of the last WINDOW steps at which a step counts as a spike.
        recent: (loss, gradient norm) pairs of the last steps, as checkpoints store them.
    """

    WINDOW = 128

    def __init__(self, sigmas: float, recent: Iterable[Sequence[float]] = ()) -> None:
        self.sigmas, self.recent = sigmas, deque(map(tuple, recent), maxlen=self.WINDOW)

    def is_spike(self, loss: float, grad_norm: float) -> bool:
        """True if a step is a spike compared with the recent steps. The step then becomes one of the recent steps.

        The first WINDOW / 2 steps never count as spikes, because too few earlier steps exist.
        """
        is_spike = False
        if len(self.recent) >= self.WINDOW // 2:
            losses, norms = zip(*self.recent, strict=True)
            for value, before in ((loss, losses), (grad_norm, norms)):
                is_spike |= value > statistics.fmean(before) + self.sigmas * statistics.pstdev(before)
        # A single non-finite value would make the means of the next WINDOW steps useless.
        if math.isfinite(loss) and math.isfinite(grad_norm):
            self.recent.append((loss, grad_norm))
        return is_spike
