"""Console output. A full disk, a closed pipe or a dead terminal must neither end a run nor change its exit code.

with guarded():      # in this block, print, tqdm, warnings and tracebacks cannot fail
    with copied(log):    # and each line is also passed to a function: log("a line")
        print("a line")
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

MAX_LINE_CHARS = 2000  # of a message; a stranger's file may name a tensor with any number of characters


class Guarded:
    """A text stream whose methods never fail. Text that cannot be written is lost.

    Args:
        stream: text stream to write to; None if the process was started without the stream (`sys.stdout` is then None).
    """

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        try:
            self._stream.write(text)
        # UnicodeEncodeError: the terminal's encoding lacks a character, such as a letter in a generated sample.
        except UnicodeEncodeError:
            self.write(text.encode("ascii", "backslashreplace").decode())
        # OSError: the stream is not writable. ValueError: the stream is closed. AttributeError: the stream is None.
        except (OSError, ValueError, AttributeError):
            pass
        return len(text)

    def flush(self) -> None:
        with suppress(OSError, ValueError, AttributeError):
            self._stream.flush()

    def isatty(self) -> bool:
        try:
            return self._stream.isatty()
        except (ValueError, AttributeError):
            return False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def guarded() -> Iterator[None]:
    """Make stdout and stderr `Guarded` within the `with` block. Also works as a decorator."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = Guarded(sys.stdout), Guarded(sys.stderr)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


class Copied:
    """A `Guarded` text stream that also passes each complete line to a function.

    A line with a carriage return is not passed on, because it belongs to a progress bar, which redraws its line.

    Args:
        stream: text stream to write to.
        take: function that is called with one or more complete lines, without the final line break.
    """

    def __init__(self, stream: Any, take: Callable[[str], None]) -> None:
        self._stream, self._take = Guarded(stream), take
        self._begun: dict[int, str] = {}  # incomplete line of each thread, since `print` writes a line in pieces

    def write(self, text: str) -> int:
        # Write to the stream first, because `take` may hang, for example on a disk.
        written = self._stream.write(text)
        text = self._begun.pop(threading.get_ident(), "") + text
        # Drop the escape sequence with which tqdm moves the cursor up after drawing a nested progress bar.
        lines = text.replace("\x1b[A", "").replace("\r\n", "\n").split("\n")
        *complete, begun = ["" if "\r" in line else line for line in lines]
        if begun:
            self._begun[threading.get_ident()] = begun
        if complete:
            self._take("\n".join(complete))
        return written

    def take_rest(self) -> None:
        """Pass on the lines that are still incomplete."""
        for begun in [*self._begun.values()]:
            self._take(begun)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def copied(take: Callable[[str], None]) -> Iterator[None]:
    """Within the `with` block, replace stdout and stderr with `Copied` streams, including in existing log handlers."""
    with ExitStack() as undo:
        for owner, name in [(sys, "stdout"), (sys, "stderr"), *((handler, "stream") for handler in _handlers())]:
            stream = getattr(owner, name)
            copy = Copied(stream, take)
            undo.callback(copy.take_rest)
            undo.callback(setattr, owner, name, stream)
            setattr(owner, name, copy)
        yield


def _handlers() -> set[logging.Handler]:
    """The log handlers that hold this process's original stdout or stderr, such as torch's handlers.

    A handler like `logging.lastResort`, which torch 2.14 uses, looks up `sys.stderr` for each line and holds no stream.
    """
    loggers = [logging.root, *logging.root.manager.loggerDict.values()]
    handlers = {handler for logger in loggers for handler in getattr(logger, "handlers", ())}
    originals = (sys.__stdout__, sys.__stderr__)
    return {handler for handler in handlers if vars(handler).get("stream", handler) in originals}


def say(text: str) -> None:
    """Print lines on stderr, each `quoted`, because lines may quote untrusted text.

    All lines are printed in one write, so that the lines of several ranks do not mix.
    """
    stream = Guarded(sys.stderr)
    stream.write("\n".join(quoted(line) for line in text.split("\n")) + "\n")
    stream.flush()


def name_ranks(ranks: list[int]) -> str:
    """List ranks for a message: [2] -> rank 2, [0, 1] -> ranks 0, 1. Only the first 16 ranks are named."""
    more = f" and {len(ranks) - 16} more" if len(ranks) > 16 else ""
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks[:16])) + more


def printable(text: str, keep: str = "") -> str:
    r"""The text with control characters and invisible characters escaped: "\x1b[2J" becomes "\\x1b[2J".

    Args:
        text: text from any source, whose control characters could move the cursor or recolour a terminal.
        keep: characters that are not escaped, such as "\n" in text with several lines.
    """
    return "".join(c if c.isprintable() or c in keep else c.encode("unicode_escape").decode() for c in text)


def quoted(text: str) -> str:
    """A line for a terminal that may quote untrusted text: `printable`, and without its middle if it is long."""
    text = printable(text)
    left_out = len(text) - MAX_LINE_CHARS
    if left_out <= 0:
        return text
    # The end often says what to do.
    head, tail = text[: MAX_LINE_CHARS * 3 // 4], text[-MAX_LINE_CHARS // 4 :]
    return f"{head} ... ({left_out:,} characters) ... {tail}"


def counted(n: int, noun: str) -> str:
    """A count with its noun, in the plural unless the count is 1: 1 document, 2,048 processes."""
    if n == 1:
        return f"1 {noun}"
    return f"{n:,} {noun}{'es' if noun.endswith(('s', 'x', 'ch')) else 's'}"
