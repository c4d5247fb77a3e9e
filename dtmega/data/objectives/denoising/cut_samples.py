"""Samples made of sentences. Each row of the table from `cut.py` gives one sample per epoch.

The sample order is keyed by (seed, epoch). `pairs.py` and `separate_spans.py` turn a row's sentences into a sample.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from dtmega.data.indexed_files.dataset import CHUNK, IndexedDataset
from dtmega.data.indexed_files.record import LONGEST_SENTENCE
from dtmega.data.objectives.denoising.cut import Targets, cut_table
from dtmega.files.console import counted
from dtmega.ops import keyed

SHORTEST = 2  # number of tokens in the shortest sample


class CutSamples(ABC):
    """An endless sequence of samples from one part of a sentence-split corpus.

    Args:
        dataset: the corpus.
        documents: range (start, stop) in the corpus's document index.
        seq_len: S, length of a sample with its special tokens.
        short_seq_prob: share of short samples, see `Targets`.
        seed: the run's seed.
        split: "train", "valid" or "test"; `split` and `corpus` together give each part random draws of its own.
        corpus: position of the corpus in a blend.

    Attributes:
        n_special: number of special tokens among the S tokens of a sample.
        fewest: minimum number of sentences in a sample.
        n_tokens: number of tokens that an epoch reads.
        n_samples: number of samples in an epoch.
        n_unread: number of the part's tokens that no epoch reads.
        note: a line for the user about text that is not read; '' if all text is read.
        stream: name of this part's random stream; all draws are functions of this name.

    Raises:
        ValueError: no document is usable, or `seq_len` is too small to hold any text.
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
        """The table row of sample g: first sentence, one past the last sentence, and target length in tokens."""
        if g < 0:
            raise IndexError(f"sample {g}: samples are numbered from 0")
        epoch, i = divmod(g, self.n_samples)
        entry = keyed.permuted(i, self.n_samples, f"{self.stream}/{epoch}/samples")
        return self._table[entry].tolist()

    def n_read(self, lengths: NDArray[np.int64], targets: NDArray[np.int64]) -> NDArray[np.int64]:
        """Number of tokens that an epoch reads from each sample, [n].

        By default, all tokens are read. A subclass may drop tokens, if it drops the same tokens in every epoch.

        Args:
            lengths: number of tokens in each sample's sentences, [n].
            targets: target lengths of the samples, [n].
        """
        return lengths

    def __reduce__(self) -> tuple[type[CutSamples], tuple[Any, ...]]:
        # The table is not pickled: a worker process computes the table again or maps the table's file.
        return type(self), self._arguments

    def _count_tokens(self) -> int:
        """Number of tokens that an epoch reads, computed from the table in chunks to limit memory use."""
        total = 0
        for start in range(0, self.n_samples, CHUNK):
            entries = self._table[start : start + CHUNK].astype(np.int64)
            bounds = self.dataset.tokens_before(entries[:, :2])
            total += int(self.n_read(bounds[:, 1] - bounds[:, 0], entries[:, 2]).sum())
        return total
