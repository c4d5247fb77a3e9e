"""Attention under a rule (`dtmega/ops/attention_rule.py`): one function that chooses between four kernels.

    rule = attention_rule(places, causal=True, slopes=slopes)    # once per forward pass, shared by all layers
    out = attention(q, k, v, rule)                               # [B, H, S, K]

- CUDA, for rules with `fused=True` and K <= 256: FlexAttention. The bias is computed inside the kernel, not stored.
- CPU, and CUDA with `fused=False`: `scaled_dot_product_attention` over chunks of queries. If positions are consecutive,
  a chunk reads only the keys that its queries may see, and the bias depends only on the distance. Every chunk's bias is
  then a view of a single strip of biases: [H, C, S] floats instead of [H, S, S] per layer. If positions are not
  consecutive, or if there are documents, each chunk's bias is computed when the chunk is processed. On a CPU, the
  backward pass computes the bias again.
- CPU with AMX or avx512_bf16, for bfloat16 tensors: batched products over chunks of queries (`cpu/attention.py`).
- Plain formula over chunks of queries: for attention dropout unless the batched products run, and for a learned bias or
  a soft cap unless FlexAttention runs. No fused kernel supports a dropout mask that is keyed by global indices.

The bias is in fp32 for every compute dtype. If `slope * position` were rounded to bf16, as in the original BLOOM,
many neighbouring positions would get the same bias. Distances are measured between positions in the whole sequence
(`places`), even if `position_ids` restart in each document, because Megatron's ALiBi ignores those ids.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention

from dtmega import rooms
from dtmega.ops import keyed
from dtmega.ops.attention_rule import N_TENSORS, AttentionRule, Chunk
from dtmega.ops.cpu import features
from dtmega.ops.keyed import Dropout

MAX_KERNELS = 256  # maximum number of FlexAttention kernels outside compiled blocks, in one process
LARGEST_FUSED_HEAD = 256  # with K = 512, FlexAttention's blocks exceed the shared memory of an H100
FEW_QUERIES = 64  # with fewer queries, the overhead of calling the batched products would exceed their arithmetic
# Attention as batched products; None if this machine's CPU has no bfloat16 instructions.
attention_cpu = rooms.cpu_attention().attention_cpu if features.HAS_FAST_BFLOAT16 else None
# The operators of torch's kernels. The batched products are known by their name, because not every machine loads them.
KERNELS = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.higher_order.flex_attention,
}
BATCHED_PRODUCTS = "dtmega::attention_by_products"


def is_kernel(operator: Any) -> bool:
    """True if the operator is a kernel of attention, whose results are kept where a backward pass recomputes."""
    return operator in KERNELS or operator.name() == BATCHED_PRODUCTS


def needs_formula(rule: AttentionRule, softcap: float | None) -> bool:
    """True if the plain formula must run: FlexAttention is off, and there is a trained bias table or a soft cap."""
    is_learned = rule.table is not None and rule.table.requires_grad
    return rule.block_mask is None and (is_learned or softcap is not None)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rule: AttentionRule,
    dropout: Dropout | None = None,
    scale: float | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Compute softmax(cap(q k^T scale) + bias) v over the pairs that the rule allows.

    Args:
        q: queries, [B, H, S, K].
        k, v: keys and values, [B, G, T, K], where G divides H: the first H / G heads of q share the first head of
            k, and so on. Values may be narrower than keys. With a cache, only the new tokens' k and v, [B, G, S, K].
        rule: attention rule, built by `attention_rule`; with `fused=False` if `dropout` is given.
        dropout: dropout of the probabilities; None for no dropout.
        scale: factor of the scores; None for 1 / sqrt(K). The factor is applied in fp32, but the plain formula computes
            the products q k^T in the dtype of q.
        softcap: parameter of cap(x) = softcap tanh(x / softcap) (Gemma 2, arXiv:2408.00118, section 2); None for
            cap(x) = x.

    Returns:
        Output [B, H, S, K] in the dtype of v; 0 for a query that sees no key.
    """
    if rule.shared is not None:
        return rule.shared.attend(q, k, v, dropout, scale, softcap)
    if rule.cache is not None:
        k, v = rule.cache.append(k, v)
    lengths = (rule.query_places.shape[1], rule.key_places.shape[1])
    assert (q.shape[2], k.shape[2]) == lengths, (q.shape, k.shape, lengths)
    if rule.block_mask is not None and q.shape[-1] > LARGEST_FUSED_HEAD:
        rule = rule._replace(block_mask=None)
    if rule.block_mask is not None:
        assert dropout is None
        return _flex(q, k, v, rule, scale, softcap)
    has_kernel = not needs_formula(rule, softcap)
    if attention_cpu is not None and _products_are_fastest(q, rule) and has_kernel:
        factor = q.shape[-1] ** -0.5 if scale is None else scale
        p, *ids = (0.0, None, None, None) if dropout is None else dropout
        out, *_ = attention_cpu(q, k, v, factor, *rule[:N_TENSORS], *ids, rule.causal, rule.window, p)
        return out
    if dropout is not None or not has_kernel:
        outs: list[Tensor] = []
        for chunk in rule.chunks():
            chunk_q, chunk_k, chunk_v = _slice(chunk, q, k, v)
            outs.append(_plain(chunk_q, chunk_k, chunk_v, rule, chunk, dropout, scale, softcap))
        return torch.cat(outs, dim=2)
    if q.device.type == "cpu":
        return _by_chunks(q, k, v, scale, rule)
    outs = []
    for chunk in rule.chunks():
        bias = _in_dtype(rule.bias(chunk), q)
        shared_keys = q.shape[1] != k.shape[1]
        out = F.scaled_dot_product_attention(
            *_slice(chunk, q, k, v), attn_mask=bias, scale=scale, enable_gqa=shared_keys
        )
        outs.append(out)
    return torch.cat(outs, dim=2)


