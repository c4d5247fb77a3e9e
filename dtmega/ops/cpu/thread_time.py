"""The time that a thread spends computing or waiting for a core, as counted by Linux."""

from __future__ import annotations

import os
import time
from contextlib import suppress


class ThreadTime:
    """A clock for the busy time of the thread that creates the clock.

    The clock runs while the thread computes, and while the thread is ready to run but waits for a core. The clock stops
    while the thread sleeps, for instance while the thread waits for other ranks. Only Linux reports how long a ready
    thread waited for a core; on all other systems, the clock measures only computing time.
    """

    def __init__(self) -> None:
        self._file: int | None = None
        with suppress(OSError):
            # Three numbers for the thread that opens the file: nanoseconds on a core, nanoseconds spent ready to run
            # but waiting for a core, and number of time slices.
            self._file = os.open("/proc/thread-self/schedstat", os.O_RDONLY)

    def busy_s(self) -> float:
        """Seconds that the thread has spent computing or waiting for a core since the thread began."""
        if self._file is None:
            return time.thread_time()
        on_core_ns, ready_ns, _ = os.pread(self._file, 100, 0).split()
        return (int(on_core_ns) + int(ready_ns)) / 1e9

    def close(self) -> None:
        """Close the file that the clock reads."""
        if self._file is not None:
            os.close(self._file)
            self._file = None
