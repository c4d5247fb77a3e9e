"""FSDP2's two collectives on a CPU, implemented with point-to-point messages between all pairs of ranks.

gloo's reduce-scatter is an all-reduce of the whole input, from which each rank keeps one part. gloo's all-gather copies
the data through a buffer. Implemented with messages, both collectives move only (n - 1) / n of the payload, which is
the minimum, and take a third of gloo's CPU time (archive/2026-11.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dtmega.ops.shards import begin_at_same_place


class _Allocates:
    """Base class with the method `allocate`, which FSDP requires of a custom collective."""

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class Gathers(_Allocates):
    """An all-gather, for `FSDPModule.set_custom_all_gather`."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        """Gather [m] from each of n ranks into [n m], in rank order.

        `input_tensor` may be a view of this rank's part of the output.
        """
        parts = output_tensor.view(group.size(), -1)
        mine = parts[group.rank()]
        if not begin_at_same_place(mine, input_tensor):
            mine.copy_(input_tensor)
        messages = _exchange([mine] * group.size(), [*parts], group)
        if async_op:
            return messages
        messages.wait()
        return None


class ReducesAndScatters(_Allocates):
    """A reduce-scatter, for `FSDPModule.set_custom_reduce_scatter`. Parts are added in rank order."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        """Sum [n m] over n ranks; this rank keeps its part [m] of the sum."""
        assert op == dist.ReduceOp.SUM
        assert not async_op
        rank = group.rank()
        parts = [*input_tensor.view(group.size(), -1)]
        # received[i] is the part that rank i sends to this rank. To avoid a copy, the message from rank `first` is
        # received directly into the output, and the sum starts from that message. The order of the first two parts does
        # not affect their sum, so the result is bit-identical to a sum in rank order.
        first, second = (1, 0) if rank == 0 else (0, 1)
        buffers = {rank: parts[rank], first: output_tensor}
        received = [buffers[i] if i in buffers else torch.empty_like(part) for i, part in enumerate(parts)]
        _exchange(parts, received, group).wait()
        for part in (received[second], *received[2:]):
            output_tensor += part


class _Messages(dist.Work):
    """A handle for several messages; `wait` waits for all messages."""

    def __init__(self, messages: Sequence[dist.Work]) -> None:
        super().__init__()
        self._messages = messages

    def wait(self, timeout: timedelta = timedelta()) -> bool:
        for message in self._messages:
            message.wait(timeout)
        return True


def _exchange(parts: Sequence[Tensor], received: Sequence[Tensor], group: dist.ProcessGroup) -> _Messages:
    """For each remote rank i, send `parts[i]` to rank i, and receive rank i's part for this rank into `received[i]`."""
    n, rank = group.size(), group.rank()
    messages = []
    # Each rank sends to the next rank first, then to the rank after that, and so on, so that no rank receives all
    # messages at once.
    for distance in range(1, n):
        to, source = (rank + distance) % n, (rank - distance) % n
        messages.append(dist.P2POp(dist.isend, parts[to], group=group, group_peer=to))
        messages.append(dist.P2POp(dist.irecv, received[source], group=group, group_peer=source))
    return _Messages(dist.batch_isend_irecv(messages))
