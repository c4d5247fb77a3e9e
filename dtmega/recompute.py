"""Backward computes blocks again instead of keeping what is inside them: full or selective (arXiv:2205.05198)."""

from __future__ import annotations

import functools
import types
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

# What selective recompute keeps: matrix products and attention.
EXPENSIVE = {
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.higher_order.flex_attention,
}


def recompute(blocks: Sequence[nn.Module], selective: bool) -> None:
    """Backward computes a block's forward again: all of it, or all but what is EXPENSIVE (arXiv:2205.05198).

    Names stay as they are, because the blocks themselves are kept. Dropout needs no saved state: its masks are keyed.
    """

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if op in EXPENSIVE else CheckpointPolicy.PREFER_RECOMPUTE

    keywords: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
    if selective:
        keywords["context_fn"] = functools.partial(create_selective_checkpoint_contexts, policy)

    # One function for all blocks: with one for each, torch.compile would compile each anew.
    def forward(block: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return checkpoint(functools.partial(type(block).forward, block), *args, **keywords, **kwargs)

    for block in blocks:
        block.forward = types.MethodType(forward, block)
