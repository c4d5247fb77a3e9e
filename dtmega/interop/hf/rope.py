"""Rotary embeddings with `rope_type="longrope"`, whose frequencies depend on how long a conversation is.

transformers has two sets of frequencies, and chooses by the largest position of a forward pass: one conversation longer
than `original_max_position_embeddings` would give all others of its microbatch the frequencies for long ones, too.
"""

from __future__ import annotations

import types
from typing import Any

import torch
from torch import Tensor, nn

from dtmega.interop.hf.directory import LONGROPE, original_length


def choose_by_conversation(model: nn.Module) -> None:
    """Make the rotary embeddings of a transformers model give each conversation the frequencies for its own length.

    Without longrope, nothing changes.
    """
    for module in model.modules():
        if hasattr(module, "rope_type") and original_length(module.config) is not None:
            module.forward = types.MethodType(_forward, module)


def _forward(module: Any, x: Tensor, position_ids: Tensor, layer_type: str | None = None) -> tuple[Tensor, ...]:
    """The cosines and sines of a rotary embedding, [B, S, K], for positions that restart in each conversation, [B, S].

    A length is known only within these positions: with a cache, it is that of the text so far.
    """
    of_kind = () if layer_type is None else (layer_type,)
    own, rope = type(module).forward, module.config.rope_parameters
    if layer_type is not None:
        rope = rope[layer_type]
    if rope["rope_type"] != LONGROPE:
        return own(module, x, position_ids, *of_kind)
    is_long = _lengths(position_ids) > rope["original_max_position_embeddings"]
    long = own(module, x, position_ids, *of_kind)
    short = own(module, x, position_ids.masked_fill(is_long, 0), *of_kind)
    return tuple(torch.where(is_long.unsqueeze(-1), *pair) for pair in zip(long, short, strict=True))


def _lengths(position_ids: Tensor) -> Tensor:
    """The number of tokens in each token's conversation, [B, S] -> [B, S]."""
    conversations = (position_ids == 0).cumsum(-1)
    rows, n_tokens = position_ids.shape
    ends = position_ids.new_zeros(rows, n_tokens + 1).scatter_reduce(-1, conversations, position_ids, "amax")
    return ends.gather(-1, conversations) + 1
