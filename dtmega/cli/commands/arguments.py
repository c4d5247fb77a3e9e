"""Option types for `dtmega COMMAND`, and one-line error messages that name the option.

An option type checks the bounds of a value, so that commands need not check the bounds again.
"""

from __future__ import annotations

import argparse
import codecs
import math
import os
from collections.abc import Callable, Sequence
from typing import NoReturn

from dtmega.data.preparing.parts import Part
from dtmega.data.preparing.text_files import BLANK_LINES
from dtmega.files import urls
from dtmega.files.object_requests import check_usable
from dtmega.files.urls import is_object_store


class Parser(argparse.ArgumentParser):
    """A parser with one-line error messages. argparse's own parser would print ten lines of usage first."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {urls.masked(message)}\n")


def with_joined_values(argv: Sequence[str], options: Sequence[str]) -> list[str]:
    """Join each of the given options with its value: `--option value` becomes `--option=value`.

    Without `=`, argparse would read a value that begins with a dash, such as `--swiglu`, as another option.
    """
    words: list[str] = []
    for word in argv:
        if words and words[-1] in options:
            words[-1] += f"={word}"
        else:
            words.append(word)
    return words


def without_keys(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Separate configuration keys (`--section.key value` or `--section.key=value`) from a command's own options.

    Returns:
        The command line without the keys, and the keys with their values.
    """
    rest: list[str] = []
    keys: list[str] = []
    words = iter(argv)
    for word in words:
        flag, equals, _ = word.partition("=")
        if not (flag.startswith("--") and "." in flag):
            rest.append(word)
            continue
        keys.append(word)
        if not equals:
            value = next(words, None)
            if value is not None:
                keys.append(value)
    return rest, keys


def integer(low: int, high: int | None = None) -> Callable[[str], int]:
    """Make an option type for whole numbers from `low` to `high`; if `high` is None, there is no upper bound."""
    expected = f"a whole number of {low} or more" if high is None else f"a whole number from {low} to {high}"

    def read(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = None
        if value is None or value < low or (high is not None and value > high):
            raise argparse.ArgumentTypeError(f"expected {expected}, got '{text}'")
        return value

    return read


def temperature(text: str) -> float:
    """Parse a temperature: 0, or a number from 1e-6 to 1e6, so that dividing fp32 logits by it cannot overflow."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if value != 0 and not 1e-6 <= value <= 1e6:
        raise argparse.ArgumentTypeError(f"expected 0, or a number from 1e-6 to 1e6, got '{text}'")
    return value


def number(low: float, high: float) -> Callable[[str], float]:
    """Make an option type for numbers greater than `low` and at most `high`."""

    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not low < value <= high:
            raise argparse.ArgumentTypeError(f"expected a number above {low:g} and up to {high:g}, got '{text}'")
        return value

    return read


def path(text: str) -> str:
    """Check a path or a URL (`urls.check`)."""
    return _usable(text, local=False)


def local_path(text: str) -> str:
    """Check a path of this machine (`urls.check`)."""
    return _usable(text, local=True)


def _usable(text: str, local: bool) -> str:
    try:
        return urls.check(text, local=local)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def prefix(text: str) -> str:
    """Parse the prefix of a corpus's files, `PREFIX.bin` and `PREFIX.idx`. The name of either file is also accepted.

    Raises:
        argparse.ArgumentTypeError: the text names a folder or is a URL that holds credentials or is of no object store.
    """
    if is_object_store(text):
        try:
            check_usable(text, "PREFIX")
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
    else:
        local_path(text)
    text = text.removesuffix(".idx").removesuffix(".bin")
    if os.path.basename(text) in ("", ".", ".."):
        raise argparse.ArgumentTypeError(
            f"expected a prefix such as data/mine, for data/mine.bin and .idx, got '{text}'"
        )
    return text


def role(text: str) -> tuple[str, str]:
    """Parse NAME=ROLE, such as bot=assistant, into the name and the role."""
    name, _, meant = text.partition("=")
    if not name or not meant:
        raise argparse.ArgumentTypeError(f"expected NAME=ROLE, such as bot=assistant, got '{text}'")
    return name, meant


def part(text: str) -> Part:
    """Parse `--part I/N`, such as 3/12, into the index of the part of the input (from 0), and the number of parts."""
    number, _, of = text.partition("/")
    try:
        parsed = Part(int(number), int(of))
    except ValueError:
        parsed = Part(0, 0)
    if not 0 <= parsed.number < parsed.of:
        raise argparse.ArgumentTypeError(f"expected I/N with 0 <= I < N, from 0/12 to 11/12 for 12 parts, got '{text}'")
    return parsed


def encoding(text: str) -> str:
    """Return Python's name for a text encoding; '' for UTF-8."""
    try:
        name = codecs.lookup(text).name
        # This line raises LookupError for codecs that do not encode text, such as base64.
        "".encode(name)
    except LookupError:
        raise argparse.ArgumentTypeError(
            f"expected an encoding such as latin-1, cp1252 or utf-16, got '{text}'"
        ) from None
    return "" if name in ("utf-8", "utf-8-sig") else name


def places_to_cut(text: str) -> str | int:
    """Parse where to split text into documents: at BLANK_LINES, or after a number of tokens."""
    try:
        return BLANK_LINES if text == BLANK_LINES else integer(1)(text)
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(f"expected {BLANK_LINES} or a number of tokens, got '{text}'") from None
