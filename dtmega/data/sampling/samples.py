"""Samples of running text: the S + 1 tokens of sample g are a pure function of (seed, g).

The tokens depend neither on the samples that were read earlier nor on the length of the run.

    samples = Samples(dataset, documents=(0, 1000), seq_len=256, seed=1234, split="train")
    samples[g]  # [S + 1] token ids

Documents are shuffled in each epoch, concatenated and cut into samples, as in Megatron's GPTDataset, but the
stream of samples has no end. Megatron's shuffle depends on the number of samples that the run asks for, so
a longer run reads different data, and Megatron needs a special rule for the last epoch. Here there is no last epoch.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from dtmega.data.indexed_files.dataset import IndexedDataset
from dtmega.data.sampling.order import Order, document_order
from dtmega.files.console import counted
from dtmega.ops import keyed


class AnySamples(Protocol):
    """An endless sequence of samples from one part of a corpus or from a blend, in the form that an objective reads.

    Attributes:
        n_tokens: number of tokens in an epoch.
        n_samples: number of samples in an epoch; a fraction if samples cross from one epoch into the next.
        note: a line to show to the user; '' for no line.
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
    """An endless sequence of samples from one part of a corpus.

    Epoch e holds the part's documents in an order keyed by (seed, e). One stream joins all epochs. Stream sample i
    consists of tokens `i * S` to `i * S + S`, inclusive. Neighbouring samples overlap by one token, so that each token
    is predicted once. A sample may cross the bounds of documents and epochs.

    The samples that start in epoch e are delivered in an order that is also keyed by (seed, e). This order needs no
    table, because a sample's position is computed from its number. The orders of documents are tables (`order.py`);
    only the two newest tables are kept in memory.

    Args:
        dataset: the corpus.
        documents: range (start, stop) in the corpus's document index; a document may consist of several sequences.
        seq_len: S, number of tokens that the model reads; a sample has one token more.
        seed: the run's seed.
        split: "train", "valid" or "test"; `split` and `corpus` together give each part its own shuffle.
        corpus: position of the corpus in a blend.

    Raises:
        ValueError: the part has fewer than S + 1 tokens.
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
            n_tokens = counted(max(self.n_tokens, 0), "token")
            n_documents = max(documents[1] - documents[0], 0)
            all_documents = counted(len(dataset.document_index) - 1, "document")
            raise ValueError(
                f"{dataset.prefix}: expected at least {seq_len} + 1 = {seq_len + 1} tokens for '{split}', got "
                f"{n_tokens} in {n_documents} of {all_documents}. "
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
        # A stream sample is shuffled only among the samples that start in the same epoch.
        epoch = g * self.seq_len // self.n_tokens
        first = self._first_sample(epoch)
        count = self._first_sample(epoch + 1) - first
        i = first + keyed.permuted(g - first, count, f"{self._stream}/{epoch}/samples")
        tokens = self._read(epoch, i * self.seq_len - epoch * self.n_tokens, self.seq_len + 1)
        missing = self.seq_len + 1 - len(tokens)
        return np.concatenate([tokens, self._read(epoch + 1, 0, missing)]) if missing else tokens

    def __reduce__(self) -> tuple[type[Samples], tuple[Any, ...]]:
        # The orders of documents are not pickled: a worker process makes or maps the orders that it needs.
        return type(self), (self.dataset, self.documents, self.seq_len, self.seed, self.split, self.corpus)

    def _first_sample(self, epoch: int) -> int:
        """Number of the first stream sample that starts in the epoch: `ceil(epoch * n_tokens / S)`."""
        return -(-epoch * self.n_tokens // self.seq_len)

    def _epoch(self, epoch: int) -> Order:
        """The order of documents in an epoch."""
        if epoch not in self._epochs:
            # Keep two orders, because a sample may start in one epoch and end in the next.
            while len(self._epochs) > 1:
                del self._epochs[next(iter(self._epochs))]
            self._epochs[epoch] = document_order(self.dataset, self.documents, self._stream, epoch)
        return self._epochs[epoch]

    def _read(self, epoch: int, offset: int, length: int) -> NDArray[Any]:
        """Read `length` tokens of the epoch, starting at `offset`; fewer if the epoch ends first."""
        documents, starts = self._epoch(epoch)
        stop = min(offset + length, self.n_tokens)
        # Entries a to b - 1 of the order hold the tokens to read. The sides "right" and "left" skip empty documents at
        # both ends. Megatron's `_build_sample_idx` finds the same bounds with a loop.
        a = np.searchsorted(starts, offset, "right") - 1
        b = np.searchsorted(starts, stop, "left")
        # `cuts` are the bounds of the pieces in the epoch's stream. `to_file` holds each document's offset in the file
        # minus its offset in the stream.
        cuts = starts[a : b + 1].clip(offset, stop)
        to_file = self.dataset.first_token(documents[a:b].astype(np.int64) + self.documents[0]) - starts[a:b]
        pieces = zip(cuts[:-1] + to_file, cuts[1:] + to_file, strict=True)
        return np.concatenate([self.dataset.tokens[begin:end] for begin, end in pieces])
