"""One process at a time: a lock on a file, which is free again when its holder dies.

with Lock(Path("order.bin.lock")):   # waits for whoever holds it
    ...

The locks are flock's. What the holder starts does not inherit them. A file system that has no locks is used without
them, and a line on stderr says so.
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
    """A lock that one process may hold, until `close()` or its death.

    Args:
        path: of a file, made if need be; whoever may write in its folder may take the lock.

    Raises:
        OSError: the file cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        # Python's descriptors are not inherited by what this process starts, which may outlive it.
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)

    def take(self, patience_s: float = math.inf) -> bool:
        """Wait for the lock; False if another process still holds it after patience_s.

        Raises:
            OSError: the disk is broken.
        """
        deadline = time.monotonic() + patience_s
        while not self._try():
            if time.monotonic() > deadline:
                return False
            time.sleep(POLL_S)
        return True

    def write(self, text: str) -> None:
        """Replace what stands in the file, on the disk; for the holder, to say who it is."""
        os.ftruncate(self._fd, 0)
        os.write(self._fd, text.encode())
        os.fsync(self._fd)

    def close(self) -> None:
        """Release the lock; the file stays."""
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
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError as error:
            if error.errno not in (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK):  # Lustre without -o flock, for one
                raise
            console.say(f"{self._path} cannot be locked ({error.strerror}): a second writer would not be noticed")
        return True


def is_held(path: Path) -> bool | None:
    """True if a process holds the lock on this file, False if none does, None if that cannot be found out.

    A free lock is taken for a moment. Whoever wants it in that moment finds it taken, and has to try again.
    """
    try:
        fd = os.open(path, os.O_RDONLY)
    except OSError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # a file system that has no locks
        return None
    finally:
        os.close(fd)
    return False
