"""Hidden spans of a text as the sequences of an encoder and a decoder.

    text     a b c d e f g                of which c d and f are hidden
    tokens   a b <0> e <1> g              what the encoder reads
    labels   <0> c d <1> f <end>          what the decoder is to say
    decoder  <start> <0> c d <1> f        what it has said so far

Both are padded. The choice of spans is in `merged_spans.py` and `separate_spans.py`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dtmega.config import Data
from dtmega.data.denoising.sentinels import Marks
from dtmega.output import counted


class SpanSample(NamedTuple):
    """The tokens of a text, and 64 bits of which its spans are a function."""

    tokens: NDArray[Any]
    key: int


class HiddenSpans(NamedTuple):
    """Texts [B, L] with what is hidden of them.

    Attributes:
        tokens: int64 [B, L].
        is_text: bool [B, L], false at what only fills a row up.
        hidden: bool [B, L].
        begins: bool [B, L], the first token of each hidden span; two spans may touch.
    """

    tokens: NDArray[np.int64]
    is_text: NDArray[np.bool_]
    hidden: NDArray[np.bool_]
    begins: NDArray[np.bool_]


class Sequences(NamedTuple):
    """The sequences of encoder and decoder of some texts.

    Attributes:
        tokens: int64 [B, S], of the encoder.
        decoder_tokens: int64 [B, T].
        targets: int64 [B, T], what the decoder is to say.
        padding, decoder_padding: bool [B, S] and [B, T].
    """

    tokens: NDArray[np.int64]
    decoder_tokens: NDArray[np.int64]
    targets: NDArray[np.int64]
    padding: NDArray[np.bool_]
    decoder_padding: NDArray[np.bool_]


def check_room(data: Data, n_tokens: int, n_hidden: int, n_spans: int, key: str) -> None:
    """Refuse lengths of the decoder, or numbers of sentinels, that do not hold the spans of a text.

    Args:
        n_tokens, n_hidden, n_spans: of the text, hidden of it, and the spans that these are in.
        key: of [data], for the length of spans.

    Raises:
        ValueError: the equation, and the keys to change.
    """
    what = f"the {n_hidden} tokens in {counted(n_spans, 'span')} that are hidden of {n_tokens}"
    keys = f"[data] seq_len, [data] mask_prob, [data] {key}"
    n_said = n_hidden + n_spans + 1
    if n_said > data.decoder_length:
        raise ValueError(
            f"decoder_seq_len={data.decoder_length} has no room for {what}, a sentinel for each span and an end: "
            f"{n_hidden} + {n_spans} + 1 = {n_said} ([data] decoder_seq_len, {keys})"
        )
    if n_spans > data.sentinels:
        raise ValueError(
            f"sentinels={data.sentinels} are too few for {what}: expected {n_spans} or more ([data] sentinels, {keys})"
        )


def sequences(spans: HiddenSpans, marks: Marks, seq_len: int, decoder_seq_len: int, end_of_input: bool) -> Sequences:
    """The sequences of all texts at once, which have room in S and T, and a sentinel for each span.

    Args:
        end_of_input: the encoder's sequence ends with that mark, too.
    """
    n_rows = len(spans.tokens)
    row = np.broadcast_to(np.arange(n_rows)[:, None], spans.tokens.shape)
    number = spans.begins.cumsum(1) - 1  # of the span that a hidden token is in
    sentinels = np.array(marks.sentinels)[np.maximum(number, 0)]

    is_read = spans.is_text & (~spans.hidden | spans.begins)
    place = is_read.cumsum(1) - 1
    tokens = np.full((n_rows, seq_len), marks.pad)
    tokens[row[is_read], place[is_read]] = np.where(spans.begins, sentinels, spans.tokens)[is_read]
    n_read = is_read.sum(1)
    if end_of_input:
        tokens[row[:, 0], n_read] = marks.end
        n_read = n_read + 1

    # Behind the hidden tokens before it, and the sentinels of its own span and those before.
    place = spans.hidden.cumsum(1) + number
    targets = np.full((n_rows, decoder_seq_len), marks.pad)
    targets[row[spans.begins], place[spans.begins] - 1] = sentinels[spans.begins]
    targets[row[spans.hidden], place[spans.hidden]] = spans.tokens[spans.hidden]
    n_said = spans.hidden.sum(1) + spans.begins.sum(1)
    targets[row[:, 0], n_said] = marks.end

    decoder_padding = np.arange(decoder_seq_len) > n_said[:, None]
    before = np.concatenate([np.full((n_rows, 1), marks.start), targets[:, :-1]], 1)
    return Sequences(
        tokens=tokens,
        decoder_tokens=np.where(decoder_padding, marks.pad, before),
        targets=targets,
        padding=np.arange(seq_len) >= n_read[:, None],
        decoder_padding=decoder_padding,
    )
