"""Rows (training samples) packed with whole conversations: the conversations of row g depend only on (seed, g).

    packs = Packs(dataset, documents=(0, 400), data=cfg.data, seed=1234, split="train")
    packs[g]  # the conversations of row g, each with its ids and the mask of tokens that bear loss

A row has room for S inputs. A conversation of L tokens needs room for L - 1 inputs, because its last token is never an
input. In each epoch, the conversations are shuffled and divided into windows of WINDOW conversations. Each conversation
of a window goes into the window's first row that still has enough room. The rows of an epoch are then shuffled.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dtmega.config import Data
from dtmega.data.indexed_files.conversations import Conversation, Conversations
from dtmega.data.indexed_files.dataset import IndexedDataset
from dtmega.data.sampling.order import permutation
from dtmega.files.console import counted
from dtmega.ops import keyed

WINDOW = 1024  # conversations packed together; a larger window fills rows slightly better, but packing takes longer


class Epoch(NamedTuple):
    """The rows of one epoch, before shuffling.

    Attributes:
        conversations: indices of the conversations, row by row, int64 [n].
        starts: index in `conversations` at which each row begins, followed by n, int64 [rows + 1].
    """

    conversations: NDArray[np.int64]
    starts: NDArray[np.int64]


class Packs:
    """An endless sequence of rows, filled with the conversations from one part of a corpus.

    Args:
        dataset: data set that `dtmega tokenize --chat` has written.
        documents: range (start, stop) of the data set's conversations.
        data: the configuration's [data] section.
        seed: the run's seed.
        split: "train", "valid" or "test"; `split` and `corpus` together give each part its own shuffle.
        corpus: position of the corpus in a blend.

    Attributes:
        n_tokens: number of tokens in an epoch's conversations, after long conversations have been truncated.
        n_samples: number of rows in the first epoch; later epochs may have a few rows more or fewer.
        note: line for the user about dropped or truncated conversations and about how full the rows are.

    Raises:
        ValueError: all conversations of the part are left out.
    """

    def __init__(
        self, dataset: IndexedDataset, documents: tuple[int, int], data: Data, seed: int, split: str, corpus: int = 0
    ) -> None:
        self._made_from = (dataset, documents, data, seed, split, corpus)
        self._conversations = Conversations(dataset)
        self._stream = f"{seed}/{split}/{corpus}"
        self._pack = data.pack
        self._longest = data.seq_len + 1
        part = slice(*documents)
        lengths = self._conversations.lengths[part]
        too_long = lengths > self._longest
        kept = ~too_long
        if data.too_long == "cut":
            kept |= self._conversations.first_learned[part] < self._longest
        self._kept: NDArray[np.int64] = documents[0] + np.flatnonzero(kept)
        self._lengths = np.minimum(lengths[kept], self._longest)
        if not len(self._kept):
            raise ValueError(
                f"{dataset.prefix}: expected a conversation for '{split}' of at most {data.seq_len} + 1 = "
                f"{self._longest} tokens{', or with a token to learn in these' if data.too_long == 'cut' else ''}, got "
                f"none of {counted(len(lengths), 'conversation')} ([data] seq_len, too_long, split)"
            )
        self.n_tokens = int(self._lengths.sum())
        self._firsts = [0]  # number of rows before each epoch
        self._newest = -1, Epoch(np.empty(0, np.int64), np.zeros(1, np.int64))
        self.n_samples = self.first_row(1)
        n_cut = int((too_long & kept).sum())
        self.note = self._describe(split, len(lengths), n_cut)

    def _describe(self, split: str, n_all: int, n_cut: int) -> str:
        """Return the text of `note`: a line for the user about the conversations that an epoch reads."""
        inputs = self.n_tokens - len(self._kept)
        share = inputs / (self.n_samples * (self._longest - 1))
        left_out = n_all - len(self._kept)
        parts = [f"{split}: {counted(len(self._kept), 'conversation')} in {counted(self.n_samples, 'row')}"]
        parts.append(f"{share:.0%} full")
        if left_out:
            parts.append(f"{left_out:,} left out, longer than S + 1 = {self._longest} tokens ([data] too_long)")
        if n_cut:
            parts.append(f"{n_cut:,} cut to {self._longest} tokens ([data] too_long)")
        return ", ".join(parts)

    def first_row(self, epoch: int) -> int:
        """Number of rows before an epoch."""
        while len(self._firsts) <= epoch:
            rows = len(self._epoch(len(self._firsts) - 1).starts) - 1
            self._firsts.append(self._firsts[-1] + rows)
        return self._firsts[epoch]

    def __getitem__(self, g: int) -> list[Conversation]:
        """The conversations of row g >= 0, each truncated to at most S + 1 tokens."""
        epoch = 0
        while self.first_row(epoch + 1) <= g:
            epoch += 1
        first, n_rows = self.first_row(epoch), self.first_row(epoch + 1) - self.first_row(epoch)
        row = keyed.permuted(g - first, n_rows, f"{self._stream}/{epoch}/rows")
        members, starts = self._epoch(epoch)
        found: list[Conversation] = []
        for i in members[starts[row] : starts[row + 1]]:
            tokens, learns = self._conversations[int(i)]
            found.append(Conversation(tokens[: self._longest], learns[: self._longest]))
        return found

    def __reduce__(self) -> tuple[type[Packs], tuple[Any, ...]]:
        # The tables are not pickled: a worker process computes the tables that it needs.
        return Packs, self._made_from

    def _epoch(self, epoch: int) -> Epoch:
        """The rows of an epoch. Only the most recently requested epoch's table is kept."""
        if self._newest[0] != epoch:
            order = permutation(len(self._kept), f"{self._stream}/{epoch}/documents").astype(np.int64)
            rows = self._row_of_each(self._lengths[order] - 1)
            by_row = np.argsort(rows, kind="stable")
            starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(np.bincount(rows))])
            self._newest = epoch, Epoch(self._kept[order[by_row]], starts)
        return self._newest[1]

    def _row_of_each(self, inputs: NDArray[np.int64]) -> NDArray[np.int64]:
        """Index of the row that each conversation goes into, [n].

        Args:
            inputs: number of inputs in each conversation, in the epoch's order, [n].
        """
        if not self._pack:
            return np.arange(len(inputs))
        rows = np.empty(len(inputs), np.int64)
        n_rows = 0
        for start in range(0, len(inputs), WINDOW):
            window = inputs[start : start + WINDOW]
            found = first_fit(window, self._longest - 1)
            rows[start : start + WINDOW] = n_rows + found
            n_rows += int(found.max()) + 1
        return rows


def first_fit(sizes: NDArray[np.int64], room: int) -> NDArray[np.int64]:
    """Put each item into the first box with enough room. Returns the index of each item's box, [n].

    Args:
        sizes: size of each item, at most `room`, [n].
        room: capacity of an empty box.
    """
    left = np.full(len(sizes), room)  # one box per item is always enough
    boxes = np.empty(len(sizes), np.int64)
    for i, size in enumerate(sizes.tolist()):
        box = int(np.argmax(left >= size))
        left[box] -= size
        boxes[i] = box
    return boxes
