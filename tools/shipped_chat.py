"""Write the shipped conversations, dtmega/data/preparing/shipped-chat.jsonl, by rule.

    python tools/shipped_chat.py

They are short questions with short answers that a small model can learn in minutes. The last HELD_OUT conversations
have questions that no other conversation has. Each fact is asked for in two ways, and at most one way is held out.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

FILE = Path(__file__).parents[1] / "dtmega" / "data" / "preparing" / "shipped-chat.jsonl"
HELD_OUT, LONG = 40, 64  # number of conversations that are held out; with two questions each

OPPOSITES = (
    "hot cold, big small, old new, fast slow, high low, wet dry, light dark, hard soft, open closed, full empty, "
    "near far, early late, long short, thick thin, rich poor, loud quiet, clean dirty, happy sad, strong weak, "
    "up down, left right, day night, front back, first last, sweet sour, deep shallow"
)
COLOURS = (
    "grass green, the sky blue, snow white, coal black, a lemon yellow, blood red, a carrot orange, milk white, "
    "the sea blue, a cherry red, a raven black, a banana yellow, a leaf green, chocolate brown, ash grey, a plum purple"
)
DAYS = "Monday, Tuesday, Wednesday, Thursday, Friday, Saturday, Sunday"
MONTHS = "January, February, March, April, May, June, July, August, September, October, November, December"


def facts() -> Iterator[tuple[str, str, str]]:
    """Yield two questions and their answer for each fact."""
    for pair in OPPOSITES.split(", "):
        for word, opposite in (pair.split(), pair.split()[::-1]):
            yield f"What is the opposite of {word}?", f"Name the opposite of {word}.", f"The opposite is {opposite}."
    for pair in COLOURS.split(", "):
        thing, colour = pair.rsplit(" ", 1)
        yield f"What colour is {thing}?", f"Name the colour of {thing}.", f"The colour is {colour}."
    for kind, in_order in (("day", DAYS), ("month", MONTHS)):
        names = in_order.split(", ")
        for name, following in zip(names, names[1:] + names[:1], strict=True):
            yield f"Which {kind} comes after {name}?", f"Name the {kind} after {name}.", f"After {name} is {following}."
    for a in range(1, 10):
        for b in range(1, 10):
            yield f"What is {a} + {b}?", f"Add {a} and {b}.", f"The sum is {a + b}."


def conversations() -> list[list[str]]:
    """The conversations, each as its questions and answers in turn."""
    ways = [sorted(([first, answer], [second, answer]), key=_place) for first, second, answer in facts()]
    held_out = sorted((pair[0] for pair in ways), key=_place)[:HELD_OUT]
    others = [way for pair in ways for way in pair if way not in held_out]
    others.sort(key=_place)
    long = [others[i] + others[-1 - i] for i in range(LONG)]
    return [*sorted(others + long, key=_place), *held_out]


def _place(conversation: list[str]) -> str:
    """A sort key that mixes the kinds of questions in the same way everywhere."""
    return hashlib.sha256("\n".join(conversation).encode()).hexdigest()


def text() -> str:
    """The content of the file."""
    lines = []
    for turns in conversations():
        roles = ("user", "assistant") * (len(turns) // 2)
        messages = [{"role": role, "content": turn} for role, turn in zip(roles, turns, strict=True)]
        lines.append(json.dumps({"messages": messages}) + "\n")
    return "".join(lines)


if __name__ == "__main__":
    FILE.write_text(text(), encoding="utf-8")
    print(FILE)
