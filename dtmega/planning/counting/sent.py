"""Pipeline messages that hold their tensors. torch's "fake" process group would release a sent tensor at once."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d


class _Sent(dist.Work):
    """A message in flight that holds its tensor.

    An NCCL message holds the tensor until `wait`. A gloo message holds the tensor as long as the message exists.

    Args:
        tensor: tensor that is sent.
        work: message of the "fake" process group.
        until_waited: whether to release the tensor in `wait`.
    """

    def __init__(self, tensor: Tensor, work: dist.Work | None, until_waited: bool) -> None:
        super().__init__()
        self._tensor: Tensor | None = tensor
        self._work, self._until_waited = work, until_waited

    def wait(self, timeout: timedelta = timedelta()) -> bool:
        if self._work is not None:
            self._work.wait()
        if self._until_waited:
            self._tensor = None
        return True


@contextlib.contextmanager
def holding_tensors(device: torch.device) -> Iterator[None]:
    """Inside the `with` block, make `isend` return messages that hold their tensors."""
    send = distributed_c10d.isend

    def isend(tensor: Tensor, *args: Any, **kwargs: Any) -> dist.Work:
        return _Sent(tensor, send(tensor, *args, **kwargs), device.type == "cuda")

    with patch.object(distributed_c10d, "isend", isend), patch.object(dist, "isend", isend):
        yield
