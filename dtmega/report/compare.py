"""Tables that compare several runs, or the configurations of one run before and after a restart.

Differences come first; equal values are folded away.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import tomli_w

from dtmega.report.markup import breakable, names, table, text
from dtmega.report.run import Config, Run, numbers

SHOWN_ROWS = 12  # number of differences that are not folded away; runs of two different model families have about 50
ABSENT = "–"


def differences(runs: Sequence[Run], colours: Sequence[str]) -> list[str]:
    """The HTML of the section "Differences": first the keys and numbers that differ, then the equal numbers."""
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
    """One row (label, values) for each number that at least one run has. `values` holds one value per run."""
    numbers_of_runs = [numbers(run) for run in runs]
    labels = list(dict.fromkeys(chain.from_iterable(numbers_of_runs)))
    rows = []
    for label in labels:
        rows.append((label, [of_run.get(label, ABSENT) for of_run in numbers_of_runs]))
    rows.append(("layout", [run.layout for run in runs]))
    rows.append(("newest checkpoint", [run.newest_checkpoint or ABSENT for run in runs]))
    return rows


def difference_table(configs: Sequence[Config], headings: Sequence[str]) -> str:
    """The HTML of a table of the keys that differ between configurations. Rows after the first SHOWN_ROWS are folded.

    Args:
        configs: configurations to compare, each as section -> key -> value.
        headings: column headings, one for each configuration.
    """
    rows = []
    for key, values in different_keys(configs):
        rows.append([f'<span class="key">{breakable(key)}</span>', *(breakable(_toml(value)) for value in values)])
    if not rows:
        return '<p class="note">None.</p>'
    shown = table(["key", *headings], rows[:SHOWN_ROWS])
    more = rows[SHOWN_ROWS:]
    if not more:
        return shown
    return f"{shown}<details><summary>{len(more)} more</summary>{table(['key', *headings], more)}</details>"


def different_keys(configs: Sequence[Config]) -> list[tuple[str, list[Any]]]:
    """One row (key, values) for each key that differs between configurations.

    Each row has one value per configuration; the value is None if the configuration lacks the key. The key `run.dir`
    is left out, because `run.dir` always differs and the page already shows it as the name of the run.
    """
    different = []
    for (section, key), values in _keys(configs).items():
        is_run_dir = (section, key) == ("run", "dir")
        if not is_run_dir and any(value != values[0] for value in values):
            different.append((f"{section}.{key}", values))
    return different


def equal_keys(configs: Sequence[Config]) -> Config:
    """The keys that have the same value in all configurations, grouped by section."""
    equal: dict[str, dict[str, Any]] = {}
    for (section, key), values in _keys(configs).items():
        if all(value == values[0] for value in values):
            equal.setdefault(section, {})[key] = values[0]
    return equal


def _keys(configs: Sequence[Config]) -> Mapping[tuple[str, str], list[Any]]:
    """Map each (section, key) to the key's values, one per configuration; None for a configuration without the key."""
    values: dict[tuple[str, str], list[Any]] = {}
    for config in configs:
        for section in config:
            for key in config[section]:
                values[section, key] = [each.get(section, {}).get(key) for each in configs]
    return values


def _toml(value: Any) -> str:
    """A value in TOML notation; a dash for None."""
    if value is None:
        return ABSENT
    return tomli_w.dumps({"x": value}).removeprefix("x = ").strip()
