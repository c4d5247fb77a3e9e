"""Encoder and decoder sequences for texts with hidden spans.

    text     a b c d e f g                hidden: c d and f
    tokens   a b <0> e <1> g              input of the encoder
    labels   <0> c d <1> f <end>          targets of the decoder
    decoder  <start> <0> c d <1> f        input of the decoder: the targets, shifted by one

Both sequences are padded. `merged_spans.py` and `separate_spans.py` choose the spans.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dtmega.config import Data
from dtmega.data.objectives.denoising.sentinels import Marks
from dtmega.files.console import counted


class SpanSample(NamedTuple):
    """A text: its tokens [n], and a 64-bit key that determines which spans are hidden."""

    tokens: NDArray[Any]
    key: int


class HiddenSpans(NamedTuple):
    """B texts with hidden spans; L is the length of the longest text.

    Attributes:
        tokens: tokens of the texts, int64 [B, L].
        is_text: mask of the tokens that are text, bool [B, L]; false at the padding of shorter texts.
        hidden: mask of the hidden tokens, bool [B, L].
        begins: mask of the first token of each hidden span, bool [B, L]. Without this mask, two spans that touch would
            look like a single span.
    """

    tokens: NDArray[np.int64]
    is_text: NDArray[np.bool_]
    hidden: NDArray[np.bool_]
    begins: NDArray[np.bool_]


class Sequences(NamedTuple):
    """Encoder and decoder sequences for B texts.

    Attributes:
        tokens: input of the encoder, int64 [B, S].
        decoder_tokens: input of the decoder, int64 [B, T].
        targets: tokens that the decoder has to predict, int64 [B, T].
        padding, decoder_padding: masks of padding, bool [B, S] and [B, T].
    """

    tokens: NDArray[np.int64]
    decoder_tokens: NDArray[np.int64]
    targets: NDArray[np.int64]
    padding: NDArray[np.bool_]
    decoder_padding: NDArray[np.bool_]


def check_room(data: Data, n_tokens: int, n_hidden: int, n_spans: int, key: str) -> None:
    """Check that the decoder length and the number of sentinels are large enough for a text's hidden spans.

    Args:
        data: the configuration's [data] section.
        n_tokens: number of tokens in the text.
        n_hidden: number of hidden tokens.
        n_spans: number of hidden spans.
        key: [data] key that sets the span length, for the message.

    Raises:
        ValueError: the decoder length or the number of sentinels is too small; the message gives the required number
            and the keys to change.
    """
    spans = f"the {n_hidden} tokens in {counted(n_spans, 'span')} that are hidden of {n_tokens}"
    keys = f"[data] seq_len, [data] mask_prob, [data] {key}"
    n_decoder = n_hidden + n_spans + 1
    if n_decoder > data.decoder_length:
        raise ValueError(
            f"decoder_seq_len={data.decoder_length} has no room for {spans}, a sentinel for each span and an end: "
            f"{n_hidden} + {n_spans} + 1 = {n_decoder} ([data] decoder_seq_len, {keys})"
        )
    if n_spans > data.sentinels:
        raise ValueError(
            f"sentinels={data.sentinels} are too few for {spans}: expected {n_spans} or more ([data] sentinels, {keys})"
        )


def sequences(spans: HiddenSpans, marks: Marks, seq_len: int, decoder_seq_len: int, end_of_input: bool) -> Sequences:
    """Build the encoder and decoder sequences of all texts at once.

    Args:
        spans: texts and their hidden spans, which must fit in S, T and the number of sentinels.
        marks: ids of sentinels, start, end and padding.
        seq_len: S, length of the encoder's sequence.
        decoder_seq_len: T, length of the decoder's sequence.
        end_of_input: whether to put the end mark after the encoder's sequence too.
    """
    n_rows = len(spans.tokens)
    row = np.broadcast_to(np.arange(n_rows)[:, None], spans.tokens.shape)
    number = spans.begins.cumsum(1) - 1  # index of the span that a hidden token is in
    sentinels = np.array(marks.sentinels)[np.maximum(number, 0)]

    # The encoder reads the text that is not hidden, and a sentinel in place of each hidden span.
    is_read = spans.is_text & (~spans.hidden | spans.begins)
    place = is_read.cumsum(1) - 1
    tokens = np.full((n_rows, seq_len), marks.pad)
    tokens[row[is_read], place[is_read]] = np.where(spans.begins, sentinels, spans.tokens)[is_read]
    n_read = is_read.sum(1)
    if end_of_input:
        tokens[row[:, 0], n_read] = marks.end
        n_read = n_read + 1

    # Among the targets, a hidden token comes after all earlier hidden tokens, and after the sentinels of its own span
    # and of all earlier spans. A span's sentinel comes right before the span's first token.
    place = spans.hidden.cumsum(1) + number
    targets = np.full((n_rows, decoder_seq_len), marks.pad)
    targets[row[spans.begins], place[spans.begins] - 1] = sentinels[spans.begins]
    targets[row[spans.hidden], place[spans.hidden]] = spans.tokens[spans.hidden]
    n_targets = spans.hidden.sum(1) + spans.begins.sum(1)
    targets[row[:, 0], n_targets] = marks.end

    decoder_padding = np.arange(decoder_seq_len) > n_targets[:, None]
    shifted = np.concatenate([np.full((n_rows, 1), marks.start), targets[:, :-1]], 1)
    return Sequences(
        tokens=tokens,
        decoder_tokens=np.where(decoder_padding, marks.pad, shifted),
        targets=targets,
        padding=np.arange(seq_len) >= n_read[:, None],
        decoder_padding=decoder_padding,
    )
