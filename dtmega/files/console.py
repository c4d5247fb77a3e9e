"""Text for people, who may have left: a full disk, a closed pipe or a dead terminal must neither end a run nor change
its exit code.

with guarded():      # from here on print, tqdm, warnings and tracebacks cannot fail
    print("a line")
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any


class Guarded:
    """A text stream whose methods do not fail. Text that cannot be written is lost.

    Args:
        stream: text stream to write to; None, as `sys.stdout` is in a process that was started without one.
    """

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        try:
            self._stream.write(text)
        # The terminal's encoding lacks a character of the text, such as a letter in a generated sample.
        except UnicodeEncodeError:
            self.write(text.encode("ascii", "backslashreplace").decode())
        # The stream is not writable, is closed or is None, in this order.
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
    """Make stdout and stderr `Guarded` within this block. Also works as a decorator."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = Guarded(sys.stdout), Guarded(sys.stderr)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


def say(text: str) -> None:
    """Print lines on stderr, made `printable` because they may quote file names and other people's text.

    All lines go out in one write, so that the lines of several ranks do not mix.
    """
    stream = Guarded(sys.stderr)
    stream.write(printable(text, keep="\n") + "\n")
    stream.flush()


def name_ranks(ranks: list[int]) -> str:
    """The ranks in words: [2] -> rank 2, [0, 1] -> ranks 0, 1; of many, the first 16 and how many more."""
    more = f" and {len(ranks) - 16} more" if len(ranks) > 16 else ""
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks[:16])) + more


def printable(text: str, keep: str = "") -> str:
    r"""The text with its control characters and invisible characters escaped: "\x1b[2J" becomes "\\x1b[2J".

    Args:
        text: text from anywhere, which could otherwise move the cursor or recolour a terminal.
        keep: characters to leave alone, such as "\n" in a text of several lines.
    """
    return "".join(c if c.isprintable() or c in keep else c.encode("unicode_escape").decode() for c in text)


def counted(n: int, noun: str) -> str:
    """A count with its noun, in the plural if need be: 1 document, 2,048 processes."""
    if n == 1:
        return f"1 {noun}"
    return f"{n:,} {noun}{'es' if noun.endswith(('s', 'x', 'ch')) else 's'}"
