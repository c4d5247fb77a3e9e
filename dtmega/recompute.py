"""Backward that computes blocks again instead of keeping what is inside them: full or selective (arXiv:2205.05198)."""

from __future__ import annotations

import functools
import types
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from dtmega import config
from dtmega.attention_cpu import OPERATOR
from dtmega.linear_cpu import BIASED_PRODUCT
from dtmega.models.model import Model

# What selective recompute keeps: matrix products and attention.
EXPENSIVE = {
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    BIASED_PRODUCT,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    OPERATOR,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.higher_order.flex_attention,
}


def recompute(stage: Model, how: config.Recompute) -> list[nn.Module]:
    """Let backward compute the forward of blocks again: all of it, or all but what is EXPENSIVE (arXiv:2205.05198).

    The method is that of Megatron's --activations-checkpoint-method: `block` takes the first blocks here; `uniform`
    takes all, in units of so many, and keeps only the input of each unit. Names stay as they are, because the blocks
    themselves are kept. Dropout needs no saved state: its masks are keyed.

    Returns:
        The blocks that backward computes again.
    """

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if op in EXPENSIVE else CheckpointPolicy.PREFER_RECOMPUTE

    keywords: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
    if how.mode == "selective":
        keywords["context_fn"] = functools.partial(create_selective_checkpoint_contexts, policy)

    # One function for all blocks: with one for each, torch.compile would compile each anew.
    def forward(block: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return checkpoint(functools.partial(type(block).forward, block), *args, **keywords, **kwargs)

    if how.method == "uniform" and how.layers > 1:
        honest = type(stage).run_layers

        def in_units(stage: Model, layers: Sequence[nn.Module], hidden: Tensor, *shared: Any) -> Tensor:
            for first in range(0, len(layers), how.layers):
                unit = functools.partial(honest, stage, layers[first : first + how.layers])
                hidden = checkpoint(unit, hidden, *shared, **keywords)
            return hidden

        stage.run_layers = types.MethodType(in_units, stage)
        return stage.blocks()
    chosen = stage.blocks()[: how.layers if how.method == "block" else None]
    for block in chosen:
        block.forward = types.MethodType(forward, block)
    return chosen
