"""Conversations in a `.bin/.idx` pair: the tokens of each conversation, and a mask of the tokens to learn.

A conversation is a document of alternating sequences: the tokens of the first do not count in the loss, those of the
second do, those of the third do not, and so on. No sequence is empty, so at least one token of a conversation counts in
the loss. The first token never does, because no earlier token could predict it.

    | User:\\nHi<end>Assistant:\\n | Hello<end> | User:\\nBye<end>Assistant:\\n | See you<end> | \\n |
      sequence 0: no loss           1: loss       2: no loss                   3: loss         4: no loss

Megatron's formats cannot mark the tokens that count in the loss. Only the record (`record.py`, `chat`) shows that the
documents are conversations. Without the record, conversations look like documents of several sentences.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dtmega.data.indexed_files import record
from dtmega.data.indexed_files.dataset import CHUNK, IndexedDataset


class Conversation(NamedTuple):
    """The tokens of one conversation.

    Attributes:
        tokens: ids of all tokens, a read-only view of the file, [length].
        learns: mask of the tokens that count in the loss, bool [length]; the first entry is always False.
    """

    tokens: NDArray[Any]
    learns: NDArray[np.bool_]


class Conversations:
    """The conversations of a data set, checked when opened.

        conversations = Conversations(IndexedDataset("data/chat"))
        tokens, learns = conversations[3]
        labels = np.where(learns, tokens.astype(np.int64), IGNORED)  # labels of these tokens, not yet shifted by one

    Args:
        dataset: data set that `dtmega tokenize --chat` has written.

    Attributes:
        dataset: the data set.
        record: entry `chat` of the data set's record.
        lengths: number of tokens in each conversation, int64 [n].
        first_learned: index of each conversation's first token that counts in the loss, int64 [n], at least 1. If
            L > first_learned, a conversation's first L tokens include a token to learn.

    Raises:
        ValueError: the data set has no record of conversations, or its sequences or its number of learned tokens
            contradict the record.
    """

    def __init__(self, dataset: IndexedDataset) -> None:
        record.check_conversations(dataset, True)
        self.dataset, self.record = dataset, chat_of(dataset)
        starts = np.asarray(dataset.document_index)
        self._check(starts)
        bounds = dataset.tokens_before(starts)
        self.lengths: NDArray[np.int64] = np.diff(bounds)
        self.first_learned: NDArray[np.int64] = dataset.sizes[starts[:-1]].astype(np.int64)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, i: int) -> Conversation:
        """The tokens of conversation i, and the mask of the tokens that count in the loss.

        Raises:
            IndexError: there is no conversation i.
        """
        if not 0 <= i < len(self):
            raise IndexError(f"{self.dataset.prefix}: conversation {i} of {len(self)}")
        first, end = self.dataset.document_index[i : i + 2]
        sizes = self.dataset.sizes[first:end]
        start, stop = self.dataset.tokens_before(np.array([first, end]))
        bears_loss = np.arange(len(sizes)) % 2 == 1
        return Conversation(self.dataset.tokens[start:stop], np.repeat(bears_loss, sizes))

    def _check(self, starts: NDArray[np.int64]) -> None:
        """Check the number and sizes of the sequences, and the number of learned tokens.

        Args:
            starts: index of each document's first sequence, followed by the number of sequences, [documents + 1].
        """
        path = f"{self.dataset.prefix}.idx"
        counts = np.diff(starts)
        if (counts < 2).any():
            i = int(np.argmax(counts < 2))
            raise ValueError(
                f"{path}: expected at least 2 sequences in each conversation, one without loss and one with loss, got "
                f"{counts[i]} in conversation {i}: tokenize the conversations again"
            )
        learned = 0
        for start in range(0, len(counts), CHUNK):
            piece = starts[start : start + CHUNK + 1]
            sizes = self.dataset.sizes[piece[0] : piece[-1]]
            if (sizes == 0).any():
                sequence = int(piece[0]) + int(np.argmax(sizes == 0))
                raise ValueError(
                    f"{path}: expected no empty sequence in conversations, got sequence {sequence}: tokenize the "
                    f"conversations again"
                )
            place = np.arange(piece[0], piece[-1]) - np.repeat(piece[:-1], np.diff(piece))
            learned += int(sizes[place % 2 == 1].sum(dtype=np.int64))
        if learned != self.record.learned:
            raise ValueError(
                f"{path}: expected {self.record.learned} tokens that bear loss, as {self.dataset.prefix}.meta.json "
                f"says, got {learned}: tokenize the conversations again"
            )


def chat_of(dataset: IndexedDataset) -> record.ChatRecord:
    """The entry `chat` in the record of a data set that has passed `record.check_conversations`."""
    made = record.record_of(dataset)
    assert made is not None
    assert made.chat is not None
    return made.chat


def check_same_chat(datasets: Sequence[IndexedDataset]) -> None:
    """Check that all data sets of conversations have the same template and the same `train_on`.

    Args:
        datasets: data sets that have passed `record.check_conversations`.

    Raises:
        ValueError: two data sets differ in template or `train_on`; the message names both data sets.
    """
    made: dict[tuple[str, str], str] = {}
    for dataset in datasets:
        chat = chat_of(dataset)
        made.setdefault((chat.template, chat.train_on), dataset.prefix)
    if len(made) > 1:
        (template, train_on), (other_template, other_train_on) = list(made)[:2]
        prefix, other = list(made.values())[:2]
        raise ValueError(
            f"{other}.bin: expected conversations in template {template} with --train-on {train_on}, as {prefix}.bin "
            f"has, got template {other_template} with --train-on {other_train_on}: tokenize both in the same way, or "
            f"train on one of them ([data] path)"
        )


def sequence_sizes(learns: NDArray[np.bool_]) -> list[int]:
    """The lengths in tokens of a conversation's alternating sequences, without and with loss.

    Args:
        learns: mask of the tokens that count in the loss, bool [length]. The first entry is False, and at least one
            entry is True.
    """
    assert not learns[0]
    assert learns.any()
    changes = np.flatnonzero(np.diff(learns)) + 1
    return np.diff(np.concatenate([[0], changes, [len(learns)]])).tolist()
