"""The capacity of experts: of each document, an expert takes at most so many pairs, and later pairs are dropped.

An expert takes ceil(f T k / E) pairs of a document with T tokens that count: f times an even share. It takes the pairs
at the earliest places. A token uses an expert at most once, so no two pairs have the same place. A later token never
takes an earlier one's place, as it may in GShard, where all first choices come before all second ones, and by
`--moe-token-drop-policy probs`, Megatron's default. Only T is known from the whole document.

A token counts if it has a label. The others, such as prompts and padding, take no place, and are never dropped: what
attends to a prompt would suffer. So without labels, as in generation, nothing is dropped.
"""

from __future__ import annotations

from fractions import Fraction
from typing import NamedTuple

import torch
from torch import Tensor

from dtmega import config
from dtmega.ops.context_parallel import ContextParallel


class Capacity(NamedTuple):
    """The number of pairs that each expert takes of each document of a microbatch.

    Under cp, every rank finds the late pairs of the whole sequences, so that they are the same on every layout.

    Attributes:
        document: number of each token's document, of whole sequences, [B, S] int64. Tokens that do not count have a
            number of their own, the last one.
        limit: largest number of pairs of an expert in each document, [documents] int64.
        n_experts: E, the number of experts.
        context: ranks that share the sequences; None: this rank has whole sequences.
    """

    document: Tensor
    limit: Tensor
    n_experts: int
    context: ContextParallel | None

    def late(self, experts: Tensor) -> Tensor:
        """True for the pairs that come after an expert's last one, [N, k] bool.

        Args:
            experts: experts of each of this rank's tokens, [N, k] int64.
        """
        chosen = experts.unflatten(0, (len(self.document), -1))  # [B, S / cp, k]
        if self.context is not None:
            chosen = self.context.whole(chosen.to(torch.int32), balanced=True)
        queue = self.document.unsqueeze(-1) * self.n_experts + chosen  # [B, S, k]
        # A stable sort keeps the pairs of a queue in the order of their places.
        in_order, pairs = queue.flatten().sort(stable=True)
        numbers = torch.arange(len(pairs), device=pairs.device)
        number_in_queue = torch.empty_like(pairs)
        number_in_queue[pairs] = numbers - torch.searchsorted(in_order, in_order)
        late = number_in_queue.view(queue.shape) >= self.limit[self.document].unsqueeze(-1)
        if self.context is not None:
            late = self.context.slice(late, balanced=True)
        return late.flatten(0, 1)


def capacity_of(
    cfg: config.MoE, counts: Tensor, document: Tensor, length: Tensor, context: ContextParallel | None
) -> Capacity:
    """The capacity of a model's experts in the documents of a microbatch.

    Args:
        cfg: the model's sizes and its capacity factor.
        counts: whether each token counts, [B, S / cp] bool.
        document: number of each token's document, [B, S / cp] int64.
        length: number of tokens that count in each document, [documents] fp32.
        context: ranks that share the sequences; the tokens are this rank's part of them.
    """
    n_documents = len(length)
    document = document.masked_fill(~counts, n_documents)
    if context is not None:
        document = context.whole(document, balanced=True)
    # Integers, because a product of floats may be just above the integer that is meant.
    share = share_of(cfg)
    limit = -(-length.long() * share.numerator // share.denominator)
    without_limit = document.new_full((1,), document.numel())
    return Capacity(document, torch.cat([limit, without_limit]), cfg.n_experts, context)


def share_of(cfg: config.MoE) -> Fraction:
    """The share of a document's tokens that an expert takes at most, f k / E. It takes each token at most once."""
    return min(Fraction(str(cfg.capacity_factor)) * cfg.experts_per_token / cfg.n_experts, Fraction(1))
