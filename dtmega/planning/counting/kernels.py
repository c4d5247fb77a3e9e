"""Stand-ins that compute no values, for kernels that torch would replace or refuse on a fake device.

The stand-in for a GPU's fused attention kernels keeps the tensors that the real kernels keep for backward. Without the
stand-in, FlexAttention and `scaled_dot_product_attention` would build all scores, [B, H, S, S]. The stand-in for
`grouped_mm`, which multiplies the tokens of all experts, accepts every dtype of the real kernel and has a FLOP formula.
torch 2.13's own fake `grouped_mm` supports only bf16 and has no FLOP formula.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses import fake_impls
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import flop_registry, register_flop_formula

from dtmega.ops import attention
from dtmega.ops.attention import KERNELS
from dtmega.ops.attention_rule import AttentionRule

HALF = (torch.bfloat16, torch.float16)
FLASH_HEAD_SIZE = 256  # largest head size of torch's flash kernel


@torch.library.custom_op("dtmega_planning::attention", mutates_args=())
def fused(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, share: float) -> tuple[Tensor, Tensor]:
    """The output of attention [B, H, S, K] and the logarithm of each query's softmax sum [B, H, S], without values.

    Args:
        q: queries, [B, H, S, K].
        k, v: keys and values, [B, G, T, K], where G divides H.
        bias: tensor that the kernel reads from memory and adds to the scores; broadcasts to [B, H, S, T].
        share: share of the query-key pairs that the kernel computes.
    """
    raise NotImplementedError  # only the fake below is ever called


@fused.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, share: float) -> tuple[Tensor, Tensor]:
    n_rows, n_heads, n_queries, _ = q.shape
    out = q.new_empty(n_rows, n_queries, n_heads, v.shape[-1]).transpose(1, 2)
    return out, q.new_empty(n_rows, n_heads, n_queries, dtype=torch.float32)


@torch.library.custom_op("dtmega_planning::attention_backward", mutates_args=())
def fused_backward(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, share: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v, without values."""
    raise NotImplementedError  # only the fake below is ever called


