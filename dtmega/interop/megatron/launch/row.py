"""The row type for the table of Megatron's flags, and functions that create rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

MANY = -1  # value of n_values for a flag that takes all words up to the next flag


class Flag(NamedTuple):
    """A command-line flag of Megatron.

    Attributes:
        names: name of the flag, or names of several flags that share the row, as written on a command line.
        n_values: number of values that the flag takes; MANY for all words up to the next flag.
        default: Megatron's default, as written on a command line; None for switches and for flags without a default.
        keys: keys of the configuration that replace the flag; empty if the flag is not carried over.
        why: difference between the key and the flag, or reason why there is no key.
        same: whether the flag has a single key with the same value, so that the translation copies the value.
        changes: whether a run without the flag would compute different results. If so, dtmega refuses the
            configuration until the user has decided about the flag.
        neutral: values with which the flag does not affect a run's results although `changes` is True.
        other_names: mapping from a name in other versions and forks to the flag's first name.
    """

    names: tuple[str, ...]
    n_values: int
    default: str | None
    keys: tuple[str, ...]
    why: str = ""
    same: bool = False
    changes: bool = False
    neutral: tuple[str, ...] = ()
    other_names: Mapping[str, str] = {}


def row(names: str, n_values: int, keys: str = "", why: str = "", default: str | None = None, **marks: Any) -> Flag:
    """Create a row of the table.

    Args:
        names: names of the flags, separated by blanks. Several names of one flag are separated by bars.
        n_values: number of values that each flag takes.
        keys: keys of the configuration, separated by blanks.
        why: remark for readers of the table.
        default: Megatron's default.
        **marks: further attributes of `Flag`, such as `changes=True`.
    """
    written: list[str] = []
    other_names: dict[str, str] = {}
    for group in names.split():
        first, *others = (f"--{name}" for name in group.split("|"))
        written += [first, *others]
        other_names |= dict.fromkeys(others, first)
    return Flag(tuple(written), n_values, default, tuple(keys.split()), why, other_names=other_names, **marks)


def same(names: str, key: str, default: str | None = None, why: str = "") -> Flag:
    """A flag whose value is copied to one key."""
    return row(names, 1, key, why, default, same=True)


def switch(name: str, key: str, why: str = "") -> Flag:
    """A switch that sets a key to true."""
    return row(name, 0, key, why, same=True)


def other(names: str, n_values: int, keys: str, why: str, default: str | None = None) -> Flag:
    """A flag that another module in this folder translates to keys."""
    return row(names, n_values, keys, why, default)


def gone(names: str, n_values: int, why: str) -> Flag:
    """A flag that is not carried over and does not change what a run computes."""
    return row(names, n_values, why=why)


def lost(names: str, n_values: int, why: str, neutral: str = "") -> Flag:
    """A flag that changes what a run computes and is not carried over. Neutral values are separated by blanks."""
    return row(names, n_values, why=why, changes=True, neutral=tuple(neutral.split()))
