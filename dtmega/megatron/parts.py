"""Whole tensors, of the parts that the ranks of tensor parallelism hold: joined, put in order, compared.

WholeTensors(parts) a `Source` by the names of names.py; parts are read when a tensor is, one after the other
copies(whole)       how far apart the copies are that each rank has of a tensor
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from dtmega.formats.sources import Slices
from dtmega.megatron.names import cut_dim
from dtmega.megatron.saved import SavedFile, Stored

FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
MOST = 1e-3  # of a tensor's largest absolute value: how far apart copies may be


class Part(Protocol):
    """A tensor as one rank holds it.

    Attributes:
        where: the file, for messages.
    """

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def where(self) -> str: ...

    def read(self) -> Tensor:
        """Read all of it, in host memory."""
        ...


@dataclass(frozen=True)
class Shard:
    """A tensor in a file."""

    file: SavedFile
    stored: Stored

    @property
    def dtype(self) -> torch.dtype:
        return self.stored.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self.stored.shape

    @property
    def where(self) -> str:
        return str(self.file.path)

    def read(self) -> Tensor:
        return self.file.read(self.stored)


@dataclass(frozen=True)
class _Around:
    """A tensor that is made of `part` when it is read, with its dtype and shape."""

    part: Part

    @property
    def dtype(self) -> torch.dtype:
        return self.part.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self.part.shape

    @property
    def where(self) -> str:
        return self.part.where


@dataclass(frozen=True)
class InOrder(_Around):
    """A fused QKV of a version before 2.0 with its rows as later ones have them, [H, (q, k, v), K].

    Attributes:
        outermost: the rows are [(q, k, v), H, K], as in files without a version; else [H, K, (q, k, v)], as in 1.0.
        n_parts: 3, or 2 where keys and values only are together.
        n_heads: of this rank.
    """

    outermost: bool
    n_parts: int
    n_heads: int

    def read(self) -> Tensor:
        rows, *columns = self.shape
        if rows % (self.n_parts * self.n_heads):
            raise ValueError(f"{self.where}: {rows} rows cannot be {self.n_parts} x {self.n_heads} heads")
        tensor = self.part.read()
        if self.outermost:
            by_head = tensor.reshape(self.n_parts, self.n_heads, -1, *columns).transpose(0, 1)
        else:
            by_head = tensor.reshape(self.n_heads, -1, self.n_parts, *columns).transpose(1, 2)
        return by_head.reshape(rows, *columns)


@dataclass(frozen=True)
class Master(_Around):
    """The fp32 master of a weight of 16 bits, to which it has to round: that its number is the right one.

    Attributes:
        name: of the weight, for messages.
    """

    weight: Part
    name: str

    def read(self) -> Tensor:
        master = self.part.read()
        weight = self.weight.read()
        rounded = master.to(weight.dtype)
        if not torch.equal(rounded.contiguous().view(torch.int16), weight.contiguous().view(torch.int16)):
            raise ValueError(f"{self.where}: the fp32 master that should be of '{self.name}' does not round to it")
        return master


class WholeTensors:
    """Whole tensors as a `Source`: parts one after the other along the dim that is cut, or one of equal copies.

    Attributes:
        tensors: name -> dtype and whole shape.
        parts: name -> part of each rank.
    """

    def __init__(self, parts: Mapping[str, Sequence[Part]], average: bool = False) -> None:
        """Check that the parts of each tensor fit together.

        Args:
            average: of copies that have drifted apart take the mean, else the first.

        Raises:
            ValueError: parts of one tensor that do not fit together, or are of no dtype of weights.
        """
        self.parts = parts
        self.tensors = {name: _joined(name, those) for name, those in parts.items()}
        self._average = average

    def read(self, name: str, index: Slices | None = None) -> Tensor:
        """Read a part (None: all) of a tensor."""
        dtype, shape = self.tensors[name]
        parts = self.parts[name]
        index = index or (slice(None),) * len(shape)
        dim = cut_dim(name)
        if dim is None or len(parts) == 1:
            mean = self._average and dim is None and len(parts) > 1
            return (_mean(parts) if mean else parts[0].read())[index]
        start, stop, _ = index[dim].indices(shape[dim])
        share = shape[dim] // len(parts)
        pieces = []
        for number, part in enumerate(parts):
            low = max(start - number * share, 0)
            high = min(stop - number * share, share)
            if low < high:
                pieces.append(part.read()[(*index[:dim], slice(low, high), *index[dim + 1 :])])
        return torch.cat(pieces, dim) if pieces else torch.empty(0, dtype=dtype)


def _joined(name: str, parts: Sequence[Part]) -> tuple[torch.dtype, tuple[int, ...]]:
    """The dtype and the shape of the whole tensor."""
    first, *others = parts
    if first.dtype not in FLOATS:
        raise ValueError(f"{first.where}: '{name}' is of {first.dtype}, expected one of {', '.join(map(str, FLOATS))}")
    for other in others:
        if (other.dtype, other.shape) != (first.dtype, first.shape):
            raise ValueError(
                f"'{name}' is {list(first.shape)} of {first.dtype} in {first.where}, but {list(other.shape)} of "
                f"{other.dtype} in {other.where}"
            )
    dim = cut_dim(name)
    if dim is None:
        return first.dtype, first.shape
    if dim >= len(first.shape):
        raise ValueError(f"{first.where}: '{name}' is {list(first.shape)}, expected dim {dim} to be cut over ranks")
    shape = [*first.shape]
    shape[dim] *= len(parts)
    return first.dtype, tuple(shape)


def _mean(parts: Sequence[Part]) -> Tensor:
    first, *others = parts
    total = first.read().double()
    for other in others:
        total += other.read().double()
    return (total / len(parts)).to(first.dtype)


class Drift(NamedTuple):
    """The distance of a tensor's copies, as a fraction of its largest absolute value."""

    name: str
    size: float


def copies(whole: WholeTensors) -> list[Drift]:
    """The tensors whose copies are not equal, the worst first. These are vectors, and the embedding of positions."""
    found = []
    for name, (first, *others) in whole.parts.items():
        if cut_dim(name) is not None or not others:
            continue
        values = first.read().double()
        largest = values.abs().max()
        apart = torch.zeros((), dtype=torch.float64)
        for other in others:
            theirs = other.read().double()
            apart = torch.maximum(apart, (theirs - values).abs().max())
            largest = torch.maximum(largest, theirs.abs().max())
        if apart.item() != 0:
            found.append(Drift(name, (apart / largest).item()))
    return sorted(found, key=lambda drift: (drift.size <= MOST, -drift.size))


def said_of(drifts: Sequence[Drift], average: bool) -> str:
    """The line that reports copies that have drifted apart.

    Raises:
        ValueError: too far.
    """
    worst = drifts[0]
    line = (
        f"copies of {len(drifts)} tensors that each tensor-parallel rank has are not equal, '{worst.name}' by most: "
        f"{worst.size:.1e} of its largest value"
    )
    # A NaN compares false, so it is too far as well.
    if not worst.size <= MOST and not average:
        raise ValueError(f"{line}, expected at most {MOST:.0e}; --average-copies takes their mean")
    return f"{line}; {'their mean is' if average else 'those of rank 0 are'} taken"
