"""Join the tensor-parallel ranks' shards into full tensors and compare the ranks' copies of replicated tensors.

WholeTensors(parts)         a `Source` of full tensors, named as in names.py; reads a tensor's shards one after another
drifted_copies(tensors)     the tensors whose copies on the ranks are no longer equal
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from dtmega.checkpoint.sources import Slices
from dtmega.files.console import counted
from dtmega.interop.megatron.names import cut_dim
from dtmega.interop.megatron.saved import SavedFile, Stored

FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
MAX_DRIFT = 1e-3  # largest allowed difference between copies, as a fraction of the tensor's largest absolute value


class Part(Protocol):
    """One rank's shard of a tensor, or its copy of a replicated tensor.

    Attributes:
        where: path of the file that contains the part, for messages.
    """

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def where(self) -> str: ...

    def read(self) -> Tensor:
        """Read the whole part into host memory."""
        ...


@dataclass(frozen=True)
class Shard:
    """A part stored as a single tensor in a file."""

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
class _Derived:
    """A part whose `read` computes the values from another part with the same dtype and shape."""

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
class ReorderedQKV(_Derived):
    """A fused QKV from checkpoint version 0 or 1, with its rows sorted into today's order, [H, (q, k, v), K].

    Attributes:
        qkv_outermost: flag for the row order in the file; True for [(q, k, v), H, K], as in files without a version;
            False for [H, K, (q, k, v)], as in version 1.0.
        n_parts: number of fused projections, 3 for q, k and v or 2 for k and v.
        n_heads: number of heads on this rank.
    """

    qkv_outermost: bool
    n_parts: int
    n_heads: int

    def read(self) -> Tensor:
        rows, *columns = self.shape
        if rows % (self.n_parts * self.n_heads):
            raise ValueError(f"{self.where}: {rows} rows cannot be {self.n_parts} x {self.n_heads} heads")
        tensor = self.part.read()
        if self.qkv_outermost:
            by_head = tensor.reshape(self.n_parts, self.n_heads, -1, *columns).transpose(0, 1)
        else:
            by_head = tensor.reshape(self.n_heads, -1, self.n_parts, *columns).transpose(1, 2)
        return by_head.reshape(rows, *columns)


@dataclass(frozen=True)
class Master(_Derived):
    """The fp32 master of a 16-bit weight. `read` checks that the master, rounded to 16 bits, equals the weight.

    A file lists masters by position, without names, so this check proves that the master belongs to the weight.

    Attributes:
        weight: the 16-bit weight.
        name: name of the weight, for messages.
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
    """A `Source` of full tensors, joined from the tensor-parallel ranks' parts.

    A sharded tensor is the concatenation of the ranks' parts. A replicated tensor is rank 0's copy, or the mean of all
    copies.

    Attributes:
        tensors: dtype and full shape of each tensor, keyed by the tensor's name.
        parts: mapping from each tensor's name to its parts, one part for each rank, in rank order.
    """

    def __init__(self, parts: Mapping[str, Sequence[Part]], average: bool = False) -> None:
        """Check that the parts of each tensor fit together.

        Args:
            average: whether to read the mean of a tensor's copies; if False, rank 0's copy is read. The choice
                matters only if the copies differ.

        Raises:
            ValueError: the parts of a tensor do not fit together, or have a dtype that weights cannot have.
        """
        self.parts = parts
        self.tensors = {name: _joined_shape(name, parts_of_name) for name, parts_of_name in parts.items()}
        self._average = average

    def read(self, name: str, index: Slices | None = None) -> Tensor:
        """Read the slice `index` of a tensor, or the whole tensor if `index` is None."""
        dtype, shape = self.tensors[name]
        parts = self.parts[name]
        index = index or (slice(None),) * len(shape)
        dim = cut_dim(name)
        if len(parts) == 1:
            return parts[0].read()[index]
        if dim is None:
            tensor = _mean(parts) if self._average else parts[0].read()
            return tensor[index]
        start, stop, _ = index[dim].indices(shape[dim])
        share = shape[dim] // len(parts)
        pieces = []
        for number, part in enumerate(parts):
            # The index selects rows (or columns) `low` to `high` of this rank's part. Skip the part if the range is
            # empty.
            low = max(start - number * share, 0)
            high = min(stop - number * share, share)
            if low < high:
                pieces.append(part.read()[(*index[:dim], slice(low, high), *index[dim + 1 :])])
        return torch.cat(pieces, dim) if pieces else torch.empty(0, dtype=dtype)


def _joined_shape(name: str, parts: Sequence[Part]) -> tuple[torch.dtype, tuple[int, ...]]:
    """The dtype and the full shape of a tensor with the given parts.

    Raises:
        ValueError: the parts differ in dtype or shape, or have a dtype that weights cannot have.
    """
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
    """The mean of copies, computed in float64 and rounded to the dtype of the copies."""
    first, *others = parts
    total = first.read().double()
    for other in others:
        total += other.read().double()
    return (total / len(parts)).to(first.dtype)


class Drift(NamedTuple):
    """The difference between the copies of one tensor.

    Attributes:
        name: name of the tensor.
        size: largest difference from rank 0's copy, as a fraction of the largest absolute value in any copy.
    """

    name: str
    size: float


def drifted_copies(tensors: WholeTensors) -> list[Drift]:
    """The drift of each tensor whose copies differ, worst first.

    Only vectors and the position embedding have copies; all other tensors are sharded across the ranks.
    """
    drifts = []
    for name, (first, *others) in tensors.parts.items():
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
            drifts.append(Drift(name, (apart / largest).item()))
    # `nan <= MAX_DRIFT` is False, so the first sort key puts NaNs ahead of all drifts within the limit.
    return sorted(drifts, key=lambda drift: (drift.size <= MAX_DRIFT, -drift.size))


def drift_note(drifts: Sequence[Drift], average: bool) -> str:
    """A message for the user about copies that have drifted apart.

    Args:
        drifts: drifts of all tensors with differing copies, worst first; at least one drift.
        average: whether the mean of the copies is read; if True, drifts of any size are allowed.

    Raises:
        ValueError: the worst drift exceeds MAX_DRIFT, and `average` is False.
    """
    worst = drifts[0]
    line = (
        f"copies of {counted(len(drifts), 'tensor')} differ between tensor-parallel ranks, most of all '{worst.name}': "
        f"by {worst.size:.1e} of its largest value"
    )
    # `nan <= MAX_DRIFT` is False, so this condition also holds for a NaN.
    if not worst.size <= MAX_DRIFT and not average:
        raise ValueError(f"{line}, expected at most {MAX_DRIFT:.0e}; --average-copies takes their mean")
    used = "their mean is" if average else "those of rank 0 are"
    return f"{line}; {used} used"
