"""The rectangular boxes that make up this rank's part of a tensor, for any DTensor placement."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard


class Box(NamedTuple):
    """A rectangular part of a tensor, held by this rank.

    Attributes:
        offsets: start of the box in the whole tensor, one index for each dim.
        part: elements of the box, a view of this rank's memory.
    """

    offsets: tuple[int, ...]
    part: Tensor

    @property
    def where(self) -> tuple[slice, ...]:
        """The box as slices of the whole tensor."""
        return tuple(slice(offset, offset + n) for offset, n in zip(self.offsets, self.part.shape, strict=True))


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor, as a plain tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def begin_at_same_place(a: Tensor, b: Tensor) -> bool:
    """True if two tensors share a storage and begin at the same offset.

    Unlike a comparison of `data_ptr`, this function also works for tensors without memory.
    """
    same_storage = a.untyped_storage()._cdata == b.untyped_storage()._cdata
    return same_storage and a.storage_offset() == b.storage_offset()


def boxes(tensor: Tensor) -> list[Box]:
    """All boxes of this rank's part of a tensor, except empty boxes.

    A rank has several boxes if a dim holds several matrices that are each sharded. For example, GPT-2's [q | k | v] is
    sharded so that each rank holds a shard of q, a shard of k and a shard of v.
    """
    part = local(tensor)
    if not isinstance(tensor, DTensor):
        return [Box((0,) * tensor.ndim, tensor)]
    if part.numel() == 0:
        return []
    if not in_parts(tensor):
        # torch itself computes the offsets here, but supports only one box per rank.
        (chunk,) = tensor.__create_chunk_list__()
        return [Box(tuple(chunk.offsets), part)]
    # Along each dim this rank has one or more runs of consecutive elements. Each combination of runs is a box.
    runs_of_dims = [list(_runs(_local_numbers(tensor, dim))) for dim in range(tensor.ndim)]
    local_boxes = []
    for runs in itertools.product(*runs_of_dims):
        offsets = tuple(start for start, _, _ in runs)
        view = part[tuple(slice(at, at + size) for _, at, size in runs)]
        local_boxes.append(Box(offsets, view))
    return local_boxes


def full_tensor(tensor: Tensor) -> Tensor:
    """The whole tensor, on every rank. All ranks of the tensor's mesh must call this function together.

    In torch 2.11, DTensor's own `full_tensor()` raises an error if a dim is sharded in parts (see `in_parts`).
    """
    if not isinstance(tensor, DTensor):
        return tensor
    if not in_parts(tensor):
        return tensor.full_tensor()
    mesh = tensor.device_mesh
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    # Each rank writes its boxes into a tensor of zeros, and the sum over all ranks is the whole tensor. If several
    # ranks hold the same boxes, only the first of these ranks writes the boxes.
    copied = [
        number for number, placement in zip(coordinate, tensor.placements, strict=True) if placement.is_replicate()
    ]
    filled = torch.zeros(tensor.shape, dtype=tensor.dtype, device=local(tensor).device)
    if not any(copied):
        for box in boxes(tensor.detach()):
            filled[box.where] = box.part
    for dim in range(mesh.ndim):
        dist.all_reduce(filled, group=mesh.get_group(dim))
    return filled


def in_parts(tensor: DTensor) -> bool:
    """True if a dim is sharded in parts, as in [q | k | v], so that a rank may hold several boxes of the tensor.

    For such a dim, DTensor uses a strided placement. If FSDP2 and tp both shard dim 0, FSDP2's placement is strided
    too, but each rank still holds a single box.
    """
    for i, placement in enumerate(tensor.placements):
        if isinstance(placement, _StridedShard):
            later_ones = tensor.placements[i + 1 :]
            if not any(_cuts(later, placement.dim) for later in later_ones):
                return True
    return False


def dim_to_cut(parameter: Tensor) -> Shard | None:
    """The dim that FSDP2 must shard: dim 1 if tp shards dim 0 in parts, otherwise None (FSDP2's default, dim 0).

    If FSDP2 sharded such a dim 0 once more, the parts ([q | k | v]) would be mixed up.
    """
    if isinstance(parameter, DTensor) and in_parts(parameter) and any(_cuts(p, 0) for p in parameter.placements):
        return Shard(1)
    return None


def dim_of_experts(parameter: Tensor, n_shards: int) -> Shard:
    """The dim along which FSDP2 must shard a rank's experts, [E, ...]: the first dim that divides evenly, or dim 0.

    If a rank has fewer experts than there are shards, sharding dim 0 would leave some of the shards empty.

    Args:
        parameter: DTensor on a mesh with the dims (ep,) or (ep, tp).
        n_shards: number of shards.
    """
    assert isinstance(parameter, DTensor)
    cut_by_tp = [placement.dim for placement in parameter.placements[1:] if isinstance(placement, Shard)]
    for dim, size in enumerate(local(parameter).shape):
        if size % n_shards == 0 and dim not in cut_by_tp:
            return Shard(dim)
    return Shard(0)


def _cuts(placement: Placement, dim: int) -> bool:
    return isinstance(placement, Shard | _StridedShard) and placement.dim == dim


def _local_numbers(tensor: DTensor, dim: int) -> Tensor:
    """The indices of this rank's elements along `dim`, [n].

    The function finds the indices by sharding the vector 0, 1, 2, ... in the same way as the tensor's dim.
    """
    mesh = tensor.device_mesh
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    numbers = torch.arange(tensor.shape[dim])
    for mesh_dim, placement in enumerate(tensor.placements):
        if _cuts(placement, dim):
            numbers = _part_of(numbers, placement, mesh.size(mesh_dim), coordinate[mesh_dim])
    return numbers


def _part_of(numbers: Tensor, placement: Placement, n: int, place: int) -> Tensor:
    """The part of a vector that a placement assigns to rank `place` of n ranks."""
    is_strided = isinstance(placement, _StridedShard)
    cut = _StridedShard(0, split_factor=placement.split_factor) if is_strided else Shard(0)
    parts, _ = cut._split_tensor(numbers, n, with_padding=False)
    return parts[place]


class Runs(NamedTuple):
    """The elements of a matrix that one rank holds.

    Attributes:
        rows: runs (start, at, size) of consecutive rows. Rows [start, start + size) of the whole matrix are rows
            [at, at + size) of the rank's part.
        columns: runs of consecutive columns, likewise.
    """

    rows: list[tuple[int, int, int]]
    columns: list[tuple[int, int, int]]

    @property
    def shape(self) -> tuple[int, int]:
        """The shape of the rank's part."""
        return sum(size for _, _, size in self.rows), sum(size for _, _, size in self.columns)

    @property
    def numel(self) -> int:
        """The number of elements in the rank's part."""
        return math.prod(self.shape)

    def copy(self, part: Tensor, whole: Tensor, into_whole: bool) -> None:
        """Copy the elements between the part (a tensor of any shape) and the whole matrix.

        Args:
            part: elements of the rank's part.
            whole: whole matrix.
            into_whole: whether to copy from the part into the whole matrix; if False, copy from the matrix to the part.
        """
        part = part.view(self.shape)
        for (row, row_at, n_rows), (column, column_at, n_columns) in itertools.product(self.rows, self.columns):
            here = part[row_at : row_at + n_rows, column_at : column_at + n_columns]
            there = whole[row : row + n_rows, column : column + n_columns]
            if into_whole:
                there.copy_(here)
            else:
                here.copy_(there)


def runs_at(matrix: Tensor, place: Mapping[str, int]) -> Runs:
    """The elements of a matrix that a given rank holds.

    A matrix is sharded over tp first. FSDP2 then shards each tp shard; the last FSDP2 shards may be short or empty.

    Args:
        matrix: DTensor, or a plain tensor that is whole on all ranks. This rank may hold a different part of a DTensor.
        place: name of each dim of the matrix's mesh -> coordinate of the given rank along this dim.
    """
    runs = []
    for dim in range(2):
        numbers = torch.arange(matrix.shape[dim])
        if isinstance(matrix, DTensor):
            mesh = matrix.device_mesh
            names = mesh.mesh_dim_names or ()
            by_name = dict(zip(names, matrix.placements, strict=True))
            for name in sorted(names, key=lambda name: name == "fsdp"):
                if _cuts(by_name[name], dim):
                    placement = Shard(dim) if name == "fsdp" else by_name[name]
                    numbers = _part_of(numbers, placement, mesh.size(names.index(name)), place[name])
        runs.append(list(_runs(numbers)) if len(numbers) else [])
    return Runs(*runs)


def _runs(numbers: Tensor) -> Iterator[tuple[int, int, int]]:
    """Yield the runs of consecutive numbers, as (start, at, size).

    Elements [start, start + size) of the whole tensor are elements [at, at + size) on this rank.
    """
    ends = [*(torch.diff(numbers) != 1).nonzero().flatten().add(1).tolist(), len(numbers)]
    for at, end in zip([0, *ends], ends, strict=False):
        yield int(numbers[at]), at, end - at
