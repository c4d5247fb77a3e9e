"""Open a file that may come from a stranger: a pipe or a device is refused, and does not block."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO


def open_regular(path: str | Path, *, follow: bool = True, buffering: int = -1) -> BinaryIO:
    """Open a regular file for reading.

    Args:
        path: path of the file.
        follow: whether to follow a symbolic link.
        buffering: buffering policy, as in `open`; 0 turns buffering off.

    Raises:
        OSError: the file is missing or unreadable, is not a regular file, or is a link that is not followed.
    """
    # Without O_NONBLOCK, opening a pipe would wait until another process writes to it.
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | (0 if follow else os.O_NOFOLLOW))
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(errno.EINVAL, "expected a regular file", str(path))
        return open(fd, "rb", buffering=buffering)
    except BaseException:
        os.close(fd)
        raise


def read_regular(path: str | Path) -> bytes:
    """The content of a regular file.

    Raises:
        OSError: as for `open_regular`.
    """
    with open_regular(path) as file:
        return file.read()
