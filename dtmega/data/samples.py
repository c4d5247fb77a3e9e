"""The S + 1 tokens of sample g, a pure function of (seed, g), whatever was read before and however long the run is.

    samples = Samples(dataset, documents=(0, 1000), seq_len=256, seed=1234, split="train")
    samples[g]  # [S + 1] token ids

Documents are shuffled per epoch, laid end to end and cut into samples as Megatron's GPTDataset does, except that the
stream has no end: Megatron's shuffle depends on the number of samples the run asks for, so that a longer run reads
other data, and it needs a rule for the last epoch. Here there is no last epoch.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from dtmega import keyed
from dtmega.data.indexed import IndexedDataset
from dtmega.data.order import Order, document_order
from dtmega.output import counted


class AnySamples(Protocol):
    """The endless samples of one part of one corpus, or of several of them mixed, as some objective reads them.

    Attributes:
        n_tokens: of an epoch.
        n_samples: of an epoch; no whole number where samples run from one into the next.
        note: for people, '' where there is nothing to say.
    """

    @property
    def n_tokens(self) -> int: ...

    @property
    def n_samples(self) -> float: ...

    @property
    def note(self) -> str: ...

    def __getitem__(self, g: int) -> Any:
        """Sample g >= 0, a pure function of g."""
        ...


class Samples:
    """The endless samples of one part of one corpus.

    Epoch e is the part's documents in an order keyed by (seed, e); the epochs, one after the other, are the stream.
    Stream sample i is tokens i S to i S + S, both included: samples overlap by one token, so that each token is
    predicted once, and cross documents and epochs. The samples that start in epoch e come in an order keyed by
    (seed, e) too, which is computed for each sample by itself. Only the last two epochs' orders of documents are
    kept, see `order.py`.

    Args:
        documents: (start, stop) in the data set's document index; a document may be several sequences.
        split: "train", "valid" or "test"; with `corpus`, the position in a blend, it gives each part its own shuffle.

    Raises:
        ValueError: the part has no S + 1 tokens.
    """

    note = ""

    def __init__(
        self, dataset: IndexedDataset, documents: tuple[int, int], seq_len: int, seed: int, split: str, corpus: int = 0
    ) -> None:
        self.dataset, self.documents, self.seq_len = dataset, documents, seq_len
        self.seed, self.split, self.corpus = seed, split, corpus
        self._stream = f"{seed}/{split}/{corpus}"
        begin, end = dataset.first_token(np.array(documents))
        self.n_tokens = int(end - begin)
        if self.n_tokens <= seq_len:
            there = counted(len(dataset.document_index) - 1, "document")
            raise ValueError(
                f"{dataset.prefix}: expected at least {seq_len} + 1 = {seq_len + 1} tokens for '{split}', got "
                f"{counted(max(self.n_tokens, 0), 'token')} in {max(documents[1] - documents[0], 0)} of {there}. "
                f"[data] split deals out whole documents: cut the text into more of them (python -m dtmega tokenize "
                f"--split-documents), or leave a part out ([data] split = '1,0,0': all to train); or take a shorter "
                f"[data] seq_len or more text"
            )
        self._epochs: dict[int, Order] = {}

    @property
    def n_samples(self) -> float:
        return self.n_tokens / self.seq_len

    def __getitem__(self, g: int) -> Any:
        return self.tokens(g)

    def tokens(self, g: int) -> NDArray[Any]:
        """Tokens [S + 1] of sample g >= 0, in the data set's dtype."""
        if g < 0:
            raise IndexError(f"sample {g}: samples are numbered from 0")
        epoch = g * self.seq_len // self.n_tokens
        first = self._first_sample(epoch)
        count = self._first_sample(epoch + 1) - first
        i = first + keyed.permuted(g - first, count, f"{self._stream}/{epoch}/samples")
        tokens = self._read(epoch, i * self.seq_len - epoch * self.n_tokens, self.seq_len + 1)
        missing = self.seq_len + 1 - len(tokens)
        return np.concatenate([tokens, self._read(epoch + 1, 0, missing)]) if missing else tokens

    def __reduce__(self) -> tuple[type[Samples], tuple[Any, ...]]:
        # A worker process makes the epochs it needs for itself.
        return type(self), (self.dataset, self.documents, self.seq_len, self.seed, self.split, self.corpus)

    def _first_sample(self, epoch: int) -> int:
        """The first stream sample that starts in the epoch: ceil(epoch n_tokens / S)."""
        return -(-epoch * self.n_tokens // self.seq_len)

    def _epoch(self, epoch: int) -> Order:
        if epoch not in self._epochs:
            while len(self._epochs) > 1:  # two, because a sample may need the next epoch as well
                del self._epochs[next(iter(self._epochs))]
            self._epochs[epoch] = document_order(self.dataset, self.documents, self._stream, epoch)
        return self._epochs[epoch]

    def _read(self, epoch: int, offset: int, length: int) -> NDArray[Any]:
        """Tokens [length] of the epoch from `offset` on, fewer where it ends: at least one document's piece."""
        documents, starts = self._epoch(epoch)
        stop = min(offset + length, self.n_tokens)
        # "right" and "left" leave out the empty documents at both ends: Megatron's `_build_sample_idx` without a loop.
        a, b = np.searchsorted(starts, offset, "right") - 1, np.searchsorted(starts, stop, "left")
        cuts = starts[a : b + 1].clip(offset, stop)
        to_file = self.dataset.first_token(documents[a:b].astype(np.int64) + self.documents[0]) - starts[a:b]
        pieces = zip(cuts[:-1] + to_file, cuts[1:] + to_file, strict=True)
        return np.concatenate([self.dataset.tokens[begin:end] for begin, end in pieces])
