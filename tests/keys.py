"""The table of keys.toml, which a person reads: each key of the configuration, and what was decided for it.

A line is `key = default  # type and bounds; what a resumed run does with another value`. The code is compared with it,
so a default or a bound changes in two places, or not at all. Keys that not all families of [model] have stand under a
heading of their own, as `--help` has it: `[model], name = 'hf'`.
"""

from __future__ import annotations

import json
import types
from pathlib import Path
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin

import tomli
from pydantic.fields import FieldInfo

TABLE = Path(__file__).with_name("keys.toml")
# What pydantic calls the bounds, and how they are written here.
BOUNDS = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<", "min_length": "length >="}


class Key(NamedTuple):
    """A line of the table.

    Attributes:
        title: of its group of keys.
        values: type or choices.
        bounds: (>=, 0) and so on.
        resumed: free, printed, course (printed, with what it comes to), content (its digest counts), or refused.
    """

    section: str
    title: str
    key: str
    default: Any
    values: str
    bounds: tuple[tuple[str, float], ...]
    resumed: str

    @property
    def option(self) -> str:
        return f"--{self.section}.{self.key}"

    @property
    def family(self) -> list[str]:
        """Overrides that choose a model which has it."""
        _, _, name = self.title.partition("name = ")
        return ["--model.name", name.split(" or ")[0].strip("'")] if name else []


def read() -> list[Key]:
    """The table, in its order."""
    keys, title = list[Key](), ""
    for line in TABLE.read_text().splitlines():
        if line.startswith("["):
            title = line
        elif line and not line.startswith("#"):
            written, _, comment = line.rpartition("  # ")
            ((key, default),) = tomli.loads(written).items()
            allowed, _, resumed = comment.rpartition("; ")
            values, *bounds = allowed.split(", ")
            pairs = [bound.rpartition(" ") for bound in bounds]
            section = title[1 : title.index("]")]
            limits = tuple((sign, float(n)) for sign, _, n in pairs)
            keys.append(Key(section, title, key, default, values, limits, resumed))
    return keys


def values_of(kind: Any) -> str:
    """A type as the table writes it: `float`, `list of int`, `"auto" | bool`."""
    inside = get_args(kind)
    if get_origin(kind) is Literal:
        return " | ".join(json.dumps(choice) for choice in inside)
    if get_origin(kind) in (Union, types.UnionType):
        return " | ".join(values_of(one) for one in inside)
    if get_origin(kind) is list:
        return f"list of {values_of(inside[0])}"
    return kind.__name__


def bounds_of(field: FieldInfo) -> tuple[tuple[str, float], ...]:
    """The bounds of a key as pydantic has them."""
    return tuple(
        (sign, float(getattr(m, name))) for m in field.metadata for name, sign in BOUNDS.items() if hasattr(m, name)
    )
