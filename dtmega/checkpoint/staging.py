"""A copy in host memory of what a save writes in a thread, so that training may go on and change the tensors."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from dtmega.shards import local


class Stager:
    """Buffers by name, of this rank's parts: allocated at the first save, and written over at each later one.

    torch's `DefaultStager` forgets its buffers after each use in torch 2.11, and fails at the second.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    @torch.no_grad()
    def stage(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copies on the CPU, of the same layout, with the values of now. The copies of the last call are overwritten.

        A name has the same shape and layout each time. What is on a GPU is copied to pinned memory; the copies have
        ended when this returns.
        """
        waits = False
        for name, tensor in tensors.items():
            on_gpu = local(tensor).is_cuda
            if name not in self._buffers:
                self._buffers[name] = torch.empty_like(tensor, device="cpu", pin_memory=on_gpu)
            local(self._buffers[name]).copy_(local(tensor), non_blocking=on_gpu)
            waits |= on_gpu
        if waits:
            torch.cuda.current_stream().synchronize()
        return {name: self._buffers[name] for name in tensors}
