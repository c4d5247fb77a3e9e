"""The message and exit code for an error that ends a command.

The exit code is 2 for errors that the user can correct, 1 for machine failures (such as a full disk), 3 for a damaged
checkpoint, 76 for an object store that does not answer, and 130 for Ctrl-C.
"""

from __future__ import annotations

import argparse
import errno
from collections.abc import Callable

from dtmega.distributed import exit_codes
from dtmega.files.console import quoted

BROKEN = 1
INTERRUPTED = 130  # the shells' code for a process ended by SIGINT: 128 + 2
# Errors about a path that is missing, exists already, is a file instead of a folder (or vice versa), or may not be
# accessed. All other operating system errors are machine failures.
WRONG_PATH = {
    *(errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENOTEMPTY, errno.ELOOP, errno.ENAMETOOLONG),
    *(errno.EACCES, errno.EPERM, errno.EROFS),
}


class NothingWritten(Exception):
    """An error that ended a command before any output file got its final name.

    Attributes:
        error: the original error.
    """

    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.error = error


def explained(error: BaseException) -> tuple[str, int]:
    """The one-line message and the exit code for an error."""
    if isinstance(error, KeyboardInterrupt):
        return "interrupted", INTERRUPTED
    if isinstance(error, OSError):
        path = f"{error.filename}: " if error.filename is not None else ""
        message = path + error.strerror if error.strerror else str(error)
        return message, getattr(error, "exit_code", exit_codes.REFUSED if error.errno in WRONG_PATH else BROKEN)
    return str(error), getattr(error, "exit_code", exit_codes.REFUSED)


def write_output(write: Callable[[argparse.Namespace], str], args: argparse.Namespace) -> int:
    """Write a command's output and print a summary.

    Args:
        write: function that writes the output and returns the summary.
        args: the command's options.

    Returns:
        The exit code.

    Raises:
        NothingWritten: `write` raised ValueError, OSError or KeyboardInterrupt.
    """
    try:
        summary = write(args)
    except (ValueError, OSError, KeyboardInterrupt) as error:
        raise NothingWritten(error) from None
    print(quoted(summary))
    return exit_codes.DONE
