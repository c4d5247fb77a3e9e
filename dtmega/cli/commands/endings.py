"""Line and exit code of what ends a command early.

The code is 2 for what its user can correct, 1 for what broke on the way (a full disk), 3 for a damaged checkpoint, 130
for Ctrl-C.
"""

from __future__ import annotations

import argparse
import errno
from collections.abc import Callable

from dtmega.distributed import exit_codes

BROKEN = 1
INTERRUPTED = 130  # as shells say it: 128 + SIGINT
# A path that is not there, not of this kind, or not this user's; other errors are of the machine.
WRONG_PATH = {
    *(errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENOTEMPTY, errno.ELOOP, errno.ENAMETOOLONG),
    *(errno.EACCES, errno.EPERM, errno.EROFS),
}


class NothingWritten(Exception):
    """A command that ended before any of its output stood under its name.

    Attributes:
        error: why.
    """

    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.error = error


def explained(error: BaseException) -> tuple[str, int]:
    """The line to say of an error, and the exit code."""
    if isinstance(error, KeyboardInterrupt):
        return "interrupted", INTERRUPTED
    if isinstance(error, OSError):
        path = f"{error.filename}: " if error.filename is not None else ""
        message = path + error.strerror if error.strerror else str(error)
        return message, exit_codes.REFUSED if error.errno in WRONG_PATH else BROKEN
    return str(error), getattr(error, "exit_code", exit_codes.REFUSED)


def write_output(write: Callable[[argparse.Namespace], str], args: argparse.Namespace) -> int:
    """Write the output of a command and print the summary; returns the exit code.

    Raises:
        NothingWritten: for all that `write` raises.
    """
    try:
        summary = write(args)
    except (ValueError, OSError, KeyboardInterrupt) as error:
        raise NothingWritten(error) from None
    print(summary)
    return exit_codes.DONE
