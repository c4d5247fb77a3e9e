"""Watch the pace of a run: warn if the tokens per second have fallen by half, and name the slow rank.

All ranks end a step together, so the step times are equal and do not show which rank made the other ranks wait. The
time that each rank spends on its own work (`StepTimes.own_s`) shows the slow rank. The ranks exchange these times, one
number per rank, every `[log] interval` steps.
"""

from __future__ import annotations

from collections import deque
from statistics import median

import torch
import torch.distributed as dist

from dtmega.distributed import replica_check
from dtmega.training.phases import StepTimes

WINDOW = 1000  # number of earlier steps whose median pace is the usual pace
SLOW = 0.5  # fraction of the usual pace below which a step is slow
CONSPICUOUS = 1.2  # a rank is called slow if its own time is at least this multiple of the other ranks' median


class Pace:
    """A monitor of the run's pace since this process started. All ranks must call the methods together.

    Args:
        slow_steps: number of consecutive slow steps after which the run warns; 0 for no warnings.
        device: device on which collectives run.
    """

    def __init__(self, slow_steps: int, device: torch.device) -> None:
        self._slow_steps, self._device = slow_steps, device
        self._usual: deque[float] = deque(maxlen=WINDOW)
        self._slow: list[float] = []
        self._own_s: list[float] = []
        self._said = False

    def after_step(self, n_tokens: int, times: StepTimes, exchange: bool) -> str:
        """Record a step.

        Args:
            n_tokens: number of tokens that all ranks together read in this step.
            times: times of the step on this rank.
            exchange: whether the ranks exchange `own_s` after this step. Without an exchange, there is no warning.

        Returns:
            The warning, which is given only once per process; '' if there is no warning.
        """
        if not self._slow_steps or self._said:
            return ""
        tokens_per_s = n_tokens / times.step_s
        self._own_s.append(times.own_s)
        # The first step includes compilation, so its pace alone is no basis for a comparison.
        if len(self._usual) > 1 and tokens_per_s < SLOW * median(self._usual):
            self._slow.append(tokens_per_s)
        else:
            self._slow = []
            self._usual.append(tokens_per_s)
        if not exchange:
            return ""
        mine = torch.tensor([sum(self._own_s) / len(self._own_s)], dtype=torch.float64, device=self._device)
        self._own_s = []
        everyone = dist.group.WORLD
        assert everyone is not None
        own_s = replica_check.gather_vectors(mine, everyone).flatten().tolist()
        if len(self._slow) < self._slow_steps:
            return ""
        self._said = True
        return (
            f"WARNING: for {len(self._slow)} steps the run has made {median(self._slow):,.0f} tok/s, less than half of "
            f"the {median(self._usual):,.0f} before; {slowest(own_s)}"
        )


def slowest(own_s: list[float]) -> str:
    """Describe the rank that makes the other ranks wait.

    Args:
        own_s: mean seconds per step that each rank spent on its own work.
    """
    if len(own_s) == 1:
        return "there is one rank only"
    rank = own_s.index(max(own_s))
    others_s = median(own_s[:rank] + own_s[rank + 1 :])
    if own_s[rank] < CONSPICUOUS * others_s:
        return f"no rank is slower than the others by itself: about {median(own_s):.3g} s of its own in a step"
    return (
        f"rank {rank} is the slowest: {own_s[rank]:.3g} s of its own work in a step, {others_s:.3g} s in the median of "
        f"the others, which wait for it"
    )
