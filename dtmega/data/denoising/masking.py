"""BERT's masks: some whole words of each sample are hidden, and are to be predicted.

    masked = hide(pairs, vocabulary, mask_prob=0.15, max_ngram=3)
    masked.tokens, masked.hidden  # [B, S] both

The rule is Megatron-LM's (`create_masked_lm_predictions`): n-grams are chosen as `ngrams.py` says, n <= max_ngram words
with probability in proportion to 1/n. Of hidden tokens 80 % become [MASK], 10 % a random one, 10 % stay.

Other than there: random tokens are never special ones, and an n-gram never reaches from one segment into the other.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dtmega import keyed
from dtmega.data.denoising.ngrams import choose, n_to_hide, words_of
from dtmega.data.denoising.pairs import Pairs, Specials

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


class MaskedTokens(NamedTuple):
    """Samples after masking.

    Attributes:
        tokens: int64 [B, S], with masks.
        hidden: bool [B, S], to be predicted.
    """

    tokens: NDArray[np.int64]
    hidden: NDArray[np.bool_]


def hide(pairs: Pairs, vocabulary: Vocabulary, mask_prob: float, max_ngram: int) -> MaskedTokens:
    """Hide `mask_prob` of the tokens of each sample, as far as n-grams fit, all samples at once."""
    words = words_of(pairs.tokens, pairs.segments, vocabulary.continuing)
    lengths = (~pairs.padding).sum(1)  # with special tokens, as in the original
    drawn = keyed.uniform(keyed.draws(pairs.keys[:, None], "n", np.arange(words.sizes.shape[1])))
    n_words = _drawn_lengths(drawn, words.in_segment, max_ngram)
    grams = choose(words, n_words, max_ngram, n_to_hide(mask_prob, lengths), pairs.keys)
    hidden = (pairs.segments > 0) & np.take_along_axis(grams.words, words.numbers, 1)
    return MaskedTokens(_replaced(pairs, hidden, vocabulary), hidden)


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
