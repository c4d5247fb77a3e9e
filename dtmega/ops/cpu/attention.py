"""Attention in bfloat16 on a CPU with bfloat16 instructions, which torch's fused kernels do not use.

Queries are processed in parts; each part has some samples, some heads and a few hundred tokens. One batched product
computes a part's scores. The scores are turned into probabilities in fp32, as many rows at a time as fit into a core's
cache. For short sequences, the probabilities are kept for the backward pass. For long sequences, the backward pass
recomputes the probabilities from the logarithms of the softmax sums, as in FlashAttention (Dao et al.,
arXiv:2205.14135).

The queries of a chunk are in reverse order. In this order, a bias that depends only on the distance is a view of one
row of numbers per head, and this row stays in the cache.

Products, including the scores, are rounded to bfloat16, as in the plain formula and in transformers' models. A sample's
result does not depend on the other samples in its batch. To autograd and torch.compile, the forward pass is a single
operator, and so is the backward pass: nothing inside the two operators is traced or compiled.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from dtmega.ops import keyed
from dtmega.ops.attention_rule import N_TENSORS, AttentionRule, Chunk

# Number of scores to turn into probabilities at a time: 1 MiB in fp32 plus 0.5 MiB in bf16 fit into a 2 MiB L2 cache.
CACHED_SCORES = 2**18
# Number of scores to compute in one product. Calling the library takes as long as computing 2^16 scores.
PRODUCT_SCORES = 2**22
# Probabilities are kept for backward if they take at most this multiple of the memory of q, k, v and the result.
KEPT_SHARE = 1.0
SHORT_CHUNK = 128  # approximate number of queries in a chunk, for sequences shorter than LONG
LONG = 1024
# Scores are in base 2, because torch's `exp2` is as accurate as `exp` and can be faster. On CPUs for which `exp` is not
# optimised (AMD), `exp2` is three times as fast, and is not slower for -inf than for other numbers.
LOG2_E = math.log2(math.e)
# A probability of at most 2^-60 times the query's largest probability is set to 0, because even the sum of thousands of
# such probabilities would not change the largest probability. With ALiBi many numbers are so small that fp32 stores
# them as denormals, and computing with denormals takes ten times as long on a CPU.
NEGLIGIBLE = -60.0


# If you change the arguments or results of an operator, rename the operator: torch's cache of compiled graphs outlives
# the process and identifies an operator by its name alone.
@torch.library.custom_op("dtmega::attention_by_products", mutates_args=())
def attention_cpu(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    query_places: Tensor,
    key_places: Tensor,
    query_documents: Tensor | None,
    key_documents: Tensor | None,
    prefix: Tensor | None,
    slopes: Tensor | None,
    table: Tensor | None,
    strip: Tensor | None,
    dropout_key: Tensor | None,
    head_ids: Tensor | None,
    sample_ids: Tensor | None,
    causal: bool,
    window: int,
    p: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute softmax(q k^T scale + bias) v, and the numbers that backward needs to recover the probabilities.

    Args:
        q: queries, [B, H, S, K] bfloat16.
        k, v: keys and values, [B, G, T, K] bfloat16, where G divides H.
        scale: factor of the scores.
        query_places, ..., strip, causal, window: fields of an `AttentionRule`.
        dropout_key, head_ids, sample_ids, p: fields of a `Dropout`; without dropout, p is 0 and the tensors are None.

    Returns:
        - The output [B, H, S, K], in memory as [B, S, H, K].
        - The base-2 logarithm of each query's sum of exponentials, fp32 [B, H, S, 1], with each chunk's queries in
          reverse order.
        - The probabilities kept for backward, chunk after chunk; an empty tensor if no probabilities are kept
          (`_n_kept`).
    """
    rule = AttentionRule(
        query_places,
        key_places,
        query_documents,
        key_documents,
        prefix,
        slopes,
        table,
        strip,
        causal,
        window,
    )
    out, log_sums, kept = _results(q, k, v, rule, p)
    chunks = _chunks(rule)
    scratch = _Scratch(q, k, chunks, 0 if kept.numel() else 1, kept)
    dropout_rows = _row_keys(rule, dropout_key, head_ids, sample_ids)
    for part in _parts(q, k, v, rule, chunks, scratch, dropout_rows):
        (scores,) = scratch.shaped(part.q, part.k)
        stacked = part.stacked(scores)
        torch.bmm(part.stacked(part.q), part.k.flatten(0, 1).mT, out=stacked)
        part_log_sums = log_sums[part.queries]
        for piece in _pieces(scores):
            piece_scores = scores[piece]
            x = scratch.scaled(piece_scores, part.bias, piece, scale)
            # Subtract the peak so that exponentials do not overflow; the peak cancels in the quotient. If a query sees
            # no key, its peak is -inf, and -inf - -inf would be NaN. With the clamp, that query's exponentials are 0.
            peak = x.amax(-1, keepdim=True).clamp_(min=torch.finfo(x.dtype).min)
            _exponentials(x.sub_(peak))
            # The largest exponential is 1, so the sum is at least 1. Only a query that sees no key has the sum 0, and
            # 0 / 0 would be NaN without the clamp.
            total = x.sum(-1, keepdim=True).clamp_(min=1.0)
            x.mul_(total.reciprocal())
            if part.drops is not None:
                _drop(x, part.drops[piece], part.key_places[piece[0]], p)
            piece_scores.copy_(x)  # from here on, the scores' memory holds probabilities
            part_log_sums[piece] = total.log2_().add_(peak)
        part_out = torch.bmm(stacked, part.v.flatten(0, 1)).view(*part.q.shape[:3], -1)
        out[part.queries] = _reversed(part_out)
    return out, log_sums, kept


