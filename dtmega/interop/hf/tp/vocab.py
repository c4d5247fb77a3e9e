"""Shards the head of a `transformers` model over the vocabulary. Logits are computed only when they are used."""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor

from dtmega.interop.hf.logits import FusedHead
from dtmega.interop.hf.tp.styles import Stack
from dtmega.plans import mappings
from dtmega.plans.base import local_part
from dtmega.plans.vocabulary import VocabStyle

_FUSED = "backward all-reduce; 3 numbers a token for the loss"
_WHOLE = "all-gather of the logits, backward all-reduce"


class LogitsHead(VocabStyle, FusedHead):
    """Style of the head, an nn.Linear sharded by rows: [..., D] -> logits [..., V] on every rank.

    If `fused`, a forward with labels returns `VocabLogits`: the loss is computed from this rank's columns, and the full
    logits are computed only if other code needs them.

    Args:
        fused: whether to return `VocabLogits` if there are labels; if False, every forward gathers the logits.
    """

    cost = (_FUSED, _FUSED)

    def __init__(self, fused: bool) -> None:
        VocabStyle.__init__(self, Stack())
        FusedHead.__init__(self, fused)
        if not fused:
            self.cost = (_WHOLE, _WHOLE)

    def forward(self, module: Any, x: Tensor) -> Tensor:
        weight, bias = local_part(module.weight), local_part(module.bias)
        join = functools.partial(mappings.join, group=self.group, dim=-1, size=module.weight.shape[0])
        start = self.first_row(module.weight)
        return self.logits(module.weight, mappings.copy(x, self.group), weight, bias, start, self.group, join)
