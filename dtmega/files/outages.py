"""The errors of an object store that does not answer, for code that may catch them without opening a store."""

from __future__ import annotations


class Unreachable(OSError):
    """Raised if a request to an object store still fails, or gets no answer, after several tries."""

    exit_code = 76  # `STUCK` of `distributed/exit_codes.py`: run the command again


class Denied(Unreachable):
    """Raised if the store answers that the request is not allowed or not understood."""

    exit_code = 2  # `REFUSED`: correct what the message names


def at_start(error: Exception, message: str) -> OSError | ValueError:
    """The error to raise if a run or command cannot start: an outage stays an `Unreachable`, with another message."""
    return type(error)(message) if isinstance(error, Unreachable) else ValueError(message)
