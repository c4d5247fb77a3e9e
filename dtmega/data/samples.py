"""Which S + 1 tokens are sample g: a pure function of (seed, g), whatever was read before and however long the run is.

    samples = build_samples(config.data, prefixes, config.run.seed)
    samples["train"][g]  # [S + 1] token ids

Documents are shuffled per epoch, laid end to end and cut into samples as Megatron's GPTDataset does, except that the
stream has no end: Megatron's shuffle depends on the number of samples the run asks for, so that a longer run reads
other data, and it needs a rule for the last epoch. Here there is no last epoch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dtmega.config import Data
from dtmega.data.indexed import IndexedDataset

SPLITS = ("train", "valid", "test")
BLEND_BLOCK = 1 << 17  # samples after which a blend repeats its order of corpora


def split_documents(n_documents: int, weights: Sequence[float]) -> list[tuple[int, int]]:
    """A (start, stop) range of documents for each weight, rounded as Megatron's `get_train_valid_test_split_` does."""
    total = sum(weights)
    bounds = [0]
    for weight in weights:
        bounds.append(bounds[-1] + round(weight / total * n_documents))
    surplus = bounds[-1] - n_documents
    bounds[1:] = [bound - surplus for bound in bounds[1:]]
    return list(pairwise(bounds))


def permutation(n: int, key: str) -> NDArray[Any]:
    """The numbers 0 to n - 1 in an order that is a function of (n, key); 4 bytes each as long as they fit."""
    numbers = np.arange(n, dtype=np.uint32 if n <= 2**32 else np.int64)
    seed = np.frombuffer(hashlib.blake2b(key.encode(), digest_size=16).digest(), "<u4")
    # RandomState, because NEP 19 froze its stream forever; a Generator may change with numpy's version.
    np.random.RandomState(seed).shuffle(numbers)
    return numbers


class _Epoch(NamedTuple):
    documents: NDArray[Any]  # [n] in the order of the stream, counted from the part's first
    starts: NDArray[np.int64]  # [n + 1] tokens of the epoch before each document, then all of them
    shuffle: NDArray[Any]  # [samples that start in the epoch] their order