def _products_are_fastest(q: Tensor, rule: AttentionRule) -> bool:
    """True if batched products, where a CPU has bfloat16 instructions, are faster than torch's fused kernels."""
    has_dtype = q.device.type == "cpu" and q.dtype == torch.bfloat16
    return has_dtype and rule.cache is None and q.shape[2] >= FEW_QUERIES


def _slice(chunk: Chunk, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Slice out a chunk's queries from q, and the keys and values that these queries may see from k and v."""
    keys = slice(chunk.first, chunk.last)
    return q[:, :, chunk.start : chunk.stop], k[:, :, keys], v[:, :, keys]


def _plain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rule: AttentionRule,
    chunk: Chunk,
    dropout: Dropout | None,
    scale: float | None,
    softcap: float | None,
) -> Tensor:
    """Compute one chunk with the plain formula, which supports keyed dropout, learned tables and soft caps."""
    bias = rule.bias(chunk)
    scores = _scores(q, k, bias, scale, softcap)
    # The softmax of a row of -inf is NaN, and so is its gradient. Therefore the row of a query that sees no key is set
    # to 0 before and after the softmax. With a strip, every query sees at least itself.
    if bias is not None and rule.strip is None:
        sees_none = (bias == -math.inf).all(-1, keepdim=True)
        probabilities = scores.masked_fill(sees_none, 0.0).softmax(-1).masked_fill(sees_none, 0.0)
    else:
        probabilities = scores.softmax(-1)
    if dropout is not None:
        queries = rule.query_places[:, chunk.start : chunk.stop]
        keys = rule.key_places[:, chunk.first : chunk.last]
        probabilities = _drop(probabilities, dropout, queries, keys)
    return _grouped_matmul(probabilities.to(v.dtype), v)


def _drop(probabilities: Tensor, dropout: Dropout, query_places: Tensor, key_places: Tensor) -> Tensor:
    """Drop and rescale probabilities [B, H, C, keys]. Queries have positions [B, C], keys have positions [B, keys]."""
    rows = keyed.attention_rows(dropout.key, dropout.sample_ids, dropout.head_ids, query_places)
    keep = keyed.keep(dropout.p, rows, key_places[:, None, None])
    return torch.where(keep, probabilities / (1 - dropout.p), 0.0)


def _in_dtype(bias: Tensor | None, q: Tensor) -> Tensor | None:
    """Convert the bias to fp64 if q is fp64: torch's CPU kernel would otherwise give wrong results (torch 2.13)."""
    return None if bias is None else bias.to(torch.promote_types(bias.dtype, q.dtype))


def _by_chunks(q: Tensor, k: Tensor, v: Tensor, scale: float | None, rule: AttentionRule) -> Tensor:
    """Compute attention with `_ByChunks`, which needs values as wide as keys. Narrower values are padded."""
    wide = v if v.shape[-1] == k.shape[-1] else F.pad(v, (0, k.shape[-1] - v.shape[-1]))
    out: Any = _ByChunks.apply(q, k, wide, scale, *rule)
    return out[..., : v.shape[-1]]


