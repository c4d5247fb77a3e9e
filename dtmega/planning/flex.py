"""A stand-in for FlexAttention on a pretended GPU: it keeps for backward what FlexAttention keeps.

The real function would build its scores, [B, H, S, S], when it runs without a compiler.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from dtmega.ops import attention
from dtmega.ops.attention_rule import AttentionRule


@torch.library.custom_op("dtmega_planning::flex", mutates_args=())
def flex(q: Tensor, k: Tensor, v: Tensor, share: float) -> tuple[Tensor, Tensor]:
    """The output of FlexAttention [B, H, S, K], and the logarithm of each query's sum [B, H, S]; without values."""
    raise NotImplementedError  # only the fake below is ever called


@flex.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, share: float) -> tuple[Tensor, Tensor]:
    n_rows, n_heads, n_queries, _ = q.shape
    out = q.new_empty(n_rows, n_queries, n_heads, v.shape[-1]).transpose(1, 2)
    return out, q.new_empty(n_rows, n_heads, n_queries, dtype=torch.float32)


@torch.library.custom_op("dtmega_planning::flex_backward", mutates_args=())
def flex_backward(gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, share: float) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v; without values."""
    raise NotImplementedError  # only the fake below is ever called


@flex_backward.register_fake
def _(gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, share: float) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, share = inputs
    ctx.share = share
    ctx.save_for_backward(*tensors, *output)


def _backward(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    q, k, v = ctx.saved_tensors[:3]
    return *flex_backward(gradient, q, k, v, ctx.share), None


flex.register_autograd(_backward, setup_context=_keep)


@register_flop_formula(torch.ops.dtmega_planning.flex)
def _flops(q: Any, k: Any, v: Any, share: float, *_: Any, **__: Any) -> int:
    """Two products of all visible pairs, q k^T and p v."""
    n_rows, n_heads, n_queries, size = q
    return round(2 * n_rows * n_heads * n_queries * k[2] * (size + v[3]) * share)


@register_flop_formula(torch.ops.dtmega_planning.flex_backward)
def _flops_backward(gradient: Any, q: Any, k: Any, v: Any, share: float, *_: Any, **__: Any) -> int:
    """Five products of all visible pairs: the scores again, and the gradients of p, v, q and k."""
    n_rows, n_heads, n_queries, size = q
    return round(2 * n_rows * n_heads * n_queries * k[2] * (3 * size + 2 * v[3]) * share)


def visible_share(rule: AttentionRule) -> float:
    """Share of the pairs of queries and keys that the rule allows, from causality and the window alone."""
    n_queries, n_keys = rule.query_places.shape[1], rule.key_places.shape[1]
    if not rule.causal:
        return 1.0
    n_before = n_keys - n_queries
    visible = n_queries * n_before + n_queries * (n_queries + 1) / 2
    if rule.window:
        visible = min(visible, n_queries * rule.window)
    return visible / (n_queries * n_keys)


@contextlib.contextmanager
def without_values() -> Iterator[None]:
    """Put the stand-in in the place of FlexAttention, inside the `with` block only."""

    def stand_in(q: Tensor, k: Tensor, v: Tensor, rule: AttentionRule, scale: float | None) -> Tensor:
        out, _ = flex(q, k, v, visible_share(rule))
        return out

    with patch.object(attention, "_flex", stand_in):
        yield
