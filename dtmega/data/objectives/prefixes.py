"""Prefix language models: the beginning of each text is given, and the model continues the text.

    tokens a b c d e f, with a prefix of 3 (drawn for each sample, or for each document):
        a b c    each attends to all three; no label
        d e f    each attends to itself and all tokens before it; the label is the next token

Sources: Megatron-DeepSpeed's `pretrain_prefix_lm.py` and `get_prefix_indices`, with `--loss-on-targets-only`. Without
that flag, the tokens of a prefix would have to predict tokens that they can already see.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dtmega.config import Data
from dtmega.data.indexed_files.dataset import IndexedDataset
from dtmega.data.objectives.keys import READS
from dtmega.data.objectives.next_token import NextToken, NextTokenRows
from dtmega.data.objectives.rows import IGNORED
from dtmega.data.sampling.samples import AnySamples, Samples
from dtmega.data.tokenizers.tokenizer import Tokenizer
from dtmega.ops import keyed


class Prefix(NextToken):
    """Cross-entropy of the tokens after a given prefix, as a mean over these tokens, optionally weighted."""

    aim = "next tokens after a prefix"
    reads = READS["prefix-lm"]
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


@dataclass(frozen=True)
class PrefixRows(NextTokenRows):
    """Rows of samples with S + 1 tokens each, without labels for the tokens of a prefix. Additional tensors:

    prefix         bool [B, S]  true at the tokens of a prefix
    label_weights  fp32 [B, S]  with `[data] reweight_positions`
    """

    def __getitem__(self, indices: range) -> dict[str, Tensor]:
        samples = [self.samples[g] for g in indices]
        rows = self.rows_of([sample.tokens for sample in samples], indices)
        tokens = rows["tokens"].numpy()
        n_tokens = tokens.shape[1]
        # If attention stays inside documents, each document has a prefix. Otherwise, the sample counts as one document.
        if self.data.reset_attention_mask:
            ends = tokens == self.eod_id
        else:
            ends = np.broadcast_to(np.arange(n_tokens) == n_tokens - 1, tokens.shape)
        keys = np.array([sample.key for sample in samples], np.uint64)
        prefix = torch.from_numpy(prefixes(ends, keys))
        rows["prefix"] = prefix
        rows["labels"].masked_fill_(prefix, IGNORED)
        if self.data.reweight_positions:
            rows["label_weights"] = torch.from_numpy(weights(n_tokens)).repeat(len(tokens), 1)
        return rows


class PrefixSample(NamedTuple):
    """A sample: its tokens [S + 1], and a 64-bit key from which the lengths of its prefixes are drawn."""

    tokens: NDArray[Any]
    key: int


class PrefixSamples(Samples):
    """Samples of running text, each with the key that determines the lengths of its prefixes."""

    def __getitem__(self, g: int) -> PrefixSample:
        return PrefixSample(self.tokens(g), keyed.key64(f"{self._stream}/{g}/prefix"))


def prefixes(ends: NDArray[np.bool_], keys: NDArray[np.uint64]) -> NDArray[np.bool_]:
    """Mask of the tokens that are in the prefix of their document, bool [B, S].

    The length of a prefix is drawn uniformly, from 0 to the document's length minus 1. If a document continues after
    the sample's end, the prefix may cover all of the document's tokens in the sample, because the document's last token
    is not in the sample.

    Args:
        ends: mask of document ends, bool [B, S]: true at the last token of each document, or only at the sample's last
            token if the whole sample counts as one document.
        keys: keys of the samples, uint64 [B].
    """
    n_tokens = ends.shape[1]
    place = np.arange(n_tokens)
    starts_here = np.ones_like(ends)
    starts_here[:, 1:] = ends[:, :-1]
    document = starts_here.cumsum(axis=1) - 1
    start = np.maximum.accumulate(np.where(starts_here, place, 0), axis=1)
    # The nearest document end at or after each position, found from right to left; S if there is none.
    reversed_ends = np.where(ends, place, n_tokens)[:, ::-1]
    end = np.minimum.accumulate(reversed_ends, axis=1)[:, ::-1]
    drawn = keyed.draws(keys[:, None], "length", document)
    first_target = start + keyed.below(drawn, end - start + 1)
    return place < first_target


def weights(n_tokens: int) -> NDArray[np.float32]:
    """Weight of the label at each position, fp32 [S]: `2 * (S - i) / (S + 1)` at position i.

    The length of a prefix is drawn uniformly, so position i has a label in (i + 1) / S of the samples. Later positions
    have labels more often, so later labels weigh less: Megatron-DeepSpeed's
    `--reweight-loss-based-on-position-frequency`.
    """
    place = np.arange(n_tokens)
    return (2 * (n_tokens - place) / (n_tokens + 1)).astype(np.float32)


PREFIX = Prefix()
