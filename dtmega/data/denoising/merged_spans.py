"""Span corruption as in T5: a share of each text is hidden in spans that never touch.

    counts = longest(seq_len=512, mask_prob=0.15, mean_span=3.0)  # 568 tokens, 85 of them hidden in 28 spans
    samples = SpanSamples(dataset, (0, 1000), counts.n_tokens, seed=1234, split="train")
    hidden(counts, keys)  # [B, 568]

The rule is `random_spans_noise_mask` of T5 (Raffel et al., arXiv:1910.10683, section 3.3.4), which transformers'
`run_t5_mlm_flax.py` has too: the hidden tokens are cut into spans and the others into as many pieces, each cut as
likely as any other, and they take turns, beginning with a piece of text. So all samples have the same counts, and texts
are so long that what is left of them, with a sentinel for each span and an end, is as near to S as can be.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dtmega import keyed
from dtmega.data.denoising.spans import HiddenSpans, SpanSample
from dtmega.data.samples import Samples


class SpanCounts(NamedTuple):
    """The numbers of a sample.

    Attributes:
        n_tokens: L, of its text.
        n_hidden: of them in spans.
        n_spans: those spans.
    """

    n_tokens: int
    n_hidden: int
    n_spans: int

    @property
    def n_read(self) -> int:
        """Tokens that the encoder reads: text, sentinels and an end."""
        return self.n_tokens - self.n_hidden + self.n_spans + 1

    @property
    def n_said(self) -> int:
        """Tokens that the decoder says: hidden ones, sentinels and an end."""
        return self.n_hidden + self.n_spans + 1


def counts_of(n_tokens: int, mask_prob: float, mean_span: float) -> SpanCounts:
    """The counts of a text of two tokens or more."""
    n_hidden = min(max(round(n_tokens * mask_prob), 1), n_tokens - 1)
    n_spans = max(round(min(n_hidden, n_tokens - n_hidden) / mean_span), 1)
    return SpanCounts(n_tokens, n_hidden, n_spans)


def longest(seq_len: int, mask_prob: float, mean_span: float) -> SpanCounts:
    """The counts of the longest text of which an encoder of S tokens can read what is left.

    Raises:
        ValueError: S has no room for the shortest.
    """

    def n_read(n_tokens: int) -> int:
        return counts_of(n_tokens, mask_prob, mean_span).n_read

    shortest = counts_of(2, mask_prob, mean_span)
    if seq_len < shortest.n_read:
        raise ValueError(
            f"seq_len={seq_len} has no room for a token, a sentinel and an end: expected at least {shortest.n_read} "
            f"([data] seq_len)"
        )
    too_long = seq_len
    while n_read(too_long) <= seq_len:
        too_long *= 2
    lengths = range(2, too_long)
    return counts_of(lengths[bisect_right(lengths, seq_len, key=n_read) - 1], mask_prob, mean_span)


class SpanSamples(Samples):
    """The samples of `Samples`, without the token that each shares with the next, and each with a key of its own."""

    def __getitem__(self, g: int) -> SpanSample:
        return SpanSample(self.tokens(g)[:-1], keyed.key64(f"{self._stream}/{g}/spans"))


def hidden(counts: SpanCounts, samples: list[SpanSample]) -> HiddenSpans:
    """The texts of some samples, with what is hidden of them."""
    tokens = np.stack([sample.tokens for sample in samples]).astype(np.int64)
    keys = np.array([sample.key for sample in samples], np.uint64)
    is_hidden = _turns(counts, keys)
    begins = is_hidden.copy()
    begins[:, 1:] &= ~is_hidden[:, :-1]
    return HiddenSpans(tokens, np.ones_like(is_hidden), is_hidden, begins)


def _turns(counts: SpanCounts, keys: NDArray[np.uint64]) -> NDArray[np.bool_]:
    """[B, L] hidden tokens: pieces of text and spans take turns."""
    text = _pieces(counts.n_tokens - counts.n_hidden, counts.n_spans, keys, "text")
    spans = _pieces(counts.n_hidden, counts.n_spans, keys, "hidden")
    lengths = np.stack([text, spans], 2).reshape(len(keys), -1)
    changes = np.zeros((len(keys), counts.n_tokens), np.bool_)
    np.put_along_axis(changes, lengths.cumsum(1)[:, :-1], True, 1)
    return changes.cumsum(1) % 2 == 1


def _pieces(n_items: int, n_pieces: int, keys: NDArray[np.uint64], name: str) -> NDArray[np.int64]:
    """Lengths [B, n_pieces] of at least 1 that add up to n_items, each such row equally likely."""
    order = np.argsort(keyed.draws(keys[:, None], name, np.arange(n_items - 1)), 1)
    last = np.sort(order[:, : n_pieces - 1], 1)  # items of the pieces but for the last one
    bounds = np.pad(last, ((0, 0), (1, 1)), constant_values=((0, 0), (-1, n_items - 1)))
    return np.diff(bounds)
