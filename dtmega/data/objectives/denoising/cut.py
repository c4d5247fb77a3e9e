"""Cut documents into samples of consecutive sentences, for BERT's pairs and for Megatron's T5.

    table = cut_table(dataset, documents=(0, 1000), targets=Targets(longest=509, short_seq_prob=0.1, stream="train"))
    table[i]  # sample i: its first sentence, one past its last sentence, and its target length in tokens

The rule is Megatron's (`build_mapping_impl` in `helpers.cpp`). Sentences are added to a sample until it has its
target length and at least `fewest` sentences. If only one sentence then remains in the document, the sample takes that
sentence too. Then the next sample begins, with a target length of its own. A document is not used if it has fewer than
`fewest` sentences, if one of its sentences is empty, or if it has several sentences and one of them has more than
LONGEST_SENTENCE tokens.

Megatron draws each target length from a generator. Here the target length is a function of the sample's first sentence.
So the code can compute the end of a sample for all possible first sentences at once and then cut all documents in
parallel. Every epoch cuts the documents at the same places; epochs differ in the draws for each sample (`pairs.py`).
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dtmega.data import cache_dir
from dtmega.data.indexed_files.dataset import IndexedDataset
from dtmega.data.indexed_files.record import LONGEST_SENTENCE
from dtmega.data.indexed_files.shared_file import DIGEST_BYTES, SharedFile
from dtmega.ops import keyed

FORMAT = 1  # increase this number when a change alters the table for the same documents and targets
CHUNK = 1 << 20  # number of sentences or documents cut at a time, to bound the memory; a longer document is cut at once
LONG = 1 << 22  # tables for at least this many sentences are kept in a file; smaller tables are computed in a second


class Targets(NamedTuple):
    """The target lengths of samples.

    Attributes:
        longest: target length of most samples, in tokens.
        short_seq_prob: share of the samples whose target length is drawn uniformly from 2 to `longest`.
        stream: name of the random stream that decides which samples are short, and how short.
        fewest: minimum number of sentences in a sample, and therefore in a document; 2 for pairs.
    """

    longest: int
    short_seq_prob: float
    stream: str
    fewest: int = 2

    def lengths_at(self, sentences: NDArray[np.integer]) -> NDArray[np.int64]:
        """Target lengths of the samples that begin with the given sentences, [n] -> [n]."""
        keys = np.full(1, keyed.key64(self.stream), np.uint64)
        drawn = keyed.uniform(keyed.draws(keys, "target", sentences))
        lengths = np.full(len(drawn), self.longest)
        is_short = drawn < self.short_seq_prob
        # A draw below short_seq_prob makes the sample short. Such a draw is uniform in [0, short_seq_prob), so it also
        # sets the length.
        lengths[is_short] = 2 + drawn[is_short] / self.short_seq_prob * (self.longest - 1)
        return lengths


def cut_table(dataset: IndexedDataset, documents: tuple[int, int], targets: Targets) -> NDArray[Any]:
    """Cut a range (start, stop) of documents into samples. Each sentence of a usable document is in exactly one sample.

    Returns:
        One row per sample, in ascending order, uint32 or int64 [n, 3]: the index of the sample's first sentence in the
        data set, the index one past its last sentence, and the target length.
    """
    dtype = np.dtype(np.uint32 if len(dataset) < 2**32 else np.int64)

    def pieces() -> Iterator[NDArray[Any]]:
        for piece in _pieces(dataset, documents, targets):
            yield piece.astype(dtype)

    first, end = dataset.document_index[list(documents)]
    if end - first >= LONG:
        try:
            return _from_file(dataset, documents, targets, dtype, pieces)
        except (OSError, ValueError) as error:  # no cache directory is writable, or the disk is full
            print(f"dtmega: {error}: the table of samples is kept in the memory of this process", file=sys.stderr)
    return np.concatenate([np.zeros((0, 3), dtype), *pieces()])


def _from_file(
    dataset: IndexedDataset,
    documents: tuple[int, int],
    targets: Targets,
    dtype: np.dtype[Any],
    pieces: Callable[[], Iterator[NDArray[Any]]],
) -> NDArray[Any]:
    """Memory-map the table from a file in the cache directory; create the file first if it is missing.

    Raises:
        OSError, ValueError: no cache directory is writable, or the disk is full.
    """
    name = hashlib.sha256(f"{dataset.index_path}/{documents}/{targets}".encode()).hexdigest()[:16]
    path = cache_dir() / f"pairs-{name}.bin"
    about = f"cutting documents {documents[0]} to {documents[1]} of {dataset.prefix} into samples"
    made_from = f"{dataset.index_state} {documents} {targets} {FORMAT}"
    SharedFile(path, made_from, pieces, about).read_or_make()
    n = (path.stat().st_size - DIGEST_BYTES) // (3 * dtype.itemsize)
    return np.asarray(np.memmap(path, dtype, "r", shape=(n, 3))) if n else np.zeros((0, 3), dtype)


def _pieces(dataset: IndexedDataset, documents: tuple[int, int], targets: Targets) -> Iterator[NDArray[np.int64]]:
    """Yield the table in chunks, one for each range of documents, to limit memory use."""
    start, stop = documents
    while start < stop:
        # Take as many documents as fit in CHUNK sentences, but at least one document.
        bounds = dataset.document_index[start : min(stop, start + CHUNK) + 1]
        n = int(np.searchsorted(bounds, bounds[0] + CHUNK, "right")) - 1
        n = max(n, 1)
        yield _cut(dataset, bounds[: n + 1], targets)
        start += n


def _cut(dataset: IndexedDataset, bounds: NDArray[np.int64], targets: Targets) -> NDArray[np.int64]:
    """Cut consecutive documents into samples; return the samples' table rows, [n, 3].

    Args:
        dataset: data set that holds the documents.
        bounds: index of each document's first sentence, followed by one past the last sentence's index,
            [documents + 1].
        targets: target lengths of the samples.
    """
    low, high = int(bounds[0]), int(bounds[-1])
    bounds = bounds - low  # from here on, index 0 is the first document's first sentence
    n_sentences = high - low
    starts = dataset.tokens_before(np.arange(low, high))
    lengths = targets.lengths_at(np.arange(low, high))

    # For each sentence, compute the end of a sample that begins with this sentence. The end is the first sentence whose
    # start is at least the target length after the sample's start.
    ends = np.searchsorted(starts, starts + lengths)
    ends = np.maximum(ends, np.arange(n_sentences) + targets.fewest)
    # If fewer than two sentences would remain in the document, the sample extends to the document's end.
    document_ends = np.repeat(bounds[1:], np.diff(bounds))
    ends = np.where(document_ends - ends > 1, ends, document_ends)

    # Step from sample to sample in all documents at once. Documents that have reached their end drop out.
    is_bound = np.zeros(n_sentences + 1, np.bool_)
    is_bound[bounds] = True
    begins_sample = np.zeros(n_sentences, np.bool_)
    heads = bounds[:-1][_usable(dataset.sizes[low:high], bounds, targets.fewest)]
    while len(heads):
        begins_sample[heads] = True
        heads = ends[heads]
        heads = heads[~is_bound[heads]]
    firsts = np.flatnonzero(begins_sample)
    return np.stack([low + firsts, low + ends[firsts], lengths[firsts]], 1)


def _usable(sizes: NDArray[np.integer], bounds: NDArray[np.int64], fewest: int) -> NDArray[np.bool_]:
    """Mask of the usable documents, bool [documents].

    Args:
        sizes: number of tokens in each sentence, [n].
        bounds: index of each document's first sentence, followed by n, [documents + 1].
        fewest: minimum number of sentences in a document.
    """

    def has_any(wrong: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Mask of the documents that have at least one `wrong` sentence, [n] -> [documents]."""
        before = np.concatenate([np.zeros(1, np.int64), np.cumsum(wrong)])
        return np.diff(before[bounds]) > 0

    n_sentences = np.diff(bounds)
    too_long = has_any(sizes > LONGEST_SENTENCE) & (n_sentences > 1)
    return (n_sentences >= fewest) & ~has_any(sizes < 1) & ~too_long
