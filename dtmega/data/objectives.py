"""Objectives of training: the samples of a text, the rows that are made of them, and the sums that a model gives."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dtmega.config import Data
from dtmega.data.denoising.masking import Vocabulary
from dtmega.data.denoising.merged_spans import SpanCounts, SpanSamples, longest
from dtmega.data.denoising.pairs import PairSamples, Specials
from dtmega.data.denoising.sentinels import marks
from dtmega.data.denoising.separate_spans import N_SPECIAL, Limits, SentenceSamples, expected
from dtmega.data.denoising.spans import check_room
from dtmega.data.indexed import IndexedDataset
from dtmega.data.prefixes import PrefixSamples
from dtmega.data.rows import IGNORED, MaskedRows, NextTokenRows, PrefixRows, Rows, SeparateRows, SpanRows
from dtmega.data.samples import AnySamples, Samples
from dtmega.data.sums import Sum
from dtmega.data.tokenizer import Tokenizer


class Objective(Protocol):
    """An aim of training.

    Attributes:
        sums: all that a model returns with labels, whichever stages have them.
        aim: for people, what its models are trained on.
        reads: keys of [data] that it reads and not every objective does; the samples depend on them.
        sentences: it reads texts that are split into sentences, each a sequence of the data set.
        not_in_megatrons_order: why [data] order cannot be one of Megatron's; '' where it can.
        prompt_is_prefix: a prompt is read both ways, as the prefixes of its samples are; False: each token sees those
            before it.
        order: raise it when sample g of the same data, keys and seed becomes another: older runs are then refused.
    """

    @property
    def sums(self) -> tuple[Sum, ...]: ...

    @property
    def aim(self) -> str: ...

    @property
    def reads(self) -> tuple[str, ...]: ...

    @property
    def sentences(self) -> bool: ...

    @property
    def not_in_megatrons_order(self) -> str: ...

    @property
    def prompt_is_prefix(self) -> bool: ...

    @property
    def order(self) -> int: ...

    def counts(self, microbatch: Mapping[str, Tensor]) -> dict[str, float]:
        """The part of each divisor that a microbatch adds; every microbatch has the same names, in the same order."""
        ...

    def check(self, tokenizer: Tokenizer, data: Data) -> None:
        """Refuse a tokenizer that lacks what the objective needs of it, and lengths that do not hold a sample.

        Raises:
            ValueError: names the token that is missing, or the equation, and the key.
        """
        ...

    def n_added(self, tokenizer: Tokenizer, data: Data) -> int:
        """The number of ids in samples that are not the tokenizer's, but stand behind its last one."""
        ...

    def samples(
        self, dataset: IndexedDataset, documents: tuple[int, int], data: Data, seed: int, split: str, corpus: int
    ) -> AnySamples:
        """The samples of documents (start, stop) of one corpus of a split.

        Raises:
            ValueError: there is not one.
        """
        ...

    def rows(self, samples: AnySamples, data: Data, tokenizer: Tokenizer) -> Rows:
        """The rows of such samples, or of several mixed."""
        ...


class NextToken:
    """Cross-entropy of the next token, as a mean over the tokens that have a label."""

    sums = (Sum("lm", "tokens"),)
    aim = "next tokens"
    reads = ("eod_mask_loss", "reset_position_ids", "reset_attention_mask")
    sentences = False
    not_in_megatrons_order = ""
    prompt_is_prefix = False
    order = 2

    def counts(self, microbatch: Mapping[str, Tensor]) -> dict[str, float]:
        return {"tokens": _labelled(microbatch)}

    def check(self, tokenizer: Tokenizer, data: Data) -> None:
        pass

    def n_added(self, tokenizer: Tokenizer, data: Data) -> int:
        return 0

    def samples(
        self, dataset: IndexedDataset, documents: tuple[int, int], data: Data, seed: int, split: str, corpus: int
    ) -> Samples:
        return Samples(dataset, documents, data.seq_len, seed, split, corpus)

    def rows(self, samples: AnySamples, data: Data, tokenizer: Tokenizer) -> NextTokenRows:
        return NextTokenRows(samples, data, tokenizer.eod_id)


class Prefix(NextToken):
    """The next token behind a prefix that is given, as a mean over those tokens, weighted or not."""

    aim = "next tokens behind a prefix"
    reads = (*NextToken.reads, "objective", "reweight_positions")
    not_in_megatrons_order = "lengths of prefixes are drawn by a generator of torch's there"
    prompt_is_prefix = True
    order = 1

    def counts(self, microbatch: Mapping[str, Tensor]) -> dict[str, float]:
        if "label_weights" not in microbatch:
            return super().counts(microbatch)
        targets = microbatch["labels"] != IGNORED
        return {"tokens": float(microbatch["label_weights"][targets].sum(dtype=torch.float64))}

    def samples(
        self, dataset: IndexedDataset, documents: tuple[int, int], data: Data, seed: int, split: str, corpus: int
    ) -> Samples:
        return PrefixSamples(dataset, documents, data.seq_len, seed, split, corpus)

    def rows(self, samples: AnySamples, data: Data, tokenizer: Tokenizer) -> PrefixRows:
        return PrefixRows(samples, data, tokenizer.eod_id)


