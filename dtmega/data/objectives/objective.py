"""Training objectives. An objective defines how text is cut into samples, the tensors of a batch, and the loss."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import Protocol

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
from dtmega.data.objectives.prefixes import PrefixSamples
from dtmega.data.objectives.rows import (
    IGNORED,
    MaskedRows,
    NextTokenRows,
    PrefixRows,
    Rows,
    SeparateRows,
    SpanRows,
    blank_rows,
)
from dtmega.data.objectives.sums import Sum
from dtmega.data.sampling.samples import AnySamples, Samples
from dtmega.data.tokenizers.tokenizer import Tokenizer
from dtmega.ops import host


class Objective(Protocol):
    """A training objective.

    Attributes:
        sums: sums that a model returns if it is given labels; each sum may come from any pipeline stage.
        aim: description of the targets that a model learns to predict, for messages, such as "next tokens".
        reads: keys of [data] that this objective reads but some other objectives ignore; the samples depend on these
            keys.
        sentences: whether the objective reads texts that are split into sentences, one per sequence of the data set.
        conversations: whether the objective reads conversations (`indexed_files/conversations.py`).
        not_in_megatrons_order: reason why the objective cannot follow Megatron's orders ([data] order); '' if the
            objective can follow them.
        prompt_is_prefix: whether the tokens of a prompt all see each other, like the tokens of a prefix in training; if
            not, each token sees only the tokens before it.
        order: version number of the samples. Raise this number if a change alters sample g for the same data, keys and
            seed; runs that began with the old samples are then refused.
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
    def conversations(self) -> bool: ...

    @property
    def not_in_megatrons_order(self) -> str: ...

    @property
    def prompt_is_prefix(self) -> bool: ...

    @property
    def order(self) -> int: ...

    def counts(self, microbatch: Mapping[str, Tensor]) -> dict[str, float]:
        """A microbatch's contribution to each count that divides a sum, by count name.

        The names and their order are the same for all microbatches.
        """
        ...

    def check(self, tokenizer: Tokenizer, data: Data) -> None:
        """Check that the tokenizer has the special tokens, and that the lengths in [data] have room for a sample.

        Raises:
            ValueError: a token is missing, or a length is too small; the message names the key, and the token or the
                equation that fails.
        """
        ...

    def n_added(self, tokenizer: Tokenizer, data: Data) -> int:
        """Number of ids that the samples add after the tokenizer's last id."""
        ...

    def samples(
        self, dataset: IndexedDataset, documents: tuple[int, int], data: Data, seed: int, split: str, corpus: int
    ) -> AnySamples:
        """The samples made from a range (start, stop) of the documents of one corpus, for one split.

        Raises:
            ValueError: the documents are too small for a single sample.
        """
        ...

    def rows(self, samples: AnySamples, data: Data, tokenizer: Tokenizer) -> Rows:
        """The rows of this objective's samples, which come from one corpus or from a blend."""
        ...

    def blank(self, data: Data, n_rows: int) -> dict[str, Tensor]:
        """Rows without text, for a plan: the names, shapes and dtypes of real rows.

        Where memory depends on the number of labels, they have about as many, rather more.
        """
        ...


class NextToken:
    """Cross-entropy of the next token, averaged over the tokens that have a label."""

    sums = (Sum("lm", "tokens"),)
    aim = "next tokens"
    reads = ("eod_mask_loss", "reset_position_ids", "reset_attention_mask")
    sentences = False
    conversations = False
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

    def blank(self, data: Data, n_rows: int) -> dict[str, Tensor]:
        rows = blank_rows(n_rows, data.seq_len)
        if data.reset_position_ids:
            rows["position_ids"] = rows["places"].clone()
        if data.reset_attention_mask:
            rows["document_ids"] = torch.zeros_like(rows["tokens"])
        return rows


class Prefix(NextToken):
    """Cross-entropy of the tokens after a given prefix, averaged over these tokens, optionally with weights."""

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
    ) -> Samples:
        return PrefixSamples(dataset, documents, data.seq_len, seed, split, corpus)

    def rows(self, samples: AnySamples, data: Data, tokenizer: Tokenizer) -> PrefixRows:
        return PrefixRows(samples, data, tokenizer.eod_id)

    def blank(self, data: Data, n_rows: int) -> dict[str, Tensor]:
        rows = super().blank(data, n_rows)
        rows["prefix"] = torch.zeros_like(rows["tokens"], dtype=torch.bool)
        if data.reweight_positions:
            rows["label_weights"] = torch.ones_like(rows["tokens"], dtype=torch.float32)
        return rows


class Masked:
    """BERT's objective: the loss of predicting masked tokens, plus the loss of predicting the order of two segments.

    The first loss is averaged over the masked tokens, the second over the sequences.
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

    def blank(self, data: Data, n_rows: int) -> dict[str, Tensor]:
        rows = blank_rows(n_rows, data.seq_len)
        rows["labels"][:, round(data.mask_prob * data.seq_len) :] = IGNORED
        rows["token_types"] = torch.zeros_like(rows["tokens"])
        rows["swapped"] = torch.zeros_like(rows["sample_ids"])
        rows["document_ids"] = torch.zeros_like(rows["tokens"])
        return rows


class Spans:
    """T5's objective: the loss of predicting hidden spans, averaged over the decoder's targets. Spans never touch."""

    sums = (Sum("lm", "tokens"),)
    aim = "hidden spans"
    reads: tuple[str, ...] = ("decoder_seq_len", "mask_prob", "mean_span", "sentinels")
    sentences = False
    conversations = False
    not_in_megatrons_order = "Megatron's T5 chooses spans by another rule"
    prompt_is_prefix = False
    order = 1

    def counts(self, microbatch: Mapping[str, Tensor]) -> dict[str, float]:
        return {"tokens": _labelled(microbatch)}

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


NEXT_TOKEN = NextToken()
PREFIX = Prefix()
MASKED = Masked()
SPANS = Spans()
SEPARATE_SPANS = SeparateSpans()
OBJECTIVES: tuple[Objective, ...] = (NEXT_TOKEN, PREFIX, MASKED, SPANS, SEPARATE_SPANS)


def check_keys(data: Data, objective: Objective) -> None:
    """Refuse [data] keys that only other objectives read.

    Raises:
        ValueError: one of these keys differs from its default.
    """
    keys = chain.from_iterable(other.reads for other in OBJECTIVES)
    foreign = {*keys} - {*objective.reads}
    for key, field in Data.model_fields.items():
        if key in foreign and getattr(data, key) != field.default:
            raise ValueError(
                f"{key}={getattr(data, key)} means nothing to a model that is trained on {objective.aim}: expected "
                f"{field.default}, or another objective or model ([data] {key}, [data] objective, [model] name)"
            )


def _continuing(tokenizer: Tokenizer) -> NDArray[np.int64]:
    """The ids of tokens that continue a word, [n]."""
    return np.array(sorted(tokenizer.continuing_ids), np.int64)


def _labelled(microbatch: Mapping[str, Tensor]) -> int:
    """Number of tokens with a label in a microbatch."""
    return int(host.read((microbatch["labels"] != IGNORED).sum()))
