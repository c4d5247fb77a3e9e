"""Data parallelism with unsharded replicas: gradients are all-reduced in place, as in DDP but without DDP's buckets.

DDP and FSDP2 copy a block's gradients into one buffer before reducing the gradients. If nothing is sharded or cast,
that copy is not needed: each matrix's gradient is all-reduced in its own memory. Only vectors are packed together,
because each vector is too small for an all-reduce of its own.

    replicas = Replicas(stage, blocks, group)
    replicas.expect()      # before the last backward of a step: all-reduces start during that backward
    replicas.finish()      # afterwards: waits until all gradients are reduced
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dtmega.ops.shards import local


class Replicas:
    """All-reduces the gradients of one stage over a group of ranks. Every rank holds a replica of the stage.

    All-reduces start block by block, the last block first, as backward finishes the blocks. A block's all-reduces start
    only after those of all later blocks. All ranks therefore launch their collectives in the same order, even if the
    ranks use different parameters.

    Args:
        stage: model of the stage, whose parameters must not be replaced later.
        blocks: blocks of the stage, in order.
        group: process group of the ranks that hold a replica of the stage.
    """

    def __init__(self, stage: nn.Module, blocks: Sequence[nn.Module], group: dist.ProcessGroup) -> None:
        self._group = group
        # Each block is a unit, and the parameters outside all blocks are the last unit. If several blocks share a
        # parameter, backward completes the parameter's gradient in the first of these blocks. The loop visits the
        # blocks in reverse order, so the first block's number overwrites the numbers of later blocks.
        unit_of: dict[nn.Parameter, int] = {}
        for number, module in enumerate(reversed(blocks)):
            unit_of |= dict.fromkeys(module.parameters(), number)
        for parameter in stage.parameters():
            unit_of.setdefault(parameter, len(blocks))
        self._units: list[list[nn.Parameter]] = [[] for _ in range(len(blocks) + 1)]
        for parameter, number in unit_of.items():
            if parameter.requires_grad:
                self._units[number].append(parameter)
                parameter.register_post_accumulate_grad_hook(self._arrived)
        self._awaited: list[set[nn.Parameter]] | None = None
        self._n_launched = 0
        self._under_way: list[dist.Work | None] = []
        self._packed: list[tuple[Tensor, list[Tensor]]] = []

    def expect(self) -> None:
        """Prepare for the step's last backward, in which all-reduces start as soon as their gradients are complete."""
        self._awaited = [set(unit) for unit in self._units]

    def finish(self) -> None:
        """Start the remaining all-reduces and wait for all of them. Every trained parameter must have a gradient."""
        while self._n_launched < len(self._units):
            self._launch()
        for work in self._under_way:
            if work is not None:
                work.wait()
        for flat, gradients in self._packed:
            sums = flat.split([gradient.numel() for gradient in gradients])
            for gradient, total in zip(gradients, sums, strict=True):
                gradient.copy_(total.view_as(gradient))
        self._awaited = None
        self._n_launched = 0
        self._under_way = []
        self._packed = []

    def _arrived(self, parameter: Tensor) -> None:
        """Record that a parameter's gradient is complete. Start the all-reduces of the next units that are complete."""
        if self._awaited is None:
            return
        for awaited in self._awaited:
            awaited.discard(parameter)  # pyright: ignore[reportArgumentType]
        while self._n_launched < len(self._units) and not self._awaited[self._n_launched]:
            self._launch()

    @torch.no_grad()
    def _launch(self) -> None:
        """Start the all-reduces of the next unit: one for each matrix, and one for all vectors."""
        gradients = [local(parameter.grad) for parameter in self._units[self._n_launched] if parameter.grad is not None]
        assert len(gradients) == len(self._units[self._n_launched])
        self._n_launched += 1
        # A gradient that is not contiguous cannot be reduced in place, so it is packed with the vectors.
        matrices = [gradient for gradient in gradients if gradient.ndim > 1 and gradient.is_contiguous()]
        vectors = [gradient for gradient in gradients if not (gradient.ndim > 1 and gradient.is_contiguous())]
        for matrix in matrices:
            self._under_way.append(dist.all_reduce(matrix, group=self._group, async_op=True))
        if vectors:
            flat = torch.cat([vector.flatten() for vector in vectors])
            self._under_way.append(dist.all_reduce(flat, group=self._group, async_op=True))
            self._packed.append((flat, vectors))
