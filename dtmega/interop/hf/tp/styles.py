"""Words that models of `transformers` need beside those of `plans/styles.py`: their stacks, and a few words more.

Inside a block attention and feed-forward compute on this rank's heads and features. Outside blocks every rank has the
whole hidden state and computes the same. The gradients of parameters are complete after each backward: where a
replicated parameter saw only this rank's tokens or heads, autograd sums them over tp, so that any loop of the user's is
right.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from dtmega.interop.hf.tp.dropout import RandomStream
from dtmega.plans import base, mappings
from dtmega.plans.base import local_part
from dtmega.plans.styles import Column, Row, check_kv_heads


class Stack(base.Stack):
    """A run of blocks whose hidden state is cut along S in some forwards, and in others not.

    It is where sequence parallelism is wanted and tp divides S; else that forward is plain tensor parallelism, with the
    same numbers: so an odd prompt works, and each token that `generate` adds.
    """

    sums_in_backward = True

    def __init__(self, sequence_parallel: bool = False) -> None:
        super().__init__(sequence_parallel)
        self.hidden_states_wanted = False
        self.cut = False
        self.random = RandomStream()

    def shared(self, parameter: Any, group: ProcessGroup, of_heads: bool) -> Any:
        weight = local_part(parameter)
        return mappings.copy(weight, group) if (self.cut or of_heads) and weight is not None else weight


class GatheredColumn(Column):
    """`colwise_gather_output`: cut by output features, but every rank gets all of them."""

    def __init__(self) -> None:
        super().__init__(Stack())
        self.entering()
        self.cost = ("all-gather, backward all-reduce", "")

    def check_size(self, what: str, size: int, tp: int) -> None:
        if size <= (tp - 1) * -(-size // tp):
            raise ValueError(f"tp={tp} leaves a rank without any of {size}: {what} ([mesh] tp)")

    def forward(self, module: Any, x: Tensor) -> Tensor:
        return mappings.join(super().forward(module, x), self.group, -1, module.weight.shape[0])


class SplitRow(Row):
    """`rowwise_split_input`: every rank has the whole input and takes its part."""

    cost = ("all-reduce, backward all-gather", "")

    def __init__(self) -> None:
        super().__init__(Stack())

    def forward(self, module: Any, x: Tensor) -> Tensor:
        return super().forward(module, mappings.split(x, self.group, -1))


class NormOfEachHead(base.Style):
    """A module with a LayerNorm for each head, `norms`: [B, H/tp, S, K] by those of this rank's heads.

    Where heads are fewer than ranks, several ranks have one. The norms themselves are whole on every rank. Their
    gradients are summed together, since a norm that one rank does not call cannot wait for it there.
    """

    cost = ("backward all-reduce of the weights", "backward all-reduce of the weights")

    def check_class(self, module: nn.Module) -> None:
        norms = getattr(module, "norms", None)
        found = list(norms) if isinstance(norms, nn.ModuleList) else []
        plain = all(type(norm) is nn.LayerNorm and norm.bias is None for norm in found)
        if not found or not plain or len({(norm.normalized_shape, norm.eps) for norm in found}) > 1:
            raise ValueError(
                f"NormOfEachHead is for `norms`, LayerNorms of one size without bias: it does not know "
                f"{type(module).__name__}"
            )

    def check(self, module: Any, tp: int) -> None:
        super().check(module, tp)
        check_kv_heads(len(module.norms), tp, f"norms of {type(module).__name__}")

    def forward(self, module: Any, x: Tensor) -> Tensor:
        tp, heads = self.group.size(), len(module.norms)
        weights = torch.stack([local_part(norm.weight) for norm in module.norms])
        weights = mappings.copy(weights, self.group)
        first = self.group.rank() * heads // tp
        here = max(1, heads // tp)
        normed = F.layer_norm(x, module.norms[0].normalized_shape, eps=module.norms[0].eps)
        return normed * weights[first : first + here].unsqueeze(1)
