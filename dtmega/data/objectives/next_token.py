"""Causal language models: each token of running text is predicted from the tokens before it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dtmega.config import Data
from dtmega.data.indexed_files.dataset import IndexedDataset
from dtmega.data.objectives.keys import READS
from dtmega.data.objectives.objective import labelled
from dtmega.data.objectives.rows import IGNORED, Rows, blank_rows, numbers
from dtmega.data.objectives.sums import Sum
from dtmega.data.sampling.samples import AnySamples, Samples
from dtmega.data.tokenizers.tokenizer import Tokenizer


class NextToken:
    """Cross-entropy of the next token, averaged over the tokens that have a label."""

    sums = (Sum("lm", "tokens"),)
    aim = "next tokens"
    reads = READS["next-token"]
    sentences = False
    conversations = False
    not_in_megatrons_order = ""
    prompt_is_prefix = False
    order = 2

    def counts(self, microbatch: Mapping[str, Tensor]) -> dict[str, float]:
        return {"tokens": labelled(microbatch)}

    def check(self, tokenizer: Tokenizer, data: Data) -> None:
        pass

    def n_added(self, tokenizer: Tokenizer, data: Data) -> int:
        return 0

    def samples(
        self, dataset: IndexedDataset, documents: tuple[int, int], data: Data, seed: int, split: str, corpus: int
    ) -> AnySamples:
        return Samples(dataset, documents, data.seq_len, seed, split, corpus)

    def rows(self, samples: AnySamples, data: Data, tokenizer: Tokenizer) -> Rows:
        return NextTokenRows(samples, data, tokenizer.eod_id)

    def blank(self, data: Data, n_rows: int) -> dict[str, Tensor]:
        rows = blank_rows(n_rows, data.seq_len)
        if data.reset_position_ids:
            rows["position_ids"] = rows["places"].clone()
        if data.reset_attention_mask:
            rows["document_ids"] = torch.zeros_like(rows["tokens"])
        return rows


@dataclass(frozen=True)
class NextTokenRows(Rows):
    """Rows of samples with S + 1 tokens each: the first S tokens are inputs, and the last S tokens are labels.

    `[data] reset_attention_mask` adds `document_ids`, and `[data] reset_position_ids` adds

        position_ids  int64 [B, S]  0, 1, ..., restarting at 0 after each end-of-document token
    """

    samples: AnySamples
    data: Data
    eod_id: int

    def __getitem__(self, indices: range) -> dict[str, Tensor]:
        return self.rows_of([self.samples[g] for g in indices], indices)

    def rows_of(self, samples: list[NDArray[Any]], indices: range) -> dict[str, Tensor]:
        """The tensors made from `samples`, each [S + 1]; `indices` holds the samples' global indices."""
        ids = torch.from_numpy(np.stack(samples).astype(np.int64))  # [B, S + 1]
        tokens = ids[:, :-1].clone()
        labels = ids[:, 1:].clone()
        rows = {"tokens": tokens, "labels": labels, **numbers(indices, tokens)}
        if self.data.eod_mask_loss:
            labels.masked_fill_(tokens == self.eod_id, IGNORED)
        if self.data.reset_position_ids:
            rows["position_ids"] = position_ids(tokens, self.eod_id)
        if self.data.reset_attention_mask:
            rows["document_ids"] = document_ids(tokens, self.eod_id)
        return rows


def document_ids(tokens: Tensor, eod_id: int) -> Tensor:
    """Index of the document that each token belongs to, counted from 0 in each sample, [B, S] -> [B, S].

    An end-of-document token belongs to the document that it ends.
    """
    ends = (tokens == eod_id).long()
    return ends.cumsum(1) - ends


def position_ids(tokens: Tensor, eod_id: int) -> Tensor:
    """Position of each token in its document, [B, S] -> [B, S] (Megatron-LM `get_ltor_masks_and_position_ids`)."""
    positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    # `starts` holds a token's index in the sample if the token is the first of its document, and 0 otherwise. The
    # running maximum of `starts` is the index at which a token's document starts.
    starts = torch.zeros_like(tokens)
    starts[:, 1:] = (tokens[:, :-1] == eod_id) * positions[:, 1:]
    return positions - starts.cummax(1).values


NEXT_TOKEN = NextToken()
