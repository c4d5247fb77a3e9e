"""The time in which a thread wanted to compute, by Linux's own account of it."""

from __future__ import annotations

import os
import time
from contextlib import suppress


class ThreadTime:
    """A clock of the thread that makes it: it stands still while the thread sleeps, as in a wait for other ranks.

    It goes on while the thread computes, and while the thread is ready but another program has its core. Systems other
    than Linux do not tell the second; there only computing counts.
    """

    def __init__(self) -> None:
        self._file: int | None = None
        with suppress(OSError):
            # "nanoseconds on a core, nanoseconds ready without one, number of turns", for the thread that opens it.
            self._file = os.open("/proc/thread-self/schedstat", os.O_RDONLY)

    def busy_s(self) -> float:
        """Seconds that the thread has computed or waited for a core, since it began."""
        if self._file is None:
            return time.thread_time()
        on_core_ns, ready_ns, _ = os.pread(self._file, 100, 0).split()
        return (int(on_core_ns) + int(ready_ns)) / 1e9

    def close(self) -> None:
        """Close the system's file."""
        if self._file is not None:
            os.close(self._file)
            self._file = None
