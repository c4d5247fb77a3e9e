"""Named tensors that can be read in parts, and the same tensors under other names and in another form.

Everything is lazy: a source of a source of a file reads from the file what it is asked for, when it is asked.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from dtmega.formats.rules import Made, RowRun, stored

Slices = tuple[slice, ...]
# Tensors with a row, or a number, for each token of the vocabulary, in every model of the house. Rows of padding are
# ours alone.
BY_TOKEN = ("embed.weight", "head.weight", "head.bias", "head.output.weight", "head.output.bias")


class Source(Protocol):
    """Named tensors that can be read in parts, wherever they are stored.

    Attributes:
        tensors: name -> dtype and whole shape.
    """

    @property
    def tensors(self) -> Mapping[str, tuple[torch.dtype, tuple[int, ...]]]: ...

    def read(self, name: str, index: Slices | None = None) -> Tensor:
        """Read a part (None: all) of a tensor, in host memory."""
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

    def read(self, name: str, index: Slices | None = None) -> Tensor:
        self._on_read()
        return self._source.read(self._names[name], index)


class Cast:
    """The tensors of a source in another dtype, refused where a number is not finite, or would not be any more."""

    def __init__(
        self,
        source: Source,
        where: str,
        dtype: torch.dtype | None = None,
        allowed: Collection[str] = (),
        kind: str = "",
        kept: Collection[str] = (),
    ) -> None:
        """Cast the tensors of a source.

        Args:
            where: the source is; for messages.
            dtype: of all tensors; None leaves each as it is.
            allowed: names of tensors that may hold NaN and infinities.
            kind: what the tensors are, if they are no weights; for messages.
            kept: names of tensors that stay in their dtype.
        """
        self._source = source
        self._where = where
        self._dtype = dtype
        self._allowed = allowed
        self._kind = f"{kind} of " if kind else ""
        self.tensors = {
            name: (its if name in kept else dtype or its, shape) for name, (its, shape) in source.tensors.items()
        }

    def read(self, name: str, index: Slices | None = None) -> Tensor:
        """Read a part (None: all) of a tensor.

        Raises:
            ValueError: a number in that part is not finite in the new dtype; names it.
        """
        before = self._source.read(name, index)
        after = before.to(self.tensors[name][0])
        finite = torch.isfinite(after)
        if name not in self._allowed and not finite.all():
            first = finite.logical_not().nonzero()[0].tolist()
            raise ValueError(self._refusal(name, index, first, before[tuple(first)].item(), after[tuple(first)].item()))
        return after

    def _refusal(self, name: str, index: Slices | None, first: list[int], before: float, after: float) -> str:
        """The message for a number that is not finite, at the place `first` of the part that was read."""
        starts = [part.start or 0 for part in index] if index else [0] * len(first)
        place = [start + i for start, i in zip(starts, first, strict=True)]
        found = f"{self._where}: {self._kind}'{name}' has {before} at {place}"
        passes = f"--allow-nonfinite {name} lets this tensor pass"
        if not math.isfinite(before):
            return f"{found}, expected finite numbers; {passes}"
        dtype = str(self._dtype).removeprefix("torch.")
        return f"{found}, which is {after} in {dtype}; choose a wider dtype (--dtype), or {passes}"


class Together:
    """The tensors of several sources, no two of which have a name in common."""

    def __init__(self, *sources: Source) -> None:
        self._source_of = {name: source for source in sources for name in source.tensors}
        self.tensors = {name: source.tensors[name] for name, source in self._source_of.items()}

    def read(self, name: str, index: Slices | None = None) -> Tensor:
        return self._source_of[name].read(name, index)


class Translated:
    """Tensors of one side of `Directions`, made of those of the other side.

    Reads the rows that the asked box is made of, neighbours at once, and holds them beside the box.
    """

    def __init__(self, source: Source, made: Mapping[str, Made]) -> None:
        """Make the tensors of another source.

        Args:
            made: name -> how it is made of the source's tensors.
        """
        self._source = source
        self._made = made
        self._there = source.tensors
        dtypes = {name: [self._there[run.of][0] for run in its.runs] for name, its in made.items()}
        self.tensors = {
            name: (functools.reduce(torch.promote_types, dtypes[name]), its.shape) for name, its in made.items()
        }

    def read(self, name: str, index: Slices | None = None) -> Tensor:
        """Read a part (None: all) of a tensor; of a transposed one, a view that is not contiguous."""
        made = self._made[name]
        box = _box(made, index)
        if made.here == "transpose":
            rows, *others = box[::-1]
            return self._part(name, rows, others).t()
        if made.here != "stack":
            rows, *others = box
            return self._part(name, rows, others)
        entries, rows, *others = box
        result = torch.empty([side.stop - side.start for side in box], dtype=self.tensors[name][0])
        for at, entry in enumerate(range(entries.start, entries.stop)):
            first = entry * made.shape[1]
            result[at] = self._part(name, slice(first + rows.start, first + rows.stop), others)
        return result

    def _part(self, name: str, rows: slice, others: Sequence[slice]) -> Tensor:
        """These rows, as rules see them, and of each the part that `others` says."""
        made = self._made[name]
        needed = [_clipped(run, rows) for run in made.runs if run.at < rows.stop and rows.start < run.at + run.rows]
        if len(needed) == 1:
            return self._rows(needed[0], others, made.there)
        shape = [side.stop - side.start for side in (rows, *others)]
        result = torch.empty(shape, dtype=self.tensors[name][0])
        for stretch in _stretches(needed):
            first, last = stretch[0], stretch[-1]
            whole = first._replace(rows=last.start + last.rows - first.start)
            read = self._rows(whole, others, made.there)
            for run in stretch:
                at = run.at - rows.start
                start = run.start - first.start
                result[at : at + run.rows] = read[start : start + run.rows]
        return result

    def _rows(self, run: RowRun, others: Sequence[slice], view: str) -> Tensor:
        """Rows of a tensor of the source, as rules see them; of a stack, of one of its entries."""
        if view == "stack":
            _, (_, rows_of_each, *_) = self._there[run.of]
            entry, start = divmod(run.start, rows_of_each)
            return self._source.read(run.of, (slice(entry, entry + 1), slice(start, start + run.rows), *others))[0]
        box = (slice(run.start, run.start + run.rows), *others)
        tensor = self._source.read(run.of, stored(view, box))
        return tensor.t() if view == "transpose" else tensor


def _box(made: Made, index: Slices | None) -> Slices:
    """The box that an index into a tensor asks for: bounds for each dim."""
    whole = index or (slice(None),) * len(made.shape)
    bounds = [s.indices(n) for s, n in zip(whole, made.shape, strict=True)]
    return tuple(slice(start, max(start, stop)) for start, stop, _ in bounds)


def _clipped(run: RowRun, rows: slice) -> RowRun:
    """The part of a run that is in these rows."""
    before = max(0, rows.start - run.at)
    after = max(0, run.at + run.rows - rows.stop)
    return RowRun(run.at + before, run.of, run.start + before, run.rows - before - after)


def _stretches(runs: Iterable[RowRun]) -> list[list[RowRun]]:
    """Runs whose rows follow each other on the other side, together."""
    found: list[list[RowRun]] = []
    for run in sorted(runs, key=lambda run: (run.of, run.start)):
        before = found[-1][-1] if found else None
        if before and before.of == run.of and before.start + before.rows == run.start:
            found[-1].append(run)
        else:
            found.append([run])
    return found
