"""Read `expert_loads.jsonl` into at most 100 columns of steps.

Lines that dtmega would never write are left out and counted. To save memory, the file is read twice, line by line:
first to find the steps that the lines cover, then to add up the loads.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dtmega.distributed.exit_codes import MAX_STEP
from dtmega.report.record import raw_lines
from dtmega.training.records.lines import EXPERT_LOADS, parse_line

COLUMNS = 100  # maximum number of columns
MAX_EXPERTS = 100_000  # maximum number of experts in all layers together; a line with more experts is left out


class LoadColumns(NamedTuple):
    """The loads of a run's experts in C columns. All columns cover about the same number of steps.

    Attributes:
        edges: boundaries of the columns, int64 [C + 1]. Column c covers the steps edges[c] + 1 to edges[c + 1].
        loads: layer number -> number of tokens that used each of the layer's E experts in each column, float64 [E, C].
        last_used: layer number -> for each expert, the last step of the newest line with tokens for the expert,
            int64 [E]; 0 for an expert that has no tokens in any line.
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
        """The number of columns that count as recent: a tenth of all columns, but at least one."""
        return max(1, self.n_columns // 10)

    @property
    def first_recent(self) -> int:
        """The first step that the recent columns cover."""
        return int(self.edges[self.n_columns - self.n_recent]) + 1

    @property
    def last_step(self) -> int:
        return int(self.edges[-1])

    def multiples(self, layer: int) -> NDArray[np.float64]:
        """The loads of a layer's experts, divided by each column's mean load, [E, C]; NaN in a column without loads."""
        loads = self.loads[layer]
        mean = loads.mean(0)
        return np.divide(loads, mean, out=np.full_like(loads, np.nan), where=mean > 0)

    def unused(self) -> dict[int, list[int]]:
        """The experts that no token used in the recent columns, keyed by layer number.

        Layers without such experts, and layers without any tokens in the recent columns, are left out.
        """
        found = {}
        for layer, loads in self.loads.items():
            recent = loads[:, -self.n_recent :].sum(1)
            if recent.any() and not recent.all():
                found[layer] = np.flatnonzero(recent == 0).tolist()
        return found

    def joined(self, n: int) -> LoadColumns:
        """A copy in which each group of n consecutive columns, beginning at the first column, is joined into one."""
        firsts = np.arange(0, self.n_columns, n)
        loads = {layer: np.add.reduceat(loads, firsts, axis=1) for layer, loads in self.loads.items()}
        return self._replace(edges=np.append(self.edges[firsts], self.edges[-1]), loads=loads)


class _Line(NamedTuple):
    """The content of a line. `loads` maps each layer number to the loads in the steps `before` + 1 to `last`."""

    before: int
    last: int
    loads: dict[int, NDArray[np.float64]]


def read(run_dir: Path) -> LoadColumns | None:
    """Read the loads of a run's experts; None if no loads are recorded."""
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
    """Distribute a line's loads over the columns, in proportion to the number of the line's steps in each column.

    Returns:
        True if the loads were added; False if the layers or numbers of experts differ from those in the first line.
    """
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
    """Yield the content of each line, or None for a damaged line. A run without expert_loads.jsonl yields nothing."""
    for raw in raw_lines(run_dir / EXPERT_LOADS):
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
