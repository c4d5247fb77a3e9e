"""Words of a shell command, as sequences of pieces. A piece is known text, or text that only a real run could produce.

Each piece holds its line number in the script, so that a message about a flag can name the line.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

LONGEST = 1_000_000  # limit in characters for one word


class Text(NamedTuple):
    """A piece of known text.

    Attributes:
        text: text of the piece.
        line: line number in the script.
    """

    text: str
    line: int


class Unknown(NamedTuple):
    """A piece whose value is not known, such as an environment variable or another program's output.

    Attributes:
        text: the piece as written in the script.
        line: line number in the script.
        name: names of variables that a user can set to make the value known, separated by blanks; '' if no variable
            would help.
        condition: condition that determines the value, with the condition's line; '' if there is no such condition.
        path: path that the piece stands for, relative to the script's folder; '' if the path is not known.
    """

    text: str
    line: int
    name: str = ""
    condition: str = ""
    path: str = ""


Piece = Text | Unknown
Word = tuple[Piece, ...]


class Undecided(ValueError):
    """Raised if a wanted command, or the order of statements, depends on a condition with an unknown value."""

    def __init__(self, condition: str, names: Iterable[str]) -> None:
        # `$@` and `$*` need the number of arguments. Quote `#`, because an unquoted # starts a comment in a shell.
        known_by = ["'#=VALUE'" if name in ("#", "@", "*") else f"{name}=VALUE" for name in names if name]
        options = " ".join(f"--set {option}" for option in dict.fromkeys(known_by))
        cure = f"give it with {options}" if options else "write the script without it"
        super().__init__(f"{condition} is not known, and the command depends on it: {cure}")


def known(word: Word) -> str | None:
    """The text of a word; None if a piece is not known."""
    if any(isinstance(piece, Unknown) for piece in word):
        return None
    return "".join(piece.text for piece in word)


def written(word: Word) -> str:
    """The text of a word, with unknown pieces as written in the script."""
    return "".join(piece.text for piece in word)


def unknowns(words: Iterable[Word]) -> list[Unknown]:
    """All unknown pieces in the given words."""
    return [piece for word in words for piece in word if isinstance(piece, Unknown)]


def joined(words: Iterable[Word]) -> Word:
    """Join words into one word and merge adjacent known pieces from the same line.

    Raises:
        ValueError: the word is longer than LONGEST.
    """
    pieces: list[Piece] = []
    length = 0
    for word in words:
        for piece in word:
            length += len(piece.text)
            last = pieces[-1] if pieces else None
            if isinstance(piece, Text) and isinstance(last, Text) and last.line == piece.line:
                pieces[-1] = Text(last.text + piece.text, piece.line)
            else:
                pieces.append(piece)
    if length > LONGEST:
        raise ValueError(f"line {pieces[0].line}: the variables of this line make a text of {length:,} characters")
    return tuple(pieces)


def with_blanks(words: Iterable[Word], line: int) -> Word:
    """Join words into one word, with a blank between neighbouring words."""
    parts: list[Word] = []
    for word in words:
        if parts:
            parts.append((Text(" ", line),))
        parts.append(word)
    return joined(parts)


class Fields:
    """The words that result from an expansion, built piece by piece.

    Attributes:
        words: the finished words.
    """

    def __init__(self) -> None:
        self.words: list[Word] = []
        self._open: list[Word] | None = None

    def add(self, word: Word) -> None:
        """Append text to the last word without splitting the text, as the shell does for quoted text."""
        self._open = self._open or []
        self._open.append(word)

    def add_split(self, word: Word) -> None:
        """Split text at blanks and append each part, as the shell does for an unquoted variable."""
        for piece in word:
            if isinstance(piece, Unknown):
                self.add((piece,))
                continue
            parts = piece.text.split()
            if piece.text[:1].isspace():
                self.close()
            for i, part in enumerate(parts):
                if i:
                    self.close()
                self.add((Text(part, piece.line),))
            if parts and piece.text[-1:].isspace():
                self.close()

    def close(self) -> None:
        """End the last word."""
        if self._open is not None:
            self.words.append(joined(self._open))
            self._open = None
