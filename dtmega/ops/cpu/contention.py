"""The cores of a CPU that a run computes on, and whether it has them to itself.

An operation on several threads is done when the last of them is. If another process wants one of the cores, the thread
that shares it comes late each time, and the others keep their cores busy with waiting (docs/decisions.md).
"""

from __future__ import annotations

import time
from pathlib import Path

import torch

# Steps of this process: the first ones start programs of their own, compilers and readers of data.
FROM, TO = 3, 13
CROWDED = 0.25  # seconds in each that threads of this process wait for a core
THREADS = Path("/proc/self/task")  # Linux


class Cores:
    """A look at some steps of a run.

    Args:
        device: what it computes on; if that is not a CPU, there is nothing to see.
    """

    def __init__(self, device: torch.device) -> None:
        self._n_threads = torch.get_num_threads() if device.type == "cpu" else 1
        self._start: tuple[float, float] | None = None  # the time, and how long threads had waited by then

    def after_step(self, n: int) -> str:
        """Advice, once, if threads of this process have to wait for a core; else, or if nobody knows, ''.

        Args:
            n: how many steps this process has done.
        """
        if self._n_threads == 1 or n not in (FROM, TO):
            return ""
        waited_s = _waited_s()
        if waited_s is None:
            return ""
        now = time.perf_counter()
        if self._start is None:
            self._start = now, waited_s
            return ""
        began, waited_before_s = self._start
        share = (waited_s - waited_before_s) / (now - began)
        if share < CROWDED:
            return ""
        return (
            f"other processes use this machine's cores: in each second threads of this run waited {share:.1f} s for "
            f"one, and the rest of its {self._n_threads} for them; OMP_NUM_THREADS={self._n_threads // 2} in front of "
            f"the same command may be much faster"
        )


def _waited_s() -> float | None:
    """How long the threads that there are were ready to run, and no core was free."""
    try:
        schedules = [(thread / "schedstat").read_text() for thread in THREADS.iterdir()]
        return sum(int(schedule.split()[1]) for schedule in schedules) / 1e9
    except (OSError, IndexError, ValueError):
        return None
