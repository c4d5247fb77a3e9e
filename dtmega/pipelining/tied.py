"""Parameters that several stages share, such as an embedding tied to the head, or a bias that a whole stack reads.

Each stage that shares a parameter has a copy, and all copies have the same name. The copies start equal, because
initial values depend on the name. After backward, the gradients of all copies are summed in stage order, and every copy
gets the sum. The optimizer is elementwise and has equal state for all copies, so the copies stay equal. Megatron also
treats its `shared` weights in this way. Here, however, any number of stages may share a parameter, and a rank may hold
several copies.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from dtmega.distributed import replica_check
from dtmega.mesh import World
from dtmega.ops.shards import local
from dtmega.pipelining.split import Stages

GATHERED = 2**22  # number of elements gathered at a time from each copy, to limit the memory for remote copies


def shared(
    whole: nn.Module, parts: Mapping[str, Sequence[nn.Module]], stages: Sequence[Sequence[str]]
) -> dict[str, list[int]]:
    """Find the parameters that several stages share.

    Args:
        whole: whole model, in which tied names share one parameter.
        parts: name of each pipeline piece -> modules that the piece needs.
        stages: names of the pieces in each stage.

    Returns:
        First name of each shared parameter -> indices of the stages that share the parameter, in ascending order.
    """
    parameters_of_stages = []
    for pieces in stages:
        here: set[int] = set()
        for piece in pieces:
            for module in parts[piece]:
                here |= {id(parameter) for parameter in module.parameters(recurse=False)}
        parameters_of_stages.append(here)
    stages_of: dict[str, list[int]] = {}
    for name, parameter in whole.named_parameters():
        numbers = [number for number, here in enumerate(parameters_of_stages) if id(parameter) in here]
        if len(numbers) > 1:
            stages_of[name] = numbers
    return stages_of


class Tied:
    """This rank's copies of a parameter that several stages share.

    Args:
        name: name of the parameter in checkpoints.
        copies: this rank's copies, at least one, keyed by stage index in ascending order.
        places: indices of the stages whose copies each rank holds, one list per rank of the group, in rank order.
        group: process group of the ranks that hold a copy; None if this rank holds all copies.
    """

    def __init__(
        self,
        name: str,
        copies: Mapping[int, nn.Parameter],
        places: Sequence[Sequence[int]],
        group: dist.ProcessGroup | None,
    ) -> None:
        self.name, self.copies = name, dict(copies)
        self.stages = sorted(itertools.chain.from_iterable(places))
        self._places, self._group = places, group

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The ranks that hold a copy; None if this rank holds all copies."""
        return self._group

    @property
    def duplicates(self) -> list[nn.Parameter]:
        """This rank's copies except the copy of the first stage. Norms, zero counts and checkpoints skip duplicates."""
        return [copy for number, copy in self.copies.items() if number != self.stages[0]]

    def sum_gradients(self) -> None:
        """Set the gradient of every copy to the sum over all copies. Frozen copies have no gradient.

        All ranks of the group call this method together, after backward and before the gradient norm.
        """
        gradients = [local(copy.grad) for copy in self.copies.values() if copy.grad is not None]
        assert len(gradients) == sum(copy.requires_grad for copy in self.copies.values())
        if gradients:
            total = self._sum(gradients)
            for gradient in gradients:
                gradient.copy_(total)

    def _sum(self, gradients: Sequence[Tensor]) -> Tensor:
        """Sum the gradients of all copies.

        The gradients are added in stage order, so the sum is bit-identical no matter which ranks hold the copies.
        """
        device = _device(next(iter(self.copies.values())))
        if self._group is None:
            return _add_up(gradients)
        if len(self.stages) == 2:
            total = gradients[0].to(device)
            # A sum of two numbers has the same bits in either order, so a plain all-reduce is enough.
            dist.all_reduce(total, group=self._group)
            return total
        flat = torch.stack([gradient.flatten() for gradient in gradients]).to(device)
        # An all-gather needs tensors of equal size from all ranks, so ranks with fewer copies repeat their first copy
        # as padding, which no rank reads.
        most_copies = max(map(len, self._places))
        mine = torch.cat([flat, flat[:1].expand(most_copies - len(flat), -1)])
        order = []
        for rank, numbers in enumerate(self._places):
            for i, number in enumerate(numbers):
                order.append((number, rank, i))
        order.sort()
        total = torch.empty_like(mine[0])
        for part, out in zip(mine.split(GATHERED, dim=1), total.split(GATHERED), strict=True):
            ranks = [torch.empty_like(part, memory_format=torch.contiguous_format) for _ in self._places]
            dist.all_gather(ranks, part.contiguous(), group=self._group)
            out.copy_(_add_up([ranks[rank][i] for _, rank, i in order]))
        return total.view_as(gradients[0])

    @torch.no_grad()
    def equal(self) -> bool:
        """Return True on all ranks if all copies are bitwise equal. All ranks of the group must call this method."""
        sums = replica_check.checksums({str(number): copy for number, copy in self.copies.items()})
        least_and_most = torch.stack([sums.min(), sums.max()])
        if self._group is not None:
            least_and_most = replica_check.gather_vectors(least_and_most, self._group)
        return bool((least_and_most == least_and_most.flatten()[0]).all())


def _add_up(tensors: Sequence[Tensor]) -> Tensor:
    """The sum of the tensors, added one after the other in the given order."""
    total = tensors[0].clone()
    for tensor in tensors[1:]:
        total += tensor
    return total


def _device(parameter: Tensor) -> torch.device:
    """The device for collectives. A DTensor uses the mesh's device, since FSDP may offload the tensor's data."""
    return torch.device(parameter.device_mesh.device_type) if isinstance(parameter, DTensor) else parameter.device


def copies_of_stages(world: World, cut: Stages, whole: Any, stages: Mapping[int, Any]) -> list[Tied]:
    """The parameters that this rank's stages share with other stages.

    Every rank must call this function, because it makes process groups.

    Args:
        world: processes and mesh.
        cut: pieces of the model in each stage, and stages on each rank.
        whole: whole model (`models.model.Model`), on the meta device.
        stages: this rank's stages of the model, keyed by stage index.
    """
    rank_of: dict[int, int] = {}
    for rank, numbers in enumerate(cut.ranks):
        rank_of |= dict.fromkeys(numbers, rank)
    parameters = {}
    for number, stage in stages.items():
        for name, parameter in stage.named_parameters():
            parameters[number, stage.full_name(name)] = parameter
    tied = []
    for first_name, numbers in shared(whole, whole.parts(), cut.pieces).items():
        ranks = sorted({rank_of[number] for number in numbers})
        group = world.between(ranks) if len(ranks) > 1 else None
        name = whole.full_name(first_name)
        places = []
        for rank in ranks:
            places.append([number for number in numbers if rank_of[number] == rank])
        copies = {number: parameters[number, name] for number in numbers if number in stages}
        if copies:
            tied.append(Tied(name, copies, places, group))
    return tied
