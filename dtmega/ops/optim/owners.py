"""Owners of matrices: a matrix's owner gathers the whole matrix, changes the matrix, and sends each rank its part.

Matrices are divided among the ranks according to the work that each matrix needs. One all-to-all sends all parts to
the owners, and a second all-to-all returns the results. If several ranks hold copies of a part, the rank with the
owner's coordinates along the replicated dims sends the part, and all ranks with a copy receive the result.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from dtmega.ops.shards import Runs, runs_at

DIMS: tuple[str, ...] = ("dp_replicate", "fsdp", "tp")


class _Owned(NamedTuple):
    """A matrix that this rank owns.

    Attributes:
        number: index of the matrix.
        runs: elements of the matrix that each rank of the group holds.
        senders: ranks that together hold every element exactly once.
    """

    number: int
    runs: list[Runs]
    senders: frozenset[int]


class Owners:
    """The assignment of matrices to the ranks that own them.

    Args:
        matrices: matrices to divide, in the same order on all ranks of the group. Each is a DTensor on a mesh with some
            of the dims in DIMS, or a tensor that every rank holds as a whole.
        costs: amount of work for each matrix.
        group: process group of the ranks that hold the matrices, in the order of DIMS.
        sizes: number of ranks along each dim in DIMS.
    """

    def __init__(
        self, matrices: Sequence[Tensor], costs: Sequence[float], group: dist.ProcessGroup, sizes: Sequence[int]
    ) -> None:
        self._group = group
        n, me = group.size(), group.rank()
        places = [dict(zip(DIMS, place, strict=True)) for place in itertools.product(*map(range, sizes))]
        assert len(places) == n
        self._shapes = [matrix.shape for matrix in matrices]
        owners = divided(costs, n)
        # `_of_owner` lists, for each rank, the indices of the matrices that the rank owns. `_sent` lists, for each
        # owner, the indices of the matrices whose parts this rank sends to the owner.
        self._of_owner: list[list[int]] = [[] for _ in range(n)]
        self._sent: list[list[int]] = [[] for _ in range(n)]
        self._owned: list[_Owned] = []
        found: dict[object, Runs] = {}
        for number, (matrix, owner) in enumerate(zip(matrices, owners, strict=True)):
            self._of_owner[owner].append(number)
            copied = _copied_over(matrix)
            if _same(places[me], places[owner], copied):
                self._sent[owner].append(number)
            if owner == me and n > 1:
                runs = []
                for place in places:
                    key = (matrix.shape, tuple(_placements(matrix).items()), tuple(place.values()))
                    if key not in found:
                        found[key] = runs_at(matrix, place)
                    runs.append(found[key])
                senders = frozenset(rank for rank in range(n) if _same(places[rank], places[owner], copied))
                self._owned.append(_Owned(number, runs, senders))

    def compute(self, parts: Sequence[Tensor], function: Callable[[int, Tensor], object]) -> None:
        """Make each matrix's owner change the matrix in place. All ranks of the group call this method together.

        Args:
            parts: this rank's part of each matrix. The method replaces each part with this rank's part of the result.
            function: function that changes a whole matrix in place; called with the matrix's index and the matrix.
        """
        if self._group.size() == 1:
            for number, part in enumerate(parts):
                function(number, part)
            return
        wholes = self._gather(parts)
        for owned, whole in zip(self._owned, wholes, strict=True):
            function(owned.number, whole)
        self._scatter(wholes, parts)

    def _gather(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """Gather the whole matrices that this rank owns."""
        sent = [[parts[number] for number in numbers] for numbers in self._sent]
        n_received = []
        for rank in range(self._group.size()):
            n_received.append(sum(owned.runs[rank].numel for owned in self._owned if rank in owned.senders))
        received = self._exchange(sent, n_received, parts)
        wholes = [parts[owned.number].new_empty(self._shapes[owned.number]) for owned in self._owned]
        for rank, flat in enumerate(received):
            for owned, whole in zip(self._owned, wholes, strict=True):
                if rank in owned.senders:
                    part, flat = flat[: owned.runs[rank].numel], flat[owned.runs[rank].numel :]
                    owned.runs[rank].copy(part, whole, into_whole=True)
        return wholes

    def _scatter(self, wholes: Sequence[Tensor], parts: Sequence[Tensor]) -> None:
        """Send each rank its parts of this rank's matrices, and receive this rank's parts from all other owners."""
        sent: list[list[Tensor]] = []
        for rank in range(self._group.size()):
            of_rank = []
            for owned, whole in zip(self._owned, wholes, strict=True):
                part = whole.new_empty(owned.runs[rank].numel)
                owned.runs[rank].copy(part, whole, into_whole=False)
                of_rank.append(part)
            sent.append(of_rank)
        n_received = [sum(parts[number].numel() for number in numbers) for numbers in self._of_owner]
        received = self._exchange(sent, n_received, parts)
        for numbers, flat in zip(self._of_owner, received, strict=True):
            results = flat.split([parts[number].numel() for number in numbers])
            for number, result in zip(numbers, results, strict=True):
                parts[number].copy_(result.view(parts[number].shape))

    def _exchange(
        self, sent: Sequence[Sequence[Tensor]], n_received: Sequence[int], like: Sequence[Tensor]
    ) -> list[Tensor]:
        """Send the tensors in sent[r] to rank r, for all r. Return the received data, one flat tensor per sender."""
        n_sent = [sum(tensor.numel() for tensor in tensors) for tensors in sent]
        flat = torch.cat([like[0].new_empty(0), *(tensor.flatten() for tensor in itertools.chain(*sent))])
        received = like[0].new_empty(sum(n_received))
        dist.all_to_all_single(received, flat, list(n_received), n_sent, group=self._group)
        return list(received.split(list(n_received)))


def divided(costs: Sequence[float], n: int) -> list[int]:
    """Choose the owner of each matrix: in order of decreasing cost, assign each matrix to the least loaded rank.

    The first rank gets the most work, so that a plan for the first rank is an upper bound for all ranks.
    """
    owners, loads = [0] * len(costs), [0.0] * n
    for number in sorted(range(len(costs)), key=lambda number: -costs[number]):
        owner = loads.index(min(loads))
        owners[number] = owner
        loads[owner] += costs[number]
    order = sorted(range(n), key=lambda rank: -loads[rank])
    return [order.index(owner) for owner in owners]


def _placements(matrix: Tensor) -> dict[str, Placement]:
    """The placement of a matrix along each dim of its mesh; {} if the matrix is not a DTensor."""
    if not isinstance(matrix, DTensor):
        return {}
    return dict(zip(matrix.device_mesh.mesh_dim_names or (), matrix.placements, strict=True))


def _copied_over(matrix: Tensor) -> list[str]:
    """The dims in DIMS along which all ranks hold the same elements of a matrix."""
    placements = _placements(matrix)
    return [dim for dim in DIMS if dim not in placements or placements[dim].is_replicate()]


def _same(a: Mapping[str, int], b: Mapping[str, int], dims: Sequence[str]) -> bool:
    """True if the ranks with coordinates a and b have equal coordinates along all dims in `dims`."""
    return all(a[dim] == b[dim] for dim in dims)
