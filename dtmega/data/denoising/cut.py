"""The cut of documents into samples of sentences that follow each other: BERT's, a pair, and those of Megatron's T5.

    table = cut_table(dataset, documents=(0, 1000), targets=Targets(longest=509, short_seq_prob=0.1, stream="train"))
    table[i]  # the first sentence of entry i, the one after its last, and the tokens that it should have

Megatron's rule (`build_mapping_impl` in its helpers.cpp): a document is gone through from its beginning, with a target
length drawn at its start and after each sample. A sample ends where it has its target and the fewest sentences that it
may have, and more than one sentence is left; or with the document. Documents of fewer sentences, with an empty one, or
with several of which one is longer than LONGEST_SENTENCE, are not used.

Here the target is a function of the sample's first sentence instead of the next number of a generator. So where a
sample would end is known for all sentences at once, and documents need not wait for each other. And the cut is that of
all epochs: they differ by what is drawn for each sample (`pairs.py`).
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dtmega import keyed
from dtmega.data import cache_dir
from dtmega.data.indexed import IndexedDataset
from dtmega.data.record import LONGEST_SENTENCE
from dtmega.data.shared_file import DIGEST_BYTES, SharedFile, index_path, index_state

FORMAT = 1  # raise it when the same documents and targets give another table
CHUNK = 1 << 20  # sentences or documents that are cut at a time, which bounds the memory, but for a longer document
LONG = 1 << 22  # sentences from which on a table is worth a file: below, it is made in less than a second


class Targets(NamedTuple):
    """The lengths that samples should have.

    Attributes:
        longest: of most samples, in tokens.
        short_seq_prob: share of the others, whose length is uniform in 2 to `longest`.
        stream: a name; the lengths are functions of it.
        fewest: sentences in a sample and in a document, 2 for a pair.
    """

    longest: int
    short_seq_prob: float
    stream: str
    fewest: int = 2

    def of(self, sentences: NDArray[np.integer]) -> NDArray[np.int64]:
        """The tokens that the samples should have that begin with these sentences, [n] -> [n]."""
        keys = np.full(1, keyed.key64(self.stream), np.uint64)
        drawn = keyed.uniform(keyed.draws(keys, "target", sentences))
        lengths = np.full(len(drawn), self.longest)
        is_short = drawn < self.short_seq_prob
        # Where it is below that share, the drawn number is as uniform as it was.
        lengths[is_short] = 2 + drawn[is_short] / self.short_seq_prob * (self.longest - 1)
        return lengths


def cut_table(dataset: IndexedDataset, documents: tuple[int, int], targets: Targets) -> NDArray[Any]:
    """The samples of documents (start, stop), each sentence of a usable document in exactly one of them.

    Returns:
        [n, 3] first sentence and one past the last, by their numbers in the data set, and target; in ascending order.
    """
    dtype = np.dtype(np.uint32 if len(dataset) < 2**32 else np.int64)

    def pieces() -> Iterator[NDArray[Any]]:
        for piece in _pieces(dataset, documents, targets):
            yield piece.astype(dtype)

    first, end = dataset.document_index[list(documents)]
    if end - first >= LONG:
        try:
            return _from_file(dataset, documents, targets, dtype, pieces)
        except (OSError, ValueError) as error:  # no cache directory, or no room in it
            print(f"dtmega: {error}: the table of samples is kept in the memory of this process", file=sys.stderr)
    return np.concatenate([np.zeros((0, 3), dtype), *pieces()])


def _from_file(
    dataset: IndexedDataset,
    documents: tuple[int, int],
    targets: Targets,
    dtype: np.dtype[Any],
    pieces: Callable[[], Iterator[NDArray[Any]]],
) -> NDArray[Any]:
    """The table in the cache directory.

    Raises:
        OSError, ValueError: no cache directory, or no room in it.
    """
    name = hashlib.sha256(f"{index_path(dataset)}/{documents}/{targets}".encode()).hexdigest()[:16]
    path = cache_dir() / f"pairs-{name}.bin"
    about = f"cutting documents {documents[0]} to {documents[1]} of {dataset.prefix} into samples"
    made_from = f"{index_state(dataset)} {documents} {targets} {FORMAT}"
    SharedFile(path, made_from, pieces, about).read_or_make()
    n = (path.stat().st_size - DIGEST_BYTES) // (3 * dtype.itemsize)
    return np.asarray(np.memmap(path, dtype, "r", shape=(n, 3))) if n else np.zeros((0, 3), dtype)


def _pieces(dataset: IndexedDataset, documents: tuple[int, int], targets: Targets) -> Iterator[NDArray[np.int64]]:
    """The table, some documents at a time."""
    start, stop = documents
    while start < stop:
        # As many documents as have CHUNK sentences together, but at least one.
        bounds = dataset.document_index[start : min(stop, start + CHUNK) + 1]
        n = int(np.searchsorted(bounds, bounds[0] + CHUNK, "right")) - 1
        n = max(n, 1)
        yield _cut(dataset, bounds[: n + 1], targets)
        start += n


def _cut(dataset: IndexedDataset, bounds: NDArray[np.int64], targets: Targets) -> NDArray[np.int64]:
    """[n, 3] of the documents whose first sentences, and the one past the last one's last, are `bounds`."""
    low, high = int(bounds[0]), int(bounds[-1])
    bounds = bounds - low  # from here on sentences are counted from the first of these
    n_sentences = high - low
    starts = dataset.tokens_before(np.arange(low, high))
    wanted = targets.of(np.arange(low, high))

    # For each sentence, the end of a sample that begins there: before the first one that starts at its target or later.
    ends = np.searchsorted(starts, starts + wanted)
    ends = np.maximum(ends, np.arange(n_sentences) + targets.fewest)
    document_ends = np.repeat(bounds[1:], np.diff(bounds))
    ends = np.where(document_ends - ends > 1, ends, document_ends)

    # From the beginning of each document from sample to sample, all documents at once.
    is_bound = np.zeros(n_sentences + 1, np.bool_)
    is_bound[bounds] = True
    begins_sample = np.zeros(n_sentences, np.bool_)
    now = bounds[:-1][_usable(dataset.sizes[low:high], bounds, targets.fewest)]
    while len(now):
        begins_sample[now] = True
        now = ends[now]
        now = now[~is_bound[now]]
    found = np.flatnonzero(begins_sample)
    return np.stack([low + found, low + ends[found], wanted[found]], 1)


def _usable(sizes: NDArray[np.integer], bounds: NDArray[np.int64], fewest: int) -> NDArray[np.bool_]:
    """[documents] whether a document has so many sentences, none empty, and none too long unless it is the only one."""

    def has(wrong: NDArray[np.bool_]) -> NDArray[np.bool_]:
        before = np.concatenate([np.zeros(1, np.int64), np.cumsum(wrong)])
        return np.diff(before[bounds]) > 0

    n_sentences = np.diff(bounds)
    too_long = has(sizes > LONGEST_SENTENCE) & (n_sentences > 1)
    return (n_sentences >= fewest) & ~has(sizes < 1) & ~too_long
