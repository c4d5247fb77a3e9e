"""The sum of gradients over whole copies of a model, where the gradients are: what DDP does, without its buckets.

FSDP2 copies the gradients of a block into one buffer before it reduces them, and DDP does, too. Where nothing is cut
and nothing is cast there is no need: each matrix's gradient is summed in its own memory, and only vectors, which are
too small for a message each, are packed.

    replicas = Replicas(stage, blocks, group)
    replicas.expect()      # before the last backward of a step: sums begin while it runs
    replicas.finish()      # all gradients are sums
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dtmega.ops.shards import local


class Replicas:
    """The copies of one stage over a group.

    Sums begin block by block, the last block first, as backward finishes them. A block waits for those before it in
    this order: ranks on which other parameters are used launch the same collectives in the same order all the same.

    Args:
        stage: with its parameters in place, which are not replaced any more.
        blocks: of the stage, in order.
        group: the ranks that have a copy of it.
    """

    def __init__(self, stage: nn.Module, blocks: Sequence[nn.Module], group: dist.ProcessGroup) -> None:
        self._group = group
        unit_of: dict[nn.Parameter, int] = {}
        # One that several units have is ready with the last of them.
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
        """Begin to sum as soon as gradients are complete: the next backward is the step's last."""
        self._awaited = [set(unit) for unit in self._units]

    def finish(self) -> None:
        """Sum what is left, and wait for all. Each parameter that is trained has a gradient by now."""
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
        if self._awaited is None:
            return
        for awaited in self._awaited:
            awaited.discard(parameter)  # pyright: ignore[reportArgumentType]
        while self._n_launched < len(self._units) and not self._awaited[self._n_launched]:
            self._launch()

    @torch.no_grad()
    def _launch(self) -> None:
        gradients = [local(parameter.grad) for parameter in self._units[self._n_launched] if parameter.grad is not None]
        assert len(gradients) == len(self._units[self._n_launched])
        self._n_launched += 1
        matrices = [gradient for gradient in gradients if gradient.ndim > 1 and gradient.is_contiguous()]
        vectors = [gradient for gradient in gradients if not (gradient.ndim > 1 and gradient.is_contiguous())]
        for matrix in matrices:
            self._under_way.append(dist.all_reduce(matrix, group=self._group, async_op=True))
        if vectors:
            flat = torch.cat([vector.flatten() for vector in vectors])
            self._under_way.append(dist.all_reduce(flat, group=self._group, async_op=True))
            self._packed.append((flat, vectors))
