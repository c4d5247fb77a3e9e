"""Megatron's doc, sample and shuffle indices of a corpus: the exact order in which Megatron's GPTDataset reads samples.

    indices = index_of(OrderSettings(dataset, sequences=(0, 1000), samples=3200, seq_len=256, seed=1234, cutoff=0.80))
    indices.shuffle[g]  # index of sample g in the stream

The sequences of the .idx are repeated for as many epochs as the samples need, shuffled together and joined into one
stream. Sample k of the stream consists of the tokens `k * S` to `k * S + S`, inclusive. The samples are shuffled too.
If the run needs only a small part of the last epoch's samples (a share below `cutoff`), that epoch's sequences and
samples are shuffled separately.

Sources: `_build_index_mappings` and `build_sample_idx` in `megatron/data/gpt_dataset.py` and `helpers.cpp` of
Megatron-LM (2022) and of BigScience's Megatron-DeepSpeed; `_build_document_sample_shuffle_indices` in megatron-core's
`datasets/gpt_dataset.py`. Megatron walks through the tokens sample by sample. This file looks up token `k * S`, the
first token of sample k, for many k at once.
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
from dtmega.data.indexed_files.shared_file import SharedFile

FORMAT = 1  # increase this number when a change alters the indices for the same settings
LONG = 1 << 20  # indices with at least this many entries are kept in a file; smaller indices are computed in 0.1 s
SEQUENCES_AT_ONCE = 1 << 17  # number of sequences processed at a time, which bounds the memory
INT32 = np.iinfo(np.int32).max
UINT32 = np.iinfo(np.uint32).max
N_RUNS = 64  # number of ranges of entries that a digest reads from each index
RUN_ENTRIES = 1 << 12  # number of entries in each of these ranges


class OrderSettings(NamedTuple):
    """The settings that determine the sample order of a corpus.

    Attributes:
        dataset: the corpus.
        sequences: range (start, stop) of the sequences to read from the .idx.
        samples: minimum number of samples.
        seq_len: S, number of tokens that a model reads; a sample has one token more.
        seed: value of Megatron's `--seed`.
        cutoff: share of an epoch's samples. If the order needs less than this share of the last epoch, that epoch is
            shuffled separately.
    """

    dataset: IndexedDataset
    sequences: tuple[int, int]
    samples: int
    seq_len: int
    seed: int
    cutoff: float

    @property
    def epoch_tokens(self) -> int:
        """Number of tokens in an epoch."""
        first, end = self.dataset.tokens_before(np.array(self.sequences))
        return int(end - first)


class Epochs(NamedTuple):
    """The epochs that an order needs.

    Attributes:
        n: number of epochs.
        samples: number of samples in these epochs.
        first: number of samples that are shuffled together: all samples, or only the samples before the last epoch.
    """

    n: int
    samples: int
    first: int

    @property
    def last_apart(self) -> bool:
        """True if the last epoch is shuffled separately."""
        return self.first < self.samples


class Indices(NamedTuple):
    """Megatron's three index arrays.

    Attributes:
        documents: sequence indices in stream order, int32 [epochs x sequences] ("doc_idx").
        samples: start of each stream sample, int32 or int64 [samples + 1, 2]: an index into `documents`, and a token
            offset in the sequence at this index ("sample_idx").
        shuffle: indices of the stream's samples in reading order, uint32 or int64 [samples]: sample g is stream sample
            shuffle[g] ("shuffle_idx").
    """

    documents: NDArray[Any]
    samples: NDArray[Any]
    shuffle: NDArray[Any]

    def digest(self) -> str:
        """Hash the arrays' shapes and some ranges of the arrays' entries to 16 hex digits. Dtypes do not matter."""
        digest = xxhash.xxh3_64()
        for array in self:
            digest.update(str(array.shape).encode())
            last_start = max(0, len(array) - RUN_ENTRIES)
            for start in sorted({last_start * i // (N_RUNS - 1) for i in range(N_RUNS)}):
                digest.update(array[start : start + RUN_ENTRIES].astype(np.int64).tobytes())
        return digest.hexdigest()


def epochs_of(settings: OrderSettings) -> Epochs:
    """Compute the epochs that the samples need. The corpus must have tokens."""
    tokens, length = settings.epoch_tokens, settings.seq_len
    # The smallest n for which (n tokens - 1) // S >= samples; 1 is subtracted because a sample has S + 1 tokens.
    n = max(1, -(-(settings.samples * length + 1) // tokens))
    samples = (n * tokens - 1) // length
    if n == 1:
        return Epochs(n, samples, samples)
    before = ((n - 1) * tokens - 1) // length
    per_epoch = (tokens - 1) // length
    apart = settings.samples - before < int(settings.cutoff * per_epoch)
    return Epochs(n, samples, before if apart else samples)


def index_of(settings: OrderSettings) -> Indices:
    """The indices of a corpus. Long indices are stored once per node, in a file that all processes map.

    Raises:
        ValueError: the sequences have no tokens.
    """
    if not settings.epoch_tokens:
        raise ValueError(f"{settings.dataset.prefix}: no tokens in sequences {settings.sequences}, so no samples")
    epochs = epochs_of(settings)
    n_entries = epochs.n * (settings.sequences[1] - settings.sequences[0])
    if n_entries + 3 * epochs.samples >= LONG:
        try:
            return _from_file(settings, epochs, n_entries)
        except (OSError, ValueError) as error:  # no cache directory is writable, or the disk is full
            print(f"dtmega: {error}: the order is kept in the memory of this process", file=sys.stderr)
    documents, *samples, shuffle = _pieces(settings, epochs)
    return Indices(documents, np.concatenate(samples), shuffle)


def _from_file(settings: OrderSettings, epochs: Epochs, n_entries: int) -> Indices:
    """Memory-map the indices from a file in the cache directory; create the file first if it is missing.

    The file holds the three arrays one after another.

    Raises:
        OSError, ValueError: no cache directory is writable, or the disk is full.
    """
    version = f"{settings[1:]} {FORMAT}"
    name = hashlib.sha256(f"{settings.dataset.index_path}/{version}".encode()).hexdigest()[:16]
    path = cache_dir() / f"megatron-order-{name}.bin"
    about = f"ordering {epochs.samples} samples of {settings.dataset.prefix} as Megatron does"
    made_from = f"{settings.dataset.index_state} {version}"
    SharedFile(path, made_from, lambda: _pieces(settings, epochs), about).read_or_make()
    sample_dtype = _sample_dtype(settings, n_entries)
    shuffle_dtype = _shuffle_dtype(epochs.samples)
    documents = np.memmap(path, np.int32, "r", shape=(n_entries,))
    samples = np.memmap(path, sample_dtype, "r", documents.nbytes, (epochs.samples + 1, 2))
    shuffle = np.memmap(path, shuffle_dtype, "r", documents.nbytes + samples.nbytes, (epochs.samples,))
    return Indices(np.asarray(documents), np.asarray(samples), np.asarray(shuffle))


def _pieces(settings: OrderSettings, epochs: Epochs) -> Iterator[NDArray[Any]]:
    """Yield the doc index, the sample index in chunks, and the shuffle index: Megatron's order of random draws."""
    # Megatron also uses RandomState. NEP 19 guarantees that the stream of RandomState never changes.
    random = np.random.RandomState(settings.seed)
    documents = _document_index(settings, epochs, random)
    yield documents
    yield from _sample_index(settings, epochs, documents)
    shuffle = np.arange(epochs.samples, dtype=_shuffle_dtype(epochs.samples))
    random.shuffle(shuffle[: epochs.first])
    if epochs.last_apart:
        random.shuffle(shuffle[epochs.first :])
    yield shuffle


