"""Attention in sequences whose tokens are split over the cp ranks (context parallelism).

Each rank either gathers the keys and values of all tokens, or exchanges tokens for heads with the other ranks and then
computes attention over all tokens for some heads. `ContextParallel.by_heads` chooses between the two.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from dtmega.ops.attention_rule import AttentionRule
from dtmega.ops.cpu.attention import OPERATOR
from dtmega.ops.keyed import Dropout
from dtmega.ops.shared_rule import SharedRule

Attend = Callable[..., Tensor]  # the type of `attention.attention`

# Operators of the attention kernels. Their results are kept when backward gathers the keys and values again.
KERNELS = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    OPERATOR,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.higher_order.flex_attention,
}


def attention_over_ranks(
    attend: Attend,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    shared: SharedRule,
    dropout: Dropout | None,
    scale: float | None,
    softcap: float | None,
) -> Tensor:
    """Compute attention for this rank's tokens, [B, H, S / cp, K], in sequences that are split over the cp ranks."""
    context = shared.context
    if context.by_heads:
        if dropout is not None:
            dropout = dropout._replace(head_ids=context.own_heads(dropout.head_ids))
        q = context.to_heads(q, shared.queries_balanced)
        k, v = (context.to_heads(x, shared.keys_balanced) for x in (k, v))
        out = attend(q, k, v, shared.runs[0].rule, dropout, scale, softcap)
        return context.to_tokens(out, shared.queries_balanced)
    if context.keeps_gathered or not torch.is_grad_enabled():
        return _over_all_keys(attend, q, k, v, shared, dropout, scale, softcap)
    if not torch.compiler.is_compiling():
        return _over_all_keys(attend, q, k, v, shared, dropout, scale, softcap, again=True)
    # In a compiled block, Inductor chooses the tensors to keep for backward from the tensors that the policy allows.
    # The plain formula has no kernel whose results could be kept, and recomputing it would cost more than keeping the
    # keys.
    if dropout is not None or any(needs_formula(run.rule, softcap) for run in shared.runs):
        return _over_all_keys(attend, q, k, v, shared, dropout, scale, softcap)

    def compute(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return _over_all_keys(attend, q, k, v, shared, None, scale, softcap)

    keywords: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
    return checkpoint(compute, q, k, v, context_fn=_keeping_results_of_kernels, **keywords)


def _over_all_keys(
    attend: Attend,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    shared: SharedRule,
    dropout: Dropout | None,
    scale: float | None,
    softcap: float | None,
    again: bool = False,
) -> Tensor:
    """Gather the keys and values of all tokens and compute attention for this rank's tokens.

    Args:
        again: whether to gather keys and values again in backward, instead of keeping them.
    """
    context = shared.context
    # One message carries keys and values.
    parts = [k, v]
    gathered = context.gather(torch.cat(parts, dim=-1), shared.keys_balanced)
    k, v = gathered.split([k.shape[-1], v.shape[-1]], dim=-1)
    outs: list[Tensor] = []
    keeping = context.gathering_again(gathered, parts, shared.keys_balanced) if again else contextlib.nullcontext()
    with keeping:
        for run in shared.runs:
            queries = q[:, :, run.start : run.stop]
            run_k, run_v = k[:, :, : run.n_keys], v[:, :, : run.n_keys]
            outs.append(attend(queries, run_k, run_v, run.rule, dropout, scale, softcap))
    return torch.cat(outs, dim=2)


def _policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Keep the kernels' results and recompute the remaining operations: the gather and the slicing of its result."""
    return CheckpointPolicy.MUST_SAVE if op in KERNELS else CheckpointPolicy.MUST_RECOMPUTE


_keeping_results_of_kernels = functools.partial(create_selective_checkpoint_contexts, _policy)


def needs_formula(rule: AttentionRule, softcap: float | None) -> bool:
    """True if the plain formula must run: FlexAttention is off, and there is a trained bias table or a soft cap."""
    is_learned = rule.table is not None and rule.table.requires_grad
    return rule.block_mask is None and (is_learned or softcap is not None)
