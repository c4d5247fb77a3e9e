"""Megatron's doc, sample and shuffle index of a corpus, to the integer: the order of samples that its GPTDataset reads.

    indices = index_of(Asked(dataset, sequences=(0, 1000), samples=3200, seq_len=256, seed=1234, cutoff=0.80))
    indices.shuffle[g]  # the sample of the stream that is sample g

Sequences of the .idx, as many epochs of them as the samples need, are shuffled together; laid end to end they are
the stream, of which sample k is tokens k S to k S + S, both included. Samples are shuffled too. Where the last epoch
gives less than a share of its samples (`cutoff`), it is shuffled apart from those before it, sequences and samples.

Source: `_build_index_mappings` and `build_sample_idx` in `megatron/data/gpt_dataset.py` and `helpers.cpp` of
Megatron-LM (2022) and BigScience's Megatron-DeepSpeed, `_build_document_sample_shuffle_indices` in megatron-core's
`datasets/gpt_dataset.py`. They go through the tokens sample by sample; where token k S lies is here looked up for many
k at once.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from dtmega.data import cache_dir
from dtmega.data.indexed_files.dataset import CHUNK, IndexedDataset
from dtmega.data.indexed_files.shared_file import SharedFile, index_path, index_state

FORMAT = 1  # raise it when the same arguments give other indices
LONG = 1 << 20  # entries from which on indices are worth a file: below, they are made in 0.1 s
SEQUENCES = 1 << 17  # that are gone through at a time, which bounds the memory
INT32 = np.iinfo(np.int32).max
UINT32 = np.iinfo(np.uint32).max
DIGESTED = 64  # runs of entries of each index that tell one order from another ...
RUN = 1 << 12  # ... and their length


class Asked(NamedTuple):
    """The things that an order is a function of.

    Attributes:
        sequences: (start, stop) in the .idx.
        samples: how many are wanted at least.
        cutoff: share of an epoch's samples that the last epoch has at least if it is shuffled with the others.
    """

    dataset: IndexedDataset
    sequences: tuple[int, int]
    samples: int
    seq_len: int
    seed: int
    cutoff: float

    @property
    def epoch_tokens(self) -> int:
        first, end = self.dataset.tokens_before(np.array(self.sequences))
        return int(end - first)


class Epochs(NamedTuple):
    """The number of times that a corpus is read.

    Attributes:
        n: epochs.
        samples: that fit into their tokens.
        first: of these, how many are shuffled together; all, or those that begin before the last epoch.
    """

    n: int
    samples: int
    first: int

    @property
    def last_apart(self) -> bool:
        return self.first < self.samples


class Indices(NamedTuple):
    """The three arrays as Megatron keeps them.

    Attributes:
        documents: int32 [epochs x sequences], sequences in the order of the stream ("doc_idx").
        samples: [samples + 1, 2] where each begins: an entry of `documents`, and a token of it ("sample_idx").
        shuffle: [samples] ("shuffle_idx").
    """

    documents: NDArray[Any]
    samples: NDArray[Any]
    shuffle: NDArray[Any]

    def digest(self) -> str:
        """16 hex digits of their lengths and of runs spread over them, whatever integers they are kept in."""
        found = xxhash.xxh3_64()
        for array in self:
            found.update(str(array.shape).encode())
            last = max(0, len(array) - RUN)
            for start in sorted({last * i // (DIGESTED - 1) for i in range(DIGESTED)}):
                found.update(array[start : start + RUN].astype(np.int64).tobytes())
        return found.hexdigest()


def epochs_of(asked: Asked) -> Epochs:
    """The epochs of a corpus that has tokens."""
    tokens, length = asked.epoch_tokens, asked.seq_len
    # The first n for which (n tokens - 1) // S samples, each with the token after its last, are enough.
    n = max(1, -(-(asked.samples * length + 1) // tokens))
    samples = (n * tokens - 1) // length
    if n == 1:
        return Epochs(n, samples, samples)
    before = ((n - 1) * tokens - 1) // length
    of_an_epoch = (tokens - 1) // length
    apart = asked.samples - before < int(asked.cutoff * of_an_epoch)
    return Epochs(n, samples, before if apart else samples)


def index_of(asked: Asked) -> Indices:
    """The order of a corpus. A long one is made once per node, in a file that every process there maps.

    Raises:
        ValueError: there are no tokens.
    """
    if not asked.epoch_tokens:
        raise ValueError(
            f"{asked.dataset.prefix}: no tokens in sequences {asked.sequences}, of which samples are wanted"
        )
    epochs = epochs_of(asked)
    n_entries = epochs.n * (asked.sequences[1] - asked.sequences[0])
    if n_entries + 3 * epochs.samples >= LONG:
        try:
            return _from_file(asked, epochs, n_entries)
        except (OSError, ValueError) as error:  # no cache directory, or no room in it
            print(f"dtmega: {error}: the order is kept in the memory of this process", file=sys.stderr)
    documents, *samples, shuffle = _pieces(asked, epochs)
    return Indices(documents, np.concatenate(samples), shuffle)


def _from_file(asked: Asked, epochs: Epochs, n_entries: int) -> Indices:
    """The indices in the cache directory, one behind the other.

    Raises:
        OSError, ValueError: no cache directory, or no room in it.
    """
    settings = f"{asked[1:]} {FORMAT}"
    name = hashlib.sha256(f"{index_path(asked.dataset)}/{settings}".encode()).hexdigest()[:16]
    path = cache_dir() / f"megatron-order-{name}.bin"
    about = f"ordering {epochs.samples} samples of {asked.dataset.prefix} as Megatron does"
    made_from = f"{index_state(asked.dataset)} {settings}"
    SharedFile(path, made_from, lambda: _pieces(asked, epochs), about).read_or_make()
    place, number = _sample_dtype(asked, n_entries), _shuffle_dtype(epochs.samples)
    documents = np.memmap(path, np.int32, "r", shape=(n_entries,))
    samples = np.memmap(path, place, "r", documents.nbytes, (epochs.samples + 1, 2))
    shuffle = np.memmap(path, number, "r", documents.nbytes + samples.nbytes, (epochs.samples,))
    return Indices(np.asarray(documents), np.asarray(samples), np.asarray(shuffle))


def _pieces(asked: Asked, epochs: Epochs) -> Iterator[NDArray[Any]]:
    """The doc index, the sample index in pieces, the shuffle index: in the order in which the generator is asked."""
    # RandomState, because NEP 19 froze its stream forever.
    random = np.random.RandomState(asked.seed)
    documents = _document_index(asked, epochs, random)
    yield documents
    yield from _sample_index(asked, epochs, documents)
    shuffle = np.arange(epochs.samples, dtype=_shuffle_dtype(epochs.samples))
    random.shuffle(shuffle[: epochs.first])
    if epochs.last_apart:
        random.shuffle(shuffle[epochs.first :])
    yield shuffle


def _document_index(asked: Asked, epochs: Epochs, random: np.random.RandomState) -> NDArray[np.int32]:
    once = np.arange(*asked.sequences, dtype=np.int32)
    documents = np.tile(once, epochs.n)
    together = len(documents) - len(once) if epochs.last_apart else len(documents)
    random.shuffle(documents[:together])
    if epochs.last_apart:
        random.shuffle(documents[together:])
    return documents


def _sample_index(asked: Asked, epochs: Epochs, documents: NDArray[np.int32]) -> Iterator[NDArray[Any]]:
    """[samples + 1, 2] in pieces: the entry in which token k S of the stream lies, and its place there."""
    dtype = _sample_dtype(asked, len(documents))
    sizes = asked.dataset.sizes
    tokens = 0  # of the entries before those that are gone through
    k = 0
    for first in range(0, len(documents), SEQUENCES):
        lengths = sizes[documents[first : first + SEQUENCES]].astype(np.int64)
        ends = tokens + np.cumsum(lengths)
        tokens = int(ends[-1])
        stop = min(epochs.samples + 1, -(-tokens // asked.seq_len))
        # Some at a time too: sequences may be long.
        for start in range(k, stop, CHUNK):
            places = np.arange(start, min(start + CHUNK, stop)) * asked.seq_len
            entries = np.searchsorted(ends, places, "right")
            offsets = places - (ends[entries] - lengths[entries])
            piece = np.stack([first + entries, offsets], 1).astype(dtype)
            if start == 0:
                piece[0] = 0  # Megatron's begins with the first entry, also where that has no tokens
            yield piece
        k = max(k, stop)


def _sample_dtype(asked: Asked, n_entries: int) -> np.dtype[Any]:
    largest = max(n_entries, int(asked.dataset.sizes.max()))
    return np.dtype(np.int32 if largest <= INT32 else np.int64)


def _shuffle_dtype(n: int) -> np.dtype[Any]:
    return np.dtype(np.uint32 if n < UINT32 - 1 else np.int64)
