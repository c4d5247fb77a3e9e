"""Detect other processes that compete with a CPU run for its cores.

An operation on several threads is done when its last thread is done. If another process uses one of the cores, the
thread on that core is always late, and the other threads keep their cores busy while they wait
(archive/2026-11.md).
"""

from __future__ import annotations

import time
from pathlib import Path

import torch

# Waiting is measured between these two steps of this process. The steps before FROM are left out, because compilers and
# data readers start in these steps.
FROM, TO = 3, 13
CROWDED = 0.25  # advise the user if all threads together wait for at least this many seconds per second
THREADS = Path("/proc/self/task")  # one folder for each thread, on Linux


class Contention:
    """Measures how long a run's threads wait for a core, over a few steps.

    Args:
        device: device on which the run computes; the class measures only runs on a CPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._n_threads = torch.get_num_threads() if device.type == "cpu" else 1
        self._start: tuple[float, float] | None = None  # (time, seconds that threads had waited up to this time)

    def after_step(self, n: int) -> str:
        """Advice for the user if threads of this process wait for a core; '' if there is no advice after this step.

        Args:
            n: number of steps that this process has done so far.
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
        start, waited_before_s = self._start
        share = (waited_s - waited_before_s) / (now - start)
        if share < CROWDED:
            return ""
        return (
            f"other processes use this machine's cores: in each second, threads of this run waited {share:.1f} s for a "
            f"core, and the others of its {self._n_threads} threads waited for those; the same command with "
            f"OMP_NUM_THREADS={self._n_threads // 2} in front may be much faster"
        )


def _waited_s() -> float | None:
    """The seconds that this process's threads have waited for a core so far; None if the counts cannot be read."""
    try:
        schedules = [(thread / "schedstat").read_text() for thread in THREADS.iterdir()]
        return sum(int(schedule.split()[1]) for schedule in schedules) / 1e9
    except (OSError, IndexError, ValueError):
        return None