@torch.library.custom_op("dtmega::attention_by_products_backward", mutates_args=())
def attention_cpu_backward(
    gradient: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_sums: Tensor,
    kept: Tensor,
    scale: float,
    query_places: Tensor,
    key_places: Tensor,
    query_documents: Tensor | None,
    key_documents: Tensor | None,
    prefix: Tensor | None,
    slopes: Tensor | None,
    table: Tensor | None,
    strip: Tensor | None,
    dropout_key: Tensor | None,
    head_ids: Tensor | None,
    sample_ids: Tensor | None,
    causal: bool,
    window: int,
    p: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients of q, k and v from the output's gradient; `log_sums` and `kept` come from the forward."""
    rule = AttentionRule(
        query_places,
        key_places,
        query_documents,
        key_documents,
        prefix,
        slopes,
        table,
        strip,
        causal,
        window,
    )
    dq, dk, dv = _gradients(q, k, v)
    chunks = _chunks(rule)
    # Allocate one tensor for the gradient of the scores, one for probabilities that were not kept, and, with dropout,
    # one for the probabilities after dropout.
    n_tensors = 1
    if not kept.numel():
        n_tensors = 2 if dropout_key is None else 3
    scratch = _Scratch(q, k, chunks, n_tensors, kept)
    dropout_rows = _row_keys(rule, dropout_key, head_ids, sample_ids)
    for part in _parts(q, k, v, rule, chunks, scratch, dropout_rows):
        stacked_q = part.stacked(part.q)
        stacked_k = part.k.flatten(0, 1)
        stacked_gradient = part.stacked(_reversed(gradient[part.queries]))
        probabilities, dscores, *after_dropout = scratch.shaped(part.q, part.k)
        dropped = after_dropout[0] if after_dropout else probabilities
        if not kept.numel():
            # Recompute the probabilities as 2^(score - log2 of the sum), without separate passes for peak and sum.
            torch.bmm(stacked_q, stacked_k.mT, out=part.stacked(probabilities))
            part_log_sums = log_sums[part.queries]
            for piece in _pieces(probabilities):
                piece_scores = probabilities[piece]
                x = scratch.scaled(piece_scores, part.bias, piece, scale)
                piece_scores.copy_(_exponentials(x.sub_(part_log_sums[piece])))
                if part.drops is not None:
                    dropped[piece] = _drop(x, part.drops[piece], part.key_places[piece[0]], p)
        _add_product(dv[part.keys], part.stacked(dropped).mT, stacked_gradient, 1.0)
        # dP = dO V^T / (1 - p) for probabilities that were not dropped. Then the softmax's backward turns dP into dS.
        stacked = part.stacked(dscores)
        torch.baddbmm(stacked, stacked_gradient, part.v.flatten(0, 1).mT, beta=0, alpha=1 / (1 - p), out=stacked)
        for piece in _pieces(probabilities):
            piece_gradient = dscores[piece]
            if after_dropout:
                # Probabilities that were not dropped are positive, so their sign is the mask. A probability that was 0
                # before dropout has the gradient 0 in any case.
                piece_gradient.mul_(dropped[piece].sign())
            torch.ops.aten._softmax_backward_data.out(
                piece_gradient, probabilities[piece], -1, q.dtype, grad_input=piece_gradient
            )
        part_dq = torch.baddbmm(stacked_q, stacked, stacked_k, beta=0, alpha=scale).view_as(part.q)
        dq[part.queries] = _reversed(part_dq)
        _add_product(dk[part.keys], stacked.mT, stacked_q, scale)
    return dq, dk, dv


def _results(q: Tensor, k: Tensor, v: Tensor, rule: AttentionRule, p: float) -> tuple[Tensor, Tensor, Tensor]:
    """Allocate the results of `attention_cpu`."""
    n_rows, n_heads, n_queries, _ = q.shape
    # The output lies in memory as [B, S, H, K], the order in which the following projection reads it.
    out = v.new_empty(n_rows, n_queries, n_heads, v.shape[-1]).transpose(1, 2)
    # With dropout nothing is kept, because backward also needs the probabilities before dropout.
    kept = q.new_empty(0 if p else _n_kept(q, k, v, rule))
    return out, q.new_empty(n_rows, n_heads, n_queries, 1, dtype=torch.float32), kept


def _n_kept(q: Tensor, k: Tensor, v: Tensor, rule: AttentionRule) -> int:
    """The number of probabilities to keep for backward: all, or 0 if they take too much memory (KEPT_SHARE)."""
    n_pairs = sum((chunk.stop - chunk.start) * (chunk.last - chunk.first) for chunk in _chunks(rule))
    n_in_q_k_v_out = (q.shape[2] + k.shape[2]) * (q.shape[3] + v.shape[3])
    if n_pairs > KEPT_SHARE * n_in_q_k_v_out:
        return 0
    return q.shape[0] * q.shape[1] * n_pairs


def _gradients(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Allocate gradients. The gradients of k and v start as zeros, because each chunk of queries adds to both."""
    return q.new_empty(q.shape), k.new_zeros(k.shape), v.new_zeros(v.shape)


class _Part(NamedTuple):
    """The queries of one batched product (some rows, some heads), with the keys and values that these queries see.

    Attributes:
        queries: slices that select the queries from a tensor [B, H, S, ..].
        keys: slices that select the keys and values from k and v.
        q: queries, [rows, heads, C, K], in reverse order.
        k, v: keys and values, [rows, groups, keys, K].
        bias: bias of the scores in base 2, [rows, heads, C, keys], as a view; None if there is no bias.
        key_places: positions of the keys, [rows, 1, 1, keys].
        drops: dropout row keys (from `_row_keys`) for these queries, [rows, heads, C], in reverse order; None for
            no dropout.
    """

    queries: tuple[slice, slice, slice]
    keys: tuple[slice, slice, slice]
    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor | None
    key_places: Tensor
    drops: Tensor | None

    def stacked(self, x: Tensor) -> Tensor:
        """Stack the heads that share a head of k: [rows, H, C, n] -> [rows x groups, H / groups x C, n]."""
        return x.view(self.k.shape[0] * self.k.shape[1], -1, x.shape[-1])


def _parts(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rule: AttentionRule,
    chunks: list[Chunk],
    scratch: _Scratch,
    dropout_rows: Tensor | None,
) -> Iterator[_Part]:
    """Yield the parts, which together cover all pairs of queries and keys, in the order of `scratch.kept`."""
    rule = _in_base_2(rule)
    by_distance = _times_log2_e(rule.bias_by_distance())
    for rows in scratch.rows():
        rule_of_rows = rule.select_rows(rows)
        for chunk in chunks:
            queries, keys = slice(chunk.start, chunk.stop), slice(chunk.first, chunk.last)
            bias = rule_of_rows.bias_reversed(chunk, by_distance)
            key_places = rule_of_rows.key_places[:, None, None, keys]
            for heads, groups in scratch.heads():
                query_slices = rows, heads, queries
                key_slices = rows, groups, keys
                part_q = _reversed(q[query_slices])
                part_k = k[key_slices].contiguous()
                part_v = v[key_slices].contiguous()
                drops = None if dropout_rows is None else _reversed(dropout_rows[query_slices])
                part_bias = bias
                if bias is not None:  # [rows or 1, H or 1, C, keys]
                    part_bias = bias if bias.shape[1] == 1 else bias[:, heads]
                    part_bias = part_bias.expand(*part_q.shape[:3], part_k.shape[2])
                yield _Part(query_slices, key_slices, part_q, part_k, part_v, part_bias, key_places, drops)


def _in_base_2(rule: AttentionRule) -> AttentionRule:
    """Convert a rule's slopes and table to base 2. `_parts` converts the biases from the strip."""
    return rule._replace(slopes=_times_log2_e(rule.slopes), table=_times_log2_e(rule.table))


def _times_log2_e(x: Tensor | None) -> Tensor | None:
    return None if x is None else x * LOG2_E


def _chunks(rule: AttentionRule) -> list[Chunk]:
    """The chunks of queries. A short sequence is split into shorter chunks.

    A chunk also computes the scores of pairs that causality hides. Shorter chunks waste less work on hidden pairs. In a
    long sequence, hidden pairs are only a small share of a chunk.
    """
    divisor = 1
    if rule.query_places.shape[1] < LONG:
        divisor = max(1, round(rule.chunk_size / SHORT_CHUNK))
    return list(rule.chunks(-(-rule.chunk_size // divisor)))


def _reversed(x: Tensor) -> Tensor:
    """A contiguous copy of x [rows, heads, C, ..] with the queries in reverse order. `flip` would keep x's strides."""
    return x.index_select(2, torch.arange(x.shape[2] - 1, -1, -1))


class _Scratch:
    """Memory for one part's scores (`_Part`); all parts reuse this memory, one after another.

    Args:
        q, k: queries and keys of all chunks.
        chunks: all chunks of queries.
        n: number of tensors to allocate, each in the dtype of q and large enough for one part's scores.
        kept: memory for one additional tensor per part; empty if there is no additional tensor. Each part gets its own
            section of this memory, in the order of the parts.
    """

    def __init__(self, q: Tensor, k: Tensor, chunks: list[Chunk], n: int, kept: Tensor) -> None:
        self.kept = kept
        self.n_taken = 0
        self.n_rows, self.n_heads = q.shape[:2]
        self.n_groups = k.shape[1]
        self.heads_per_group = self.n_heads // self.n_groups  # heads of q that share a head of k
        scores_of_head = max((chunk.stop - chunk.start) * (chunk.last - chunk.first) for chunk in chunks)
        self.rows_at_a_time = min(self.n_rows, max(1, PRODUCT_SCORES // (scores_of_head * self.n_heads)))
        self.groups_at_a_time = min(self.n_groups, max(1, PRODUCT_SCORES // (scores_of_head * self.heads_per_group)))
        size = self.rows_at_a_time * self.groups_at_a_time * self.heads_per_group * scores_of_head
        self.tensors = [q.new_empty(size) for _ in range(n)]
        n_keys = max(chunk.last - chunk.first for chunk in chunks)
        self.wide = q.new_empty(max(CACHED_SCORES, n_keys), dtype=torch.float32)

    def rows(self) -> Iterator[slice]:
        """Yield slices of the batch's rows; the rows in a slice go into the same batched product."""
        for first in range(0, self.n_rows, self.rows_at_a_time):
            yield slice(first, first + self.rows_at_a_time)

    def heads(self) -> Iterator[tuple[slice, slice]]:
        """Yield a slice of q's heads for each product, and the slice of k's heads that these heads of q share."""
        for first in range(0, self.n_groups, self.groups_at_a_time):
            last = min(first + self.groups_at_a_time, self.n_groups)
            yield slice(first * self.heads_per_group, last * self.heads_per_group), slice(first, last)

    def shaped(self, q: Tensor, k: Tensor) -> list[Tensor]:
        """Views of this object's scratch tensors in the shape of the scores q k^T, [rows, heads, C queries, keys]."""
        shape = (*q.shape[:3], k.shape[2])
        size = math.prod(shape)
        tensors = self.tensors
        if self.kept.numel():
            tensors = [self.kept[self.n_taken :], *tensors]
            self.n_taken += size
        return [tensor[:size].view(shape) for tensor in tensors]

    def scaled(self, scores: Tensor, bias: Tensor | None, piece: tuple[slice, ...], scale: float) -> Tensor:
        """The given slices of the scores, converted to fp32 and base 2, plus the bias, which is already in base 2."""
        x = self.wide[: scores.numel()].view(scores.shape).copy_(scores)
        if bias is None:
            return x.mul_(scale * LOG2_E)
        return torch.add(bias[piece], x, alpha=scale * LOG2_E, out=x)


def _add_product(to: Tensor, x: Tensor, y: Tensor, scale: float) -> None:
    """Add scale * x @ y to `to` [rows, groups, keys, K], in one operation that rounds the sum only once."""
    part = to.view(-1, *to.shape[2:])
    torch.baddbmm(part, x, y, alpha=scale, out=part)


def _pieces(scores: Tensor) -> Iterator[tuple[slice, ...]]:
    """Yield slices that divide scores [rows, heads, C, keys] into blocks that fit into the cache.

    Each block has several rows, or several heads of one row, or several queries of one head.
    """
    n_rows, n_heads, n_queries, n_keys = scores.shape
    queries = max(1, CACHED_SCORES // n_keys)
    heads = max(1, queries // n_queries)
    rows = max(1, heads // n_heads)
    for row in range(0, n_rows, rows):
        for head in range(0, n_heads, heads):
            for query in range(0, n_queries, queries):
                yield slice(row, row + rows), slice(head, head + heads), slice(query, query + queries)


def _exponentials(x: Tensor) -> Tensor:
    """Replace each element x with 2^x in place, or with 0 if 2^x is negligible or x is -inf."""
    return torch.threshold_(x, NEGLIGIBLE, -math.inf).exp2_()


def _row_keys(
    rule: AttentionRule, key: Tensor | None, head_ids: Tensor | None, sample_ids: Tensor | None
) -> Tensor | None:
    """The row keys of dropout, [B, H, S]; None if nothing is dropped."""
    if key is None or head_ids is None or sample_ids is None:
        return None
    return keyed.attention_rows(key, sample_ids, head_ids, rule.query_places)


def _drop(x: Tensor, row_keys: Tensor, key_places: Tensor, p: float) -> Tensor:
    """Apply dropout to probabilities [rows, heads, C, keys] in place; `row_keys` and `key_places` define the mask."""
    # Compared with torch, numpy is four times as fast at multiplying by booleans, and twice as fast at hashing.
    kept = keyed.keep(p, row_keys.numpy(), key_places.numpy())
    np.multiply(x.numpy(), kept, out=x.numpy())
    return x.mul_(1 / (1 - p))


@attention_cpu.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, scale: float, *fields: Any) -> tuple[Tensor, Tensor, Tensor]:
    rule = AttentionRule(*fields[:N_TENSORS], *fields[N_TENSORS + 3 : -1])
    return _results(q, k, v, rule, fields[-1])


@attention_cpu_backward.register_fake
def _(gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, *settings: Any) -> tuple[Tensor, Tensor, Tensor]:
    return _gradients(q, k, v)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    q, k, v, scale, *fields = inputs
    ctx.save_for_backward(q, k, v, *output[1:], *fields[: N_TENSORS + 3])
    ctx.scale = scale
    ctx.settings = fields[N_TENSORS + 3 :]


def _backward(ctx: Any, gradient: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    q, k, v, log_sums, kept, *tensors = ctx.saved_tensors
    fields = (*tensors, *ctx.settings)
    gradients = attention_cpu_backward(gradient, q, k, v, log_sums, kept, ctx.scale, *fields)
    return *gradients, None, *(None for _ in fields)


attention_cpu.register_autograd(_backward, setup_context=_keep)
