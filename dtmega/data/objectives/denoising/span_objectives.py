"""T5's objectives: hidden spans, merged as in the paper and in transformers, or separate as in Megatron."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dtmega.config import Data
from dtmega.data.indexed_files.dataset import IndexedDataset
from dtmega.data.objectives.denoising import merged_spans, separate_spans
from dtmega.data.objectives.denoising.merged_spans import SpanCounts, SpanSamples, counts_of_longest
from dtmega.data.objectives.denoising.sentinels import Marks, marks
from dtmega.data.objectives.denoising.separate_spans import N_SPECIAL, Limits, SentenceSamples, expected
from dtmega.data.objectives.denoising.spans import HiddenSpans, check_room, sequences
from dtmega.data.objectives.keys import READS
from dtmega.data.objectives.objective import labelled
from dtmega.data.objectives.rows import IGNORED, Rows, blank_rows, numbers, places
from dtmega.data.objectives.sums import Sum
from dtmega.data.sampling.samples import AnySamples
from dtmega.data.tokenizers.tokenizer import Tokenizer


class Spans:
    """T5's objective: the loss for predicting hidden spans, averaged over the decoder's targets. Spans never touch."""

    sums = (Sum("lm", "tokens"),)
    aim = "hidden spans"
    reads = READS["spans"]
    sentences = False
    conversations = False
    not_in_megatrons_order = "Megatron's T5 chooses spans by another rule"
    prompt_is_prefix = False
    order = 1

    def counts(self, microbatch: Mapping[str, Tensor]) -> dict[str, float]:
        return {"tokens": labelled(microbatch)}

    def check(self, tokenizer: Tokenizer, data: Data) -> None:
        n = _span_counts(data)
        check_room(data, n.n_tokens, n.n_hidden, n.n_spans, "mean_span")
        marks(tokenizer, data.sentinels)

    def n_added(self, tokenizer: Tokenizer, data: Data) -> int:
        return marks(tokenizer, data.sentinels).n_added

    def samples(
        self, dataset: IndexedDataset, documents: tuple[int, int], data: Data, seed: int, split: str, corpus: int
    ) -> AnySamples:
        return SpanSamples(dataset, documents, _span_counts(data).n_tokens, seed, split, corpus)

    def rows(self, samples: AnySamples, data: Data, tokenizer: Tokenizer) -> Rows:
        return SpanRows(samples, data, marks(tokenizer, data.sentinels), _span_counts(data))

    def blank(self, data: Data, n_rows: int) -> dict[str, Tensor]:
        rows = blank_rows(n_rows, data.seq_len)
        decoder = blank_rows(n_rows, data.decoder_length)
        return rows | {
            "labels": decoder["labels"],
            "decoder_tokens": decoder["tokens"],
            "decoder_places": decoder["places"],
            "document_ids": torch.zeros_like(rows["tokens"]),
            "decoder_document_ids": torch.zeros_like(decoder["tokens"]),
        }


class SeparateSpans(Spans):
    """The objective of Megatron's T5: predict hidden n-grams of words in a text that is split into sentences.

    Two n-grams that touch stay separate spans.
    """

    aim = "hidden n-grams"
    reads = READS["separate-spans"]
    sentences = True
    not_in_megatrons_order = "Megatron's samples depend on random draws in a compiled helper"
    order = 1

    def check(self, tokenizer: Tokenizer, data: Data) -> None:
        # The number of spans differs from sample to sample. Check that the average number fits.
        n_tokens = max(1, data.seq_len - N_SPECIAL)
        n_hidden, n_spans = expected(n_tokens, data.mask_prob, data.max_span)
        check_room(data, n_tokens, n_hidden, n_spans, "max_span")
        marks(tokenizer, data.sentinels)

    def samples(
        self, dataset: IndexedDataset, documents: tuple[int, int], data: Data, seed: int, split: str, corpus: int
    ) -> AnySamples:
        return SentenceSamples(dataset, documents, data.seq_len, data.short_seq_prob, seed, split, corpus)

    def rows(self, samples: AnySamples, data: Data, tokenizer: Tokenizer) -> Rows:
        limits = Limits(data.mask_prob, data.max_span, data.sentinels, data.decoder_length)
        return SeparateRows(
            samples, data, marks(tokenizer, data.sentinels), np.array(sorted(tokenizer.continuing_ids)), limits
        )


def _span_counts(data: Data) -> SpanCounts:
    return counts_of_longest(data.seq_len, data.mask_prob, data.mean_span)


@dataclass(frozen=True)
class SpanRows(Rows):
    """Rows of texts with hidden spans, with the decoder's targets as labels, [B, T]. Additional tensors:

    decoder_tokens        int64 [B, T]  input of the decoder
    decoder_places        int64 [B, T]  0, 1, ...: index of each token in the decoder's sequence
    document_ids          int64 [B, S]  1 at padding, 0 elsewhere
    decoder_document_ids  int64 [B, T]  1 at padding, 0 elsewhere
    """

    samples: AnySamples
    data: Data
    marks: Marks
    counts: SpanCounts

    def __getitem__(self, indices: range) -> dict[str, Tensor]:
        spans = merged_spans.hide(self.counts, [self.samples[g] for g in indices])
        return _span_rows(spans, self.marks, self.data, indices, end_of_input=True)


@dataclass(frozen=True)
class SeparateRows(Rows):
    """Rows of texts with hidden n-grams: like `SpanRows`, but without an end mark in the encoder's sequence."""

    samples: AnySamples
    data: Data
    marks: Marks
    continuing: NDArray[np.int64]
    limits: Limits

    def __getitem__(self, indices: range) -> dict[str, Tensor]:
        spans = separate_spans.hide([self.samples[g] for g in indices], self.continuing, self.limits)
        return _span_rows(spans, self.marks, self.data, indices, end_of_input=False)


def _span_rows(spans: HiddenSpans, marks: Marks, data: Data, indices: range, end_of_input: bool) -> dict[str, Tensor]:
    """The tensors for texts with hidden spans. `end_of_input` is described in `spans.sequences`."""
    batch = sequences(spans, marks, data.seq_len, data.decoder_length, end_of_input)
    tokens = torch.from_numpy(batch.tokens)
    decoder_tokens = torch.from_numpy(batch.decoder_tokens)
    return {
        "tokens": tokens,
        "decoder_tokens": decoder_tokens,
        "labels": torch.from_numpy(np.where(batch.decoder_padding, IGNORED, batch.targets)),
        **numbers(indices, tokens),
        "decoder_places": places(decoder_tokens),
        "document_ids": torch.from_numpy(batch.padding.astype(np.int64)),
        "decoder_document_ids": torch.from_numpy(batch.decoder_padding.astype(np.int64)),
    }


SPANS = Spans()
SEPARATE_SPANS = SeparateSpans()
