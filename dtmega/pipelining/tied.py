"""One weight on two stages: the embedding on the first, the head on the last. One name, the same bits, one gradient.

Both copies start with the same bits, because initial values are keyed by one name. After backward their gradients
are summed and both get the sum; the optimizer, elementwise and in the same state on both, then does the same to both.
Megatron does this for its `shared` weights; here it holds under V shapes too, where one rank has both copies.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from dtmega import drift
from dtmega.shards import local


class TiedWeight:
    """The copies of the tied weight that this rank holds: none, one or two.

    Args:
        stages: this rank's modules by stage number.
        n_stages: of the whole pipeline.
        names: of the embedding's weight and of the head's, in their modules.
        group: the ranks of this pipeline with the first and with the last stage; None on all others.

    Attributes:
        copies: the parameters here, the embedding before the head.
        duplicate: the head's copy, which norms, counts of zeros and checkpoints leave out; None if it is not here.
    """

    def __init__(
        self,
        stages: Mapping[int, nn.Module],
        n_stages: int,
        names: tuple[str, str],
        group: dist.ProcessGroup | None,
    ) -> None:
        embed = stages[0].get_parameter(names[0]) if 0 in stages else None
        self.duplicate = stages[n_stages - 1].get_parameter(names[1]) if n_stages - 1 in stages else None
        self.copies = [copy for copy in (embed, self.duplicate) if copy is not None]
        assert len(self.copies) != 1 or group is not None
        self._group = group

    def sum_gradients(self) -> None:
        """Give both copies the sum of their gradients. After backward, before the norm; every rank calls it once.

        Frozen copies have none.
        """
        gradients = [local(copy.grad) for copy in self.copies if copy.grad is not None]
        assert len(gradients) == sum(copy.requires_grad for copy in self.copies)
        if len(gradients) == 2:
            gradients[0] += gradients[1]
            gradients[1].copy_(gradients[0])
        elif gradients:
            total = gradients[0].to(_device(self.copies[0]))
            # Of two numbers, a sum in either order has the same bits.
            dist.all_reduce(total, group=self._group)
            gradients[0].copy_(total)

    @torch.no_grad()
    def equal(self) -> bool:
        """Are both copies equal to the bit? Every rank calls it; True where there is none."""
        if not self.copies:
            return True
        if len(self.copies) == 2:
            first, last = drift.checksums({"embedding": self.copies[0], "head": self.copies[1]})
        else:
            assert self._group is not None
            first, last = drift.gather_checksums({"tied": self.copies[0]}, self._group)
        return torch.equal(first, last)


def _device(parameter: Tensor) -> torch.device:
    """What its group's collectives run on; an offloaded shard is elsewhere."""
    return torch.device(parameter.device_mesh.device_type) if isinstance(parameter, DTensor) else parameter.device
