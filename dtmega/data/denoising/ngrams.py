"""The choice of words that are hidden: n-grams at random places, until so many tokens are in them.

    words = words_of(tokens, segments, continuing)
    grams = choose(words, n_words, max_ngram, n_to_hide(0.15, lengths), keys)

The rule is Megatron-LM's (`create_masked_lm_predictions`), for BERT and for T5: words in random order begin n-grams.
One that is larger than what is still to be hidden is tried with fewer words; one that overlaps another is left out.

Other than there: the number of tokens to hide is rounded, where Megatron's is in effect rounded down; and the first
token of a segment begins a word, also where truncation left the rest of one.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dtmega import keyed

UNBOUNDED = 1 << 40


class Words(NamedTuple):
    """The words of some samples, W = the most that one has.

    Attributes:
        numbers: [B, S] the word that a token is of, counted from 0 in each sample; of no meaning outside segments.
        begins: bool [B, S], the first token of each word.
        sizes: [B, W] tokens, 0 beyond the last one.
        in_segment: [B, W] words from this one to the end of its segment, itself included.
    """

    numbers: NDArray[np.int64]
    begins: NDArray[np.bool_]
    sizes: NDArray[np.int64]
    in_segment: NDArray[np.int64]


class Grams(NamedTuple):
    """The n-grams that were chosen in some samples.

    Attributes:
        words: bool [B, W], those in some n-gram.
        firsts: bool [B, W], the first word of each n-gram; two of them may touch.
    """

    words: NDArray[np.bool_]
    firsts: NDArray[np.bool_]


def n_to_hide(mask_prob: float, lengths: NDArray[np.integer]) -> NDArray[np.int64]:
    """The tokens to hide in samples of so many."""
    return np.maximum(1, np.rint(mask_prob * lengths)).astype(np.int64)


def words_of(tokens: NDArray[np.int64], segments: NDArray[np.int64], continuing: NDArray[np.int64]) -> Words:
    """The words of the samples.

    Args:
        tokens, segments: [B, S]; words are in segments 1 and 2, not in 0.
        continuing: ids that go on within a word.
    """
    in_text = segments > 0
    begins = in_text & ~np.isin(tokens, continuing)
    begins[:, 0] |= in_text[:, 0]
    begins[:, 1:] |= in_text[:, 1:] & (segments[:, 1:] != segments[:, :-1])
    numbers = np.maximum(np.cumsum(begins, 1) - 1, 0)
    n_rows = len(numbers)
    n_words = int(numbers.max()) + 1
    rows = np.arange(n_rows)[:, None] * n_words

    sizes = np.bincount((rows + numbers)[in_text], minlength=n_rows * n_words).reshape(n_rows, n_words)
    in_first = (begins & (segments == 1)).sum(1)[:, None]
    in_both = begins.sum(1)[:, None]
    index = np.arange(n_words)
    in_segment = np.maximum(np.where(index < in_first, in_first, in_both) - index, 0)
    return Words(numbers, begins, sizes, in_segment)


def choose(
    words: Words,
    n_words: NDArray[np.int64],
    max_ngram: int,
    to_hide: NDArray[np.int64],
    keys: NDArray[np.uint64],
    most: int = UNBOUNDED,
    room: int = UNBOUNDED,
) -> Grams:
    """The n-grams of each sample; each round goes on to the next word of every sample.

    Args:
        n_words: [B, W] of the n-gram that begins with a word, at most max_ngram and what its segment has.
        to_hide: [B] tokens.
        keys: uint64 [B], of the samples; their order of words is a function of it.
        most: n-grams of a sample.
        room: for the tokens of all n-grams of a sample, with one more for each of them.
    """
    n_rows, width = words.sizes.shape
    index = np.arange(width)
    is_word = words.sizes > 0
    order = keyed.draws(keys[:, None], "order", index)
    order[~is_word] = np.iinfo(np.uint64).max  # last
    order = np.argsort(order, 1, kind="stable")

    # What an n-gram from each word on has in tokens, [B, W, max_ngram].
    padded = np.pad(words.sizes, ((0, 0), (0, max_ngram)))
    ahead = np.arange(max_ngram)
    totals = np.cumsum(padded[:, index[:, None] + ahead], 2)
    chosen = np.zeros(padded.shape, np.bool_)
    firsts = np.zeros(padded.shape, np.bool_)
    left = to_hide.copy()
    room_left = np.full(n_rows, room)
    most_left = np.full(n_rows, most)
    rows = np.arange(n_rows)
    for word in order.T:
        allowed = np.where(most_left > 0, np.minimum(left, room_left - 1), 0)
        if not (allowed > 0).any():
            break
        total = totals[rows, word]
        fits = ((total <= allowed[:, None]) & (ahead < n_words[rows, word][:, None])).sum(1)  # words
        taken = (rows[:, None], word[:, None] + ahead)
        within = ahead < fits[:, None]
        free = (fits > 0) & is_word[rows, word] & ~(chosen[taken] & within).any(1)
        chosen[taken] |= within & free[:, None]
        firsts[rows, word] |= free
        n_tokens = np.where(free, total[rows, np.maximum(fits, 1) - 1], 0)
        left -= n_tokens
        room_left -= n_tokens + free
        most_left -= free
    return Grams(chosen[:, :width], firsts[:, :width])
