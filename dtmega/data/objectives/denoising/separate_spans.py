"""Span corruption as in Megatron's T5: hidden n-grams of words, each with its own sentinel, in texts made of sentences.

    samples = SentenceSamples(dataset, (0, 1000), seq_len=512, short_seq_prob=0.1, seed=1234, split="train")
    hide([samples[g] for g in range(8)], continuing, limits)

The rule is taken from Megatron-LM's `t5_dataset.py`. A sample consists of consecutive sentences of one document, cut
off at S - 2 tokens, or earlier if the sample is short. `ngrams.py` chooses the n-grams. The number of words in an
n-gram follows a geometric distribution with p = 0.2 (SpanBERT, arXiv:1907.10529, section 3.1), up to `[data] max_span`.
Two n-grams that touch keep separate sentinels.

There is one difference from Megatron. If an n-gram does not fit in the decoder's remaining room, it is tried with fewer
words. If even one word does not fit, or no sentinel is left, the n-gram is not hidden. Megatron stops the run instead.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dtmega.data.indexed_files.record import LONGEST_SENTENCE
from dtmega.data.objectives.denoising.cut_samples import CutSamples
from dtmega.data.objectives.denoising.ngrams import choose, n_to_hide, words_of
from dtmega.data.objectives.denoising.spans import HiddenSpans, SpanSample
from dtmega.files.console import counted
from dtmega.ops import keyed

N_SPECIAL = 2  # number of positions in the encoder's sequence that Megatron leaves free
STOPS = 0.2  # probability that a span ends after each of its words


class Limits(NamedTuple):
    """Limits on the hidden n-grams of a sample.

    Attributes:
        mask_prob: share of the tokens to hide.
        max_span: maximum number of words in a span.
        sentinels: number of sentinels, which is also the maximum number of spans.
        room: T, length of the decoder's sequence: hidden n-grams, their sentinels and the end mark must fit in it.
    """

    mask_prob: float
    max_span: int
    sentinels: int
    room: int


class SentenceSamples(CutSamples):
    """An endless sequence of samples from one part of a corpus. Each sample has one or more sentences."""

    n_special = N_SPECIAL
    fewest = 1

    @property
    def note(self) -> str:
        if not self.n_unread:
            return ""
        return (
            f"'{self.split}': {counted(self.n_unread, 'token')} of {self.dataset.prefix} are not read, at the end of "
            f"samples that are longer than their target, or in documents with an empty sentence, or with several of "
            f"which one is longer than {LONGEST_SENTENCE} tokens"
        )

    def __getitem__(self, g: int) -> SpanSample:
        first, end, target = self.entry(g)
        begin, stop = self.dataset.tokens_before(np.array([first, end])).tolist()
        return SpanSample(self.dataset.tokens[begin : min(stop, begin + target)], keyed.key64(f"{self.stream}/{g}"))

    def n_read(self, lengths: NDArray[np.int64], targets: NDArray[np.int64]) -> NDArray[np.int64]:
        return np.minimum(lengths, targets)


def expected(n_tokens: int, mask_prob: float, max_span: int) -> tuple[int, int]:
    """Number of hidden tokens in a text, and the average number of hidden spans if each token is a word.

    Args:
        n_tokens: number of tokens in the text.
        mask_prob: share of the tokens to hide.
        max_span: maximum number of words in a span.
    """
    n_hidden = int(n_to_hide(mask_prob, np.array(n_tokens)))
    # Mean of a geometric distribution that is cut off at max_span.
    mean = (1 - (1 - STOPS) ** max_span) / STOPS
    return n_hidden, math.ceil(n_hidden / mean)


def hide(samples: list[SpanSample], continuing: NDArray[np.int64], limits: Limits) -> HiddenSpans:
    """Choose the hidden n-grams of all samples at once.

    Args:
        samples: texts of up to S - 2 tokens.
        continuing: ids of tokens that continue a word.
        limits: limits on the hidden n-grams.
    """
    keys = np.array([sample.key for sample in samples], np.uint64)
    lengths = np.array([len(sample.tokens) for sample in samples])
    is_text = np.arange(lengths.max()) < lengths[:, None]
    tokens = np.zeros(is_text.shape, np.int64)
    tokens[is_text] = np.concatenate([sample.tokens for sample in samples])

    words = words_of(tokens, is_text.astype(np.int64), continuing)
    drawn = keyed.uniform(keyed.draws(keys[:, None], "n", np.arange(words.sizes.shape[1])))
    n_words = np.minimum(_drawn_lengths(drawn, limits.max_span), words.in_segment)
    to_hide = n_to_hide(limits.mask_prob, lengths)
    # One position in the decoder's sequence is reserved for the end mark.
    grams = choose(words, n_words, limits.max_span, to_hide, keys, limits.sentinels, limits.room - 1)
    is_hidden = is_text & np.take_along_axis(grams.words, words.numbers, 1)
    begins = words.begins & np.take_along_axis(grams.firsts, words.numbers, 1)
    return HiddenSpans(tokens, is_text, is_hidden, begins)


def _drawn_lengths(drawn: NDArray[np.float64], max_span: int) -> NDArray[np.int64]:
    """Number of words in each span, [B, W]: 1 to max_span, geometrically distributed with p = STOPS.

    Args:
        drawn: uniform numbers in [0, 1), [B, W].
        max_span: maximum number of words in a span.
    """
    bounds = 1 - (1 - STOPS) ** np.arange(1, max_span)
    return 1 + np.searchsorted(bounds, drawn, "right")
