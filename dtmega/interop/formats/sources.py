"""Wrappers around a `Source` that rename, cast, combine or reassemble its tensors.

Everything is lazy: a read through any stack of wrappers loads only the needed parts from the file.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from dtmega.checkpoint.sources import Slices, Source
from dtmega.interop.formats.rules import Assembly, RowRun, stored_dims


class Renamed:
    """Some of a source's tensors, under new names."""

    def __init__(self, source: Source, names: Mapping[str, str], on_read: Callable[[], object] = int) -> None:
        """Rename tensors of a source and hide all other tensors.

        Args:
            names: map from each new name to the name in the source.
            on_read: function that is called before each read.
        """
        self._source = source
        self._names = names
        self._on_read = on_read
        self.tensors = {new: source.tensors[old] for new, old in names.items()}

    def read(self, name: str, index: Slices | None = None) -> Tensor:
        self._on_read()
        return self._source.read(self._names[name], index)


class Cast:
    """A source's tensors, cast to another dtype. A read refuses NaN, infinities, and overflow in the new dtype."""

    def __init__(
        self,
        source: Source,
        where: str,
        dtype: torch.dtype | None = None,
        allowed: Collection[str] = (),
        kind: str = "",
        unchanged: Collection[str] = (),
    ) -> None:
        """Cast the tensors of a source.

        Args:
            where: path of the source, for messages.
            dtype: dtype of the tensors that `read` returns; if None, each tensor keeps its own dtype.
            allowed: names of tensors that may hold NaN and infinities.
            kind: kind of the tensors, such as "exp_avg", for messages; '' if the tensors are weights.
            unchanged: names of tensors that keep their own dtype.
        """
        self._source = source
        self._where = where
        self._dtype = dtype
        self._allowed = allowed
        self._kind = f"{kind} of " if kind else ""
        self.tensors: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
        for name, (stored_dtype, shape) in source.tensors.items():
            self.tensors[name] = (stored_dtype if dtype is None or name in unchanged else dtype, shape)

    def read(self, name: str, index: Slices | None = None) -> Tensor:
        """Read the part `index` of a tensor, or the whole tensor if `index` is None.

        Raises:
            ValueError: a number in that part is not finite in the new dtype; the message gives the number's position.
        """
        before = self._source.read(name, index)
        after = before.to(self.tensors[name][0])
        finite = torch.isfinite(after)
        if name not in self._allowed and not finite.all():
            first = finite.logical_not().nonzero()[0].tolist()
            raise ValueError(self._refusal(name, index, first, before[tuple(first)].item(), after[tuple(first)].item()))
        return after

    def _refusal(self, name: str, index: Slices | None, first: list[int], before: float, after: float) -> str:
        """The error message for a number that is not finite.

        Args:
            index: the part of the tensor that was read.
            first: position of the number within that part.
            before: the number in the stored dtype.
            after: the number in the new dtype.
        """
        starts = [part.start or 0 for part in index] if index else [0] * len(first)
        place = [start + i for start, i in zip(starts, first, strict=True)]
        fault = f"{self._where}: {self._kind}'{name}' has {before} at {place}"
        passes = f"--allow-nonfinite {name} lets this tensor pass"
        if not math.isfinite(before):
            return f"{fault}, expected finite numbers; {passes}"
        dtype = str(self._dtype).removeprefix("torch.")
        return f"{fault}, which is {after} in {dtype}; choose a wider dtype (--dtype), or {passes}"


class Combined:
    """The tensors of several sources as one source. No name may occur in two sources."""

    def __init__(self, *sources: Source) -> None:
        self._source_of = {name: source for source in sources for name in source.tensors}
        self.tensors = {name: source.tensors[name] for name, source in self._source_of.items()}

    def read(self, name: str, index: Slices | None = None) -> Tensor:
        return self._source_of[name].read(name, index)