class Masked:
    """BERT's: the masked tokens as a mean over them, and which of two segments came first, as a mean over sequences."""

    sums = (
        Sum("lm", "tokens"),
        Sum("order", "sequences"),
        Sum("order_right", "sequences", weight=0.0),
    )
    aim = "masked tokens and the order of sentences"
    reads = ("short_seq_prob", "mask_prob", "max_ngram")
    sentences = True
    not_in_megatrons_order = "a compiled helper draws while it cuts the samples there"
    prompt_is_prefix = False
    order = 1

    def counts(self, microbatch: Mapping[str, Tensor]) -> dict[str, float]:
        return {"tokens": _labelled(microbatch), "sequences": len(microbatch["labels"])}

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


class Spans:
    """T5's objective: hidden spans, which never touch, as a mean over what the decoder is to say of them."""

    sums = (Sum("lm", "tokens"),)
    aim = "hidden spans"
    reads: tuple[str, ...] = ("decoder_seq_len", "mask_prob", "mean_span", "sentinels")
    sentences = False
    not_in_megatrons_order = "Megatron's T5 hides spans otherwise"
    prompt_is_prefix = False
    order = 1

    def counts(self, microbatch: Mapping[str, Tensor]) -> dict[str, float]:
        return {"tokens": _labelled(microbatch)}

    def check(self, tokenizer: Tokenizer, data: Data) -> None:
        n = _longest(data)
        check_room(data, n.n_tokens, n.n_hidden, n.n_spans, "mean_span")
        marks(tokenizer, data.sentinels)

    def n_added(self, tokenizer: Tokenizer, data: Data) -> int:
        return marks(tokenizer, data.sentinels).n_added

    def samples(
        self, dataset: IndexedDataset, documents: tuple[int, int], data: Data, seed: int, split: str, corpus: int
    ) -> AnySamples:
        return SpanSamples(dataset, documents, _longest(data).n_tokens, seed, split, corpus)

    def rows(self, samples: AnySamples, data: Data, tokenizer: Tokenizer) -> Rows:
        return SpanRows(samples, data, marks(tokenizer, data.sentinels), _longest(data))


class SeparateSpans(Spans):
    """Megatron's: n-grams of words in a text of sentences, each a span of its own also where it touches another."""

    aim = "hidden n-grams"
    reads = ("objective", "decoder_seq_len", "short_seq_prob", "mask_prob", "max_span", "sentinels")
    sentences = True
    not_in_megatrons_order = "a compiled helper draws while it cuts the samples there"
    order = 1

    def check(self, tokenizer: Tokenizer, data: Data) -> None:
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


def _longest(data: Data) -> SpanCounts:
    return longest(data.seq_len, data.mask_prob, data.mean_span)


def specials(tokenizer: Tokenizer) -> Specials:
    """The ids of the special tokens that BERT's samples have.

    Raises:
        ValueError: the vocabulary lacks one.
    """
    found = {
        "[CLS]": tokenizer.cls_id,
        "[SEP]": tokenizer.sep_id,
        "[MASK]": tokenizer.mask_id,
        "[PAD]": tokenizer.pad_id,
    }
    for name, i in found.items():
        if i is None:
            raise ValueError(
                f"tokenizer '{tokenizer.name}': expected {', '.join(found)} in its vocabulary, {name} is missing; take "
                f"stdlib-wordpiece or bert:PATH of a vocab.txt ([data] tokenizer)"
            )
    return Specials(*(i for i in found.values() if i is not None))


NEXT_TOKEN = NextToken()
PREFIX = Prefix()
MASKED = Masked()
SPANS = Spans()
SEPARATE_SPANS = SeparateSpans()
OBJECTIVES: tuple[Objective, ...] = (NEXT_TOKEN, PREFIX, MASKED, SPANS, SEPARATE_SPANS)


def check_keys(data: Data, objective: Objective) -> None:
    """Refuse keys of [data] that the objective would not read.

    Raises:
        ValueError: one of them is set.
    """
    foreign = {key for other in OBJECTIVES for key in other.reads} - {*objective.reads}
    for key, field in Data.model_fields.items():
        if key in foreign and getattr(data, key) != field.default:
            raise ValueError(
                f"{key}={getattr(data, key)} means nothing to a model that is trained on {objective.aim}: expected "
                f"{field.default}, or another objective or model ([data] {key}, [data] objective, [model] name)"
            )


def _continuing(tokenizer: Tokenizer) -> NDArray[np.int64]:
    """The ids that go on within a word."""
    return np.array(sorted(tokenizer.continuing_ids), np.int64)


def _labelled(microbatch: Mapping[str, Tensor]) -> int:
    return int((microbatch["labels"] != IGNORED).sum())
