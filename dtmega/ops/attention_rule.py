"""A rule of attention for every kernel: the pairs of a query and a key that attend, and what is added to their scores.

    rule = attention_rule(places, causal=True, document_ids=document_ids, slopes=slopes)    # once per forward
    out = attention(q, k, v, rule, dropout)                                                 # in each layer

A rule is a function of (sample, head, place of the query, place of the key). Places are global and come with the batch:
a rank may hold any part of a sequence, in any order. Documents and padding are numbers, [B, S]; no tensor of all pairs
exists. `allowed` and `added` say the rule once, by indices, for FlexAttention's mods as for chunks of queries; the rest
of this file finds out early what need not be computed pair by pair:

- on CUDA, blocks of pairs that are all allowed or all forbidden, from the bounds of places and numbers in each block;
- elsewhere, if places are consecutive, one strip of scores that serves all chunks of queries: causality, windows, ALiBi
  and tables depend on the distance alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from dtmega.ops.key_value_cache import KeyValueCache

BLOCK = 128  # queries, and keys, of a block in FlexAttention's masks
# Queries that are taken at a time, about: below 192 torch's kernel for CPUs works in its smallest tiles.
CHUNK_QUERIES = {"cpu": 256, "cuda": 512}
N_TENSORS = 8  # of a rule, or None, before its settings


class Chunk(NamedTuple):
    """Queries `start` to `stop`, and the keys from `first` to `last`, outside which they see none."""

    start: int
    stop: int
    first: int
    last: int


class AttentionRule(NamedTuple):
    """A rule of attention, as tensors; `attention_rule` makes one.

    Attributes:
        query_places, key_places: [B, S] and [B, T] int32.
        query_documents, key_documents: the same shapes; pairs of equal numbers attend.
        prefix: [B, T] bool: keys that causality does not hide.
        slopes: [H], added to the scores times the distance from the query to the key.
        table: [H, 2 M + 1], added to the scores by that distance, from -M to M and beyond.
        strip: [1, H or 1, C, columns] where places are consecutive: what `bias` is for the last chunk and all others.
        causal, window: see `attention_rule`.
        block_mask: for FlexAttention; the chunked formula has none.
        cache: what keeps the keys and values of the tokens before; their places are the first of `key_places`.
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

    def allowed(self, b: Tensor, i: Tensor, j: Tensor) -> Tensor:
        """Tell whether the i-th query of row b attends to the j-th key; indices of any shapes that broadcast."""
        query = self.query_places[b, i]
        key = self.key_places[b, j]
        demands = []
        if self.causal:
            before = query >= key
            demands.append(before if self.prefix is None else before | self.prefix[b, j])
        if self.window:
            demands.append((query - key).abs() < self.window)
        if self.query_documents is not None and self.key_documents is not None:
            demands.append(self.query_documents[b, i] == self.key_documents[b, j])
        # "True and the first one" would take as long on a CPU as all else here together.
        pairs = demands[0] if demands else b.new_ones((), dtype=torch.bool)
        for demand in demands[1:]:
            pairs = pairs & demand
        return pairs

    def added(self, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor | None:
        """The number added to the score of the i-th query of row b and the j-th key in head h; None: nothing to any."""
        distance = self.key_places[b, j] - self.query_places[b, i]
        bias = None if self.slopes is None else self.slopes[h] * distance
        if self.table is not None:
            furthest = self.table.shape[1] // 2
            entry = self.table[h, distance.clamp(-furthest, furthest) + furthest]
            bias = entry if bias is None else bias + entry
        return bias

    @property
    def adds(self) -> bool:
        return self.slopes is not None or self.table is not None

    @property
    def forbids(self) -> bool:
        return self.causal or self.window > 0 or self.query_documents is not None

    @property
    def chunk_size(self) -> int:
        """Queries of a chunk, and rows of a strip."""
        return _chunk_size(self.query_places.shape[1], self.query_places.device)

    def chunks(self, size: int | None = None) -> Iterator[Chunk]:
        """All queries, some at a time: `chunk_size`, or as many as are asked for."""
        n_queries = self.query_places.shape[1]
        n_keys = self.key_places.shape[1]
        n_before = n_keys - n_queries  # keys of tokens before the first query, where places are consecutive
        size = size or self.chunk_size
        for start in range(0, n_queries, size):
            stop = min(start + size, n_queries)
            first, last = 0, n_keys
            if self.strip is not None and self.causal:
                last = n_before + stop
            if self.strip is not None and self.window:
                first = max(0, n_before + start - self.window + 1)
                last = min(last, n_before + stop - 1 + self.window)
            yield Chunk(start, stop, first, last)

    def bias(self, chunk: Chunk) -> Tensor | None:
        """[B or 1, H or 1, queries, keys]: what is added to the scores of a chunk, -inf where a pair is not allowed."""
        if self.strip is None:
            return self._bias_pair_by_pair(chunk)
        n_queries = chunk.stop - chunk.start
        # The strip's first query is the first of the last chunk. What that one sees at column c, ours sees as far away.
        shift = _last_start(self.query_places.shape[1], self.strip.device) - chunk.start
        return self._in_documents(self.strip[:, :, :n_queries, shift + chunk.first : shift + chunk.last], chunk)

    def by_distance(self) -> Tensor | None:
        """[H or 1, distances]: each number of the strip once, for `bias_backwards`; None where there is no strip."""
        if self.strip is None:
            return None
        n_rows, n_columns = self.strip.shape[2:]
        behind = self.strip[0, :, -1, : self._strip_start + n_rows - 1]
        from_zero_on = self.strip[0, :, 0, self._strip_start : n_columns]
        return torch.cat([behind, from_zero_on], dim=1)

    def bias_backwards(self, chunk: Chunk, by_distance: Tensor | None) -> Tensor | None:
        """`bias` with the last query first: then rows begin one number apart, and are a view of one row of numbers.

        Args:
            by_distance: from the method of this name. The chunk is no longer than `chunk_size`.
        """
        if self.strip is None or by_distance is None:
            bias = self._bias_pair_by_pair(chunk)
            return None if bias is None else bias.flip(2)
        n_heads, n_distances = by_distance.shape
        n_before = self.key_places.shape[1] - self.query_places.shape[1]
        zero = self._strip_start + self.strip.shape[2] - 1
        at = zero + chunk.first - (n_before + chunk.stop - 1)
        shape = (1, n_heads, chunk.stop - chunk.start, chunk.last - chunk.first)
        bias = by_distance.as_strided(shape, (0, n_distances, 1, 1), at)
        return self._in_documents(bias, chunk, backwards=True)

    @property
    def _strip_start(self) -> int:
        """The place of the strip's first query: of those of the last chunk, behind the keys of tokens before."""
        n_before = self.key_places.shape[1] - self.query_places.shape[1]
        return n_before + _last_start(self.query_places.shape[1], self.query_places.device)

    def _in_documents(self, bias: Tensor, chunk: Chunk, backwards: bool = False) -> Tensor:
        if self.query_documents is None or self.key_documents is None:
            return bias
        queries = self.query_documents[:, None, chunk.start : chunk.stop, None]
        if backwards:
            queries = queries.flip(2)
        keys = self.key_documents[:, None, None, chunk.first : chunk.last]
        return torch.where(queries == keys, bias, -math.inf)

    def of_rows(self, rows: slice) -> AttentionRule:
        """The rule of some rows of the batch."""
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
        per_head = self.slopes if self.slopes is not None else self.table
        n_heads = 1 if per_head is None else len(per_head)
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
) -> AttentionRule:
    """The rule of a batch, for all layers that share it.

    Of what is given, a pair must satisfy all; only `prefix` makes an exception, and only from causality.

    Args:
        places: [B, S] int, the global place in its sample of each token that asks.
        causal: a query sees the keys up to its own place.
        window: it sees those less than so many places away; 0: however far.
        document_ids: [B, S] int; it sees those of its own document. Padding is a document of its own.
        prefix: [B, T] bool; keys that all queries of a document see, those before them too. With a cache only of its
            first tokens.
        slopes: [H], ALiBi: slope x (place of the key - place of the query) is added. Under tp this rank's heads.
        table: [H, 2 M + 1], relative positions: the entry of (place of the key - place of the query), clamped to
            -M ... M, is added; its gradient is computed. See `distance_buckets`. Under tp this rank's heads.
        key_places, key_document_ids: [B, T], where keys are not those of the same tokens.
        cache: tokens before these, which queries see as well; it takes in these. Once per forward.
        fused: False where no kernel is wanted on CUDA (attention dropout, lengths that come once): there the chunked
            formula waits for the device once, to see whether places are consecutive.

    Returns:
        The rule, in which a query that sees no key gets 0 for its output.
    """
    if cache is not None:
        assert key_places is None, "a cache is of the same tokens"
        assert prefix is None or cache.length == 0, "what was computed before has not seen a later prefix"
        key_places, key_document_ids = cache.begin_forward(places, document_ids)
    own = key_places is None
    query_places = places.to(torch.int32)
    # Copies: a compiled block breaks where its own autograd is given one tensor twice (torch 2.13).
    keys = query_places.clone() if key_places is None else key_places.to(torch.int32)
    documents = key_document_ids
    if own and document_ids is not None:
        documents = document_ids.clone()
    assert (document_ids is None) == (documents is None), "documents of queries and of keys come together"
    rule = AttentionRule(
        query_places, keys, document_ids, documents, prefix, slopes, table, None, causal, window, cache=cache
    )
    if places.device.type == "cuda" and fused:
        return rule._replace(block_mask=block_mask(rule))
    by_distance = rule.adds or causal or window > 0
    if (own or cache is not None) and by_distance and prefix is None and _consecutive(keys):
        return rule._replace(strip=_strip(rule))
    return rule


