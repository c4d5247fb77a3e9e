"""Choose the words to hide for BERT and Megatron's T5: n-grams at random places, until enough tokens are hidden.

    words = words_of(tokens, segments, continuing)
    grams = choose(words, n_words, max_ngram, n_to_hide(0.15, lengths), keys)

The rule is Megatron-LM's (`create_masked_lm_predictions`). The words of a sample are taken in random order; each word
begins an n-gram. If an n-gram has more tokens than still have to be hidden, it is tried with fewer words. An n-gram
that overlaps an earlier n-gram is dropped.

There are two differences from Megatron. The number of tokens to hide is rounded to the nearest integer; Megatron in
effect rounds down. And the first token of a segment always begins a word, even if truncation cut off the beginning of
that word.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dtmega.ops import keyed

UNBOUNDED = 1 << 40


class Words(NamedTuple):
    """The words of B samples. W is the largest number of words in a sample.

    Attributes:
        numbers: index of the word that each token belongs to, int64 [B, S], counted from 0 in each sample; meaningless
            outside segments.
        begins: mask of the first token of each word, bool [B, S].
        sizes: number of tokens in each word, int64 [B, W]; 0 after a sample's last word.
        in_segment: number of words from each word to the last word of its segment, inclusive, int64 [B, W].
    """

    numbers: NDArray[np.int64]
    begins: NDArray[np.bool_]
    sizes: NDArray[np.int64]
    in_segment: NDArray[np.int64]


class Grams(NamedTuple):
    """The n-grams chosen in B samples. Two n-grams may touch but not overlap.

    Attributes:
        words: mask of the words in n-grams, bool [B, W].
        firsts: mask of the first word of each n-gram, bool [B, W].
    """

    words: NDArray[np.bool_]
    firsts: NDArray[np.bool_]


def n_to_hide(mask_prob: float, lengths: NDArray[np.integer]) -> NDArray[np.int64]:
    """Number of tokens to hide in samples of these lengths, at least 1."""
    return np.maximum(1, np.rint(mask_prob * lengths)).astype(np.int64)


def words_of(tokens: NDArray[np.int64], segments: NDArray[np.int64], continuing: NDArray[np.int64]) -> Words:
    """The words of B samples.

    Args:
        tokens: tokens of the samples, int64 [B, S].
        segments: segment of each token, int64 [B, S]: 1 or 2, or 0 for a token that is not text.
        continuing: ids of tokens that continue a word.
    """
    in_text = segments > 0
    begins = in_text & ~np.isin(tokens, continuing)
    begins[:, 0] |= in_text[:, 0]
    begins[:, 1:] |= in_text[:, 1:] & (segments[:, 1:] != segments[:, :-1])
    numbers = np.maximum(np.cumsum(begins, 1) - 1, 0)
    n_rows = len(numbers)
    n_words = int(numbers.max()) + 1
    rows = np.arange(n_rows)[:, None] * n_words

    # One bincount covers all samples: word w of row b is counted in bin `b * W + w`.
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
    max_grams: int = UNBOUNDED,
    room: int = UNBOUNDED,
) -> Grams:
    """Choose the n-grams of each sample, word by word in random order, for all samples at once.

    Args:
        words: the samples' words.
        n_words: number of words in the n-gram that would begin at each word, int64 [B, W]; at most max_ngram, and at
            most `words.in_segment`.
        max_ngram: maximum number of words in an n-gram.
        to_hide: number of tokens to hide in each sample, int64 [B].
        keys: keys of the samples, uint64 [B]; the order of a sample's words is a function of its key.
        max_grams: maximum number of n-grams in a sample.
        room: maximum total number of n-gram tokens and sentinels in a sample; each n-gram has one sentinel.
    """
    n_rows, width = words.sizes.shape
    index = np.arange(width)
    is_word = words.sizes > 0
    order = keyed.draws(keys[:, None], "order", index)
    order[~is_word] = np.iinfo(np.uint64).max  # entries without a word come last
    order = np.argsort(order, 1, kind="stable")

    # Number of tokens in the n-grams of 1, 2, ..., max_ngram words that begin at each word, [B, W, max_ngram].
    padded = np.pad(words.sizes, ((0, 0), (0, max_ngram)))
    ahead = np.arange(max_ngram)
    totals = np.cumsum(padded[:, index[:, None] + ahead], 2)
    chosen = np.zeros(padded.shape, np.bool_)
    firsts = np.zeros(padded.shape, np.bool_)
    # For each sample: how many tokens are still to hide, how many tokens and sentinels still fit, and how many n-grams
    # are still allowed.
    remaining = to_hide.copy()
    room_left = np.full(n_rows, room)
    grams_left = np.full(n_rows, max_grams)
    rows = np.arange(n_rows)
    for word in order.T:
        allowed = np.where(grams_left > 0, np.minimum(remaining, room_left - 1), 0)
        if not (allowed > 0).any():
            break
        # The n-gram has as many words as were drawn for it, or fewer if these words have too many tokens.
        total = totals[rows, word]
        n_fitting = ((total <= allowed[:, None]) & (ahead < n_words[rows, word][:, None])).sum(1)
        places = (rows[:, None], word[:, None] + ahead)
        within = ahead < n_fitting[:, None]
        # Take the n-gram unless one of its words is in an n-gram already.
        free = (n_fitting > 0) & is_word[rows, word] & ~(chosen[places] & within).any(1)
        chosen[places] |= within & free[:, None]
        firsts[rows, word] |= free
        n_tokens = np.where(free, total[rows, np.maximum(n_fitting, 1) - 1], 0)
        remaining -= n_tokens
        room_left -= n_tokens + free
        grams_left -= free
    return Grams(chosen[:, :width], firsts[:, :width])
