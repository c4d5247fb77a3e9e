"""Attention in bfloat16 on a CPU that multiplies it faster than float32, which torch's fused kernels make no use of.

Sample by sample, and a few hundred queries at a time: scores are one batched product over the heads, and what turns
them into probabilities passes over as many rows as a core's cache holds, in fp32. Of short sequences the probabilities
are kept for backward. Of others they are made again from the logarithms of their sums, as FlashAttention does (Dao et
al., arXiv:2205.14135).

Queries of a chunk stand in reverse order, the last one first. Then what a rule adds by distance is, for all of them, a
view of one row of numbers for each head, which stays in the cache.

Products round their results to bfloat16, scores too, as in the plain formula and in transformers' models. No sample
sees which others are in its batch. For autograd and torch.compile all of it is one operator, and backward another:
nothing here is traced, so nothing here is compiled.
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

# Scores that are made probabilities at a time: a megabyte in fp32, and half of that beside it, of an L2 cache of two.
CACHED_SCORES = 2**18
# Scores of some rows and heads that a product makes at a time. The library's call alone takes as long as 2^16 of them.
PRODUCT_SCORES = 2**22
KEPT_SHARE = 1.0  # of the memory of q, k, v and the result: probabilities that take no more are kept for backward
SHORT_CHUNK = 128  # queries at a time, about, of sequences below LONG
LONG = 1024
# Scores are counted in base 2: torch's `exp2` is as exact as its `exp`, and takes a third of the time where that is not
# made for the CPU (AMD), and for -inf as long as for other numbers.
LOG2_E = math.log2(math.e)
# Probabilities of 2 to this power of a query's largest, or less, are 0, as the sum of thousands of them would be beside
# it. The smallest numbers of fp32 are denormal, with which a CPU computes ten times as slowly, and ALiBi makes many.
NEGLIGIBLE = -60.0


# Whoever changes what the operators take or return renames them: torch's cache of compiled graphs, which outlives a
# process, knows an operator by its name alone.
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
    """softmax(q k^T scale + added) v, and what backward has the probabilities from.

    Args:
        q: [B, H, S, K] bfloat16.
        k, v: [B, H or a divisor of it, T, K] bfloat16.
        query_places ... window: the fields of an `AttentionRule`, in its order.
        dropout_key, head_ids, sample_ids, p: of a `Dropout` of probabilities, None where nothing is dropped.

    Returns:
        [B, H, S, K], laid out as [B, S, H, K]; of each query the logarithm, in base 2, of its sum of exponentials, fp32
        [B, H, S, 1], the last query of each chunk first; the probabilities, chunk after chunk, or none (`_n_kept`).
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
    dropped_rows = _row_keys(rule, dropout_key, head_ids, sample_ids)
    for part in _parts(q, k, v, rule, chunks, scratch, dropped_rows):
        (scores,) = scratch.shaped(part.q, part.k)
        stacked = part.stacked(scores)
        torch.bmm(part.stacked(part.q), part.k.flatten(0, 1).mT, out=stacked)
        own_sums = log_sums[part.queries]
        for piece in _pieces(scores):
            own = scores[piece]
            x = scratch.scaled(own, part.bias, piece, scale)
            # A query that sees no key has -inf everywhere, and nothing to subtract it from.
            peak = x.amax(-1, keepdim=True).clamp_(min=torch.finfo(x.dtype).min)
            _exponentials(x.sub_(peak))
            total = x.sum(-1, keepdim=True).clamp_(min=1.0)  # the largest is 1, if there is any
            x.mul_(total.reciprocal())
            if part.drops is not None:
                _drop(x, part.drops[piece], part.key_places[piece[0]], p)
            own.copy_(x)  # from here on these are probabilities
            own_sums[piece] = total.log2_().add_(peak)
        of_queries = torch.bmm(stacked, part.v.flatten(0, 1)).view(*part.q.shape[:3], -1)
        out[part.queries] = _backwards(of_queries)
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
    """The gradients of q, k and v, from that of the output [B, H, S, K] and what `attention_cpu` returned."""
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
    of_q, of_k, of_v = _gradients(q, k, v)
    chunks = _chunks(rule)
    n_tensors = 1 if kept.numel() else 2 if dropout_key is None else 3
    scratch = _Scratch(q, k, chunks, n_tensors, kept)
    dropped_rows = _row_keys(rule, dropout_key, head_ids, sample_ids)
    for part in _parts(q, k, v, rule, chunks, scratch, dropped_rows):
        stacked_q = part.stacked(part.q)
        stacked_k = part.k.flatten(0, 1)
        stacked_gradient = part.stacked(_backwards(gradient[part.queries]))
        probabilities, of_scores, *dropped = scratch.shaped(part.q, part.k)
        left = dropped[0] if dropped else probabilities  # of the probabilities, by dropout
        if not kept.numel():
            torch.bmm(stacked_q, stacked_k.mT, out=part.stacked(probabilities))
            own_sums = log_sums[part.queries]
            for piece in _pieces(probabilities):
                own = probabilities[piece]
                x = scratch.scaled(own, part.bias, piece, scale)
                own.copy_(_exponentials(x.sub_(own_sums[piece])))
                if part.drops is not None:
                    left[piece] = _drop(x, part.drops[piece], part.key_places[piece[0]], p)
        _add_product(of_v[part.keys], part.stacked(left).mT, stacked_gradient, 1.0)
        stacked = part.stacked(of_scores)
        torch.baddbmm(stacked, stacked_gradient, part.v.flatten(0, 1).mT, beta=0, alpha=1 / (1 - p), out=stacked)
        for piece in _pieces(probabilities):
            own = of_scores[piece]  # of probabilities, still
            if dropped:
                # One that was 0 before has no part in the gradient anyway.
                own.mul_(left[piece].sign())
            torch.ops.aten._softmax_backward_data.out(own, probabilities[piece], -1, q.dtype, grad_input=own)
        of_queries = torch.baddbmm(stacked_q, stacked, stacked_k, beta=0, alpha=scale).view_as(part.q)
        of_q[part.queries] = _backwards(of_queries)
        _add_product(of_k[part.keys], stacked.mT, stacked_q, scale)
    return of_q, of_k, of_v


