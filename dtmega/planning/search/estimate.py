"""Estimate the memory and time of a layout in closed form, for a search over many layouts.

    estimator = Estimator(cfg, pieces, fabric)
    estimator.estimate(layout).peak_bytes

The closed forms use only the hidden size and the costs of the model's pieces: embedding, layers, head (`ops.cost`). The
reference is the planner, which runs the real step on fake devices and counts its memory and messages.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from dtmega import config
from dtmega.ops.cost import Piece
from dtmega.planning.prices.fabric import Fabric
from dtmega.planning.search.duration import TimeEstimator
from dtmega.planning.search.layout import Layout
from dtmega.planning.search.memory import MemoryEstimator
from dtmega.planning.search.places import Places

# Assumed upper bound on the ratio of the planner's peak to the estimated peak, and on the inverse ratio. On the layouts
# of benchmarks/estimates.py, the largest error was 13 %; MARGIN allows about twice that error.
MARGIN = 1.25


class Estimate(NamedTuple):
    """The estimate of a layout.

    Attributes:
        peak_bytes: peak memory of the fullest rank.
        seconds: time of one step.
        states_bytes: bytes of parameters, moments, gradients and gathered weights on the fullest rank.
        kept_bytes: bytes of activations that the fullest rank saves for backward.
    """

    peak_bytes: int
    seconds: float
    states_bytes: int
    kept_bytes: int


class Estimator:
    """Estimates the memory and time of one configuration's layouts.

    Args:
        cfg: configuration, with a dtype in [precision] params.
        pieces: embedding, layers and head of the whole model.
        fabric: fabric of the cluster.
    """

    def __init__(self, cfg: config.Config, pieces: Sequence[Piece], fabric: Fabric) -> None:
        places = Places(cfg, pieces)
        self._batch_size = cfg.batch.global_batch_size
        self._memory = MemoryEstimator(cfg, places)
        self._time = TimeEstimator(cfg, places, fabric)

    def estimate(self, layout: Layout) -> Estimate:
        """The estimate of a layout that training accepts.

        Raises:
            ValueError: the fabric has no speed for the dtype.
        """
        n = self._batch_size // (layout.data_size * layout.micro_batch_size)
        memory = self._memory.memory(layout, n)
        seconds = self._time.seconds(layout, n)
        return Estimate(round(memory.peak_bytes), seconds, round(memory.states_bytes), round(memory.kept_bytes))