def alibi_slopes(n_heads: int) -> Tensor:
    """[H] fp32: 2^(-8 i/n), i = 1..n, n the power of two at or below H; heads left over take the odd halves between.

    Press, Smith, Lewis, "Train Short, Test Long" (2022).
    """
    n = 2 ** math.floor(math.log2(n_heads))
    slopes = [2 ** (-8 * (i + 1) / n) for i in range(n)]
    slopes += [2 ** (-4 * (2 * i + 1) / n) for i in range(n_heads - n)]
    return torch.tensor(slopes, dtype=torch.float32)


def distance_buckets(n_buckets: int, max_distance: int, bidirectional: bool) -> Tensor:
    """[2 max_distance + 1] int64, the bucket of each distance: rows of a weight [buckets, H] that make a `table`.

    Half of the buckets are of one distance each, the others grow with its logarithm up to `max_distance` (Raffel et
    al., arXiv:1910.10683; mesh_tensorflow `_relative_position_bucket`). `bidirectional`: keys after the query have half
    of the buckets for themselves; otherwise they share that of distance 0.
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
    """As many queries in each chunk, but for what is left to the last one."""
    n_chunks = max(1, round(n_queries / CHUNK_QUERIES[device.type]))
    return -(-n_queries // n_chunks)


def _last_start(n_queries: int, device: torch.device) -> int:
    size = _chunk_size(n_queries, device)
    return (n_queries - 1) // size * size


def _consecutive(places: Tensor) -> bool:
    """Tell whether each row [B, S] counts up by one, from wherever it starts; waits for a GPU."""
    count = torch.arange(places.shape[1], device=places.device, dtype=places.dtype)
    return torch.equal(places - places[:, :1], count.expand_as(places))


def _strip(rule: AttentionRule) -> Tensor | None:
    """The bias of the last chunk's queries, and of as many keys behind it as the first chunk sees ahead."""
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


