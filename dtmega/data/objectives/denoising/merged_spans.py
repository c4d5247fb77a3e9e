"""Span corruption as in T5: a share of each text is hidden, in spans that never touch.

    counts = counts_of_longest(seq_len=512, mask_prob=0.15, mean_span=3.0)  # 568 tokens, 85 hidden in 28 spans
    samples = SpanSamples(dataset, (0, 1000), counts.n_tokens, seed=1234, split="train")
    hide(counts, [samples[g] for g in range(8)])  # hidden spans in texts [8, 568]

The rule is T5's `random_spans_noise_mask` (Raffel et al., arXiv:1910.10683, section 3.3.4), as in transformers'
`run_t5_mlm_flax.py`. The hidden tokens are divided at random into spans, and the visible tokens into as many runs; all
divisions are equally likely. Runs and spans alternate, beginning with a visible run. All samples have equal counts:
every text has the greatest length for which the encoder's sequence still fits in S. The encoder's sequence consists of
the visible text, a sentinel for each span, and the end mark.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dtmega.data.objectives.denoising.spans import HiddenSpans, SpanSample
from dtmega.data.sampling.samples import Samples
from dtmega.ops import keyed


class SpanCounts(NamedTuple):
    """Token and span counts of a sample; all samples have the same counts.

    Attributes:
        n_tokens: L, number of tokens in the sample's text.
        n_hidden: number of hidden tokens.
        n_spans: number of hidden spans.
    """

    n_tokens: int
    n_hidden: int
    n_spans: int

    @property
    def n_encoder_tokens(self) -> int:
        """Length of the encoder's sequence: visible text, sentinels and the end mark."""
        return self.n_tokens - self.n_hidden + self.n_spans + 1

    @property
    def n_decoder_tokens(self) -> int:
        """Length of the decoder's sequence: hidden tokens, sentinels and the end mark."""
        return self.n_hidden + self.n_spans + 1


def counts_of(n_tokens: int, mask_prob: float, mean_span: float) -> SpanCounts:
    """Compute the token and span counts of a sample with `n_tokens` >= 2 tokens of text."""
    n_hidden = min(max(round(n_tokens * mask_prob), 1), n_tokens - 1)
    # Each span has at least one hidden token and follows at least one visible token. So there cannot be more spans than
    # hidden tokens, nor more spans than visible tokens.
    n_spans = max(round(min(n_hidden, n_tokens - n_hidden) / mean_span), 1)
    return SpanCounts(n_tokens, n_hidden, n_spans)


def counts_of_longest(seq_len: int, mask_prob: float, mean_span: float) -> SpanCounts:
    """Compute the span counts for the longest text whose encoder sequence fits in S.

    Args:
        seq_len: S, length of the encoder's sequence.
        mask_prob: share of the text to hide.
        mean_span: average number of tokens in a span.

    Raises:
        ValueError: S is too small even for two tokens of text.
    """

    def n_encoder_tokens(n_tokens: int) -> int:
        return counts_of(n_tokens, mask_prob, mean_span).n_encoder_tokens

    shortest = counts_of(2, mask_prob, mean_span)
    if seq_len < shortest.n_encoder_tokens:
        raise ValueError(
            f"seq_len={seq_len} has no room for a token, a sentinel and an end: expected at least "
            f"{shortest.n_encoder_tokens} ([data] seq_len)"
        )
    # The encoder's sequence grows with the text: find a length that does not fit, then bisect.
    too_long = seq_len
    while n_encoder_tokens(too_long) <= seq_len:
        too_long *= 2
    lengths = range(2, too_long)
    n_tokens = lengths[bisect_right(lengths, seq_len, key=n_encoder_tokens) - 1]
    return counts_of(n_tokens, mask_prob, mean_span)


class SpanSamples(Samples):
    """Samples of running text, each with a key that determines its hidden spans.

    The last token of a sample is dropped, because the next sample begins with it.
    """

    def __getitem__(self, g: int) -> SpanSample:
        return SpanSample(self.tokens(g)[:-1], keyed.key64(f"{self._stream}/{g}/spans"))


def hide(counts: SpanCounts, samples: list[SpanSample]) -> HiddenSpans:
    """Choose the hidden spans of all samples at once.

    Args:
        counts: token and span counts of every sample.
        samples: texts with `counts.n_tokens` tokens each.
    """
    tokens = np.stack([sample.tokens for sample in samples]).astype(np.int64)
    keys = np.array([sample.key for sample in samples], np.uint64)
    is_hidden = _alternating(counts, keys)
    begins = is_hidden.copy()
    begins[:, 1:] &= ~is_hidden[:, :-1]
    return HiddenSpans(tokens, np.ones_like(is_hidden), is_hidden, begins)


def _alternating(counts: SpanCounts, keys: NDArray[np.uint64]) -> NDArray[np.bool_]:
    """Mask of the hidden tokens, bool [B, L]; visible runs and hidden spans alternate."""
    text = _pieces(counts.n_tokens - counts.n_hidden, counts.n_spans, keys, "text")
    spans = _pieces(counts.n_hidden, counts.n_spans, keys, "hidden")
    lengths = np.stack([text, spans], 2).reshape(len(keys), -1)
    # Mark where each run or span ends and the next begins. A token after an odd number of marks is hidden.
    changes = np.zeros((len(keys), counts.n_tokens), np.bool_)
    np.put_along_axis(changes, lengths.cumsum(1)[:, :-1], True, 1)
    return changes.cumsum(1) % 2 == 1


def _pieces(n_items: int, n_pieces: int, keys: NDArray[np.uint64], name: str) -> NDArray[np.int64]:
    """Random lengths >= 1 that add up to n_items, [B, n_pieces]; all such lists of lengths are equally likely."""
    # A piece may end after any item but the last. Choose n_pieces - 1 of these n_items - 1 items as ends.
    order = np.argsort(keyed.draws(keys[:, None], name, np.arange(n_items - 1)), 1)
    last_items = np.sort(order[:, : n_pieces - 1], 1)
    bounds = np.pad(last_items, ((0, 0), (1, 1)), constant_values=((0, 0), (-1, n_items - 1)))
    return np.diff(bounds)
