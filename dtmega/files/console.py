"""Lines for people, who may be gone: a full disk, a closed pipe, a dead terminal end no run and change no exit code.

with guarded():      # from here on print, tqdm, warnings and tracebacks cannot fail
    print("a line")
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any


class Guarded:
    """A text stream; what cannot be written to it is lost.

    Args:
        stream: None where the process was started without one, as Python has it then.
    """

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        try:
            self._stream.write(text)
        except UnicodeEncodeError:  # a sample in letters that the terminal does not have
            self.write(text.encode("ascii", "backslashreplace").decode())
        except (OSError, ValueError, AttributeError):  # cannot be written, is closed, is None
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
    """Make stdout and stderr `Guarded` in this block. Also a decorator."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = Guarded(sys.stdout), Guarded(sys.stderr)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


def say(text: str) -> None:
    """Lines on stderr in one write, so that those of several ranks do not mix; `printable`, since they repeat names."""
    stream = Guarded(sys.stderr)
    stream.write(printable(text, keep="\n") + "\n")
    stream.flush()


def name_ranks(ranks: list[int]) -> str:
    """[2] -> rank 2, [0, 1] -> ranks 0, 1; the first 16 of many."""
    more = f" and {len(ranks) - 16} more" if len(ranks) > 16 else ""
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks[:16])) + more


def printable(text: str, keep: str = "") -> str:
    r"""The text with every character that steers a terminal, or hides, written out: "\x1b[2J" becomes "\\x1b[2J".

    Args:
        keep: characters that stay, such as line ends where the text may have several lines.
    """
    return "".join(c if c.isprintable() or c in keep else c.encode("unicode_escape").decode() for c in text)


def counted(n: int, noun: str) -> str:
    """1 document, 2,048 processes."""
    if n == 1:
        return f"1 {noun}"
    return f"{n:,} {noun}{'es' if noun.endswith(('s', 'x', 'ch')) else 's'}"