def _results(q: Tensor, k: Tensor, v: Tensor, rule: AttentionRule, p: float) -> tuple[Tensor, Tensor, Tensor]:
    n_rows, n_heads, n_queries, _ = q.shape
    # As the projection behind it reads it: [B, S, H, K].
    out = v.new_empty(n_rows, n_queries, n_heads, v.shape[-1]).transpose(1, 2)
    kept = q.new_empty(0 if p else _n_kept(q, k, v, rule))  # what dropout left is not enough for backward
    return out, q.new_empty(n_rows, n_heads, n_queries, 1, dtype=torch.float32), kept


def _n_kept(q: Tensor, k: Tensor, v: Tensor, rule: AttentionRule) -> int:
    """How many probabilities wait for backward: all, where a head's take no more memory than its q, k, v and result."""
    n_pairs = sum((chunk.stop - chunk.start) * (chunk.last - chunk.first) for chunk in _chunks(rule))
    n_beside = (q.shape[2] + k.shape[2]) * (q.shape[3] + v.shape[3])
    return q.shape[0] * q.shape[1] * n_pairs if n_pairs <= KEPT_SHARE * n_beside else 0


def _gradients(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_zeros(k.shape), v.new_zeros(v.shape)


class _Part(NamedTuple):
    """Queries of some rows and heads, and the keys and values that they see: what a product takes at a time.

    Attributes:
        queries: where they stand in what is [B, H, S, ..].
        keys: where they stand in k and v.
        q: [rows, heads, C, K], the last query first.
        k, v: [rows, groups, keys, K].
        bias: what the rule adds to scores in base 2, [rows, heads, C, keys], a view; None: nothing.
        key_places: [rows, 1, 1, keys].
        drops: of `_row_keys`, [rows, heads, C], the last query first; None: nothing is dropped.
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
        """[rows, H, C, n] -> [rows x groups, H / groups x C, n]: heads that share one of k stand below each other."""
        return x.view(self.k.shape[0] * self.k.shape[1], -1, x.shape[-1])


def _parts(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rule: AttentionRule,
    chunks: list[Chunk],
    scratch: _Scratch,
    dropped_rows: Tensor | None,
) -> Iterator[_Part]:
    """All pairs of queries and keys, in the order in which `scratch` has memory for their scores."""
    rule = _in_base_2(rule)
    by_distance = _times_log2_e(rule.by_distance())
    for rows in scratch.rows():
        own_rule = rule.of_rows(rows)
        for chunk in chunks:
            queries, keys = slice(chunk.start, chunk.stop), slice(chunk.first, chunk.last)
            bias = own_rule.bias_backwards(chunk, by_distance)
            key_places = own_rule.key_places[:, None, None, keys]
            for heads, groups in scratch.heads():
                of_queries = rows, heads, queries
                of_keys = rows, groups, keys
                own_q = _backwards(q[of_queries])
                own_k = k[of_keys].contiguous()
                own_v = v[of_keys].contiguous()
                drops = None if dropped_rows is None else _backwards(dropped_rows[of_queries])
                own_bias = bias
                if bias is not None:  # [rows or 1, H or 1, C, keys]
                    own_bias = bias if bias.shape[1] == 1 else bias[:, heads]
                    own_bias = own_bias.expand(*own_q.shape[:3], own_k.shape[2])
                yield _Part(of_queries, of_keys, own_q, own_k, own_v, own_bias, key_places, drops)


def _in_base_2(rule: AttentionRule) -> AttentionRule:
    """The rule that adds to scores in base 2, but for its strip: of that, `by_distance` is a shorter form."""
    return rule._replace(slopes=_times_log2_e(rule.slopes), table=_times_log2_e(rule.table))


def _times_log2_e(x: Tensor | None) -> Tensor | None:
    return None if x is None else x * LOG2_E


def _chunks(rule: AttentionRule) -> list[Chunk]:
    """Shorter ones leave out more of the keys that causality hides; of a long sequence that is little either way."""
    parts = 1
    if rule.query_places.shape[1] < LONG:
        parts = max(1, round(rule.chunk_size / SHORT_CHUNK))
    return list(rule.chunks(-(-rule.chunk_size // parts)))


def _backwards(x: Tensor) -> Tensor:
    """[rows, heads, C, ..] with the last query first, contiguous whatever the strides of x, which `flip` would keep."""
    return x.index_select(2, torch.arange(x.shape[2] - 1, -1, -1))


class _Scratch:
    """Memory for the scores of a chunk, in some rows of the batch and some heads, which is used again and again.

    Args:
        n: how many such tensors, in the dtype of q.
        kept: before those, one that is not used again: each chunk's begins where the one before ends. Empty: none.
    """

    def __init__(self, q: Tensor, k: Tensor, chunks: list[Chunk], n: int, kept: Tensor) -> None:
        self.kept = kept
        self.n_taken = 0
        self.n_rows, self.n_heads = q.shape[:2]
        self.n_groups = k.shape[1]
        self.shared_by = self.n_heads // self.n_groups  # heads of q that share one of k
        of_head = max((chunk.stop - chunk.start) * (chunk.last - chunk.first) for chunk in chunks)
        self.rows_at_a_time = min(self.n_rows, max(1, PRODUCT_SCORES // (of_head * self.n_heads)))
        self.groups_at_a_time = min(self.n_groups, max(1, PRODUCT_SCORES // (of_head * self.shared_by)))
        size = self.rows_at_a_time * self.groups_at_a_time * self.shared_by * of_head
        self.tensors = [q.new_empty(size) for _ in range(n)]
        n_keys = max(chunk.last - chunk.first for chunk in chunks)
        self.wide = q.new_empty(max(CACHED_SCORES, n_keys), dtype=torch.float32)

    def rows(self) -> Iterator[slice]:
        """Rows of the batch, as many as a product takes at a time."""
        for first in range(0, self.n_rows, self.rows_at_a_time):
            yield slice(first, first + self.rows_at_a_time)

    def heads(self) -> Iterator[tuple[slice, slice]]:
        """Heads of q, as many as a product takes at a time, and those of k that they share."""
        for first in range(0, self.n_groups, self.groups_at_a_time):
            last = min(first + self.groups_at_a_time, self.n_groups)
            yield slice(first * self.shared_by, last * self.shared_by), slice(first, last)

    def shaped(self, q: Tensor, k: Tensor) -> list[Tensor]:
        """Each tensor as scores [rows, heads, C, keys], of queries [rows, heads, C, K] and keys [.., .., keys, K]."""
        shape = (*q.shape[:3], k.shape[2])
        size = math.prod(shape)
        tensors = self.tensors
        if self.kept.numel():
            tensors = [self.kept[self.n_taken :], *tensors]
            self.n_taken += size
        return [tensor[:size].view(shape) for tensor in tensors]

    def scaled(self, scores: Tensor, bias: Tensor | None, piece: tuple[slice, ...], scale: float) -> Tensor:
        """A piece of scores in fp32 and base 2, with what the rule adds, which is in base 2 already."""
        x = self.wide[: scores.numel()].view(scores.shape).copy_(scores)
        if bias is None:
            return x.mul_(scale * LOG2_E)
        return torch.add(bias[piece], x, alpha=scale * LOG2_E, out=x)


def _add_product(to: Tensor, x: Tensor, y: Tensor, scale: float) -> None:
    """Add x y scale to a slice [rows, groups, keys, K]; the product starts from its numbers, and rounds the sum."""
    part = to.view(-1, *to.shape[2:])
    torch.baddbmm(part, x, y, alpha=scale, out=part)


def _pieces(scores: Tensor) -> Iterator[tuple[slice, ...]]:
    """Pieces of scores [rows, heads, C, keys] that are cached: some rows, some heads of one, or some queries of one."""
    n_rows, n_heads, n_queries, n_keys = scores.shape
    queries = max(1, CACHED_SCORES // n_keys)
    heads = max(1, queries // n_queries)
    rows = max(1, heads // n_heads)
    for row in range(0, n_rows, rows):
        for head in range(0, n_heads, heads):
            for query in range(0, n_queries, queries):
                yield slice(row, row + rows), slice(head, head + heads), slice(query, query + queries)


def _exponentials(x: Tensor) -> Tensor:
    """2^x in place; 0 where it is negligible, and so where x is -inf."""
    return torch.threshold_(x, NEGLIGIBLE, -math.inf).exp2_()


def _row_keys(
    rule: AttentionRule, key: Tensor | None, head_ids: Tensor | None, sample_ids: Tensor | None
) -> Tensor | None:
    """[B, H, S]; None: nothing is dropped."""
    if key is None or head_ids is None or sample_ids is None:
        return None
    return keyed.of_pairs(key, sample_ids, head_ids, rule.query_places)


def _drop(x: Tensor, row_keys: Tensor, key_places: Tensor, p: float) -> Tensor:
    """Mask and rescale probabilities [rows, heads, C, keys] in place, by `_row_keys` and places of keys."""
    # numpy multiplies numbers with booleans in a quarter of torch's time, and hashes in half.
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


# By this name recompute knows it.
OPERATOR = torch.ops.dtmega.attention_by_products.default
attention_cpu.register_autograd(_backward, setup_context=_keep)
