"""Samples of sentences: an epoch has each entry of the table of `cut.py` once, in an order keyed by (seed, epoch).

The samples made of the sentences of an entry are described in `pairs.py` and `separate_spans.py`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from dtmega import keyed
from dtmega.data.denoising.cut import Targets, cut_table
from dtmega.data.indexed import CHUNK, IndexedDataset
from dtmega.data.record import LONGEST_SENTENCE
from dtmega.output import counted

SHORTEST = 2  # tokens of the shortest sample


class CutSamples(ABC):
    """The endless samples of one part of one corpus.

    Args:
        documents: (start, stop) in the data set's document index; each sequence is a sentence.
        seq_len: S, of the samples with their special tokens.
        split, corpus: give each part its own draws, as in `Samples`.

    Attributes:
        n_special: places of S that are not for text.
        fewest: sentences in a sample.
        n_tokens, n_samples: of an epoch.
        n_unread: tokens of the documents that are in no sample.
        note: for people, which text is not read.
        stream: a name, different for each part; what is drawn is a function of it.

    Raises:
        ValueError: no document has so many sentences, or `seq_len` has no room.
    """

    n_special: ClassVar[int]
    fewest: ClassVar[int]

    def __init__(
        self,
        dataset: IndexedDataset,
        documents: tuple[int, int],
        seq_len: int,
        short_seq_prob: float,
        seed: int,
        split: str,
        corpus: int = 0,
    ) -> None:
        longest = seq_len - self.n_special
        if longest < SHORTEST:
            raise ValueError(
                f"seq_len={seq_len} has no room for {SHORTEST} tokens of text and {self.n_special} that are not text: "
                f"expected at least {SHORTEST + self.n_special} ([data] seq_len)"
            )
        self._arguments = (dataset, documents, seq_len, short_seq_prob, seed, split, corpus)
        self.dataset = dataset
        self.split = split
        self.stream = f"{seed}/{split}/{corpus}"
        self._table = cut_table(dataset, documents, Targets(longest, short_seq_prob, self.stream, self.fewest))
        self.n_samples = len(self._table)
        self.n_tokens = self._count_tokens()
        begin, end = dataset.first_token(np.array(documents))
        self.n_unread = int(end - begin) - self.n_tokens
        if not self.n_samples:
            raise ValueError(
                f"{dataset.prefix}: expected a document of at least {counted(self.fewest, 'sentence')} for '{split}', "
                f"each of 1 to {LONGEST_SENTENCE} tokens, got none among "
                f"{counted(documents[1] - documents[0], 'document')}. "
                f"[data] split deals out whole documents: leave a part out ([data] split = '1,0,0': all to train), or "
                f"take more text"
            )

    @property
    @abstractmethod
    def note(self) -> str: ...

    @abstractmethod
    def __getitem__(self, g: int) -> Any: ...

    def entry(self, g: int) -> list[int]:
        """First sentence of sample g, the one after its last, and the tokens that it should have."""
        if g < 0:
            raise IndexError(f"sample {g}: samples are numbered from 0")
        epoch, i = divmod(g, self.n_samples)
        entry = keyed.permuted(i, self.n_samples, f"{self.stream}/{epoch}/samples")
        return self._table[entry].tolist()

    def n_kept(self, lengths: NDArray[np.int64], targets: NDArray[np.int64]) -> NDArray[np.int64]:
        """The tokens of samples that some epoch reads, of all that stand in their sentences."""
        return lengths

    def __reduce__(self) -> tuple[type[CutSamples], tuple[Any, ...]]:
        # A worker process makes the table for itself, or maps its file.
        return type(self), self._arguments

    def _count_tokens(self) -> int:
        total = 0
        for start in range(0, self.n_samples, CHUNK):
            entries = self._table[start : start + CHUNK].astype(np.int64)
            bounds = self.dataset.tokens_before(entries[:, :2])
            total += int(self.n_kept(bounds[:, 1] - bounds[:, 0], entries[:, 2]).sum())
        return total
