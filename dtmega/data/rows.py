"""The rows of a batch: what is made of a range of samples, in a worker process, from plain data that goes there.

Every microbatch of B sequences has

    tokens        int64 [B, S]
    labels        int64 [B, S]  what is to be predicted at each token, IGNORED where nothing is
    sample_ids    int64 [B]     the global sample numbers, which key dropout
    places        int64 [B, S]  0, 1, ...: the index of each token in its sample
    document_ids  int64 [B, S]  where there are several: attention stays between equal numbers

and what its objective adds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dtmega.config import Data
from dtmega.data.denoising import merged_spans, separate_spans
from dtmega.data.denoising.masking import Vocabulary, hide
from dtmega.data.denoising.merged_spans import SpanCounts
from dtmega.data.denoising.pairs import laid_out
from dtmega.data.denoising.sentinels import Marks
from dtmega.data.denoising.separate_spans import Limits
from dtmega.data.denoising.spans import HiddenSpans, sequences
from dtmega.data.prefixes import prefixes, weights
from dtmega.data.samples import AnySamples

IGNORED = -100  # a label that bears no loss, as torch's cross_entropy has it


class Rows(Protocol):
    """The rows of samples; they are pickled for worker processes."""

    def __getitem__(self, indices: range) -> dict[str, Tensor]:
        """The keys above, with B = all of the range: few large tensors travel better than many small ones."""
        ...


@dataclass(frozen=True)
class NextTokenRows:
    """Samples of S + 1 tokens as inputs and next tokens.

    `document_ids` come with `[data] reset_attention_mask`, and with `reset_position_ids`

        position_ids  int64 [B, S]  0, 1, ..., again from 0 after each end-of-document
    """

    samples: AnySamples
    data: Data
    eod_id: int

    def __getitem__(self, indices: range) -> dict[str, Tensor]:
        return self.of([self.samples[g] for g in indices], indices)

    def of(self, samples: list[NDArray[Any]], indices: range) -> dict[str, Tensor]:
        """The rows of samples [S + 1] that have these numbers."""
        ids = torch.from_numpy(np.stack(samples).astype(np.int64))  # [B, S + 1]
        tokens, labels = ids[:, :-1].clone(), ids[:, 1:].clone()
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
    """Samples of S + 1 tokens as inputs and next tokens, of which those in a prefix bear no loss. There are

    prefix         bool [B, S]
    label_weights  fp32 [B, S]  with `[data] reweight_positions`
    """

    def __getitem__(self, indices: range) -> dict[str, Tensor]:
        samples = [self.samples[g] for g in indices]
        rows = self.of([sample.tokens for sample in samples], indices)
        tokens = rows["tokens"].numpy()
        n_tokens = tokens.shape[1]
        # A prefix is of a document only where attention stays inside of it.
        alone = self.data.reset_attention_mask
        ends = tokens == self.eod_id if alone else np.broadcast_to(np.arange(n_tokens) == n_tokens - 1, tokens.shape)
        keys = np.array([sample.key for sample in samples], np.uint64)
        prefix = torch.from_numpy(prefixes(ends, keys))
        rows["prefix"] = prefix
        rows["labels"].masked_fill_(prefix, IGNORED)
        if self.data.reweight_positions:
            rows["label_weights"] = torch.from_numpy(weights(n_tokens)).repeat(len(tokens), 1)
        return rows


@dataclass(frozen=True)
class MaskedRows:
    """Pairs of segments with masks. Labels are the tokens that are hidden, and there are

    token_types   int64 [B, S]  1 in the second segment and at the [SEP] that ends it, else 0
    swapped       int64 [B]     1 where the first segment is the later one of the text
    document_ids  int64 [B, S]  1 at padding, else 0
    """

    samples: AnySamples
    data: Data
    vocabulary: Vocabulary

    def __getitem__(self, indices: range) -> dict[str, Tensor]:
        pairs = laid_out([self.samples[g] for g in indices], self.data.seq_len, self.vocabulary.specials)
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
    """Texts with hidden spans. Labels are [B, T], what the decoder is to say, and there are

    decoder_tokens        int64 [B, T]  what it has said before
    decoder_places        int64 [B, T]  0, 1, ...
    document_ids          int64 [B, S]  1 at padding, else 0
    decoder_document_ids  int64 [B, T]  1 at padding, else 0
    """

    samples: AnySamples
    data: Data
    marks: Marks
    n: SpanCounts

    def __getitem__(self, indices: range) -> dict[str, Tensor]:
        found = merged_spans.hidden(self.n, [self.samples[g] for g in indices])
        return _of_spans(found, self.marks, self.data, indices, end_of_input=True)


@dataclass(frozen=True)
class SeparateRows:
    """Texts with hidden n-grams; rows as those of `SpanRows`, without an end of what the encoder reads."""

    samples: AnySamples
    data: Data
    marks: Marks
    continuing: NDArray[np.int64]
    limits: Limits

    def __getitem__(self, indices: range) -> dict[str, Tensor]:
        found = separate_spans.hidden([self.samples[g] for g in indices], self.continuing, self.limits)
        return _of_spans(found, self.marks, self.data, indices, end_of_input=False)


def _of_spans(spans: HiddenSpans, marks: Marks, data: Data, indices: range, end_of_input: bool) -> dict[str, Tensor]:
    found = sequences(spans, marks, data.seq_len, data.decoder_length, end_of_input)
    tokens = torch.from_numpy(found.tokens)
    decoder_tokens = torch.from_numpy(found.decoder_tokens)
    return {
        "tokens": tokens,
        "decoder_tokens": decoder_tokens,
        "labels": torch.from_numpy(np.where(found.decoder_padding, IGNORED, found.targets)),
        **_numbers(indices, tokens),
        "decoder_places": _places(decoder_tokens),
        "document_ids": torch.from_numpy(found.padding.astype(np.int64)),
        "decoder_document_ids": torch.from_numpy(found.decoder_padding.astype(np.int64)),
    }


def _numbers(indices: range, tokens: Tensor) -> dict[str, Tensor]:
    return {"sample_ids": torch.arange(indices.start, indices.stop), "places": _places(tokens)}


def _places(tokens: Tensor) -> Tensor:
    return torch.arange(tokens.shape[1]).repeat(len(tokens), 1)


def document_ids(tokens: Tensor, eod_id: int) -> Tensor:
    """[B, S] -> [B, S]: 0, 1, ... by document; the end-of-document token belongs to the document that it ends."""
    ends = (tokens == eod_id).long()
    return ends.cumsum(1) - ends


def position_ids(tokens: Tensor, eod_id: int) -> Tensor:
    """[B, S] -> [B, S]: positions within each document (Megatron-LM `get_ltor_masks_and_position_ids`)."""
    positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    starts = torch.zeros_like(tokens)  # at a document's first token its position in the sample, 0 elsewhere
    starts[:, 1:] = (tokens[:, :-1] == eod_id) * positions[:, 1:]
    return positions - starts.cummax(1).values
