"""Types of the options of `dtmega COMMAND`, and a refusal in one line that names the option.

The bounds of a value stand beside its option, so that no command has to look at them again.
"""

from __future__ import annotations

import argparse
import codecs
import math
import os
from collections.abc import Callable
from typing import NoReturn

from dtmega.data.preparing.text_files import BLANK_LINES


class Parser(argparse.ArgumentParser):
    """A parser that refuses in one line; argparse prints ten lines of usage before it."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def integer(low: int, high: int | None = None) -> Callable[[str], int]:
    """The type of an option that takes whole numbers from `low` to `high`."""
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
    """A temperature: 0, or a number that logits in fp32 can be divided by without overflow."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if value != 0 and not 1e-6 <= value <= 1e6:
        raise argparse.ArgumentTypeError(f"expected 0, or a number from 1e-6 to 1e6, got '{text}'")
    return value


def number(low: float, high: float) -> Callable[[str], float]:
    """The type of an option that takes numbers above `low`, up to `high`."""

    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not low < value <= high:
            raise argparse.ArgumentTypeError(f"expected a number above {low:g} and up to {high:g}, got '{text}'")
        return value

    return read


def prefix(text: str) -> str:
    """A prefix of `.bin` and `.idx`, so not a folder. The name of either file stands for the prefix."""
    text = text.removesuffix(".idx").removesuffix(".bin")
    if os.path.basename(text) in ("", ".", ".."):
        raise argparse.ArgumentTypeError(
            f"expected a prefix such as data/mine, for data/mine.bin and .idx, got '{text}'"
        )
    return text


def encoding(text: str) -> str:
    """The name of an encoding of text as Python knows it; '' for UTF-8."""
    try:
        name = codecs.lookup(text).name
        "".encode(name)  # fails for codecs that are not of text, such as base64
    except LookupError:
        raise argparse.ArgumentTypeError(
            f"expected an encoding such as latin-1, cp1252 or utf-16, got '{text}'"
        ) from None
    return "" if name in ("utf-8", "utf-8-sig") else name


def places_to_cut(text: str) -> str | int:
    """The places to cut a text into documents at: blank lines, or every so many tokens."""
    try:
        return BLANK_LINES if text == BLANK_LINES else integer(1)(text)
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(f"expected {BLANK_LINES} or a number of tokens, got '{text}'") from None