class Translated:
    """The tensors on one side of `Directions`, assembled from a source that has the other side's tensors.

    A read fetches only the rows of the requested slice, and fetches adjacent rows together. A read needs memory for
    the slice and for one copy of the fetched rows.
    """

    def __init__(self, source: Source, assemblies: Mapping[str, Assembly]) -> None:
        """Prepare to assemble tensors from another source.

        Args:
            assemblies: recipe for assembling each tensor from the source's tensors, keyed by tensor name.
        """
        self._source = source
        self._assemblies = assemblies
        self._stored = source.tensors
        self.tensors: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
        for name, assembly in assemblies.items():
            dtypes = [self._stored[run.tensor][0] for run in assembly.runs]
            self.tensors[name] = (functools.reduce(torch.promote_types, dtypes), assembly.shape)

    def read(self, name: str, index: Slices | None = None) -> Tensor:
        """Read the part `index` of a tensor, or the whole tensor if `index` is None.

        For a transposed tensor, the result is a non-contiguous view.
        """
        assembly = self._assemblies[name]
        box = _box(assembly, index)
        if assembly.view == "transpose":
            rows, *others = box[::-1]
            return self._part(name, rows, others).t()
        if assembly.view != "stack":
            rows, *others = box
            return self._part(name, rows, others)
        entries, rows, *others = box
        result = torch.empty([side.stop - side.start for side in box], dtype=self.tensors[name][0])
        for at, entry in enumerate(range(entries.start, entries.stop)):
            # A stack's rows are numbered consecutively across its entries: entry i begins at row i * shape[1].
            first = entry * assembly.shape[1]
            result[at] = self._part(name, slice(first + rows.start, first + rows.stop), others)
        return result

    def _part(self, name: str, rows: slice, others: Sequence[slice]) -> Tensor:
        """Read some rows of a tensor.

        Args:
            rows: range of row indices, numbered as the assembly's `view` defines.
            others: slices that select the part of each row to return, one slice per further dim.
        """
        assembly = self._assemblies[name]
        runs = [_clipped(run, rows) for run in assembly.runs if run.at < rows.stop and rows.start < run.at + run.rows]
        if len(runs) == 1:
            return self._rows(runs[0], others, assembly.source_view)
        shape = [side.stop - side.start for side in (rows, *others)]
        result = torch.empty(shape, dtype=self.tensors[name][0])
        # Consecutive runs may be far apart in the source: for example, q, k and v of one head. So read rows
        # that are adjacent in the source together, then copy each row to its place.
        for stretch in _stretches(runs):
            first, last = stretch[0], stretch[-1]
            all_rows = first._replace(rows=last.start + last.rows - first.start)
            read = self._rows(all_rows, others, assembly.source_view)
            for run in stretch:
                at = run.at - rows.start
                start = run.start - first.start
                result[at : at + run.rows] = read[start : start + run.rows]
        return result

    def _rows(self, run: RowRun, others: Sequence[slice], view: str) -> Tensor:
        """Read the rows of a row run from the source. In a stack, all rows of a row run lie in one entry."""
        if view == "stack":
            _, (_, rows_of_each, *_) = self._stored[run.tensor]
            entry, start = divmod(run.start, rows_of_each)
            return self._source.read(run.tensor, (slice(entry, entry + 1), slice(start, start + run.rows), *others))[0]
        box = (slice(run.start, run.start + run.rows), *others)
        tensor = self._source.read(run.tensor, stored_dims(view, box))
        return tensor.t() if view == "transpose" else tensor


def _box(assembly: Assembly, index: Slices | None) -> Slices:
    """Replace each slice of an index by a slice with explicit bounds; an index of None means the whole tensor."""
    index = index or (slice(None),) * len(assembly.shape)
    bounds = [part.indices(size) for part, size in zip(index, assembly.shape, strict=True)]
    return tuple(slice(start, max(start, stop)) for start, stop, _ in bounds)


def _clipped(run: RowRun, rows: slice) -> RowRun:
    """The part of a row run that lies within `rows` of the assembled tensor."""
    before = max(0, rows.start - run.at)
    after = max(0, run.at + run.rows - rows.stop)
    return RowRun(run.at + before, run.tensor, run.start + before, run.rows - before - after)


def _stretches(runs: Iterable[RowRun]) -> list[list[RowRun]]:
    """Group row runs that are adjacent in the source."""
    stretches: list[list[RowRun]] = []
    for run in sorted(runs, key=lambda run: (run.tensor, run.start)):
        before = stretches[-1][-1] if stretches else None
        if before and before.tensor == run.tensor and before.start + before.rows == run.start:
            stretches[-1].append(run)
        else:
            stretches.append([run])
    return stretches
