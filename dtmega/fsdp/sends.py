"""FSDP2's two collectives on a CPU, as messages from each rank to each other one.

gloo reduces and scatters by an all-reduce of everything, of which it then keeps a part, and gathers through a buffer.
As messages both move what they must, (n - 1) / n of the payload, in a third of the CPU time (docs/decisions.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class _Allocates:
    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class Gathers(_Allocates):
    """An all-gather, for `FSDPModule.set_custom_all_gather`."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        """[m] of each rank -> [n m], in the order of ranks; `input_tensor` may be this rank's part of the output."""
        parts = output_tensor.view(group.size(), -1)
        mine = parts[group.rank()]
        if mine.data_ptr() != input_tensor.data_ptr():
            mine.copy_(input_tensor)
        messages = _exchange([mine] * group.size(), [*parts], group)
        if async_op:
            return messages
        messages.wait()
        return None


class ReducesAndScatters(_Allocates):
    """A reduce-scatter, for `FSDPModule.set_custom_reduce_scatter`. Parts are added in the order of ranks."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        """[n m] of each rank -> the sum of all ranks' m numbers for this one."""
        assert op == dist.ReduceOp.SUM
        assert not async_op
        rank = group.rank()
        parts = [*input_tensor.view(group.size(), -1)]
        # Of two numbers, a sum in either order has the same bits: the result may begin as another rank's part.
        first, second = (1, 0) if rank == 0 else (0, 1)
        have = {rank: parts[rank], first: output_tensor}
        found = [have[i] if i in have else torch.empty_like(part) for i, part in enumerate(parts)]
        _exchange(parts, found, group).wait()
        for part in (found[second], *found[2:]):
            output_tensor += part


class _Messages(dist.Work):
    """Several messages as one."""

    def __init__(self, messages: Sequence[dist.Work]) -> None:
        super().__init__()
        self._messages = messages

    def wait(self, timeout: timedelta = timedelta()) -> bool:
        for message in self._messages:
            message.wait(timeout)
        return True


def _exchange(parts: Sequence[Tensor], found: Sequence[Tensor], group: dist.ProcessGroup) -> _Messages:
    """Send part i to rank i, and receive what rank i has for this one into `found[i]`; nothing from or to itself."""
    n, rank = group.size(), group.rank()
    messages = []
    # First each to its next one, then to the one after that: nobody is sent to by all at once.
    for distance in range(1, n):
        to, source = (rank + distance) % n, (rank - distance) % n
        messages.append(dist.P2POp(dist.isend, parts[to], group=group, group_peer=to))
        messages.append(dist.P2POp(dist.irecv, found[source], group=group, group_peer=source))
    return _Messages(dist.batch_isend_irecv(messages))
