"""Copies of tensors in host memory: a thread writes the copies while training keeps changing the tensors."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from dtmega.ops.shards import local


class Stager:
    """Host buffers for this rank's shards of the tensors to save: allocated at the first save, then reused.

    torch's `DefaultStager` is not used: in torch 2.11, this class drops its buffers after each use and fails on the
    second use.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    @torch.no_grad()
    def stage(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copy tensors to the CPU without changing their layout; overwrite the previous call's copies.

        All copies are complete when the method returns. Tensors on a GPU are copied to pinned memory.

        Args:
            tensors: tensors to copy, keyed by name. A tensor's shape and layout must not change between calls.
        """
        any_on_gpu = False
        for name, tensor in tensors.items():
            on_gpu = local(tensor).is_cuda
            if name not in self._buffers:
                self._buffers[name] = torch.empty_like(tensor, device="cpu", pin_memory=on_gpu)
            local(self._buffers[name]).copy_(local(tensor), non_blocking=on_gpu)
            any_on_gpu |= on_gpu
        # Wait for all copies: otherwise the next optimizer step would change tensors that are still being copied.
        if any_on_gpu:
            torch.cuda.current_stream().synchronize()
        return {name: self._buffers[name] for name in tensors}
