"""Span corruption as in Megatron's T5: n-grams of words in a text of sentences, each with a sentinel of its own.

    samples = SentenceSamples(dataset, (0, 1000), seq_len=512, short_seq_prob=0.1, seed=1234, split="train")
    hidden([samples[g] for g in range(8)], continuing, limits)

The rule is Megatron-LM's `t5_dataset.py`: neighbouring sentences of one document, cut off at S - 2 tokens, or fewer in
a short sample; n-grams as `ngrams.py` says, whose number of words is geometric with p = 0.2 (SpanBERT,
arXiv:1907.10529, section 3.1) and at most `[data] max_span`. Two of them may touch, and stay two.

Other than there: an n-gram for which no sentinel is left, or no room in T, is tried with fewer words and then stays
text. Megatron ends the run at such a sample.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dtmega import keyed
from dtmega.data.denoising.cut_samples import CutSamples
from dtmega.data.denoising.ngrams import choose, n_to_hide, words_of
from dtmega.data.denoising.spans import HiddenSpans, SpanSample
from dtmega.data.record import LONGEST_SENTENCE
from dtmega.output import counted

N_SPECIAL = 2  # places of S that Megatron leaves free
STOPS = 0.2  # the chance that a span ends with a word


class Limits(NamedTuple):
    """The share of a sample that is hidden, and how much of it at most.

    Attributes:
        mask_prob: share of its tokens.
        max_span: words in a span at most.
        sentinels: spans at most.
        room: T, of the decoder.
    """

    mask_prob: float
    max_span: int
    sentinels: int
    room: int


class SentenceSamples(CutSamples):
    """The endless samples of one part of one corpus, each of one sentence or more."""

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

    def n_kept(self, lengths: NDArray[np.int64], targets: NDArray[np.int64]) -> NDArray[np.int64]:
        return np.minimum(lengths, targets)


def expected(n_tokens: int, mask_prob: float, max_span: int) -> tuple[int, int]:
    """Hidden tokens of a text, and the spans that they are in on average if each token is a word."""
    n_hidden = int(n_to_hide(mask_prob, np.array(n_tokens)))
    mean = (1 - (1 - STOPS) ** max_span) / STOPS
    return n_hidden, math.ceil(n_hidden / mean)


def hidden(samples: list[SpanSample], continuing: NDArray[np.int64], limits: Limits) -> HiddenSpans:
    """The texts of some samples, with what is hidden of them.

    Args:
        continuing: ids that go on within a word.
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
    # The end of the decoder's sequence takes a place, too.
    grams = choose(words, n_words, limits.max_span, to_hide, keys, limits.sentinels, limits.room - 1)
    is_hidden = is_text & np.take_along_axis(grams.words, words.numbers, 1)
    begins = words.begins & np.take_along_axis(grams.firsts, words.numbers, 1)
    return HiddenSpans(tokens, is_text, is_hidden, begins)


def _drawn_lengths(drawn: NDArray[np.float64], max_span: int) -> NDArray[np.int64]:
    """The words of each span: 1 to max_span, n or fewer with probability 1 - (1 - STOPS)^n."""
    bounds = 1 - (1 - STOPS) ** np.arange(1, max_span)
    return 1 + np.searchsorted(bounds, drawn, "right")
