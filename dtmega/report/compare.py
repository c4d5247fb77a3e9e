"""Several runs, or the parts of one, beside each other: what differs comes first, what is equal is folded away."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import tomli_w

from dtmega.report.markup import breakable, names, table, text
from dtmega.report.run import Config, Run, numbers

SHOWN_ROWS = 12  # of differences; two families of models have 50
ABSENT = "–"


def differences(runs: Sequence[Run], colours: Sequence[str]) -> list[str]:
    """The section with the keys and the numbers in which these runs differ, and the numbers that they share."""
    headings = names(runs, colours)
    different, equal = {}, {}
    for label, values in _numbers(runs):
        rows = equal if len(set(values)) == 1 else different
        rows[label] = [text(label), *map(breakable, values)]
    out = [
        "<section><h2>Differences</h2>",
        "<h3>Configuration between the runs</h3>",
        difference_table([run.config for run in runs], headings),
        "<h3>Numbers</h3>",
        table(["", *headings], different.values()) if different else '<p class="note">None.</p>',
    ]
    if equal:
        folded = table(["", *headings], equal.values())
        out.append(f"<details><summary>equal: {text(', '.join(equal))}</summary>{folded}</details>")
    return [*out, "</section>"]


def _numbers(runs: Sequence[Run]) -> list[tuple[str, list[str]]]:
    """The numbers of each run, by their label."""
    every = [numbers(run) for run in runs]
    labels = list(dict.fromkeys(chain.from_iterable(every)))
    found = [(label, [of_run.get(label, ABSENT) for of_run in every]) for label in labels]
    found.append(("layout", [run.layout for run in runs]))
    found.append(("newest checkpoint", [run.newest_checkpoint or ABSENT for run in runs]))
    return found


def difference_table(configs: Sequence[Config], headings: Sequence[str]) -> str:
    """A row for each key that is not the same in all of these configurations; many of them are folded away."""
    rows = []
    for key, values in different_keys(configs):
        rows.append([f'<span class="key">{breakable(key)}</span>', *(breakable(_toml(value)) for value in values)])
    if not rows:
        return '<p class="note">None.</p>'
    shown = table(["key", *headings], rows[:SHOWN_ROWS])
    rest = rows[SHOWN_ROWS:]
    if not rest:
        return shown
    return f"{shown}<details><summary>{len(rest)} more</summary>{table(['key', *headings], rest)}</details>"


def different_keys(configs: Sequence[Config]) -> list[tuple[str, list[Any]]]:
    """The keys whose values are not the same everywhere, and these; None where one has no such key.

    Where a run writes, `run.dir`, is left out: it names the run.
    """
    found = []
    for (section, key), values in _keys(configs).items():
        is_name = (section, key) == ("run", "dir")
        if not is_name and any(value != values[0] for value in values):
            found.append((f"{section}.{key}", values))
    return found


def equal_keys(configs: Sequence[Config]) -> Config:
    """The part of these configurations that is the same in all of them."""
    equal: dict[str, dict[str, Any]] = {}
    for (section, key), values in _keys(configs).items():
        if all(value == values[0] for value in values):
            equal.setdefault(section, {})[key] = values[0]
    return equal


def _keys(configs: Sequence[Config]) -> Mapping[tuple[str, str], list[Any]]:
    """Each key of any of these configurations, and its value in each of them, None where there is none."""
    found: dict[tuple[str, str], list[Any]] = {}
    for config in configs:
        for section in config:
            for key in config[section]:
                found[section, key] = [each.get(section, {}).get(key) for each in configs]
    return found


def _toml(value: Any) -> str:
    if value is None:
        return ABSENT
    return tomli_w.dumps({"x": value}).removeprefix("x = ").strip()
