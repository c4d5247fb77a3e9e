"""The tensors of a batch ("rows"), made from a range of samples in a worker process.

Every microbatch of B sequences has

    tokens        int64 [B, S]
    labels        int64 [B, S]  token to predict at each position, or IGNORED
    sample_ids    int64 [B]     global sample indices, which dropout uses as keys
    places        int64 [B, S]  0, 1, ...: index of each token in its sample
    document_ids  int64 [B, S]  index of each token's document; a token sees only tokens of its own document. Present
                                only if rows may have several documents or padding

and the tensors that the objective adds. The classes here hold plain data only, so that they can be pickled.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dtmega.config import Data
from dtmega.data.indexed_files.conversations import Conversation
from dtmega.data.objectives.denoising import merged_spans, separate_spans
from dtmega.data.objectives.denoising.masking import Vocabulary, hide
from dtmega.data.objectives.denoising.merged_spans import SpanCounts
from dtmega.data.objectives.denoising.pairs import lay_out
from dtmega.data.objectives.denoising.sentinels import Marks
from dtmega.data.objectives.denoising.separate_spans import Limits
from dtmega.data.objectives.denoising.spans import HiddenSpans, sequences
from dtmega.data.objectives.prefixes import prefixes, weights
from dtmega.data.sampling.samples import AnySamples

IGNORED = -100  # the label of a token without a loss, as in torch's cross_entropy


class Rows(Protocol):
    """A mapping from a range of samples to their tensors; it is pickled and sent to worker processes."""

    def __getitem__(self, indices: range) -> dict[str, Tensor]:
        """The tensors listed at the top of this file, with B = len(indices).

        A range may cover several microbatches, because a few large tensors travel between processes faster than many
        small tensors.
        """
        ...


@dataclass(frozen=True)
class NextTokenRows:
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
        rows = {"tokens": tokens, "labels": labels, **_numbers(indices, tokens)}
        if self.data.eod_mask_loss:
            labels.masked_fill_(tokens == self.eod_id, IGNORED)
        if self.data.reset_position_ids:
            rows["position_ids"] = position_ids(tokens, self.eod_id)
        if self.data.reset_attention_mask:
            rows["document_ids"] = document_ids(tokens, self.eod_id)
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


@dataclass(frozen=True)
class ConversationRows:
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
        rows = {"tokens": ids_of_rows, "labels": torch.from_numpy(labels), **_numbers(indices, ids_of_rows)}
        if self.data.pack:
            rows["position_ids"] = torch.from_numpy(positions)
            rows["document_ids"] = torch.from_numpy(documents)
        return rows


@dataclass(frozen=True)
class MaskedRows:
    """Rows of masked segment pairs, with the hidden tokens as labels. Additional tensors:

    token_types   int64 [B, S]  1 in the second segment and at the [SEP] that ends it, 0 elsewhere
    swapped       int64 [B]     1 if the sample's first segment is the later segment of the text
    document_ids  int64 [B, S]  1 at padding, 0 elsewhere
    """

    samples: AnySamples
    data: Data
    vocabulary: Vocabulary

    def __getitem__(self, indices: range) -> dict[str, Tensor]:
        pairs = lay_out([self.samples[g] for g in indices], self.data.seq_len, self.vocabulary.specials)
        masked = hide(pairs, self.vocabulary, self.data.mask_prob, self.data.max_ngram)
        labels = np.where(masked.hidden, pairs.tokens, IGNORED)
        tokens = torch.from_numpy(masked.tokens)
        return {
            "tokens": tokens,
            "labels": torch.from_numpy(labels),
            **_numbers(indices, tokens),
            "token_types": torch.from_numpy(pairs.types),
            "swapped": torch.from_numpy(pairs.swapped.astype(np.int64)),
            "document_ids": torch.from_numpy(pairs.padding.astype(np.int64)),
        }


@dataclass(frozen=True)
class SpanRows:
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
class SeparateRows:
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
        **_numbers(indices, tokens),
        "decoder_places": _places(decoder_tokens),
        "document_ids": torch.from_numpy(batch.padding.astype(np.int64)),
        "decoder_document_ids": torch.from_numpy(batch.decoder_padding.astype(np.int64)),
    }


def blank_rows(n_rows: int, n_tokens: int) -> dict[str, Tensor]:
    """The tensors that all objectives have, with zeros instead of text; every token has a label."""
    tokens = torch.zeros(n_rows, n_tokens, dtype=torch.int64)
    return {"tokens": tokens, "labels": torch.zeros_like(tokens), **_numbers(range(n_rows), tokens)}


def _numbers(indices: range, tokens: Tensor) -> dict[str, Tensor]:
    """The tensors `sample_ids` and `places`, which all objectives have."""
    return {"sample_ids": torch.arange(indices.start, indices.stop), "places": _places(tokens)}


def _places(tokens: Tensor) -> Tensor:
    """The numbers 0 to S - 1 in each row, with the shape of `tokens`, [B, S]."""
    return torch.arange(tokens.shape[1]).repeat(len(tokens), 1)


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
