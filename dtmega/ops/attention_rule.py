"""The attention rule of a batch, which defines the mask and the bias of the scores for every kernel.

    rule = attention_rule(places, causal=True, document_ids=document_ids, slopes=slopes)    # once per forward
    out = attention(q, k, v, rule, dropout)                                                 # in each layer

A rule is a function of (sample, head, query's position, key's position). A token's position is its index in its whole
sample. Positions (`places`) are part of the batch, because a cp rank may hold any part of a sequence, in any order.
Documents and padding are given as document indices [B, S]: a query attends only to keys of its own document.
The full mask [B, S, S] of all pairs is never built.

Two methods define the rule as a function of indices: `allowed` (the mask) and `added` (the bias). FlexAttention calls
both methods in its kernel; all other kernels evaluate both methods for one chunk of queries at a time. Two shortcuts
avoid evaluating every pair:

- On CUDA, the smallest and largest positions and document indices in each block of tokens show which blocks of pairs
  are entirely allowed or forbidden (`block_mask.py`).
- Elsewhere, if positions are consecutive, the bias of each chunk of queries is a view of one strip of biases, because
  causality, windows, ALiBi and tables depend on the distance alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from dtmega import rooms
from dtmega.ops import host
from dtmega.ops.key_value_cache import KeyValueCache
from dtmega.ops.keyed import Dropout

# Approximate number of queries in a chunk. With fewer than 192 queries, torch's CPU kernel uses its smallest tiles.
CHUNK_QUERIES = {"cpu": 256, "cuda": 512}
N_TENSORS = 8  # the first 8 fields of an AttentionRule are tensors or None; the remaining fields are settings


class Chunk(NamedTuple):
    """A chunk of queries, [start, stop), and a range of keys, [first, last), that covers all keys these queries see."""

    start: int
    stop: int
    first: int
    last: int


class Shared(Protocol):
    """The rule for sequences that are split over ranks (`context_parallel.SharedRule`)."""

    def with_table(self, table: Tensor) -> Shared: ...

    def with_window(self, window: int) -> Shared: ...

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, dropout: Dropout | None, scale: float | None, softcap: float | None
    ) -> Tensor: ...


class Ranks(Protocol):
    """The ranks over which sequences are split (`context_parallel.ContextParallel`)."""

    def shared(
        self, part: AttentionRule, crosses: bool, finish: Callable[[AttentionRule, bool], AttentionRule]
    ) -> AttentionRule: ...


class AttentionRule(NamedTuple):
    """A batch's attention rule as tensors, built by `attention_rule`.

    Attributes:
        query_places, key_places: positions of the queries, [B, S] int32, and of the keys, [B, T] int32.
        query_documents, key_documents: document indices, [B, S] and [B, T]; a query attends only to keys of its own
            document. None if all tokens belong to one document.
        prefix: mask of the keys that causality does not hide, [B, T] bool.
        slopes: one factor per head, [H]; the bias is factor x distance (key's position - query's position).
        table: biases for the distances from -M to M, [H, 2 M + 1]; larger distances use the entry at the nearer end.
        strip: bias of the last chunk, [1, H or 1, C, columns], which contains the bias of every other chunk; None if
            positions are not consecutive, or if the rule has a `block_mask`.
        causal, window: arguments of `attention_rule`.
        block_mask: FlexAttention's mask; None if the kernels work on chunks of queries.
        cache: cache of keys and values; the first columns of `key_places` belong to the cached tokens.
        shared: rule for sequences that are split over the cp ranks; None if this rank has whole sequences.
    """

    query_places: Tensor
    key_places: Tensor
    query_documents: Tensor | None
    key_documents: Tensor | None
    prefix: Tensor | None
    slopes: Tensor | None
    table: Tensor | None
    strip: Tensor | None
    causal: bool
    window: int
    block_mask: BlockMask | None = None
    cache: KeyValueCache | None = None
    shared: Shared | None = None

    def allowed(self, b: Tensor, i: Tensor, j: Tensor) -> Tensor:
        """True if the i-th query of row b attends to the j-th key. The indices may have any shapes that broadcast."""
        query = self.query_places[b, i]
        key = self.key_places[b, j]
        conditions = []
        if self.causal:
            before = query >= key
            conditions.append(before if self.prefix is None else before | self.prefix[b, j])
        if self.window:
            conditions.append((query - key).abs() < self.window)
        if self.query_documents is not None and self.key_documents is not None:
            conditions.append(self.query_documents[b, i] == self.key_documents[b, j])
        # Start from the first condition: on a CPU, `True & first` would take as long as the rest of this method.
        pairs = conditions[0] if conditions else b.new_ones((), dtype=torch.bool)
        for condition in conditions[1:]:
            pairs = pairs & condition
        return pairs

    def added(self, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor | None:
        """The bias that head h adds to the score of row b's i-th query and j-th key; None if the rule has no bias."""
        distance = self.key_places[b, j] - self.query_places[b, i]
        bias = None if self.slopes is None else self.slopes[h] * distance
        if self.table is not None:
            furthest = self.table.shape[1] // 2
            entry = self.table[h, distance.clamp(-furthest, furthest) + furthest]
            bias = entry if bias is None else bias + entry
        return bias

    def with_table(self, table: Tensor) -> AttentionRule:
        """Copy this rule with a different tensor for `table`. The new tensor receives the gradient of the biases."""
        shared = None if self.shared is None else self.shared.with_table(table)
        rule = self._replace(table=table, strip=None, shared=shared)
        return rule if self.strip is None else rule._replace(strip=_strip(rule))

    def with_window(self, window: int) -> AttentionRule:
        """Copy this rule with the given window, for the layers that have that window."""
        shared = None if self.shared is None else self.shared.with_window(window)
        rule = self._replace(window=window, strip=None, block_mask=None, shared=shared)
        if self.block_mask is not None:
            return rule._replace(block_mask=rooms.block_masks().block_mask(rule))
        return rule if self.strip is None else rule._replace(strip=_strip(rule))

    @property
    def adds(self) -> bool:
        return self.slopes is not None or self.table is not None

    @property
    def forbids(self) -> bool:
        return self.causal or self.window > 0 or self.query_documents is not None

    @property
    def chunk_size(self) -> int:
        """The number of queries in a chunk, and also the number of rows in the strip."""
        return _chunk_size(self.query_places.shape[1], self.query_places.device)

    def chunks(self, size: int | None = None) -> Iterator[Chunk]:
        """Divide all queries into chunks of `size` queries (default: `chunk_size`)."""
        n_queries = self.query_places.shape[1]
        n_keys = self.key_places.shape[1]
        n_cached = n_keys - n_queries  # used only with consecutive positions; cached keys come before the first query
        size = size or self.chunk_size
        for start in range(0, n_queries, size):
            stop = min(start + size, n_queries)
            first, last = 0, n_keys
            if self.strip is not None and self.causal:
                last = n_cached + stop
            if self.strip is not None and self.window:
                first = max(0, n_cached + start - self.window + 1)
                last = min(last, n_cached + stop - 1 + self.window)
            yield Chunk(start, stop, first, last)

    def bias(self, chunk: Chunk) -> Tensor | None:
        """The bias of a chunk's scores, [B or 1, H or 1, queries, keys], with -inf for pairs that are not allowed.

        The result is None if the rule adds no bias and allows all pairs.
        """
        if self.strip is None:
            return self._bias_pair_by_pair(chunk)
        n_queries = chunk.stop - chunk.start
        # The strip's columns are the keys of the last chunk of queries. This chunk starts `shift` queries earlier, so
        # key j has the same distance from its queries as column j + `shift` has from the last chunk's queries.
        shift = _last_start(self.query_places.shape[1], self.strip.device) - chunk.start
        return self._in_documents(self.strip[:, :, :n_queries, shift + chunk.first : shift + chunk.last], chunk)

    def bias_by_distance(self) -> Tensor | None:
        """The bias for each distance, [H or 1, distances], as input for `bias_reversed`; None if there is no strip."""
        if self.strip is None:
            return None
        n_rows, n_columns = self.strip.shape[2:]
        # Take the biases for negative distances from the strip's last row, and all other biases from its first row.
        negative = self.strip[0, :, -1, : self._strip_start + n_rows - 1]
        zero_and_positive = self.strip[0, :, 0, self._strip_start : n_columns]
        return torch.cat([negative, zero_and_positive], dim=1)

    def bias_reversed(self, chunk: Chunk, by_distance: Tensor | None) -> Tensor | None:
        """The bias of a chunk, [B or 1, H or 1, queries, keys]. The queries are in reverse order.

        In this order, all distances grow by 1 from each row to the next. The rows are therefore views of `by_distance`,
        each starting one element further right than the view before. `by_distance` is small and stays in the cache.

        Args:
            chunk: chunk of at most `chunk_size` queries.
            by_distance: result of `bias_by_distance`.
        """
        if self.strip is None or by_distance is None:
            bias = self._bias_pair_by_pair(chunk)
            return None if bias is None else bias.flip(2)
        n_heads, n_distances = by_distance.shape
        n_cached = self.key_places.shape[1] - self.query_places.shape[1]
        # `zero` is the index of distance 0; `at` is the index of the distance from the last query to the first key.
        zero = self._strip_start + self.strip.shape[2] - 1
        at = zero + chunk.first - (n_cached + chunk.stop - 1)
        shape = (1, n_heads, chunk.stop - chunk.start, chunk.last - chunk.first)
        bias = by_distance.as_strided(shape, (0, n_distances, 1, 1), at)
        return self._in_documents(bias, chunk, is_reversed=True)

    @property
    def _strip_start(self) -> int:
        """The column in which the strip's first row (the last chunk's first query) has distance 0."""
        n_cached = self.key_places.shape[1] - self.query_places.shape[1]
        return n_cached + _last_start(self.query_places.shape[1], self.query_places.device)

    def _in_documents(self, bias: Tensor, chunk: Chunk, is_reversed: bool = False) -> Tensor:
        """Set a chunk's bias to -inf for pairs from different documents, because the strip ignores documents."""
        if self.query_documents is None or self.key_documents is None:
            return bias
        queries = self.query_documents[:, None, chunk.start : chunk.stop, None]
        if is_reversed:
            queries = queries.flip(2)
        keys = self.key_documents[:, None, None, chunk.first : chunk.last]
        return torch.where(queries == keys, bias, -math.inf)

    def select_rows(self, rows: slice) -> AttentionRule:
        """Copy this rule for the given rows of the batch."""
        return self._replace(
            query_places=self.query_places[rows],
            key_places=self.key_places[rows],
            query_documents=None if self.query_documents is None else self.query_documents[rows],
            key_documents=None if self.key_documents is None else self.key_documents[rows],
            prefix=None if self.prefix is None else self.prefix[rows],
        )

    def _bias_pair_by_pair(self, chunk: Chunk) -> Tensor | None:
        device = self.query_places.device
        b = torch.arange(len(self.query_places), device=device)[:, None, None, None]
        i = torch.arange(chunk.start, chunk.stop, device=device)[:, None]
        j = torch.arange(chunk.first, chunk.last, device=device)
        numbers_per_head = self.slopes if self.slopes is not None else self.table
        n_heads = 1 if numbers_per_head is None else len(numbers_per_head)
        h = torch.arange(n_heads, device=device)[:, None, None]
        added = self.added(b, h, i, j)
        if not self.forbids:
            return added
        return torch.where(self.allowed(b, i, j), 0.0 if added is None else added, -math.inf)


