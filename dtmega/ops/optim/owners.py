"""Owners of matrices: for each matrix, one rank that gets all of it, computes with it, and returns the result.

Matrices are divided over the ranks by the work that they need. One all-to-all brings every rank's parts to the owners,
a second one brings the results back. If several ranks hold the same part, the one that is nearest to the owner sends
it, and all of them get the result.
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
        number: number of the matrix.
        runs: the elements of each rank of the group.
        senders: ranks that together hold every element once.
    """

    number: int
    runs: list[Runs]
    senders: frozenset[int]


class Owners:
    """The division of matrices over ranks.

    Args:
        matrices: the matrices, in the same order on all ranks of the group: DTensors on a mesh of some of DIMS, or
            tensors that every rank holds as a whole.
        costs: work that each matrix needs.
        group: the ranks that hold the matrices, ordered as DIMS.
        sizes: number of ranks along each of DIMS.
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
        # For each owner: the numbers of its matrices, and the numbers of the matrices whose part this rank sends to it.
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
        """Let each matrix's owner change the matrix in place. All ranks of the group call this method together.

        Args:
            parts: this rank's part of each matrix, replaced by its part of the result.
            function: function of a matrix's number and the whole matrix, which changes the matrix in place.
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
        """The whole matrices that this rank owns."""
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
        """Send every rank its parts of the matrices that this rank owns, and receive those of all other owners."""
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
        """Send the tensors of sent[r] to each rank r. Return what each rank has sent, as flat tensors."""
        n_sent = [sum(tensor.numel() for tensor in tensors) for tensors in sent]
        flat = torch.cat([like[0].new_empty(0), *(tensor.flatten() for tensor in itertools.chain(*sent))])
        received = like[0].new_empty(sum(n_received))
        dist.all_to_all_single(received, flat, list(n_received), n_sent, group=self._group)
        return list(received.split(list(n_received)))


def divided(costs: Sequence[float], n: int) -> list[int]:
    """The owner of each matrix: the most costly matrices first, each to the rank that has the least work so far.

    The first rank gets the most work, so that a plan of the first rank holds for all ranks.
    """
    owners, loads = [0] * len(costs), [0.0] * n
    for number in sorted(range(len(costs)), key=lambda number: -costs[number]):
        owner = loads.index(min(loads))
        owners[number] = owner
        loads[owner] += costs[number]
    order = sorted(range(n), key=lambda rank: -loads[rank])
    return [order.index(owner) for owner in owners]


def _placements(matrix: Tensor) -> dict[str, Placement]:
    """The placement of a matrix along each dim of its mesh; {} if it is no DTensor."""
    if not isinstance(matrix, DTensor):
        return {}
    return dict(zip(matrix.device_mesh.mesh_dim_names or (), matrix.placements, strict=True))


def _copied_over(matrix: Tensor) -> list[str]:
    """The dims of DIMS along which all ranks hold the same elements."""
    placements = _placements(matrix)
    return [dim for dim in DIMS if dim not in placements or placements[dim].is_replicate()]


def _same(a: Mapping[str, int], b: Mapping[str, int], dims: Sequence[str]) -> bool:
    """True if two ranks have the same place along all of these dims."""
    return all(a[dim] == b[dim] for dim in dims)
