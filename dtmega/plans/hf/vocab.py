"""Both ends of a model, cut over the vocabulary: any number of rows, their gradients cut as they are."""

from __future__ import annotations

import types
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import Placement

from dtmega.plans import mappings, styles
from dtmega.plans.hf.logits import Parts, VocabLogits
from dtmega.plans.hf.styles import computing_on
from dtmega.plans.styles import group_of, local


class VocabEmbedding(styles.VocabEmbedding):
    """nn.Embedding, or a subclass that does something to each row, cut by rows: tokens [B, S] -> [B, S, D]."""

    cost = ("all-reduce", "all-reduce")

    def __init__(self) -> None:
        super().__init__(sequence_parallel=False)

    def check(self, module: nn.Module, tp: int) -> None:
        if not isinstance(module, nn.Embedding) or module.max_norm is not None or module.scale_grad_by_freq:
            raise ValueError(
                f"VocabEmbedding is for nn.Embedding without max_norm and scale_grad_by_freq, not {module}"
            )
        super().check(module, tp)

    def forward(self, module: Any, x: Tensor) -> Tensor:
        group, weight = group_of(module), local(module.weight)
        start, size = self.first_row(module.weight), module.weight.shape[0]
        elsewhere = (x >= 0) & (x < size) & ((x < start) | (x >= start + weight.shape[0]))
        with computing_on(module, local):
            padding, here = module.padding_idx, module.padding_idx is not None
            here = here and start <= padding < start + weight.shape[0]
            module.padding_idx = padding - start if here else None
            try:
                rows = type(module).forward(module, (x - start).masked_fill(elsewhere, 0))
            finally:
                module.padding_idx = padding
        return mappings.add_up(rows.masked_fill(elsewhere.unsqueeze(-1), 0), group)


class VocabHead(styles._Vocabulary):
    """nn.Linear to the vocabulary, cut by rows: [..., D] -> logits [..., V], on every rank.

    With `fused`, in a forward with labels, they are `VocabLogits`: the loss takes this rank's columns, and the whole
    logits are made only if something else asks for them.
    """

    placements: ClassVar[dict[str, Placement]] = {"weight": Shard(0), "bias": Shard(0)}
    cost = ("backward all-reduce; 3 numbers a token for the loss",) * 2

    def __init__(self, fused: bool) -> None:
        super().__init__(sequence_parallel=False)
        self.fused, self.labelled = fused, False
        self.gathered_by_fsdp, self.calls = False, 0
        if not fused:
            self.cost = ("all-gather of the logits, backward all-reduce",) * 2

    def check(self, module: nn.Module, tp: int) -> None:
        if type(module).forward is not nn.Linear.forward:
            raise ValueError(f"VocabHead is for nn.Linear, not for {type(module).__name__}")
        super().check(module, tp)

    def fuse(self, module: Any) -> None:
        """For one rank: the module keeps its parameters, only the loss is another one."""
        self.check(module, 1)
        module.forward = types.MethodType(self._function, module)

    def forward(self, module: Any, x: Tensor) -> Tensor:
        cut, size = isinstance(module.weight, DTensor), module.weight.shape[0]
        group = group_of(module) if cut else None
        weight, bias = (local(p) if cut else p for p in (module.weight, module.bias))
        self.calls += 1
        parameter, version, call = module.weight, module.weight._version, self.calls

        def unchanged() -> bool:
            # FSDP2 writes the next weights into the same memory, without a new version of it.
            return parameter._version == version and (not self.gathered_by_fsdp or self.calls == call)

        start = 0 if group is None else self.first_row(parameter)
        x = x if group is None else mappings.copy(x, group)
        logits = VocabLogits(Parts(x, weight, bias, size, start, group, unchanged))
        return logits if self.fused and self.labelled else logits.whole()