def attention_rule(
    places: Tensor,
    *,
    causal: bool = False,
    window: int = 0,
    document_ids: Tensor | None = None,
    prefix: Tensor | None = None,
    slopes: Tensor | None = None,
    table: Tensor | None = None,
    key_places: Tensor | None = None,
    key_document_ids: Tensor | None = None,
    cache: KeyValueCache | None = None,
    fused: bool = True,
    context: Ranks | None = None,
) -> AttentionRule:
    """Build a batch's attention rule, which all layers with the same window share.

    A query sees a key if all given conditions hold (causal, window, documents). `prefix` is an exception to causality
    only. A query that sees no key gets the output 0.

    Args:
        places: positions of the query tokens in their whole samples, [B, S] int.
        causal: whether a query sees only the keys up to its own position.
        window: smallest distance at which a query no longer sees a key; 0 for no limit.
        document_ids: document of each query, [B, S] int; a query sees only the keys of its own document. Padding counts
            as a separate document.
        prefix: mask of the prefix keys, [B, T] bool; a query sees all prefix keys of its document, even keys after the
            query. With a cache, a prefix is allowed only while the cache is empty.
        slopes: ALiBi slopes, [H]; the bias is slope x (key's position - query's position). Under tp, only the slopes of
            this rank's heads.
        table: biases of relative positions, [H, 2 M + 1] (`distance_buckets`); the bias is the entry for (key's
            position - query's position), clamped to -M ... M. The table receives a gradient. Under tp, only the rows
            of this rank's heads.
        key_places, key_document_ids: positions and documents of the keys, [B, T]; None if keys and queries belong to
            the same tokens (unlike in cross-attention).
        cache: cache of earlier tokens, which the queries see as well. The tokens of this rule are added to the cache,
            so a rule with a cache serves only one forward pass, as do the copies that `with_window` makes.
        fused: whether to use a fused kernel on CUDA; False for attention dropout, or for lengths that occur only
            once. If False, the host waits for the device once, to check whether positions are consecutive.
        context: cp ranks over which the sequences are split; all tensors [B, S] and [B, T] are this rank's parts. None
            if this rank has whole sequences.
    """
    if context is not None and cache is None:
        key_documents = document_ids if key_places is None else key_document_ids
        given = AttentionRule(
            *(places, places if key_places is None else key_places, document_ids, key_documents),
            *(prefix, slopes, table, None, causal, window),
        )
        return context.shared(given, key_places is not None, partial(_with_kernel, fused=fused))
    if cache is not None:
        assert key_places is None, "a cache is of the same tokens"
        assert prefix is None or cache.length == 0, "what was computed before has not seen a later prefix"
        key_places, key_document_ids = cache.begin_forward(places, document_ids)
    attends_to_itself = key_places is None
    query_places = places.to(torch.int32)
    # Copy the positions, because torch 2.13 cannot compile a block whose custom autograd function receives the same
    # tensor twice.
    keys = query_places.clone() if key_places is None else key_places.to(torch.int32)
    documents = key_document_ids
    if attends_to_itself and document_ids is not None:
        documents = document_ids.clone()
    assert (document_ids is None) == (documents is None), "documents of queries and of keys come together"
    rule = AttentionRule(
        query_places, keys, document_ids, documents, prefix, slopes, table, None, causal, window, cache=cache
    )
    return _with_kernel(rule, attends_to_itself or cache is not None, fused)


