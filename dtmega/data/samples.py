"""Which S + 1 tokens are sample g: a pure function of (seed, g), whatever was read before and however long the run is.

    samples = Samples(dataset, documents=(0, 1000), seq_len=256, seed=1234, split="train")
    samples[g]  # [S + 1] token ids

Documents are shuffled per epoch, laid end to end and cut into samples as Megatron's GPTDataset does, except that the
stream has no end: Megatron's shuffle depends on the number of samples the run asks for, so that a longer run reads
other data, and it needs a rule for the last epoch. Here there is no last epoch.
"""

from __future__ import annotations

import hashlib
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dtmega import keyed
from dtmega.data.indexed import IndexedDataset


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


class Samples:
    """The endless samples of one part of one corpus.

    Epoch e is the part's documents in an order keyed by (seed, e); the epochs, one after the other, are the stream.
    Stream sample i is tokens i S to i S + S, both included: samples overlap by one token, so that each token is
    predicted once, and cross documents and epochs. The samples that start in epoch e come in an order keyed by
    (seed, e) too, which is computed for each sample by itself. Only the last two epochs' documents are kept, 12 bytes
    per document each.

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
        count = self._first_sample(epoch + 1) - first
        i = first + keyed.permuted(g - first, count, f"{self._key(epoch)}/samples")
        tokens = self._read(epoch, i * self.seq_len - epoch * self.n_tokens, self.seq_len + 1)
        missing = self.seq_len + 1 - len(tokens)
        return np.concatenate([tokens, self._read(epoch + 1, 0, missing)]) if missing else tokens

    def __reduce__(self) -> tuple[type[Samples], tuple[Any, ...]]:
        # A worker process makes the epochs it needs for itself.
        return Samples, (self.dataset, self.documents, self.seq_len, self.seed, self.split, self.corpus)

    def _key(self, epoch: int) -> str:
        return f"{self.seed}/{self.split}/{self.corpus}/{epoch}"

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
            start, stop = self.documents
            documents = permutation(stop - start, f"{self._key(epoch)}/documents")
            starts = np.zeros(len(documents) + 1, np.int64)
            np.cumsum(np.diff(self._first_token(np.arange(start, stop + 1)))[documents], out=starts[1:])
            while len(self._epochs) > 1:  # two, because a sample may need the next epoch as well
                del self._epochs[next(iter(self._epochs))]
            self._epochs[epoch] = _Epoch(documents, starts)
        return self._epochs[epoch]

    def _read(self, epoch: int, offset: int, length: int) -> NDArray[Any]:
        """Tokens [length] of the epoch from `offset` on, fewer where it ends: at least one document's piece."""
        documents, starts = self._epoch(epoch)
        stop = min(offset + length, self.n_tokens)
        # "right" and "left" leave out the empty documents at both ends: Megatron's `_build_sample_idx` without a loop.
        a, b = np.searchsorted(starts, offset, "right") - 1, np.searchsorted(starts, stop, "left")
        cuts = starts[a : b + 1].clip(offset, stop)
        to_file = self._first_token(documents[a:b].astype(np.int64) + self.documents[0]) - starts[a:b]
        pieces = zip(cuts[:-1] + to_file, cuts[1:] + to_file, strict=True)
        return np.concatenate([self.dataset.tokens[begin:end] for begin, end in pieces])
