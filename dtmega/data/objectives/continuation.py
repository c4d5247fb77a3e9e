"""Objectives for causal models that learn only some tokens: the tokens after a prefix, or answers in conversations."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from dtmega.config import Data
from dtmega.data.indexed_files.dataset import IndexedDataset
from dtmega.data.objectives.objective import NextToken
from dtmega.data.objectives.prefixes import PrefixSamples
from dtmega.data.objectives.rows import IGNORED, ConversationRows, PrefixRows, blank_rows
from dtmega.data.sampling.packs import Packs
from dtmega.data.sampling.samples import AnySamples
from dtmega.data.tokenizers.tokenizer import Tokenizer


class Prefix(NextToken):
    """Cross-entropy of the tokens after a given prefix, as a mean over these tokens, optionally weighted."""

    aim = "next tokens after a prefix"
    reads = (*NextToken.reads, "objective", "reweight_positions")
    not_in_megatrons_order = "Megatron draws the lengths of prefixes from a generator of torch's"
    prompt_is_prefix = True
    order = 1

    def counts(self, microbatch: Mapping[str, Tensor]) -> dict[str, float]:
        if "label_weights" not in microbatch:
            return super().counts(microbatch)
        targets = microbatch["labels"] != IGNORED
        return {"tokens": float(microbatch["label_weights"][targets].sum(dtype=torch.float64))}

    def samples(
        self, dataset: IndexedDataset, documents: tuple[int, int], data: Data, seed: int, split: str, corpus: int
    ) -> AnySamples:
        return PrefixSamples(dataset, documents, data.seq_len, seed, split, corpus)

    def rows(self, samples: AnySamples, data: Data, tokenizer: Tokenizer) -> PrefixRows:
        return PrefixRows(samples, data, tokenizer.eod_id)

    def blank(self, data: Data, n_rows: int) -> dict[str, Tensor]:
        rows = super().blank(data, n_rows)
        rows["prefix"] = torch.zeros_like(rows["tokens"], dtype=torch.bool)
        if data.reweight_positions:
            rows["label_weights"] = torch.ones_like(rows["tokens"], dtype=torch.float32)
        return rows


class LearnedTurns(NextToken):
    """Cross-entropy of the tokens to learn in conversations, such as the answers, averaged over these tokens.

    A row holds whole conversations, and no token attends to another conversation, so packing does not change the loss.
    """

    aim = "answers in conversations"
    reads = ("objective", "pack", "too_long")
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