def _with_kernel(rule: AttentionRule, keys_end_with_queries: bool, fused: bool) -> AttentionRule:
    """Add a field that reduces a kernel's work: a block mask on CUDA, or a strip if positions are consecutive."""
    if rule.query_places.device.type == "cuda" and fused:
        return rule._replace(block_mask=rooms.block_masks().block_mask(rule))
    depends_on_distance = rule.adds or rule.causal or rule.window > 0
    has_strip = keys_end_with_queries and depends_on_distance and rule.prefix is None
    if has_strip and _consecutive(rule.key_places):
        return rule._replace(strip=_strip(rule))
    return rule


def alibi_slopes(n_heads: int) -> Tensor:
    """ALiBi's slopes, [H] fp32 (Press, Smith, Lewis, "Train Short, Test Long", 2022).

    The first n heads have the slopes 2^(-8 i/n) for i = 1, 2, ..., n, where n is the largest power of two up to H. The
    remaining H - n heads have the slopes 2^(-8 i/n) for i = 1/2, 3/2, ..., whose exponents lie halfway between those of
    the first n heads.
    """
    n = 2 ** math.floor(math.log2(n_heads))
    slopes = [2 ** (-8 * (i + 1) / n) for i in range(n)]
    slopes += [2 ** (-4 * (2 * i + 1) / n) for i in range(n_heads - n)]
    return torch.tensor(slopes, dtype=torch.float32)


