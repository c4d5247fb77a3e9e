"""Read `expert_loads.jsonl` into at most 100 columns of steps.

A line that nothing of ours would write is left out and counted. The file is read twice, line by line: first for the
steps that it covers, then for the loads. So a long file takes no memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dtmega.distributed.exit_codes import MAX_STEP
from dtmega.report.record import raw_lines
from dtmega.training.records.lines import parse_line
from dtmega.training.records.loads import NAME

COLUMNS = 100  # maximum number of columns
MAX_EXPERTS = 100_000  # of all layers; a line with more is left out


class LoadColumns(NamedTuple):
    """The loads of a run's experts, by column. Each column covers about the same number of steps.

    Attributes:
        edges: steps between the columns, int64 [C + 1]. Column c covers the steps after edges[c], up to edges[c + 1].
        loads: by number of the layer, the tokens of each expert in each column, float64 [E, C].
        last_used: by number of the layer, the last step of the newest line in which each expert has a token, or 0,
            int64 [E].
        damaged_lines: number of lines that were left out.
    """

    edges: NDArray[np.int64]
    loads: dict[int, NDArray[np.float64]]
    last_used: dict[int, NDArray[np.int64]]
    damaged_lines: int

    @property
    def n_columns(self) -> int:
        return len(self.edges) - 1

    @property
    def n_recent(self) -> int:
        """The number of columns that count as recent: a tenth of them, and at least one."""
        return max(1, self.n_columns // 10)

    @property
    def first_recent(self) -> int:
        """The first step of the recent columns."""
        return int(self.edges[self.n_columns - self.n_recent]) + 1

    @property
    def last_step(self) -> int:
        return int(self.edges[-1])

    def multiples(self, layer: int) -> NDArray[np.float64]:
        """The loads of a layer's experts as multiples of their mean, [E, C]; NaN in a column without loads."""
        loads = self.loads[layer]
        mean = loads.mean(0)
        return np.divide(loads, mean, out=np.full_like(loads, np.nan), where=mean > 0)

    def unused(self) -> dict[int, list[int]]:
        """The experts without a token in the recent columns, by number of the layer; without layers that have none."""
        found = {}
        for layer, loads in self.loads.items():
            recent = loads[:, -self.n_recent :].sum(1)
            if recent.any() and not recent.all():
                found[layer] = np.flatnonzero(recent == 0).tolist()
        return found

    def joined(self, n: int) -> LoadColumns:
        """The same loads with n columns, from the first on, joined to one."""
        firsts = np.arange(0, self.n_columns, n)
        loads = {layer: np.add.reduceat(loads, firsts, axis=1) for layer, loads in self.loads.items()}
        return self._replace(edges=np.append(self.edges[firsts], self.edges[-1]), loads=loads)


class _Line(NamedTuple):
    """A line of the file: the loads of the steps after `before`, up to `last`, by number of the layer."""

    before: int
    last: int
    loads: dict[int, NDArray[np.float64]]


def read(run_dir: Path) -> LoadColumns | None:
    """Read the loads of a run's experts; None if the run has none."""
    lines = [(line.before, line.last) for line in _lines(run_dir) if line is not None]
    if not lines:
        return None
    start, end = min(before for before, _ in lines), max(last for _, last in lines)
    edges = np.linspace(start, end, min(COLUMNS, end - start) + 1).astype(np.int64)
    found = LoadColumns(edges, {}, {}, 0)
    damaged_lines = 0
    for line in _lines(run_dir):
        if line is None or not _add(found, line):
            damaged_lines += 1
    layers = sorted(found.loads)
    return found._replace(loads={layer: found.loads[layer] for layer in layers}, damaged_lines=damaged_lines)


def _add(found: LoadColumns, line: _Line) -> bool:
    """Add a line, in proportion to its steps in each column. Returns False if the first line has other experts."""
    n_experts = {layer: loads.size for layer, loads in line.loads.items()}
    if found.loads and n_experts != {layer: len(loads) for layer, loads in found.loads.items()}:
        return False
    steps = np.minimum(line.last, found.edges[1:]) - np.maximum(line.before, found.edges[:-1])
    for layer, loads in line.loads.items():
        columns = found.loads.setdefault(layer, np.zeros((loads.size, found.n_columns)))
        for column in np.flatnonzero(steps > 0):
            columns[:, column] += loads * (steps[column] / (line.last - line.before))
        last_used = found.last_used.setdefault(layer, np.zeros(loads.size, np.int64))
        last_used[loads > 0] = np.maximum(last_used[loads > 0], line.last)
    return True


def _lines(run_dir: Path) -> Iterator[_Line | None]:
    """The lines of the file, None for a damaged one; no lines if the file does not exist."""
    for raw in raw_lines(run_dir / NAME):
        record = parse_line(raw)
        yield None if record is None else _parsed(record)


def _parsed(record: Mapping[str, Any]) -> _Line | None:
    """The content of a line; None if the line is damaged."""
    first, last, layers = record.get("first"), record["step"], record.get("loads")
    if type(first) is not int or not 0 < first <= last or not isinstance(layers, dict):
        return None
    loads: dict[int, NDArray[np.float64]] = {}
    for layer, numbers in layers.items():
        if not (layer.isascii() and layer.isdecimal() and len(layer) <= 6 and isinstance(numbers, list) and numbers):
            return None
        if not all(type(number) is int and 0 <= number <= MAX_STEP for number in numbers):
            return None
        loads[int(layer)] = np.array(numbers, np.float64)
    n_experts = sum(numbers.size for numbers in loads.values())
    return _Line(first - 1, last, loads) if 0 < n_experts <= MAX_EXPERTS else None
