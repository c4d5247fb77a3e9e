"""Expert capacity: each expert accepts a limited number of (token, expert) pairs per document; later pairs are dropped.

Let T be the number of tokens that count in a document (see below), f the capacity factor, k the number of experts per
token, and E the number of experts. An expert accepts at most ceil(f T k / E) pairs from the document, which is f times
an even share. The expert accepts the pairs of the earliest tokens. A token uses an expert at most once, so no two pairs
of an expert share a token. A later token never displaces an earlier token. In GShard, a later token may displace an
earlier token, because all first choices come before all second choices. With `--moe-token-drop-policy probs`,
Megatron's default, a later token may displace an earlier token as well. Only T depends on the whole document.

A token counts if it has a label. Tokens without a label, such as prompts and padding, use no capacity and are never
dropped, because dropping a prompt token would harm the tokens that attend to the prompt. So without labels, as in
generation, nothing is dropped.
"""

from __future__ import annotations

from fractions import Fraction
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from dtmega.config.families.moe import MoEKeys

if TYPE_CHECKING:
    from dtmega.ops.context_parallel import ContextParallel


class Capacity(NamedTuple):
    """The maximum number of (token, expert) pairs that each expert takes from each document of a microbatch.

    Under cp, every rank gathers the pairs of the full sequences to find those over the limit, so that the layout does
    not change which pairs are dropped.

    Attributes:
        document: document number of each token in the full sequences, [B, S] int64. The last number is reserved for
            tokens that do not count.
        limit: maximum number of pairs that an expert takes from each document, [documents + 1] int64. The last entry,
            for tokens that do not count, is never reached.
        n_experts: E, the number of experts.
        context: cp ranks over which the sequences are sharded; None without cp.
    """

    document: Tensor
    limit: Tensor
    n_experts: int
    context: ContextParallel | None

    def late(self, experts: Tensor) -> Tensor:
        """Mark the pairs that exceed their expert's limit, [N, k] bool.

        Args:
            experts: expert numbers for each of this rank's tokens, [N, k] int64.
        """
        chosen = experts.unflatten(0, (len(self.document), -1))  # [B, S / cp, k]
        if self.context is not None:
            chosen = self.context.whole(chosen.to(torch.int32), balanced=True)
        queue = self.document.unsqueeze(-1) * self.n_experts + chosen  # [B, S, k]
        # A stable sort keeps each queue's pairs in the order of their tokens.
        in_order, pairs = queue.flatten().sort(stable=True)
        numbers = torch.arange(len(pairs), device=pairs.device)
        number_in_queue = torch.empty_like(pairs)
        number_in_queue[pairs] = numbers - torch.searchsorted(in_order, in_order)
        late = number_in_queue.view(queue.shape) >= self.limit[self.document].unsqueeze(-1)
        if self.context is not None:
            late = self.context.slice(late, balanced=True)
        return late.flatten(0, 1)


def capacity_of(
    cfg: MoEKeys, counts: Tensor, document: Tensor, length: Tensor, context: ContextParallel | None
) -> Capacity:
    """Compute the capacity of a model's experts for the documents of a microbatch.

    Args:
        cfg: sizes and capacity factor of the model.
        counts: flag for each token, [B, S / cp] bool; True if the token counts.
        document: index of each token's document in the microbatch, [B, S / cp] int64.
        length: number of tokens that count in each document, [documents] fp32.
        context: cp ranks over which the sequences are sharded; None without cp.
    """
    n_documents = len(length)
    document = document.masked_fill(~counts, n_documents)
    if context is not None:
        document = context.whole(document, balanced=True)
    # Compute with integers: a product of floats may lie just above the exact integer and would then be rounded up.
    share = share_of(cfg)
    limit = -(-length.long() * share.numerator // share.denominator)
    without_limit = document.new_full((1,), document.numel())
    return Capacity(document, torch.cat([limit, without_limit]), cfg.n_experts, context)


def share_of(cfg: MoEKeys) -> Fraction:
    """The maximum share of a document's tokens that an expert takes: f k / E, but at most 1."""
    return min(Fraction(str(cfg.capacity_factor)) * cfg.experts_per_token / cfg.n_experts, Fraction(1))