def distance_buckets(n_buckets: int, max_distance: int, bidirectional: bool) -> Tensor:
    """T5's bucket for each distance, [2 max_distance + 1] int64.

    A bucket is a row of the weight [buckets, H]; looking up these rows gives the `table` of `attention_rule`. Half of
    the buckets hold one distance each. The remaining buckets hold ranges of distances that grow logarithmically, up to
    `max_distance` (Raffel et al., arXiv:1910.10683; mesh_tensorflow `_relative_position_bucket`).

    Args:
        n_buckets: number of buckets.
        max_distance: distance beyond which all distances share the last bucket.
        bidirectional: whether half of the buckets are reserved for keys after the query; if not, all keys after
            the query share the bucket of distance 0.
    """
    if bidirectional:
        n_buckets //= 2
    ahead = torch.arange(-max_distance, max_distance + 1)
    distance = ahead.abs() if bidirectional else -ahead.clamp(max=0)
    n_exact = n_buckets // 2
    logarithm = torch.log(distance.clamp(min=1) / n_exact) / math.log(max_distance / n_exact)
    grown = (n_exact + (logarithm * (n_buckets - n_exact)).long()).clamp(max=n_buckets - 1)
    bucket = torch.where(distance < n_exact, distance, grown)
    if bidirectional:
        bucket = bucket + n_buckets * (ahead > 0)
    return bucket


