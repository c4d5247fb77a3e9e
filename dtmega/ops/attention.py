"""Attention under a rule (`dtmega/ops/attention_rule.py`), as one function over four kernels.

    rule = attention_rule(places, causal=True, slopes=slopes)    # once per forward pass, shared by all layers
    out = attention(q, k, v, rule)                               # [B, H, S, K]

- CUDA: FlexAttention; what the rule adds is computed inside the kernel and never stored.
- CPU: `scaled_dot_product_attention` over chunks of queries, each with only the keys it may see where places are
  consecutive. There the bias depends on the distance alone, so one strip of it serves every chunk as a view: [H, C, S]
  floats, not [H, S, S] per layer. Otherwise, and inside documents, a chunk's bias is made where it is needed, and again
  in backward.
- CPU that is fast at bfloat16 (AMX, avx512_bf16), in that: the same chunks as batched products, `ops/cpu/attention.py`.
- elsewhere with attention dropout: the plain formula over the same chunks; no kernel of others takes a mask keyed by
  global indices.

What is added stays in fp32 whatever the compute dtype: BLOOM's original, `slope * place` rounded to bf16, is a
staircase. Distances are of places in the sequence, also where position ids start again in each document: Megatron's
ALiBi ignores those.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention

from dtmega.ops import keyed
from dtmega.ops.attention_rule import N_TENSORS, AttentionRule, Chunk
from dtmega.ops.cpu import features
from dtmega.ops.cpu.attention import attention_cpu

FEW_QUERIES = 64


class Dropout(NamedTuple):
    """Drops attention probabilities; a function of (key, sample, head, place of the query, place of the key)."""

    p: float
    key: Tensor  # int32 scalar, one per site
    head_ids: Tensor  # [H] int32, global numbers of these heads
    sample_ids: Tensor  # [B] int64


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rule: AttentionRule,
    dropout: Dropout | None = None,
    scale: float | None = None,
) -> Tensor:
    """softmax(q k^T scale + added) v over the pairs that are allowed, with dropout on the probabilities if asked.

    Args:
        q: [B, H, S, K].
        k, v: [B, H or a divisor of it, T, K]; the first heads of q share the first head of these, and so on. Of a rule
            with a cache [.., S, K], of the new tokens.
        rule: from `attention_rule`; made with `fused=False` if `dropout` is given.
        scale: 1 / sqrt(K) if None. It is applied in fp32, to products that the plain formula has in the dtype of q.

    Returns:
        [B, H, S, K] in the dtype of v; 0 for a query that may see no key.
    """
    if rule.cache is not None:
        k, v = rule.cache.append(k, v)
    lengths = (rule.query_places.shape[1], rule.key_places.shape[1])
    assert (q.shape[2], k.shape[2]) == lengths, (q.shape, k.shape, lengths)
    if rule.block_mask is not None:
        assert dropout is None
        return _flex(q, k, v, rule, scale)
    is_learned = rule.table is not None and rule.table.requires_grad
    if _by_products(q, rule) and not is_learned:
        factor = q.shape[-1] ** -0.5 if scale is None else scale
        p, *ids = (0.0, None, None, None) if dropout is None else dropout
        out, *_ = attention_cpu(q, k, v, factor, *rule[:N_TENSORS], *ids, rule.causal, rule.window, p)
        return out
    if dropout is not None or is_learned:
        found: list[Tensor] = []
        for chunk in rule.chunks():
            one_q, one_k, one_v = _of_chunk(chunk, q, k, v)
            found.append(_plain(one_q, one_k, one_v, rule, chunk, dropout, scale))
        return torch.cat(found, dim=2)
    if q.device.type == "cpu":
        return _ByChunks.apply(q, k, v, scale, *rule)  # pyright: ignore[reportReturnType]
    outs = []
    for chunk in rule.chunks():
        bias = _in_dtype(rule.bias(chunk), q)
        part = _of_chunk(chunk, q, k, v)
        shared = q.shape[1] != k.shape[1]
        outs.append(F.scaled_dot_product_attention(*part, attn_mask=bias, scale=scale, enable_gqa=shared))
    return torch.cat(outs, dim=2)


def _by_products(q: Tensor, rule: AttentionRule) -> bool:
    """Tell whether batched products are the fastest kernel: fused ones use no instructions of bfloat16.

    Of few queries calls would be most of the time.
    """
    fits = q.device.type == "cpu" and q.dtype == torch.bfloat16 and features.HAS_FAST_BFLOAT16
    return fits and rule.cache is None and q.shape[2] >= FEW_QUERIES


def _of_chunk(chunk: Chunk, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The queries of a chunk, and the keys and values that they see."""
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
) -> Tensor:
    """The formula, for what no kernel takes: dropout by global indices, a table that learns."""
    bias = rule.bias(chunk)
    scores = _scores(q, k, bias, scale)
    if bias is not None and rule.strip is None:  # with a strip, every query sees at least itself
        sees_none = (bias == -math.inf).all(-1, keepdim=True)
        probabilities = scores.masked_fill(sees_none, 0.0).softmax(-1).masked_fill(sees_none, 0.0)
    else:
        probabilities = scores.softmax(-1)
    if dropout is not None:
        queries = rule.query_places[:, chunk.start : chunk.stop]
        keys = rule.key_places[:, chunk.first : chunk.last]
        probabilities = _drop(probabilities, dropout, queries, keys)
    return _over_heads(probabilities.to(v.dtype), v)


