"""Named tensors that can be read in parts, and the same tensors under other names and in another form.

Everything is lazy: a source of a source of a file reads from the file what it is asked for, when it is asked.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from dtmega.formats.rules import Made, Run, stored

Index = tuple[slice, ...]
# A row, or a number, for each token of the vocabulary, in every model of the house. Those of padding are ours alone.
BY_TOKEN = ("embed.weight", "head.weight", "head.bias", "head.output.weight", "head.output.bias")


class Source(Protocol):
    """Named tensors that can be read in parts, wherever they are stored.

    Attributes:
        tensors: name -> dtype and whole shape.
    """

    @property
    def tensors(self) -> Mapping[str, tuple[torch.dtype, tuple[int, ...]]]: ...

    def read(self, name: str, index: Index | None = None) -> Tensor:
        """That part (None: all) of a tensor, in host memory."""
        ...


class Renamed:
    """Some tensors of a source under other names: {new: old}.

    Args:
        on_read: called before each tensor is read.
    """

    def __init__(self, source: Source, names: Mapping[str, str], on_read: Callable[[], object] = int) -> None:
        self._source = source
        self._names = names
        self._on_read = on_read
        there = source.tensors
        self.tensors = {new: there[old] for new, old in names.items()}

    def read(self, name: str, index: Index | None = None) -> Tensor:
        self._on_read()
        return self._source.read(self._names[name], index)


class Translated:
    """Tensors of one side of a `Translation`, made of those of the other side.

    Reads the rows that the asked box is made of, neighbours at once, and holds them beside the box.
    """

    def __init__(self, source: Source, made: Mapping[str, Made]) -> None:
        """Args:
        made: name -> how it is made of the source's tensors.
        """
        self._source = source
        self._made = made
        there = source.tensors
        dtypes = {name: [there[run.of][0] for run in its.runs] for name, its in made.items()}
        self.tensors = {
            name: (functools.reduce(torch.promote_types, dtypes[name]), its.shape) for name, its in made.items()
        }

    def read(self, name: str, index: Index | None = None) -> Tensor:
        """That part (None: all) of a tensor; of a transposed one a view that is not contiguous."""
        made = self._made[name]
        rows, *others = _box(made, index)
        needed = [_clipped(run, rows) for run in made.runs if run.at < rows.stop and rows.start < run.at + run.rows]
        if len(needed) == 1:
            return _turned(made.here, self._rows(needed[0], others, made.there))
        shape = [box.stop - box.start for box in (rows, *others)]
        result = torch.empty(shape, dtype=self.tensors[name][0])
        for stretch in _stretches(needed):
            first, last = stretch[0], stretch[-1]
            whole = first._replace(rows=last.start + last.rows - first.start)
            read = self._rows(whole, others, made.there)
            for run in stretch:
                at = run.at - rows.start
                start = run.start - first.start
                result[at : at + run.rows] = read[start : start + run.rows]
        return _turned(made.here, result)

    def _rows(self, run: Run, others: Sequence[slice], view: str) -> Tensor:
        """Rows of a tensor of the source, as rules see them."""
        box = (slice(run.start, run.start + run.rows), *others)
        tensor = self._source.read(run.of, stored(view, box))
        if view == "transpose":
            return tensor.t()
        return tensor[None] if view == "stack" else tensor


def _box(made: Made, index: Index | None) -> Index:
    """The box that an index into a tensor asks for, as rules see it."""
    whole = index or (slice(None),) * len(made.shape)
    bounds = [s.indices(n) for s, n in zip(whole, made.shape, strict=True)]
    box = tuple(slice(start, max(start, stop)) for start, stop, _ in bounds)
    if made.here == "transpose":
        return box[::-1]
    return (slice(0, 1), *box) if made.here == "stack" else box


def _turned(view: str, tensor: Tensor) -> Tensor:
    """A tensor as it is stored, of one as rules see it."""
    if view == "transpose":
        return tensor.t()
    return tensor[0] if view == "stack" else tensor


def _clipped(run: Run, rows: slice) -> Run:
    """The part of a run that is in these rows."""
    before = max(0, rows.start - run.at)
    after = max(0, run.at + run.rows - rows.stop)
    return Run(run.at + before, run.of, run.start + before, run.rows - before - after)


def _stretches(runs: Iterable[Run]) -> list[list[Run]]:
    """Runs whose rows follow each other on the other side, together."""
    found: list[list[Run]] = []
    for run in sorted(runs, key=lambda run: (run.of, run.start)):
        before = found[-1][-1] if found else None
        if before and before.of == run.of and before.start + before.rows == run.start:
            found[-1].append(run)
        else:
            found.append([run])
    return found
