"""A decoder that is cut into stages, called as if it were whole: forward only, one batch at a time."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dtmega.ops.key_value_cache import KeyValueCache


class Relay:
    """Stage after stage computes, and its rank sends what it hands on to all ranks of the pipeline.

    Schedules would fill the time in which the others wait; they need the gradient's shapes, and a length for good.

    Args:
        stages: the models of this rank, by number.
        group: of the pipeline.
        device: where this rank computes.

    Attributes:
        longest, has_cache: as of a model.
        training: always False.
    """

    training = False

    def __init__(self, stages: Mapping[int, Any], group: dist.ProcessGroup, device: torch.device) -> None:
        self._stages, self._group, self._device = dict(stages), group, device
        held: list[Any] = [None] * group.size()
        dist.all_gather_object(held, [*stages], group=group)
        ranks = {number: rank for rank, numbers in enumerate(held) for number in numbers}
        self._ranks = [dist.get_global_rank(group, ranks[number]) for number in range(len(ranks))]
        first = next(iter(stages.values()))
        self.longest = first.longest
        self.has_cache = first.has_cache

    def parameters(self) -> Iterator[nn.Parameter]:
        """Those that are here."""
        return itertools.chain.from_iterable(stage.parameters() for stage in self._stages.values())

    def eval(self) -> None:
        for stage in self._stages.values():
            stage.eval()

    def train(self, mode: bool) -> None:
        """Nothing is trained here."""

    @torch.no_grad()
    def __call__(self, tokens: Tensor, *, cache: KeyValueCache | None = None, **rows: Any) -> Tensor:
        """The logits [B, S, V] of a batch, on every rank.

        Args:
            tokens: [B, S] int64.
            cache: cache of the whole model, which holds one for each stage.
            rows: others of the batch.
        """
        if cache is not None:
            cache.begin_forward(rows["places"], rows.get("document_ids"))
            cache.inner = cache.inner or {number: KeyValueCache() for number in self._stages}
        found: Any = {}
        for number, rank in enumerate(self._ranks):
            if number in self._stages:
                of_stage = {} if cache is None else {"cache": cache.inner[number]}
                found = self._stages[number](tokens, **rows, **found, **of_stage)
            found = self._from(rank, found)
        return found

    def _from(self, rank: int, found: Any) -> Any:
        """A tensor, or tensors by name, that one rank has."""
        single = isinstance(found, Tensor)
        tensors = {"": found} if single else found
        shapes: list[Any] = [single, [(name, t.shape, t.dtype) for name, t in tensors.items()]]
        dist.broadcast_object_list(shapes, src=rank, group=self._group)
        if rank != dist.get_rank():
            tensors = {name: torch.empty(shape, dtype=dtype, device=self._device) for name, shape, dtype in shapes[1]}
        for tensor in tensors.values():
            dist.broadcast(tensor.contiguous() if rank == dist.get_rank() else tensor, src=rank, group=self._group)
        return tensors[""] if shapes[0] else tensors