def _stacked(x: Tensor, n_groups: int) -> Tensor:
    """[B, H, C, ...] -> [B, groups, H / groups x C, ...]"""
    return x.unflatten(1, (n_groups, -1)).flatten(2, 3)


def _unstacked(x: Tensor, n_heads: int) -> Tensor:
    """The inverse: [B, groups, H / groups x C, ...] -> [B, H, C, ...]"""
    return x.unflatten(2, (n_heads // x.shape[1], -1)).flatten(1, 2)


def _drop(probabilities: Tensor, dropout: Dropout, query_places: Tensor, key_places: Tensor) -> Tensor:
    """Probabilities [B, H, C, keys] of queries at places [B, C] for keys at [B, keys], masked and rescaled."""
    rows = keyed.of_pairs(dropout.key, dropout.sample_ids, dropout.head_ids, query_places)
    keep = keyed.keep(dropout.p, rows, key_places[:, None, None])
    return torch.where(keep, probabilities / (1 - dropout.p), 0.0)


def _in_dtype(bias: Tensor | None, q: Tensor) -> Tensor | None:
    """A bias in fp32 for q in fp64 gives wrong numbers on a CPU (torch 2.13); for q in bf16 it stays in fp32."""
    return None if bias is None else bias.to(torch.promote_types(bias.dtype, q.dtype))


class _ByChunks(torch.autograd.Function):
    """torch's kernel for CPUs, chunk by chunk. The mask of a chunk, which that would keep, backward makes again.

    Keys are read by many chunks: their gradients are added up in place. Slices of them would each have a gradient of
    the whole length, with zeros.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float | None, *fields: Any) -> Tensor:
        rule = AttentionRule(*fields)
        n_rows, n_heads, n_queries, _ = q.shape
        # As the projection behind it reads it: [B, S, H, K].
        out = v.new_empty(n_rows, n_queries, n_heads, v.shape[-1]).transpose(1, 2)
        sums: list[Tensor] = []
        for chunk in rule.chunks():
            part, log_sum_exp = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                *_of_chunk(chunk, q, k, v), attn_mask=_in_dtype(rule.bias(chunk), q), scale=scale
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
        of_q = torch.empty_like(q)
        of_k = torch.zeros_like(k)
        of_v = torch.zeros_like(v)
        chunks = list(zip(rule.chunks(), sums, strict=True))
        for chunk, log_sum_exp in reversed(chunks):  # the order in which autograd would add them up
            queries = slice(chunk.start, chunk.stop)
            keys = slice(chunk.first, chunk.last)
            one_q, one_k, one_v = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                gradient[:, :, queries],
                *_of_chunk(chunk, q, k, v),
                out[:, :, queries],
                log_sum_exp,
                0.0,
                False,
                attn_mask=_in_dtype(rule.bias(chunk), q),
                scale=ctx.scale,
            )
            if len(chunks) == 1:
                of_q, of_k, of_v = one_q, one_k, one_v
            else:
                of_q[:, :, queries] = one_q
                of_k[:, :, keys] += one_k
                of_v[:, :, keys] += one_v
        return of_q, of_k, of_v, None, *(None for _ in rule)


def _scores(q: Tensor, k: Tensor, bias: Tensor | None, scale: float | None) -> Tensor:
    """[B, H, C, keys] in fp32, -inf where a pair is not allowed."""
    scores = _over_heads(q, k.mT)
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    scores = scores / math.sqrt(q.shape[-1]) if scale is None else scores * scale
    return scores if bias is None else scores + bias


def _over_heads(x: Tensor, y: Tensor) -> Tensor:
    """x [B, H, C, n] times y [B, H or a divisor of it, n, m], [B, H, C, m]: each of y's for some heads of x."""
    # Rows that share a head of y stand one below the other, so that y is not repeated.
    n_groups = y.shape[1]
    return _unstacked(torch.matmul(_stacked(x, n_groups), y), x.shape[1])


def _flex(q: Tensor, k: Tensor, v: Tensor, rule: AttentionRule, scale: float | None) -> Tensor:
    def score_mod(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        added = rule.added(b, h, i, j)
        return score if added is None else score + added

    kernel = _flex_kernel(q.device.type)
    shared = q.shape[1] != k.shape[1]
    out = kernel(q, k, v, score_mod=score_mod, block_mask=rule.block_mask, scale=scale, enable_gqa=shared)
    assert isinstance(out, Tensor)
    return out


def _flex_kernel(device_type: str) -> Callable[..., Any]:
    """Eager FlexAttention is the reference formula, which stores S x S scores; only the compiled one is a kernel."""
    # In a compiled block it becomes a kernel by itself, and Dynamo warns of every cached function that it meets there.
    if device_type != "cuda" or torch.compiler.is_compiling():
        return flex_attention
    return _compiled_flex()


@functools.lru_cache(maxsize=1)
def _compiled_flex() -> Callable[..., Any]:
    return torch.compile(flex_attention, dynamic=False)
