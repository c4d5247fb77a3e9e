"""Causal attention with ALiBi, as one function over three kernels.

    bias = causal_alibi(slopes, seq_len)              # once per forward pass, shared by all layers
    out = attention(q, k, v, bias)                    # [B, H, S, K]

- CUDA: FlexAttention; the bias is computed inside the kernel and never stored.
- CPU: `scaled_dot_product_attention` over chunks of queries, each with only the keys it may see. The bias depends on
  the distance alone, so one strip of it serves every chunk as a view: [H, C, S] floats, not [H, S, S] per layer.
- with attention dropout: the plain formula over the same chunks; no kernel takes a mask keyed by global indices.

ALiBi is Press, Smith, Lewis, "Train Short, Test Long" (2022). The bias is `slope * (j - i)` in fp32 whatever the
compute dtype; BLOOM's `slope * j` is the same up to a constant per row, but a staircase when rounded to bf16.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from dtmega import keyed


class Bias(NamedTuple):
    """What every layer adds to its scores. Either `chunks` or `block_mask` is there, never both."""

    slopes: Tensor  # [H]
    chunks: tuple[Tensor, ...]  # one [1 or B, H, C, keys] per chunk of queries; -inf where attention is not allowed
    block_mask: BlockMask | None
    position_ids: Tensor | None  # [B, S], only if distances are not those of the sequence


class Dropout(NamedTuple):
    """Drops attention probabilities; a function of (key, sample, head, query, key position)."""

    p: float
    key: Tensor  # int32 scalar, one per site
    head_ids: Tensor  # [H] int32, global numbers of these heads
    sample_ids: Tensor  # [B] int64


def alibi_slopes(n_heads: int) -> Tensor:
    """[H] fp32: 2^(-8 i/n), i = 1..n, n the power of two at or below H; heads left over take the odd halves between."""
    n = 2 ** math.floor(math.log2(n_heads))
    slopes = [2 ** (-8 * (i + 1) / n) for i in range(n)]
    slopes += [2 ** (-4 * (2 * i + 1) / n) for i in range(n_heads - n)]
    return torch.tensor(slopes, dtype=torch.float32)


def causal_alibi(
    slopes: Tensor,
    seq_len: int,
    position_ids: Tensor | None = None,
    document_ids: Tensor | None = None,
    fused: bool = True,
) -> Bias:
    """The bias of a causal [B, S] batch.

    Args:
        slopes: [H] fp32; under tensor parallelism this rank's heads.
        seq_len: S.
        position_ids: [B, S] int64; distances are then differences of these.
        document_ids: [B, S] int64; a token sees only tokens of its own document.
        fused: False where the caller needs the chunked formula on CUDA too (attention dropout).
    """
    device = slopes.device
    if device.type == "cuda" and fused:
        return Bias(slopes, (), _block_mask(seq_len, document_ids, device), position_ids)
    size = min(max(64, -(-seq_len // 4)), seq_len)
    place = torch.arange(seq_len, device=device)
    if position_ids is None and document_ids is None:
        strip = _bias(slopes, place[None, -size:], place[None], place[-size:, None] >= place)
        spans = [(start, min(start + size, seq_len)) for start in range(0, seq_len, size)]
        return Bias(slopes, tuple(strip[..., start - stop :, seq_len - stop :] for start, stop in spans), None, None)
    position_ids = place[None] if position_ids is None else position_ids
    chunks = []
    for start in range(0, seq_len, size):
        q, k = slice(start, start + size), slice(0, start + size)
        allowed = (place[q, None] >= place[k])[None, None]
        if document_ids is not None:
            allowed = allowed & (document_ids[:, None, q, None] == document_ids[:, None, None, k])
        chunks.append(_bias(slopes, position_ids[:, q], position_ids[:, k], allowed))
    return Bias(slopes, tuple(chunks), None, None)


def attention(q: Tensor, k: Tensor, v: Tensor, bias: Bias, dropout: Dropout | None = None) -> Tensor:
    """softmax(q k^T / sqrt(K) + bias) v, with dropout on the probabilities if asked for.

    Args:
        q, k, v: [B, H, S, K].
        bias: from `causal_alibi`; made with `fused=False` if `dropout` is given.

    Returns:
        [B, H, S, K] in the dtype of v.
    """
    if bias.block_mask is not None:
        return _flex(q, k, v, bias)
    outs = []
    start = 0
    for chunk in bias.chunks:
        stop = chunk.shape[-1]
        qc, kc, vc = q[:, :, start:stop], k[:, :, :stop], v[:, :, :stop]
        if dropout is None:
            outs.append(F.scaled_dot_product_attention(qc, kc, vc, attn_mask=chunk))
        else:
            scores = torch.matmul(qc, kc.transpose(-2, -1)).float() / math.sqrt(q.shape[-1]) + chunk
            outs.append(torch.matmul(_drop(scores.softmax(-1), dropout, start).to(v.dtype), vc))
        start = stop
    return torch.cat(outs, dim=2)


def _bias(slopes: Tensor, q_position: Tensor, k_position: Tensor, allowed: Tensor) -> Tensor:
    """[1 or B, H, queries, keys] from positions [1 or B, queries] and [1 or B, keys]."""
    distance = (k_position[:, None, None, :] - q_position[:, None, :, None]).to(slopes.dtype)
    return torch.where(allowed, slopes[:, None, None] * distance, -math.inf)


def _drop(probabilities: Tensor, dropout: Dropout, start: int) -> Tensor:
    """Probabilities [B, H, C, keys] of the queries from `start` on, masked by global indices and rescaled."""
    n_queries, n_keys = probabilities.shape[-2:]
    place = torch.arange(max(start + n_queries, n_keys), device=probabilities.device, dtype=torch.int32)
    rows = keyed.mix(keyed.fold(dropout.sample_ids) ^ dropout.key)[:, None, None] ^ dropout.head_ids[:, None]
    rows = keyed.mix(keyed.mix(rows) ^ place[start : start + n_queries])
    keep = keyed.keep(dropout.p, rows, place[:n_keys])
    return torch.where(keep, probabilities / (1 - dropout.p), 0.0)


def _block_mask(seq_len: int, document_ids: Tensor | None, device: torch.device) -> BlockMask:
    if document_ids is None:
        return _causal_block_mask(seq_len, device)
    documents = document_ids

    def mask_mod(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (i >= j) & (documents[b, i] == documents[b, j])

    return create_block_mask(mask_mod, documents.shape[0], None, seq_len, seq_len, device=str(device))


@functools.lru_cache(maxsize=8)
def _causal_block_mask(seq_len: int, device: torch.device) -> BlockMask:
    def mask_mod(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return i >= j

    return create_block_mask(mask_mod, None, None, seq_len, seq_len, device=str(device))


def _flex(q: Tensor, k: Tensor, v: Tensor, bias: Bias) -> Tensor:
    slopes, positions = bias.slopes, bias.position_ids

    def score_mod(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        distance = j - i if positions is None else positions[b, j] - positions[b, i]
        return score + slopes[h] * distance

    # Eager FlexAttention is the reference formula (it stores S x S scores); only the compiled one is a kernel.
    kernel = _compiled_flex() if q.is_cuda else flex_attention
    out = kernel(q, k, v, score_mod=score_mod, block_mask=bias.block_mask)
    assert isinstance(out, Tensor)
    return out


@functools.lru_cache(maxsize=1)
def _compiled_flex() -> Callable[..., Any]:
    return torch.compile(flex_attention, dynamic=False)
