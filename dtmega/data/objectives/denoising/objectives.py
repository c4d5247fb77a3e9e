"""The objectives of BERT and T5, which predict hidden tokens."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dtmega.config import Data
from dtmega.data.indexed_files.dataset import IndexedDataset
from dtmega.data.objectives.denoising.masking import Vocabulary
from dtmega.data.objectives.denoising.merged_spans import SpanCounts, SpanSamples, counts_of_longest
from dtmega.data.objectives.denoising.pairs import PairSamples, Specials
from dtmega.data.objectives.denoising.sentinels import marks
from dtmega.data.objectives.denoising.separate_spans import N_SPECIAL, Limits, SentenceSamples, expected
from dtmega.data.objectives.denoising.spans import check_room
from dtmega.data.objectives.objective import labelled
from dtmega.data.objectives.rows import IGNORED, MaskedRows, Rows, SeparateRows, SpanRows, blank_rows
from dtmega.data.objectives.sums import Sum
from dtmega.data.sampling.samples import AnySamples
from dtmega.data.tokenizers.tokenizer import Tokenizer


class Masked:
    """BERT's objective: a loss for predicting masked tokens, plus a loss for predicting the order of two segments.

    The first loss is averaged over the masked tokens, and the second loss over the sequences.
    """

    sums = (
        Sum("lm", "tokens"),
        Sum("order", "sequences"),
        Sum("order_right", "sequences", weight=0.0),
    )
    aim = "masked tokens and the order of sentences"
    reads = ("short_seq_prob", "mask_prob", "max_ngram")
    sentences = True
    conversations = False
    not_in_megatrons_order = "Megatron's samples depend on random draws in a compiled helper"
    prompt_is_prefix = False
    order = 1

    def counts(self, microbatch: Mapping[str, Tensor]) -> dict[str, float]:
        return {"tokens": labelled(microbatch), "sequences": len(microbatch["labels"])}

    def check(self, tokenizer: Tokenizer, data: Data) -> None:
        specials(tokenizer)

    def n_added(self, tokenizer: Tokenizer, data: Data) -> int:
        return 0

    def samples(
        self, dataset: IndexedDataset, documents: tuple[int, int], data: Data, seed: int, split: str, corpus: int
    ) -> PairSamples:
        return PairSamples(dataset, documents, data.seq_len, data.short_seq_prob, seed, split, corpus)

    def rows(self, samples: AnySamples, data: Data, tokenizer: Tokenizer) -> MaskedRows:
        ids = np.arange(tokenizer.vocab_size)
        ordinary = ids[~np.isin(ids, [*tokenizer.special_ids])]
        return MaskedRows(samples, data, Vocabulary(specials(tokenizer), _continuing(tokenizer), ordinary))

    def blank(self, data: Data, n_rows: int) -> dict[str, Tensor]:
        rows = blank_rows(n_rows, data.seq_len)
        rows["labels"][:, round(data.mask_prob * data.seq_len) :] = IGNORED
        rows["token_types"] = torch.zeros_like(rows["tokens"])
        rows["swapped"] = torch.zeros_like(rows["sample_ids"])
        rows["document_ids"] = torch.zeros_like(rows["tokens"])
        return rows


class Spans:
    """T5's objective: the loss for predicting hidden spans, averaged over the decoder's targets. Spans never touch."""

    sums = (Sum("lm", "tokens"),)
    aim = "hidden spans"
    reads: tuple[str, ...] = ("decoder_seq_len", "mask_prob", "mean_span", "sentinels")
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
    reads = ("objective", "decoder_seq_len", "short_seq_prob", "mask_prob", "max_span", "sentinels")
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
        return SeparateRows(samples, data, marks(tokenizer, data.sentinels), _continuing(tokenizer), limits)


def _span_counts(data: Data) -> SpanCounts:
    return counts_of_longest(data.seq_len, data.mask_prob, data.mean_span)


def specials(tokenizer: Tokenizer) -> Specials:
    """The ids of the special tokens in BERT's samples.

    Raises:
        ValueError: the vocabulary lacks one of these tokens.
    """
    ids = {
        "[CLS]": tokenizer.cls_id,
        "[SEP]": tokenizer.sep_id,
        "[MASK]": tokenizer.mask_id,
        "[PAD]": tokenizer.pad_id,
    }
    for name, i in ids.items():
        if i is None:
            raise ValueError(
                f"tokenizer '{tokenizer.name}': expected {', '.join(ids)} in its vocabulary, {name} is missing; take "
                f"stdlib-wordpiece or bert:PATH of a vocab.txt ([data] tokenizer)"
            )
    return Specials(*(i for i in ids.values() if i is not None))


def _continuing(tokenizer: Tokenizer) -> NDArray[np.int64]:
    """The ids of tokens that continue a word, [n]."""
    return np.array(sorted(tokenizer.continuing_ids), np.int64)
