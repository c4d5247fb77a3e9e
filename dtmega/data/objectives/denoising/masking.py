"""BERT's masks: some whole words of each sample are hidden, and the model has to predict them.

    masked = hide(pairs, vocabulary, mask_prob=0.15, max_ngram=3)
    masked.tokens, masked.hidden  # [B, S] both

The rule is Megatron-LM's (`create_masked_lm_predictions`). `ngrams.py` chooses the n-grams; an n-gram has n <=
max_ngram words, with probability proportional to 1/n. 80 % of the hidden tokens become [MASK], 10 % become a random
token, and 10 % stay unchanged.

There are two differences from Megatron: a random token is never a special token, and an n-gram never crosses from one
segment into the other.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dtmega.data.objectives.denoising.ngrams import choose, n_to_hide, words_of
from dtmega.data.objectives.denoising.pairs import Pairs, Specials
from dtmega.ops import keyed

MASKED, RANDOM = 0.8, 0.1  # shares of hidden tokens that become [MASK] or a random token; the rest stay unchanged


class Vocabulary(NamedTuple):
    """The groups of ids that masking needs, as plain arrays because a `Tokenizer` cannot be pickled.

    Attributes:
        specials: ids of [CLS], [SEP], [MASK] and [PAD].
        continuing: ids of tokens that continue a word, int64 [n].
        ordinary: all ids that are not special, int64 [n].
    """

    specials: Specials
    continuing: NDArray[np.int64]
    ordinary: NDArray[np.int64]


class MaskedTokens(NamedTuple):
    """Samples after masking.

    Attributes:
        tokens: tokens that the model reads, int64 [B, S].
        hidden: mask of the positions where the model has to predict the original token, bool [B, S].
    """

    tokens: NDArray[np.int64]
    hidden: NDArray[np.bool_]


def hide(pairs: Pairs, vocabulary: Vocabulary, mask_prob: float, max_ngram: int) -> MaskedTokens:
    """Hide a share `mask_prob` of each sample's tokens, or slightly less if no remaining word is short enough.

    Args:
        pairs: samples [B, S].
        vocabulary: groups of ids that masking needs.
        mask_prob: share of a sample's tokens to hide.
        max_ngram: maximum number of words in an n-gram.
    """
    words = words_of(pairs.tokens, pairs.segments, vocabulary.continuing)
    lengths = (~pairs.padding).sum(1)  # special tokens are counted too, as in Megatron
    drawn = keyed.uniform(keyed.draws(pairs.keys[:, None], "n", np.arange(words.sizes.shape[1])))
    n_words = _drawn_lengths(drawn, words.in_segment, max_ngram)
    grams = choose(words, n_words, max_ngram, n_to_hide(mask_prob, lengths), pairs.keys)
    hidden = (pairs.segments > 0) & np.take_along_axis(grams.words, words.numbers, 1)
    return MaskedTokens(_replaced(pairs, hidden, vocabulary), hidden)


def _drawn_lengths(drawn: NDArray[np.float64], most: NDArray[np.int64], max_ngram: int) -> NDArray[np.int64]:
    """Number n of words in each n-gram, [B, W]: 1 to min(max_ngram, most), with probability proportional to 1/n.

    Args:
        drawn: uniform numbers in [0, 1), [B, W].
        most: number of words from the n-gram's first word to the end of its segment, [B, W].
        max_ngram: maximum number of words in any n-gram.
    """
    # Inverse transform sampling: `sums[n - 1]` is 1/1 + ... + 1/n. The result is the first n with
    # sums[n - 1] > drawn x sums[most - 1].
    sums = np.cumsum(1 / np.arange(1, max_ngram + 1))
    most = np.clip(most, 1, max_ngram)
    return 1 + (drawn[..., None] * sums[most - 1][..., None] >= sums[:-1]).sum(2)


def _replaced(pairs: Pairs, hidden: NDArray[np.bool_], vocabulary: Vocabulary) -> NDArray[np.int64]:
    """The tokens that the model reads, [B, S]; a hidden token becomes [MASK] or a random token, or stays unchanged."""
    keys = pairs.keys[:, None]
    places = np.arange(pairs.tokens.shape[1])
    kind = keyed.uniform(keyed.draws(keys, "kind", places))
    ordinary = vocabulary.ordinary[keyed.below(keyed.draws(keys, "random", places), len(vocabulary.ordinary))]
    replacements = np.where(kind < MASKED, vocabulary.specials.mask, ordinary)
    return np.where(hidden & (kind < MASKED + RANDOM), replacements, pairs.tokens)
