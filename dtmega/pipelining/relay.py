"""Call a pipelined model like a whole model, for generation: forward only, and one batch at a time."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dtmega.ops.key_value_cache import KeyValueCache


class Relay:
    """Pipeline stages that run one after the other. The rank of each stage broadcasts the stage's output to all ranks.

    While one stage runs, the ranks of all other stages wait. A pipeline schedule would use the waiting time, but a
    schedule needs a fixed sequence length and the shapes of gradients.

    Args:
        stages: stage index -> model of the stage, for this rank's stages.
        group: process group of the pipeline's ranks.
        device: device on which this rank computes.

    Attributes:
        longest, has_cache: the stages' values of the `Model` attributes with these names.
        training: flag that is always False.
    """

    training = False

    def __init__(self, stages: Mapping[int, Any], group: dist.ProcessGroup, device: torch.device) -> None:
        self._stages, self._group, self._device = dict(stages), group, device
        stages_of_ranks: list[Any] = [None] * group.size()
        dist.all_gather_object(stages_of_ranks, [*stages], group=group)
        ranks: dict[int, int] = {}
        for rank, numbers in enumerate(stages_of_ranks):
            ranks |= dict.fromkeys(numbers, rank)
        self._ranks = [dist.get_global_rank(group, ranks[number]) for number in range(len(ranks))]
        first = next(iter(stages.values()))
        self.longest = first.longest
        self.has_cache = first.has_cache

    def parameters(self) -> Iterator[nn.Parameter]:
        """The parameters of this rank's stages."""
        return itertools.chain.from_iterable(stage.parameters() for stage in self._stages.values())

    def eval(self) -> None:
        for stage in self._stages.values():
            stage.eval()

    def train(self, mode: bool) -> None:
        """Do nothing, because a relay only runs forward. Generation calls `train` on every kind of model."""

    @torch.no_grad()
    def __call__(self, tokens: Tensor, *, cache: KeyValueCache | None = None, **rows: Any) -> Tensor:
        """Compute the logits [B, S, V] of a batch, on every rank.

        Args:
            tokens: token ids, [B, S] int64.
            cache: the whole model's cache, made of one cache per stage; None to cache nothing.
            rows: remaining tensors of the batch, keyed by name.
        """
        if cache is not None:
            cache.begin_forward(rows["places"], rows.get("document_ids"))
            cache.inner = cache.inner or {number: KeyValueCache() for number in self._stages}
        outputs: Any = {}
        for number, rank in enumerate(self._ranks):
            if number in self._stages:
                of_stage = {} if cache is None else {"cache": cache.inner[number]}
                outputs = self._stages[number](tokens, **rows, **outputs, **of_stage)
            outputs = self._broadcast(rank, outputs)
        return outputs

    def _broadcast(self, rank: int, outputs: Any) -> Any:
        """Broadcast a stage's outputs from `rank`: hidden states keyed by name, or the logits of the last stage."""
        single = isinstance(outputs, Tensor)
        tensors = {"": outputs} if single else outputs
        # Send the shapes first, because the receiving ranks must allocate the tensors.
        shapes: list[Any] = [single, [(name, t.shape, t.dtype) for name, t in tensors.items()]]
        dist.broadcast_object_list(shapes, src=rank, group=self._group)
        if rank != dist.get_rank():
            tensors = {name: torch.empty(shape, dtype=dtype, device=self._device) for name, shape, dtype in shapes[1]}
        for tensor in tensors.values():
            dist.broadcast(tensor.contiguous() if rank == dist.get_rank() else tensor, src=rank, group=self._group)
        return tensors[""] if shapes[0] else tensors