class _ByChunks(torch.autograd.Function):
    """torch's fused kernel for CPUs, chunk by chunk, with a backward pass that saves memory.

    torch would keep each chunk's mask for the backward pass; here the backward pass computes each mask again. Many
    chunks read each key and value, so the gradients of keys and values are summed in place; autograd would instead
    create a full-length gradient, mostly zeros, for each chunk.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float | None, *fields: Any) -> Tensor:
        rule = AttentionRule(*fields)
        n_rows, n_heads, n_queries, _ = q.shape
        # The output lies in memory as [B, S, H, K], the order in which the following projection reads it.
        out = v.new_empty(n_rows, n_queries, n_heads, v.shape[-1]).transpose(1, 2)
        sums: list[Tensor] = []
        for chunk in rule.chunks():
            part, log_sum_exp = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                *_slice(chunk, q, k, v), attn_mask=_in_dtype(rule.bias(chunk), q), scale=scale
            )
            out[:, :, chunk.start : chunk.stop] = part
            sums.append(log_sum_exp)
        ctx.save_for_backward(q, k, v, out, *sums, *rule[:N_TENSORS])
        ctx.scale = scale
        ctx.settings = rule[N_TENSORS:]
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        q, k, v, out, *saved = ctx.saved_tensors
        sums = saved[:-N_TENSORS]
        rule = AttentionRule(*saved[-N_TENSORS:], *ctx.settings)
        dq = torch.empty_like(q)
        dk = torch.zeros_like(k)
        dv = torch.zeros_like(v)
        chunks = list(zip(rule.chunks(), sums, strict=True))
        # Go from the last chunk to the first, as autograd would, so that the sums have the same bits as in autograd.
        for chunk, log_sum_exp in reversed(chunks):
            queries = slice(chunk.start, chunk.stop)
            keys = slice(chunk.first, chunk.last)
            chunk_dq, chunk_dk, chunk_dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                gradient[:, :, queries],
                *_slice(chunk, q, k, v),
                out[:, :, queries],
                log_sum_exp,
                0.0,
                False,
                attn_mask=_in_dtype(rule.bias(chunk), q),
                scale=ctx.scale,
            )
            # Even a single chunk of queries may skip keys, namely the keys that a window hides from all queries.
            if len(chunks) == 1 and chunk_dk.shape == k.shape:
                dq, dk, dv = chunk_dq, chunk_dk, chunk_dv
            else:
                dq[:, :, queries] = chunk_dq
                dk[:, :, keys] += chunk_dk
                dv[:, :, keys] += chunk_dv
        return dq, dk, dv, None, *(None for _ in rule)


def _scores(q: Tensor, k: Tensor, bias: Tensor | None, scale: float | None, softcap: float | None = None) -> Tensor:
    """The scores [B, H, C, keys] in fp32, because softmax is computed in fp32; -inf for pairs that are not allowed."""
    scores = _grouped_matmul(q, k.mT)
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    scores = scores / math.sqrt(q.shape[-1]) if scale is None else scores * scale
    if softcap is not None:
        scores = softcap * (scores / softcap).tanh()
    return scores if bias is None else scores + bias


def _grouped_matmul(x: Tensor, y: Tensor) -> Tensor:
    """Multiply x [B, H, C, n] by y [B, G, n, m], which gives [B, H, C, m]. Each head of y serves H / G heads of x."""
    # The heads of x that share a head of y are stacked into one tall matrix, so that y is not repeated.
    n_heads, n_groups = x.shape[1], y.shape[1]
    stacked = x.unflatten(1, (n_groups, -1)).flatten(2, 3)  # [B, G, H / G x C, n]
    return torch.matmul(stacked, y).unflatten(2, (n_heads // n_groups, -1)).flatten(1, 2)


def _flex(
    q: Tensor, k: Tensor, v: Tensor, rule: AttentionRule, scale: float | None, softcap: float | None = None
) -> Tensor:
    def score_mod(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        if softcap is not None:
            score = softcap * (score / softcap).tanh()
        bias = rule.added(b, h, i, j)
        return score if bias is None else score + bias

    kernel = _flex_kernel(q.device.type)
    shared_keys = q.shape[1] != k.shape[1]
    out = kernel(q, k, v, score_mod=score_mod, block_mask=rule.block_mask, scale=scale, enable_gqa=shared_keys)
    assert isinstance(out, Tensor)
    return out


def _flex_kernel(device_type: str) -> Callable[..., Any]:
    """FlexAttention for a device type: compiled on CUDA, because the uncompiled function stores all S x S scores.

    While a block is being compiled, the result is the uncompiled function: Inductor compiles it as part of the block,
    and Dynamo would warn about the cached compiled function.
    """
    if device_type != "cuda" or torch.compiler.is_compiling():
        return flex_attention
    return _compiled_flex()


@functools.lru_cache(maxsize=1)
def _compiled_flex() -> Callable[..., Any]:
    from torch._dynamo import config  # takes seconds to import, and only GPUs need it
    from torch._functorch import config as functorch_config

    # Each (shape, dtype, rule) needs its own kernel. After eight kernels, Dynamo would run the uncompiled function.
    allow_kernels = config.patch(recompile_limit=MAX_KERNELS)
    # A schedule that splits backward keeps the graph. torch then refuses a backward that may overwrite its inputs.
    keep_inputs = functorch_config.patch(donated_buffer=False)
    return keep_inputs(allow_kernels(torch.compile(flex_attention, dynamic=False)))
