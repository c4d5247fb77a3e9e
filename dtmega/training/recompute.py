"""Recomputation (activation checkpointing): recompute activations in the backward pass instead of saving them.

Recomputation is full or selective. Selective recomputation (Korthikanti et al., arXiv:2205.05198) saves the results of
matrix products and attention.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from dtmega import config
from dtmega.models.model import Model
from dtmega.ops.attention import is_kernel

# Selective recomputation saves the results of attention and of these matrix products. Ours, of linear layers on CPUs
# and of experts, are known by their names, because a run loads only those that it uses.
PRODUCTS = {torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten._grouped_mm.default}
OUR_PRODUCTS = {"dtmega::biased_product", "dtmega::grouped_product"}


def is_expensive(operator: Any) -> bool:
    """True if selective recomputation saves the operator's results."""
    return operator in PRODUCTS or operator.name() in OUR_PRODUCTS or is_kernel(operator)


def recompute(stage: Model, how: config.Recompute) -> list[nn.Module]:
    """Make the backward pass recompute blocks. In selective mode, expensive operations are not recomputed.

    `how.method` is Megatron's --activations-checkpoint-method. `block` recomputes the first `layers` blocks of the
    stage. `uniform` recomputes all blocks, in groups of `layers` blocks, and saves only the input of each group.

    Only forward methods are replaced, so parameters keep their names. Dropout needs no saved generator state, because
    dropout masks are hashes of seed, name and index (`ops/keyed.py`).

    Returns:
        The blocks that the backward pass recomputes.
    """

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if is_expensive(op) else CheckpointPolicy.PREFER_RECOMPUTE

    keywords: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
    if how.mode == "selective":
        keywords["context_fn"] = functools.partial(create_selective_checkpoint_contexts, policy)

    # All blocks share this function. With a function for each block, torch.compile would compile each block anew.
    def forward(block: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return checkpoint(functools.partial(type(block).forward, block), *args, **keywords, **kwargs)

    if how.method == "uniform" and how.layers > 1:
        original_run_layers = type(stage).run_layers

        def in_units(stage: Model, layers: Sequence[nn.Module], hidden: Tensor, *shared: Any) -> Tensor:
            for first in range(0, len(layers), how.layers):
                unit = functools.partial(original_run_layers, stage, layers[first : first + how.layers])
                hidden = checkpoint(unit, hidden, *shared, **keywords)
            return hidden

        stage.run_layers = types.MethodType(in_units, stage)
        return stage.blocks()
    recomputed = stage.blocks()
    if how.method == "block":
        recomputed = recomputed[: how.layers]
    for block in recomputed:
        block.forward = types.MethodType(forward, block)
    return recomputed
