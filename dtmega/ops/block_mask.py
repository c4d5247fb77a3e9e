"""FlexAttention's mask for an attention rule, built from the range of positions and documents in each token block."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

BLOCK = 128  # size of a block of FlexAttention's masks, in queries and in keys


def block_mask(rule: Any) -> BlockMask:
    """Build FlexAttention's mask from the smallest and largest position and document in each block of queries or keys.

    A block of pairs is marked as full if these bounds prove that all pairs are allowed, as empty if they prove that no
    pair is allowed, and as partial otherwise. In a partial block the kernel checks each pair, so marking a full
    block as partial costs time but does not change the result. `create_block_mask` would check all B S^2 pairs and
    would need 12 bytes of memory per pair (torch 2.13).
    """

    def mask_mod(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return rule.allowed(b, i, j)

    q_low, q_high = (bound[:, :, None] for bound in _bounds(rule.query_places))
    k_low, k_high = (bound[:, None, :] for bound in _bounds(rule.key_places))
    some = torch.ones_like(q_low >= k_low)
    every = some
    if rule.causal:
        some = q_high >= k_low
        every = q_low >= k_high
    if rule.prefix is not None:
        all_of_it, some_of_it = (bound[:, None, :].bool() for bound in _bounds(rule.prefix.to(torch.int32)))
        some = some | some_of_it
        every = every | all_of_it
    if rule.window:
        some = some & (q_low - k_high < rule.window) & (k_low - q_high < rule.window)
        every = every & (q_high - k_low < rule.window) & (k_high - q_low < rule.window)
    if rule.query_documents is not None and rule.key_documents is not None:
        q_low, q_high = (bound[:, :, None] for bound in _bounds(rule.query_documents))
        k_low, k_high = (bound[:, None, :] for bound in _bounds(rule.key_documents))
        some = some & (q_low <= k_high) & (k_low <= q_high)
        every = every & (q_low == k_high) & (k_low == q_high)
    every = every & _has_full_size(rule.query_places)[:, None] & _has_full_size(rule.key_places)
    partial = some & ~every
    lengths = (rule.query_places.shape[1], rule.key_places.shape[1])
    return BlockMask.from_kv_blocks(*_key_blocks(partial), *_key_blocks(every), BLOCK, mask_mod, seq_lengths=lengths)


def _bounds(x: Tensor) -> tuple[Tensor, Tensor]:
    """The smallest and the largest value of x [B, S] in each block, as two tensors [B, blocks]."""
    n_blocks = -(-x.shape[1] // BLOCK)
    index = torch.arange(n_blocks * BLOCK, device=x.device).clamp(max=x.shape[1] - 1)
    low, high = x[:, index].unflatten(1, (n_blocks, BLOCK)).aminmax(dim=-1)
    return low, high


def _has_full_size(places: Tensor) -> Tensor:
    """Mask of the blocks that hold BLOCK tokens, [blocks]. The kernel has to check the end of a shorter last block."""
    n_blocks = -(-places.shape[1] // BLOCK)
    return torch.arange(1, n_blocks + 1, device=places.device) * BLOCK <= places.shape[1]


def _key_blocks(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Convert a bool mask [B, query blocks, key blocks] to FlexAttention's form, with a dim of 1 for the heads.

    Returns:
        The number of True key blocks for each query block, [B, 1, query blocks], and the indices of all key blocks,
        True blocks first, [B, 1, query blocks, key blocks].
    """
    count = blocks.sum(-1, dtype=torch.int32)
    order = torch.argsort(blocks.to(torch.int8), dim=-1, descending=True, stable=True)
    return count[:, None], order.to(torch.int32)[:, None].contiguous()
