"""The part of a tensor that this rank holds, whatever its layout."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement, _StridedShard


class Box(NamedTuple):
    """A box of the whole tensor: where in it `part`, a view of this rank's memory, starts."""

    offsets: tuple[int, ...]
    part: Tensor

    @property
    def where(self) -> tuple[slice, ...]:
        """The box as slices of the whole tensor."""
        return tuple(slice(o, o + n) for o, n in zip(self.offsets, self.part.shape, strict=True))


def local(tensor: Tensor) -> Tensor:
    """The part that this rank holds, as one plain tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def boxes(tensor: Tensor) -> list[Box]:
    """The boxes that this rank holds, without empty ones; several where a dim is cut in parts (GPT-2's [q | k | v])."""
    part = local(tensor)
    if not isinstance(tensor, DTensor):
        return [Box((0,) * tensor.ndim, tensor)]
    if part.numel() == 0:
        return []
    if not in_parts(tensor):
        # torch's own arithmetic; of a rank's one box.
        (chunk,) = tensor.__create_chunk_list__()
        return [Box(tuple(chunk.offsets), part)]
    found = []
    for runs in itertools.product(*(list(_runs(_numbers(tensor, dim))) for dim in range(tensor.ndim))):
        view = part[tuple(slice(at, at + size) for _, at, size in runs)]
        found.append(Box(tuple(start for start, _, _ in runs), view))
    return found


def full_tensor(tensor: Tensor) -> Tensor:
    """The whole tensor, on every rank; all ranks of its mesh call it.

    `full_tensor()` of one that is cut in parts is an error in torch 2.11.
    """
    if not isinstance(tensor, DTensor):
        return tensor
    if not in_parts(tensor):
        return tensor.full_tensor()
    mesh = tensor.device_mesh
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    copied = [
        number for number, placement in zip(coordinate, tensor.placements, strict=True) if placement.is_replicate()
    ]
    filled = torch.zeros(tensor.shape, dtype=tensor.dtype, device=local(tensor).device)
    if not any(copied):  # of the copies only the first ones add to the sum
        for box in boxes(tensor.detach()):
            filled[box.where] = box.part
    for dim in range(mesh.ndim):
        dist.all_reduce(filled, group=mesh.get_group(dim))
    return filled


def in_parts(tensor: DTensor) -> bool:
    """Tell whether a dim is cut in parts, so that a rank holds several boxes of it.

    FSDP2 cuts dim 0 before tp does, and DTensor writes that in the same way: as a strided cut, which a later one of the
    same dim follows. Together they leave one box.
    """
    for i, placement in enumerate(tensor.placements):
        if isinstance(placement, _StridedShard):
            later_ones = tensor.placements[i + 1 :]
            if not any(_cuts(later, placement.dim) for later in later_ones):
                return True
    return False


def dim_to_cut(parameter: Tensor) -> Shard | None:
    """The dim for FSDP2 to cut: 0 (None), but 1 where dim 0 is cut in parts, which a second cut would mix up."""
    if isinstance(parameter, DTensor) and in_parts(parameter) and any(_cuts(p, 0) for p in parameter.placements):
        return Shard(1)
    return None


def _cuts(placement: Placement, dim: int) -> bool:
    return isinstance(placement, Shard | _StridedShard) and placement.dim == dim


def _numbers(tensor: DTensor, dim: int) -> Tensor:
    """[n] numbers along `dim` of what is here: of a vector that is cut as the tensor is along that dim."""
    cut: list[Placement] = []
    for placement in tensor.placements:
        if isinstance(placement, _StridedShard) and placement.dim == dim:
            cut.append(_StridedShard(0, split_factor=placement.split_factor))
        else:
            cut.append(Shard(0) if _cuts(placement, dim) else Replicate())
    numbers = torch.arange(tensor.shape[dim], device=tensor.device_mesh.device_type)
    return distribute_tensor(numbers, tensor.device_mesh, cut, src_data_rank=None).to_local().cpu()


def _runs(numbers: Tensor) -> Iterator[tuple[int, int, int]]:
    """(start, at, size): elements [start, start + size) of the whole are at [at, at + size) here."""
    ends = [*(torch.diff(numbers) != 1).nonzero().flatten().add(1).tolist(), len(numbers)]
    for at, end in zip([0, *ends], ends, strict=False):
        yield int(numbers[at]), at, end - at
