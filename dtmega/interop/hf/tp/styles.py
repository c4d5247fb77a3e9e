"""Stacks of blocks in `transformers` models, and styles that these models need in addition to `plans/styles.py`.

Inside a block, attention and feed-forward compute on this rank's heads and features. Outside the blocks, all ranks have
the full hidden state and do identical computations. If a replicated parameter sees only this rank's tokens or heads,
autograd sums the parameter's gradient over tp. So all gradients are complete after each backward, and any training loop
is correct without changes.
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
    """A stack of blocks. The hidden state is sharded along S in every forward where tp divides S.

    In any other forward the hidden state is replicated, and the results do not change. So a prompt of odd length works,
    and `generate` can add tokens one by one.

    Args:
        sequence_parallel: whether to shard the hidden state along S; if False, it is never sharded.
        drops: whether the model has dropout.

    Attributes:
        hidden_states_wanted: whether the current forward returns all hidden states, which are then not sharded.
        cut: whether the hidden state is sharded in the current forward.
        random: this rank's own stream of random numbers, for dropout while the hidden state is sharded.
    """

    sums_in_backward = True

    def __init__(self, sequence_parallel: bool = False, drops: bool = False) -> None:
        super().__init__(sequence_parallel)
        self.drops = drops
        self.hidden_states_wanted = False
        self.cut = False
        self.random = RandomStream()

    def shared(self, parameter: Any, group: ProcessGroup, of_heads: bool) -> Any:
        weight = local_part(parameter)
        return mappings.copy(weight, group) if (self.cut or of_heads) and weight is not None else weight


class GatheredColumn(Column):
    """transformers' `colwise_gather_output` style: shards a linear by output features and gathers the output."""

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
    """transformers' `rowwise_split_input` style: shards a linear by input features; its input is replicated."""

    cost = ("all-reduce, backward all-gather", "")

    def __init__(self) -> None:
        super().__init__(Stack())

    def forward(self, module: Any, x: Tensor) -> Tensor:
        return super().forward(module, mappings.split(x, self.group, -1))


class NormOfEachHead(base.Style):
    """Style of a module whose list `norms` has one LayerNorm per head; the input is [B, H/tp, S, K].

    A rank applies the norms of its own heads; if there are fewer heads than ranks, several ranks share a head. All
    norms are replicated. A single collective sums the gradients of all norms over tp, because a rank would
    never reach a separate collective for a norm that it does not use.
    """

    cost = ("backward all-reduce of the weights", "backward all-reduce of the weights")

    def check_class(self, module: nn.Module) -> None:
        module_list = getattr(module, "norms", None)
        norms = list(module_list) if isinstance(module_list, nn.ModuleList) else []
        are_plain = all(type(norm) is nn.LayerNorm and norm.bias is None for norm in norms)
        if not norms or not are_plain or len({(norm.normalized_shape, norm.eps) for norm in norms}) > 1:
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
        n_local = max(1, heads // tp)
        normed = F.layer_norm(x, module.norms[0].normalized_shape, eps=module.norms[0].eps)
        return normed * weights[first : first + n_local].unsqueeze(1)
