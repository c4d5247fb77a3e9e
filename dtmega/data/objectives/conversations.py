"""Conversations: a causal model learns only some turns, such as the answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dtmega.config import Data
from dtmega.data.indexed_files.conversations import Conversation, chat_of, check_same_chat
from dtmega.data.indexed_files.dataset import IndexedDataset
from dtmega.data.indexed_files.record import END_IDS
from dtmega.data.objectives.keys import READS
from dtmega.data.objectives.next_token import NextToken
from dtmega.data.objectives.rows import IGNORED, Rows, blank_rows, numbers
from dtmega.data.sampling.packs import Packs
from dtmega.data.sampling.samples import AnySamples
from dtmega.data.tokenizers.tokenizer import Tokenizer


class LearnedTurns(NextToken):
    """Cross-entropy of the tokens to learn in conversations, such as the answers, averaged over these tokens.

    A row holds whole conversations, and no token attends to another conversation, so packing does not change the loss.
    """

    aim = "answers in conversations"
    reads = READS["conversations"]
    conversations = True
    not_in_megatrons_order = "Megatron has no record of the tokens that bear loss"
    order = 1

    def samples(
        self, dataset: IndexedDataset, documents: tuple[int, int], data: Data, seed: int, split: str, corpus: int
    ) -> Packs:
        return Packs(dataset, documents, data, seed, split, corpus)

    def rows(self, samples: AnySamples, data: Data, tokenizer: Tokenizer) -> ConversationRows:
        return ConversationRows(samples, data, tokenizer.eod_id)

    def blank(self, data: Data, n_rows: int) -> dict[str, Tensor]:
        rows = blank_rows(n_rows, data.seq_len)
        if data.pack:
            # Number the positions as if each row held two conversations, so that models of transformers build the mask
            # that they use for packed rows.
            half = -(-data.seq_len // 2)
            rows["position_ids"] = rows["places"] % half
            rows["document_ids"] = rows["places"] // half
        return rows


@dataclass(frozen=True)
class ConversationRows(Rows):
    """Rows of whole conversations, followed by padding. A token has a label if the next token is to be learned.

    With [data] pack, additional tensors keep conversations apart:

    position_ids  int64 [B, S]  0, 1, ..., restarting at 0 in each conversation and in the padding
    document_ids  int64 [B, S]  0, 1, ...: index of each conversation in its row; the padding has the next index

    Without [data] pack, a row holds one conversation, and in a causal model no token of the conversation attends to the
    padding.
    """

    samples: AnySamples
    data: Data
    padding_id: int

    def __getitem__(self, indices: range) -> dict[str, Tensor]:
        shape = len(indices), self.data.seq_len
        tokens = np.full(shape, self.padding_id, np.int64)
        labels = np.full(shape, IGNORED, np.int64)
        positions = np.empty(shape, np.int64)
        documents = np.empty(shape, np.int64)
        for row, g in enumerate(indices):
            conversations: list[Conversation] = self.samples[g]
            start = 0
            for number, conversation in enumerate(conversations):
                ids, learns = conversation.tokens.astype(np.int64), conversation.learns
                place = slice(start, start + len(ids) - 1)
                tokens[row, place] = ids[:-1]
                labels[row, place] = np.where(learns[1:], ids[1:], IGNORED)
                positions[row, place] = np.arange(len(ids) - 1)
                documents[row, place] = number
                start = place.stop
            positions[row, start:] = np.arange(self.data.seq_len - start)
            documents[row, start:] = len(conversations)
        ids_of_rows = torch.from_numpy(tokens)
        rows = {"tokens": ids_of_rows, "labels": torch.from_numpy(labels), **numbers(indices, ids_of_rows)}
        if self.data.pack:
            rows["position_ids"] = torch.from_numpy(positions)
            rows["document_ids"] = torch.from_numpy(documents)
        return rows


def identity(opened: Sequence[IndexedDataset], trained: Sequence[IndexedDataset]) -> dict[str, Any]:
    """The additional entries of `Text.identity` for a run that reads conversations.

    Args:
        opened: all corpora of the run.
        trained: the corpora of its training data.

    Raises:
        ValueError: two corpora differ in their template or in the turns that they teach.
    """
    check_same_chat(opened)
    return {END_IDS: sorted({i for dataset in trained for i in chat_of(dataset).end_ids})}


CONVERSATIONS = LearnedTurns()
