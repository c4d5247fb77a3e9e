"""One parameter that several stages hold: an embedding and the head, a bias that each stage of a stack reads.

It has one name, the same bits and one gradient on all of them. The copies start with the same bits, because initial
values are keyed by the name. After backward their gradients are summed, in the order of the stages, and all get the
sum; the optimizer, elementwise and in the same state on each, then does the same to each. Megatron does this for its
`shared` weights; here it holds for any number of places, also where one rank has several of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from dtmega.distributed import replica_check
from dtmega.ops.shards import local

GATHERED = 2**22  # elements of each copy that are gathered at a time


def shared(
    whole: nn.Module, parts: Mapping[str, Sequence[nn.Module]], stages: Sequence[Sequence[str]]
) -> dict[str, list[int]]:
    """The parameters that several stages hold, by their first names: the numbers of these stages, ascending.

    Args:
        whole: a model whose tied parameters are one.
        parts: the modules of it that each piece needs.
        stages: the pieces of each stage.
    """
    held = []
    for pieces in stages:
        modules = [module for piece in pieces for module in parts[piece]]
        held.append({id(parameter) for module in modules for parameter in module.parameters(recurse=False)})
    found: dict[str, list[int]] = {}
    for name, parameter in whole.named_parameters():
        numbers = [number for number, here in enumerate(held) if id(parameter) in here]
        if len(numbers) > 1:
            found[name] = numbers
    return found


class Tied:
    """The copies of one parameter on this rank, of which there are others.

    Args:
        name: of the parameter in checkpoints.
        copies: stage number -> the parameter there, ascending; at least one.
        places: the stages with a copy of each rank of the group, in its order.
        group: the ranks with a copy; None if all copies are here.
    """

    def __init__(
        self,
        name: str,
        copies: Mapping[int, nn.Parameter],
        places: Sequence[Sequence[int]],
        group: dist.ProcessGroup | None,
    ) -> None:
        self.name, self.copies = name, dict(copies)
        self.stages = sorted(number for numbers in places for number in numbers)
        self._places, self._group = places, group

    @property
    def duplicates(self) -> list[nn.Parameter]:
        """The copies here that norms, counts of zeros and checkpoints leave out: all but that of the first stage."""
        return [copy for number, copy in self.copies.items() if number != self.stages[0]]

    def sum_gradients(self) -> None:
        """Give all copies the sum of their gradients. After backward, before the norm; every rank calls it once.

        Frozen copies have none.
        """
        gradients = [local(copy.grad) for copy in self.copies.values() if copy.grad is not None]
        assert len(gradients) == sum(copy.requires_grad for copy in self.copies.values())
        if gradients:
            total = self._sum(gradients)
            for gradient in gradients:
                gradient.copy_(total)

    def _sum(self, gradients: Sequence[Tensor]) -> Tensor:
        """The sum over all copies, in the order of their stages, whichever rank has which; where collectives run."""
        device = _device(next(iter(self.copies.values())))
        if self._group is None:
            return _add_up(gradients)
        if len(self.stages) == 2:
            total = gradients[0].to(device)
            # Of two numbers, a sum in either order has the same bits.
            dist.all_reduce(total, group=self._group)
            return total
        flat = torch.stack([gradient.flatten() for gradient in gradients]).to(device)
        # A rank with fewer copies than another one sends something in their places, which nobody reads.
        most = max(map(len, self._places))
        mine = torch.cat([flat, flat[:1].expand(most - len(flat), -1)])
        order = sorted((number, rank, i) for rank, held in enumerate(self._places) for i, number in enumerate(held))
        total = torch.empty_like(mine[0])
        for part, out in zip(mine.split(GATHERED, dim=1), total.split(GATHERED), strict=True):
            ranks = [torch.empty_like(part, memory_format=torch.contiguous_format) for _ in self._places]
            dist.all_gather(ranks, part.contiguous(), group=self._group)
            out.copy_(_add_up([ranks[rank][i] for _, rank, i in order]))
        return total.view_as(gradients[0])

    @torch.no_grad()
    def equal(self) -> bool:
        """Tell whether all copies are equal to the bit. Every rank with a copy calls it, and gets the same answer."""
        sums = replica_check.checksums({str(number): copy for number, copy in self.copies.items()})
        least_and_most = torch.stack([sums.min(), sums.max()])
        if self._group is not None:
            least_and_most = replica_check.gather_vectors(least_and_most, self._group)
        return bool((least_and_most == least_and_most.flatten()[0]).all())


def _add_up(tensors: Sequence[Tensor]) -> Tensor:
    """The sum of some tensors, added one after the other."""
    total = tensors[0].clone()
    for tensor in tensors[1:]:
        total += tensor
    return total


def _device(parameter: Tensor) -> torch.device:
    """The device that its group's collectives run on; an offloaded shard is elsewhere."""
    return torch.device(parameter.device_mesh.device_type) if isinstance(parameter, DTensor) else parameter.device
