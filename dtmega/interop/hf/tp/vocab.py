"""Shards the head of a `transformers` model over the vocabulary. Logits are computed only when they are used."""

from __future__ import annotations

import types
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from dtmega.interop.hf.tp.logits import Parts, VocabLogits
from dtmega.interop.hf.tp.styles import Stack
from dtmega.plans import mappings
from dtmega.plans.base import local_part
from dtmega.plans.vocabulary import VocabStyle

_FUSED = "backward all-reduce; 3 numbers a token for the loss"
_WHOLE = "all-gather of the logits, backward all-reduce"


class LogitsHead(VocabStyle):
    """Style of the head, an nn.Linear sharded by rows: [..., D] -> logits [..., V] on every rank.

    If `fused`, a forward with labels returns `VocabLogits`: the loss is computed from this rank's columns, and the full
    logits are computed only if other code needs them.

    Args:
        fused: whether to return `VocabLogits` if there are labels; if False, every forward gathers the logits.

    Attributes:
        labelled: whether the current forward has labels; `parallel.watch_labels` sets this attribute.
        gathered_by_fsdp: whether FSDP2 gathers the weight for each forward.
        calls: number of forwards so far.
    """

    cost = (_FUSED, _FUSED)

    def __init__(self, fused: bool) -> None:
        super().__init__(Stack())
        self.fused, self.labelled = fused, False
        self.gathered_by_fsdp, self.calls = False, 0
        if not fused:
            self.cost = (_WHOLE, _WHOLE)

    def fuse(self, module: Any) -> None:
        """Fuse head and loss on a single rank. Nothing is sharded, and the parameters stay unchanged."""
        self.check(module, 1)
        module.forward = types.MethodType(self._function, module)

    def forward(self, module: Any, x: Tensor) -> Tensor:
        cut, size = isinstance(module.weight, DTensor), module.weight.shape[0]
        group = self.group if cut else None
        weight, bias = (local_part(p) if cut else p for p in (module.weight, module.bias))
        self.calls += 1
        parameter, version, call = module.weight, module.weight._version, self.calls

        def unchanged() -> bool:
            # In every forward, FSDP2 gathers the weight into one reused buffer without changing the tensor's version.
            # So after a later forward, the weight counts as changed.
            return parameter._version == version and (not self.gathered_by_fsdp or self.calls == call)

        start = 0 if group is None else self.first_row(parameter)
        x = x if group is None else mappings.copy(x, group)
        logits = VocabLogits(Parts(x, weight, bias, size, start, group, unchanged))
        return logits if self.fused and self.labelled else logits.whole()