class Samples:
    """The endless samples of one part of one corpus.

    Epoch e is the part's documents in an order keyed by (seed, e); the epochs, one after the other, are the stream.
    Stream sample i is tokens i S to i S + S, both included: samples overlap by one token, so that each token is
    predicted once, and cross documents and epochs. The samples that start in epoch e come in an order keyed by
    (seed, e) too. Only the last two epochs' orders are kept, 12 bytes per document and 4 per sample each.

    Args:
        documents: (start, stop) in the data set's document index; a document may be several sequences.
        split: "train", "valid" or "test"; with `corpus`, the position in a blend, it gives each part its own shuffle.

    Raises:
        ValueError: the part has no S + 1 tokens.
    """

    def __init__(
        self, dataset: IndexedDataset, documents: tuple[int, int], seq_len: int, seed: int, split: str, corpus: int = 0
    ) -> None:
        self.dataset, self.documents, self.seq_len = dataset, documents, seq_len
        self.seed, self.split, self.corpus = seed, split, corpus
        begin, end = self._first_token(np.array(documents))
        self.n_tokens = int(end - begin)
        if self.n_tokens <= seq_len:
            raise ValueError(
                f"{dataset.prefix}: expected at least seq_len + 1 = {seq_len + 1} tokens for '{split}', got "
                f"{max(self.n_tokens, 0)} in {max(documents[1] - documents[0], 0)} of {len(dataset.document_index) - 1}"
                f" documents; give it more text, a shorter [data] seq_len or another [data] split"
            )
        self._epochs: dict[int, _Epoch] = {}

    def __getitem__(self, g: int) -> NDArray[Any]:
        """Tokens [S + 1] of sample g >= 0, in the data set's dtype."""
        if g < 0:
            raise IndexError(f"sample {g}: samples are numbered from 0")
        epoch = g * self.seq_len // self.n_tokens
        first = self._first_sample(epoch)
        i = first + int(self._epoch(epoch).shuffle[g - first])
        tokens = self._read(epoch, i * self.seq_len - epoch * self.n_tokens, self.seq_len + 1)
        missing = self.seq_len + 1 - len(tokens)
        return np.concatenate([tokens, self._read(epoch + 1, 0, missing)]) if missing else tokens

    def __reduce__(self) -> tuple[type[Samples], tuple[Any, ...]]:
        # A worker process makes the epochs it needs for itself.
        return Samples, (self.dataset, self.documents, self.seq_len, self.seed, self.split, self.corpus)

    def _first_sample(self, epoch: int) -> int:
        """The first stream sample that starts in the epoch: ceil(epoch n_tokens / S)."""
        return -(-epoch * self.n_tokens // self.seq_len)

    def _first_token(self, documents: NDArray[Any]) -> NDArray[np.int64]:
        """Where documents start in the .bin file, in tokens; where it ends for one past the last."""
        sequences = self.dataset.document_index[documents]
        starts = np.full(len(sequences), self.dataset.n_tokens)
        inside = sequences < len(self.dataset)
        starts[inside] = self.dataset.pointers[sequences[inside]] // self.dataset.dtype.itemsize
        return starts

    def _epoch(self, epoch: int) -> _Epoch:
        if epoch not in self._epochs:
            key = f"{self.seed}/{self.split}/{self.corpus}/{epoch}"
            start, stop = self.documents
            documents = permutation(stop - start, f"{key}/documents")
            starts = np.zeros(len(documents) + 1, np.int64)
            np.cumsum(np.diff(self._first_token(np.arange(start, stop + 1)))[documents], out=starts[1:])
            shuffle = permutation(self._first_sample(epoch + 1) - self._first_sample(epoch), f"{key}/samples")
            while len(self._epochs) > 1:  # two, because a sample may need the next epoch as well
                del self._epochs[next(iter(self._epochs))]
            self._epochs[epoch] = _Epoch(documents, starts, shuffle)
        return self._epochs[epoch]

    def _read(self, epoch: int, offset: int, length: int) -> NDArray[Any]:
        """Tokens [length] of the epoch from `offset` on, fewer where it ends: at least one document's piece."""
        documents, starts, _ = self._epoch(epoch)
        stop = min(offset + length, self.n_tokens)
        # "right" and "left" leave out the empty documents at both ends: Megatron's `_build_sample_idx` without a loop.
        a, b = np.searchsorted(starts, offset, "right") - 1, np.searchsorted(starts, stop, "left")
        cuts = starts[a : b + 1].clip(offset, stop)
        to_file = self._first_token(documents[a:b].astype(np.int64) + self.documents[0]) - starts[a:b]
        pieces = zip(cuts[:-1] + to_file, cuts[1:] + to_file, strict=True)
        return np.concatenate([self.dataset.tokens[begin:end] for begin, end in pieces])


def blend_order(weights: NDArray[np.float64], n: int) -> tuple[NDArray[Any], NDArray[np.int32]]:
    """Which corpus gives each of n samples, and how many it gave before: Megatron's `build_blending_indices`.

    Sample i goes to the corpus that is furthest behind its share, the first of them on a tie:
    argmax_k weights_k max(i, 1) - count_k.
    """
    corpora, counts_before = np.empty(n, np.min_scalar_type(len(weights))), np.empty(n, np.int32)
    counts, behind = np.zeros(len(weights)), np.empty(len(weights))
    for i in range(n):
        np.multiply(weights, max(i, 1), out=behind)
        behind -= counts
        k = behind.argmax()
        corpora[i], counts_before[i] = k, counts[k]
        counts[k] += 1
    return corpora, counts_before


class Blend:
    """Samples of several corpora, mixed by weight; endless and pure like each of them.

    The order of corpora is Megatron's greedy one for 2^17 samples and then repeats, while each corpus goes on where it
    was. The greedy rule alone makes sample g depend on all before it, so that Megatron computes the whole run's order
    with a compiled helper; repeating it makes a lookup O(1). Weights then hold to within one sample in 2^17.

    Args:
        weights: one positive number per part, normalised here; empty = by number of tokens.
    """

    def __init__(self, parts: Sequence[Samples], weights: Sequence[float]) -> None:
        self.parts = list(parts)
        self.n_tokens = sum(part.n_tokens for part in parts)
        shares = np.array(weights or [part.n_tokens for part in parts], np.float64)
        self._corpora, self._counts_before = blend_order(shares / shares.sum(), BLEND_BLOCK)
        self._counts = np.bincount(self._corpora, minlength=len(parts))

    def __getitem__(self, g: int) -> NDArray[Any]:
        """Tokens [S + 1] of sample g >= 0, in the dtype of the corpus it comes from."""
        if g < 0:
            raise IndexError(f"sample {g}: samples are numbered from 0")
        block, i = divmod(g, BLEND_BLOCK)
        k = self._corpora[i]
        return self.parts[k][block * int(self._counts[k]) + int(self._counts_before[i])]


def build_samples(data: Data, prefixes: Sequence[str], seed: int) -> dict[str, Samples | Blend | None]:
    """The samples of "train", "valid" and "test"; None where `[data] split` has weight 0.

    Each corpus is split by document, then the parts of the same name are blended by `[data] weights`.

    Raises:
        ValueError: a file is missing or damaged, or a part with a weight has less than one sample.
    """
    datasets = [IndexedDataset(prefix) for prefix in prefixes]
    ranges = [split_documents(len(dataset.document_index) - 1, data.split_weights) for dataset in datasets]
    built: dict[str, Samples | Blend | None] = dict.fromkeys(SPLITS)
    for s, split in enumerate(SPLITS):
        if data.split_weights[s] > 0:
            parts = [
                Samples(dataset, ranges[corpus][s], data.seq_len, seed, split, corpus)
                for corpus, dataset in enumerate(datasets)
            ]
            built[split] = parts[0] if len(parts) == 1 else Blend(parts, data.weights)
    return built
