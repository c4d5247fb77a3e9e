"""A file lock that one process at a time can hold. The lock is released when its holder dies.

with Lock(Path("order.bin.lock")):   # waits until no other process holds the lock
    ...

The lock uses `flock`, and the holder's child processes do not inherit the lock. On a file system without locks, every
process gets the lock, and a line on stderr warns the user.
"""

from __future__ import annotations

import errno
import fcntl
import math
import os
import time
from pathlib import Path
from types import TracebackType

from dtmega.files import console

POLL_S = 0.1


class Lock:
    """A lock that one process at a time may hold, until the process calls `close()` or dies.

    Args:
        path: file to lock, created if it does not exist.

    Raises:
        OSError: the file cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        # Child processes do not inherit this descriptor: a child that outlives its parent would keep the lock.
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)

    def take(self, patience_s: float = math.inf) -> bool:
        """Wait for the lock and take it.

        Returns:
            False if another process still holds the lock after `patience_s` seconds.

        Raises:
            OSError: the file cannot be locked, for example because the disk fails.
        """
        deadline = time.monotonic() + patience_s
        while not self._try():
            if time.monotonic() > deadline:
                return False
            time.sleep(POLL_S)
        return True

    def write(self, text: str) -> None:
        """Replace the lock file's content with `text`, which may identify the holder, then sync the file to disk."""
        os.ftruncate(self._fd, 0)
        os.write(self._fd, text.encode())
        os.fsync(self._fd)

    def close(self) -> None:
        """Release the lock. The lock file stays, because another process may be waiting for the lock."""
        os.close(self._fd)

    def __enter__(self) -> Lock:
        try:
            self.take()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _try(self) -> bool:
        """Take the lock if it is free; return False if another process holds it."""
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError as error:
            # These errors mean that the file system has no locks (for example, Lustre mounted without -o flock).
            if error.errno not in (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK):
                raise
            console.say(f"{self._path} cannot be locked ({error.strerror}): a second writer would not be noticed")
        return True


def is_held(path: Path) -> bool | None:
    """True if a process holds the lock on this file, False if no process does, None if the answer is unknown.

    If the lock is free, this check briefly takes the lock. A process that tries to take the lock at that moment has to
    try again.
    """
    try:
        fd = os.open(path, os.O_RDONLY)
    except OSError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    # The file system has no locks.
    except OSError:
        return None
    finally:
        os.close(fd)
    return False