@fused_backward.register_fake
def _(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, share: float
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, bias, ctx.share = inputs
    ctx.save_for_backward(q, k, v, bias, *output)


def _backward(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    q, k, v, bias, *_results = ctx.saved_tensors
    dq, dk, dv = fused_backward(gradient, q, k, v, bias, ctx.share)
    return dq, dk, dv, None, None


fused.register_autograd(_backward, setup_context=_keep)


@register_flop_formula(torch.ops.dtmega_planning.attention)
def _flops(q: Any, k: Any, v: Any, bias: Any, share: float, *_: Any, **__: Any) -> int:
    """FLOPs of two products over all visible pairs: q k^T and p v."""
    n_rows, n_heads, n_queries, size = q
    return round(2 * n_rows * n_heads * n_queries * k[2] * (size + v[3]) * share)


@register_flop_formula(torch.ops.dtmega_planning.attention_backward)
def _flops_backward(gradient: Any, q: Any, k: Any, v: Any, bias: Any, share: float, *_: Any, **__: Any) -> int:
    """FLOPs of five products over all visible pairs: the recomputed scores, and the gradients of p, v, q and k."""
    n_rows, n_heads, n_queries, size = q
    return round(2 * n_rows * n_heads * n_queries * k[2] * (3 * size + 2 * v[3]) * share)


def visible_share(rule: AttentionRule) -> float:
    """The share of query-key pairs that the rule allows, computed from causality and the window alone."""
    n_queries, n_keys = rule.query_places.shape[1], rule.key_places.shape[1]
    if not rule.causal:
        return 1.0
    n_before = n_keys - n_queries
    visible = n_queries * n_before + n_queries * (n_queries + 1) / 2
    if rule.window:
        visible = min(visible, n_queries * rule.window)
    return visible / (n_queries * n_keys)


def has_fused_kernel(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool) -> bool:
    """True if `scaled_dot_product_attention` has a fused kernel on a Hopper GPU, by the rules in torch's sdp_utils.cpp.

    The rules cover the flash kernel and the memory-efficient kernel. The result is False for a mask that requires a
    gradient.
    """
    is_half = q.dtype in HALF
    is_square = q.shape[-2] == k.shape[-2]
    flash = is_half and mask is None and q.shape[-1] == v.shape[-1] <= FLASH_HEAD_SIZE and (is_square or not is_causal)
    alignment = 8 if is_half else 4
    is_aligned = q.shape[-1] % alignment == 0 and v.shape[-1] % alignment == 0
    learns = mask is not None and mask.requires_grad
    efficient = (is_half or q.dtype == torch.float32) and q.shape[1] == k.shape[1] and is_aligned and not learns
    return flash or efficient


def _scaled_dot_product_attention(
    original: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Compute `scaled_dot_product_attention`, with the stand-in if a GPU would run a fused kernel."""
    if query.device.type != "cuda" or not has_fused_kernel(query, key, value, attn_mask, is_causal):
        return original(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    bias = attn_mask
    if bias is not None and bias.dtype == torch.bool:
        # The kernel adds numbers, so torch converts the boolean mask to numbers. Backward keeps these numbers.
        hidden = torch.scalar_tensor(float("-inf"), dtype=query.dtype, device=query.device)
        bias = torch.where(bias, 0.0, hidden)
    share = (query.shape[-2] + 1) / 2 / key.shape[-2] if is_causal else 1.0
    out, _ = fused(query, key, value, bias, share)
    return out


def _flex(q: Tensor, k: Tensor, v: Tensor, rule: AttentionRule, *_: float | None) -> Tensor:
    """Compute FlexAttention with the stand-in."""
    out, _ = fused(q, k, v, None, visible_share(rule))
    return out


def _grouped_product(mode: FakeTensorMode, operator: Any, a: Tensor, b: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Multiply each group of rows by the group's matrix, on fake tensors."""
    if a.dtype == torch.bfloat16:
        return NotImplemented  # torch's own function handles bfloat16
    with mode:
        return operator(a.bfloat16(), b.bfloat16(), *args, **kwargs).to(a.dtype)


def _flops_of_groups(share: float, a: Tensor, b: Tensor, *_: Any, **__: Any) -> int:
    """FLOPs of multiplying each group of rows by its expert's matrix. A rank computes only its own experts' share."""
    n_products = a.shape[0] if a.ndim == b.ndim == 3 else 1
    return round(2 * n_products * a.shape[-2] * a.shape[-1] * b.shape[-1] * share)


@contextlib.contextmanager
def without_values(experts_over: int = 1) -> Iterator[None]:
    """Inside the `with` block, replace the kernels of a real device with the stand-ins.

    Args:
        experts_over: number of ranks over which a mixture's experts are divided; 1 if every rank has a part of each
            expert. The tokens' choices of experts are not known, so all ranks are assumed to compute equal shares.
    """
    grouped = torch.ops.aten._grouped_mm
    original = F.scaled_dot_product_attention

    # Dynamo reads the function's name, and a partial function has no name.
    def scaled_dot_product(*args: Any, **kwargs: Any) -> Tensor:
        return _scaled_dot_product_attention(original, *args, **kwargs)

    # Selective recomputation keeps the results of kernels, so add the stand-in to the set of kernels.
    kernel = torch.ops.dtmega_planning.attention.default
    with (
        patch.object(attention, "_flex", _flex),
        patch.object(F, "scaled_dot_product_attention", scaled_dot_product),
        patch.dict(fake_impls.op_implementations_dict, {grouped.default: _grouped_product}),
        patch.dict(flop_registry, {grouped: functools.partial(_flops_of_groups, 1 / experts_over)}),
    ):
        KERNELS.add(kernel)
        try:
            yield
        finally:
            KERNELS.discard(kernel)
