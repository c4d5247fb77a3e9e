"""The time during which a thread computes or waits for a core, as Linux counts it."""

from __future__ import annotations

import os
import time
from contextlib import suppress


class ThreadTime:
    """A clock of the thread that creates it. It stops while the thread sleeps, for instance to wait for other ranks.

    The clock runs while the thread computes, and while the thread is ready but another program has its core. Only Linux
    reports the time of the second kind; on other systems only computing counts.
    """

    def __init__(self) -> None:
        self._file: int | None = None
        with suppress(OSError):
            # For the thread that opens the file: nanoseconds on a core, nanoseconds ready without a core, time slices.
            self._file = os.open("/proc/thread-self/schedstat", os.O_RDONLY)

    def busy_s(self) -> float:
        """Seconds that the thread has computed or waited for a core since the thread began."""
        if self._file is None:
            return time.thread_time()
        on_core_ns, ready_ns, _ = os.pread(self._file, 100, 0).split()
        return (int(on_core_ns) + int(ready_ns)) / 1e9

    def close(self) -> None:
        """Close the file that the clock reads."""
        if self._file is not None:
            os.close(self._file)
            self._file = None