def _chunk_size(n_queries: int, device: torch.device) -> int:
    """The number of queries in each chunk except the last chunk, which may be smaller."""
    n_chunks = max(1, round(n_queries / CHUNK_QUERIES[device.type]))
    return -(-n_queries // n_chunks)


def _last_start(n_queries: int, device: torch.device) -> int:
    """The index of the last chunk's first query."""
    size = _chunk_size(n_queries, device)
    return (n_queries - 1) // size * size


def _consecutive(places: Tensor) -> bool:
    """True if each row of `places` [B, S] counts up in steps of 1. On a GPU, the host waits for the result."""
    count = torch.arange(places.shape[1], device=places.device, dtype=places.dtype)
    counts_up = (places - places[:, :1] == count).all()
    return bool(host.read(counts_up))


def _strip(rule: AttentionRule) -> Tensor | None:
    """Biases by distance: one row per query of the last chunk, one column per query-key distance in any chunk.

    Without causality, early chunks have keys further ahead than the last chunk has. For their distances, the strip has
    extra columns on the right.
    """
    n_queries = rule.query_places.shape[1]
    device = rule.query_places.device
    size = _chunk_size(n_queries, device)
    start = rule.key_places.shape[1] - n_queries + _last_start(n_queries, device)
    n_columns = start + (size if rule.causal else n_queries)
    place = torch.arange(n_columns, device=device, dtype=torch.int32)[None]
    one_row = rule._replace(
        query_places=place[:, start : start + size],
        key_places=place[:, :n_columns],
        query_documents=None,
        key_documents=None,
    )
    return one_row.bias(Chunk(0, size, 0, n_columns))