def _document_index(settings: OrderSettings, epochs: Epochs, random: np.random.RandomState) -> NDArray[np.int32]:
    """The doc index, [epochs x sequences]."""
    once = np.arange(*settings.sequences, dtype=np.int32)
    documents = np.tile(once, epochs.n)
    together = len(documents) - len(once) if epochs.last_apart else len(documents)
    random.shuffle(documents[:together])
    if epochs.last_apart:
        random.shuffle(documents[together:])
    return documents


def _sample_index(settings: OrderSettings, epochs: Epochs, documents: NDArray[np.int32]) -> Iterator[NDArray[Any]]:
    """Yield the sample index in chunks [m, 2].

    Row k holds two numbers for token `k * S` of the stream: the index of the entry in `documents` whose sequence
    contains the token, and the token's offset in that sequence.
    """
    dtype = _sample_dtype(settings, len(documents))
    sizes = settings.dataset.sizes
    tokens = 0  # number of tokens in the entries processed so far
    k = 0  # index of the stream's next sample
    for first in range(0, len(documents), SEQUENCES_AT_ONCE):
        lengths = sizes[documents[first : first + SEQUENCES_AT_ONCE]].astype(np.int64)
        ends = tokens + np.cumsum(lengths)
        tokens = int(ends[-1])
        stop = min(epochs.samples + 1, -(-tokens // settings.seq_len))
        # A few long sequences can hold very many samples, so the samples are made in chunks too.
        for start in range(k, stop, CHUNK):
            places = np.arange(start, min(start + CHUNK, stop)) * settings.seq_len
            entries = np.searchsorted(ends, places, "right")
            offsets = places - (ends[entries] - lengths[entries])
            piece = np.stack([first + entries, offsets], 1).astype(dtype)
            if start == 0:
                piece[0] = 0  # Megatron's index begins with the first entry even if this entry has no tokens
            yield piece
        k = max(k, stop)


def _sample_dtype(settings: OrderSettings, n_entries: int) -> np.dtype[Any]:
    """The dtype that Megatron chooses for a sample index."""
    largest = max(n_entries, int(settings.dataset.sizes.max()))
    return np.dtype(np.int32 if largest <= INT32 else np.int64)


def _shuffle_dtype(n: int) -> np.dtype[Any]:
    """The dtype that Megatron chooses for a shuffle index of n samples."""
    return np.dtype(np.uint32 if n < UINT32 - 1 else np.int64)
