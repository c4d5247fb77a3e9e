"""Causal attention with ALiBi, as one function over three kernels.

    bias = causal_alibi(slopes, seq_len)              # once per forward pass, shared by all layers
    out = attention(q, k, v, bias)                    # [B, H, S, K]

- CUDA: FlexAttention; the bias is computed inside the kernel and never stored.
- CPU: `scaled_dot_product_attention` over chunks of queries, each with only the keys it may see. The bias depends on
  the distance alone, so one strip of it serves every chunk as a view: [H, C, S] floats, not [H, S, S] per layer.
- with attention dropout: the plain formula over the same chunks; no kernel takes a mask keyed by global indices.

ALiBi is Press, Smith, Lewis, "Train Short, Test Long" (2022). The bias is `slope * (j - i)` in fp32 whatever the
compute dtype; BLOOM's `slope * j` is the same up to a constant per row, but a staircase when rounded to bf16. i and j
are places in the sequence, also where position ids start again in each document: Megatron's ALiBi ignores those.

Attention that stays inside documents has the same bias; which pairs are of one document is computed where it is needed,
per chunk or per block, and not kept.
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

BLOCK = 128  # queries, and keys, of a block in FlexAttention's masks


class Bias(NamedTuple):
    """What every layer adds to its scores. Either `chunks` or `block_mask` is there, never both."""

    slopes: Tensor  # [H]
    chunks: tuple[Tensor, ...]  # one [1, H, C, keys] per chunk of queries, views of one strip; -inf after the query
    document_ids: Tensor | None  # [B, S], for the chunks
    block_mask: BlockMask | None


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


def causal_alibi(slopes: Tensor, seq_len: int, document_ids: Tensor | None = None, fused: bool = True) -> Bias:
    """The bias of a causal [B, S] batch.

    Args:
        slopes: [H] fp32; under tensor parallelism this rank's heads.
        seq_len: S.
        document_ids: [B, S] int64, never falling along S; a token sees only tokens of its own document.
        fused: False where the caller needs the chunked formula on CUDA too (attention dropout).
    """
    device = slopes.device
    if device.type == "cuda" and fused:
        mask = _causal_block_mask(seq_len, device) if document_ids is None else document_block_mask(document_ids)
        return Bias(slopes, (), None, mask)
    size = min(max(64, -(-seq_len // 4)), seq_len)
    place = torch.arange(seq_len, device=device)
    queries = place[-size:, None]
    distance = (place - queries).to(slopes.dtype)
    strip = torch.where(queries >= place, slopes[:, None, None] * distance, -math.inf)[None]
    spans = [(start, min(start + size, seq_len)) for start in range(0, seq_len, size)]
    chunks = tuple(strip[..., start - stop :, seq_len - stop :] for start, stop in spans)
    return Bias(slopes, chunks, document_ids, None)


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
        ids = bias.document_ids
        if dropout is None and ids is None:
            outs.append(F.scaled_dot_product_attention(qc, kc, vc, attn_mask=chunk))
        elif dropout is None:
            outs.append(_WithinDocuments.apply(qc, kc, vc, chunk, ids))
        else:
            scores = torch.matmul(qc, kc.transpose(-2, -1)).float() / math.sqrt(q.shape[-1])
            scores = scores + (chunk if ids is None else _within_documents(chunk, ids))
            outs.append(torch.matmul(_drop(scores.softmax(-1), dropout, start).to(v.dtype), vc))
        start = stop
    return torch.cat(outs, dim=2)


def _within_documents(chunk: Tensor, document_ids: Tensor) -> Tensor:
    """[1, H, C, keys] -> [B, H, C, keys]: -inf where query and key are of different documents."""
    n_queries, n_keys = chunk.shape[-2:]
    queries, keys = document_ids[:, n_keys - n_queries : n_keys], document_ids[:, :n_keys]
    same = queries[:, None, :, None] == keys[:, None, None, :]
    return torch.where(same, chunk, -math.inf)


class _WithinDocuments(torch.autograd.Function):
    """`scaled_dot_product_attention` on a CPU, which keeps its mask for backward: here the mask is made again."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, chunk: Tensor, document_ids: Tensor) -> Tensor:
        mask = _within_documents(chunk, document_ids)
        out, log_sum_exp = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, attn_mask=mask)
        ctx.save_for_backward(q, k, v, chunk, document_ids, out, log_sum_exp)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        q, k, v, chunk, document_ids, out, log_sum_exp = ctx.saved_tensors
        mask = _within_documents(chunk, document_ids)
        gradients = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            gradient, q, k, v, out, log_sum_exp, 0.0, False, attn_mask=mask
        )
        return (*gradients, None, None)


def _drop(probabilities: Tensor, dropout: Dropout, start: int) -> Tensor:
    """Probabilities [B, H, C, keys] of the queries from `start` on, masked by global indices and rescaled."""
    n_queries, n_keys = probabilities.shape[-2:]
    place = torch.arange(max(start + n_queries, n_keys), device=probabilities.device, dtype=torch.int32)
    rows = keyed.mix(keyed.fold(dropout.sample_ids) ^ dropout.key)[:, None, None] ^ dropout.head_ids[:, None]
    rows = keyed.mix(keyed.mix(rows) ^ place[start : start + n_queries])
    keep = keyed.keep(dropout.p, rows, place[:n_keys])
    return torch.where(keep, probabilities / (1 - dropout.p), 0.0)


def document_block_mask(document_ids: Tensor) -> BlockMask:
    """The mask of causal attention inside documents, from the first and the last id of each block of the sequence.

    `create_block_mask` would look at all pairs: 12 bytes B S^2 of them (torch 2.13).
    """

    def mask_mod(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (i >= j) & (document_ids[b, i] == document_ids[b, j])

    seq_len = document_ids.shape[1]
    n_blocks = -(-seq_len // BLOCK)
    number = torch.arange(n_blocks, device=document_ids.device)
    first = document_ids[:, number * BLOCK]
    last = document_ids[:, (number * BLOCK + BLOCK - 1).clamp(max=seq_len - 1)]
    below, is_whole = number[:, None] > number, (number + 1) * BLOCK <= seq_len
    # Ids never fall: a block of queries and one of keys before it share a document if they do where they are closest,
    # and are of one document if they are where they are farthest.
    share = (below & (last[:, None, :] == first[:, :, None])) | (number[:, None] == number)
    full = below & is_whole[:, None] & (first[:, None, :] == last[:, :, None])
    partial = share & ~full
    return BlockMask.from_kv_blocks(*_listed(partial), *_listed(full), BLOCK, mask_mod, seq_lengths=(seq_len, seq_len))


def _listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """[B, blocks of queries, blocks of keys] -> how many keys' blocks each queries' block has, and which come first."""
    count = blocks.sum(-1, dtype=torch.int32)
    order = torch.argsort(blocks.to(torch.int8), dim=-1, descending=True, stable=True)
    return count[:, None], order.to(torch.int32)[:, None].contiguous()


@functools.lru_cache(maxsize=8)
def _causal_block_mask(seq_len: int, device: torch.device) -> BlockMask:
    def mask_mod(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return i >= j

    return create_block_mask(mask_mod, None, None, seq_len, seq_len, device=str(device))


def _flex(q: Tensor, k: Tensor, v: Tensor, bias: Bias) -> Tensor:
    slopes = bias.slopes

    def score_mod(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return score + slopes[h] * (j - i)

    kernel = _flex_kernel(q.device.type)
    out = kernel(q, k, v, score_mod=score_mod, block_mask=bias.block_mask)
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
