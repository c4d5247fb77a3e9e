"""Masks of BERT: some whole words of each sample are hidden, and are to be predicted.

    masked = hide(pairs, vocabulary, mask_prob=0.15, max_ngram=3)
    masked.tokens, masked.hidden  # [B, S] both

The rule is Megatron-LM's (`create_masked_lm_predictions`): words in random order begin n-grams of n <= max_ngram words,
with probability in proportion to 1/n. One that is more than what is still to be hidden is tried with fewer words; one
that overlaps another is left out. Of hidden tokens 80 % become [MASK], 10 % a random one, 10 % stay.

Other than there: the number of tokens to hide is rounded, where Megatron's is in effect rounded down; random tokens are
never special ones; an n-gram never reaches from one segment into the other; and the first token of a segment begins a
word, also where truncation left the rest of one.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dtmega import keyed
from dtmega.data.pairs import Pairs, Specials

MASKED, RANDOM = 0.8, 0.1  # the rest stays


class Vocabulary(NamedTuple):
    """The ids that masking tells apart, as plain data that goes to other processes.

    Attributes:
        continuing: ids that go on within a word.
        ordinary: all ids that are not special.
    """

    specials: Specials
    continuing: NDArray[np.int64]
    ordinary: NDArray[np.int64]


class Words(NamedTuple):
    """The words of some samples, W = the most that one has.

    Attributes:
        numbers: [B, S] the word that a token is of, counted from 0 in each sample; of no meaning outside segments.
        sizes: [B, W] tokens, 0 beyond the last one.
        in_segment: [B, W] words from this one to the end of its segment, itself included.
    """

    numbers: NDArray[np.int64]
    sizes: NDArray[np.int64]
    in_segment: NDArray[np.int64]


class Masked(NamedTuple):
    """Attributes:
    tokens: int64 [B, S], with masks.
    hidden: bool [B, S], to be predicted.
    """

    tokens: NDArray[np.int64]
    hidden: NDArray[np.bool_]


def hide(pairs: Pairs, vocabulary: Vocabulary, mask_prob: float, max_ngram: int) -> Masked:
    """Hide `mask_prob` of the tokens of each sample, as far as n-grams fit, all samples at once."""
    words = words_of(pairs, vocabulary.continuing)
    lengths = (~pairs.padding).sum(1)  # with special tokens, as in the original
    to_hide = np.maximum(1, np.rint(mask_prob * lengths)).astype(np.int64)
    chosen = _choose(words, to_hide, max_ngram, pairs.keys)
    hidden = (pairs.segments > 0) & np.take_along_axis(chosen, words.numbers, 1)
    return Masked(_replaced(pairs, hidden, vocabulary), hidden)


def words_of(pairs: Pairs, continuing: NDArray[np.int64]) -> Words:
    """The words of the samples."""
    segments = pairs.segments
    in_text = segments > 0
    begins = in_text & ~np.isin(pairs.tokens, continuing)
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
    return Words(numbers, sizes, in_segment)


def _choose(words: Words, to_hide: NDArray[np.int64], max_ngram: int, keys: NDArray[np.uint64]) -> NDArray[np.bool_]:
    """[B, W] words to hide; each round goes on to the next word of every sample."""
    n_rows, n_words = words.sizes.shape
    index = np.arange(n_words)
    is_word = words.sizes > 0
    order = keyed.draws(keys[:, None], "order", index)
    order[~is_word] = np.iinfo(np.uint64).max  # last
    order = np.argsort(order, 1, kind="stable")
    lengths = _drawn_lengths(keyed.uniform(keyed.draws(keys[:, None], "n", index)), words.in_segment, max_ngram)

    # What an n-gram from each word on has in tokens, [B, W, max_ngram].
    padded = np.pad(words.sizes, ((0, 0), (0, max_ngram)))
    ahead = np.arange(max_ngram)
    totals = np.cumsum(padded[:, index[:, None] + ahead], 2)
    chosen = np.zeros(padded.shape, np.bool_)
    left = to_hide.copy()
    rows = np.arange(n_rows)
    for word in order.T:
        if not left.any():
            break
        total = totals[rows, word]
        fits = ((total <= left[:, None]) & (ahead < lengths[rows, word][:, None])).sum(1)  # words
        taken = (rows[:, None], word[:, None] + ahead)
        within = ahead < fits[:, None]
        free = (fits > 0) & is_word[rows, word] & ~(chosen[taken] & within).any(1)
        chosen[taken] |= within & free[:, None]
        left -= np.where(free, total[rows, np.maximum(fits, 1) - 1], 0)
    return chosen[:, :n_words]


def _drawn_lengths(drawn: NDArray[np.float64], most: NDArray[np.int64], max_ngram: int) -> NDArray[np.int64]:
    """n of each n-gram, [B, W]: 1 to min(max_ngram, most), with probability in proportion to 1/n."""
    weights = np.cumsum(1 / np.arange(1, max_ngram + 1))
    most = np.clip(most, 1, max_ngram)
    # n is the first whose weights together are more than the drawn share of all that are possible.
    return 1 + (drawn[..., None] * weights[most - 1][..., None] >= weights[:-1]).sum(2)


def _replaced(pairs: Pairs, hidden: NDArray[np.bool_], vocabulary: Vocabulary) -> NDArray[np.int64]:
    """[B, S] tokens, with others where they are hidden."""
    keys = pairs.keys[:, None]
    places = np.arange(pairs.tokens.shape[1])
    kind = keyed.uniform(keyed.draws(keys, "kind", places))
    ordinary = vocabulary.ordinary[keyed.below(keyed.draws(keys, "random", places), len(vocabulary.ordinary))]
    instead = np.where(kind < MASKED, vocabulary.specials.mask, ordinary)
    return np.where(hidden & (kind < MASKED + RANDOM), instead, pairs.tokens)