def block_mask(rule: AttentionRule) -> BlockMask:
    """FlexAttention's mask, from the bounds of places and numbers in each block of queries and of keys.

    A block that is said to be full is full, one that is said to be empty is empty; of the others the kernel looks at
    each pair. `create_block_mask` would look at all pairs: 12 bytes B S^2 of them (torch 2.13).
    """

    def mask_mod(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return rule.allowed(b, i, j)

    q_low, q_high = (bound[:, :, None] for bound in _bounds(rule.query_places))
    k_low, k_high = (bound[:, None, :] for bound in _bounds(rule.key_places))
    some = torch.ones_like(q_low >= k_low)
    every = some
    if rule.causal:
        some = q_high >= k_low
        every = q_low >= k_high
    if rule.prefix is not None:
        all_of_it, some_of_it = (bound[:, None, :].bool() for bound in _bounds(rule.prefix.to(torch.int32)))
        some = some | some_of_it
        every = every | all_of_it
    if rule.window:
        some = some & (q_low - k_high < rule.window) & (k_low - q_high < rule.window)
        every = every & (q_high - k_low < rule.window) & (k_high - q_low < rule.window)
    if rule.query_documents is not None and rule.key_documents is not None:
        q_low, q_high = (bound[:, :, None] for bound in _bounds(rule.query_documents))
        k_low, k_high = (bound[:, None, :] for bound in _bounds(rule.key_documents))
        some = some & (q_low <= k_high) & (k_low <= q_high)
        every = every & (q_low == k_high) & (k_low == q_high)
    every = every & _whole(rule.query_places)[:, None] & _whole(rule.key_places)
    partial = some & ~every
    lengths = (rule.query_places.shape[1], rule.key_places.shape[1])
    return BlockMask.from_kv_blocks(*_listed(partial), *_listed(every), BLOCK, mask_mod, seq_lengths=lengths)


def _bounds(x: Tensor) -> tuple[Tensor, Tensor]:
    """[B, S] -> the least and the greatest of each block, [B, blocks] each."""
    n_blocks = -(-x.shape[1] // BLOCK)
    index = torch.arange(n_blocks * BLOCK, device=x.device).clamp(max=x.shape[1] - 1)
    low, high = x[:, index].unflatten(1, (n_blocks, BLOCK)).aminmax(dim=-1)
    return low, high


def _whole(places: Tensor) -> Tensor:
    """[blocks]: False for a last block that is shorter."""
    n_blocks = -(-places.shape[1] // BLOCK)
    return torch.arange(1, n_blocks + 1, device=places.device) * BLOCK <= places.shape[1]


def _listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """[B, blocks of queries, blocks of keys] -> how many keys' blocks each queries' block has, and which come first."""
    count = blocks.sum(-1, dtype=torch.int32)
    order = torch.argsort(blocks.to(torch.int8), dim=-1, descending=True, stable=True)
    return count[:, None], order.to(torch.int32)[:, None].contiguous()
