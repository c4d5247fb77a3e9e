"""BERT's samples: two neighbouring segments of a document, in order or swapped. Sample g is a function of (seed, g).

    samples = PairSamples(dataset, documents=(0, 1000), seq_len=512, short_seq_prob=0.1, seed=1234, split="train")
    pairs = lay_out([samples[g] for g in range(8)], 512, specials)
    pairs.tokens  # [8, 512]: [CLS] A [SEP] B [SEP], padded

`cut_samples.py` decides which sentences a sample has. Draws keyed by the sample's number g decide the rest: where A
ends and B begins, which segment comes first, and which tokens are dropped if A and B together exceed the target length.
The rules are taken from Megatron-LM's `dataset_utils.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dtmega.data.indexed_files.record import LONGEST_SENTENCE
from dtmega.data.objectives.denoising.cut_samples import CutSamples
from dtmega.files.console import counted
from dtmega.ops import keyed

N_SPECIAL = 3  # [CLS], and a [SEP] after each segment


class Segments(NamedTuple):
    """Two neighbouring segments, not yet truncated or swapped.

    Attributes:
        tokens: tokens of both segments, in the order of the document, [n].
        n_first: number of tokens in the first segment.
        target: maximum number of tokens that the sample may take from both segments together.
        key: 64-bit key of the sample; all of the sample's random draws are functions of the key.
    """

    tokens: NDArray[Any]
    n_first: int
    target: int
    key: int


class PairSamples(CutSamples):
    """An endless sequence of samples from one part of a corpus. Each sample has two or more sentences."""

    n_special = N_SPECIAL
    fewest = 2

    @property
    def note(self) -> str:
        if not self.n_unread:
            return ""
        return (
            f"'{self.split}': {counted(self.n_unread, 'token')} of {self.dataset.prefix} are not read, in documents of "
            f"fewer than two sentences, or with one that is empty or longer than {LONGEST_SENTENCE} tokens"
        )

    def __getitem__(self, g: int) -> Segments:
        first, end, target = self.entry(g)
        # A and B have at least one sentence each.
        n_sentences = 1 + keyed.key64(f"{self.stream}/{g}/cut") % (end - first - 1)
        begin, middle, stop = self.dataset.tokens_before(np.array([first, first + n_sentences, end])).tolist()
        return Segments(
            tokens=self.dataset.tokens[begin:stop],
            n_first=middle - begin,
            target=target,
            key=keyed.key64(f"{self.stream}/{g}"),
        )


class Specials(NamedTuple):
    """The ids of [CLS], [SEP], [MASK] and [PAD]."""

    cls: int
    sep: int
    mask: int
    pad: int


class Pairs(NamedTuple):
    """Samples before masking.

    Attributes:
        tokens: ids of the text, special tokens and padding, int64 [B, S].
        segments: segment numbers, int64 [B, S]: 1 in the first segment, 2 in the second, 0 elsewhere.
        types: token types, int64 [B, S]: 1 in the second segment and at the [SEP] that ends it, 0 elsewhere.
        padding: mask of padding, bool [B, S].
        swapped: mask of the samples whose first segment is the later segment of the text, bool [B].
        keys: keys of the samples, uint64 [B].
    """

    tokens: NDArray[np.int64]
    segments: NDArray[np.int64]
    types: NDArray[np.int64]
    padding: NDArray[np.bool_]
    swapped: NDArray[np.bool_]
    keys: NDArray[np.uint64]


def lay_out(samples: Sequence[Segments], seq_len: int, specials: Specials) -> Pairs:
    """Lay out all samples at once as [CLS] first [SEP] second [SEP], truncated to their target lengths and padded to S.

    Args:
        samples: the segments of B samples.
        seq_len: S, length of a sample.
        specials: ids of the special tokens.
    """
    keys = np.array([sample.key for sample in samples], np.uint64)
    targets = np.array([sample.target for sample in samples])
    n_tokens = np.array([len(sample.tokens) for sample in samples])
    n_earlier = np.array([sample.n_first for sample in samples])
    n_later = n_tokens - n_earlier
    # `text` joins the tokens of all samples. `earlier` and `later` are the indices in `text` at which each sample's two
    # segments start.
    text = np.concatenate([sample.tokens for sample in samples]).astype(np.int64)
    earlier = np.cumsum(n_tokens) - n_tokens
    later = earlier + n_earlier

    swapped = keyed.below(keyed.draws(keys, "swap", np.zeros(1, np.int64)), 2) == 1
    first, n_first = np.where(swapped, [later, n_later], [earlier, n_earlier])
    second, n_second = np.where(swapped, [earlier, n_earlier], [later, n_later])

    less_first, less_second = _shares(n_first, n_second, n_first + n_second - targets)
    first = first + _from_the_front(less_first, keys, "front of the first")
    second = second + _from_the_front(less_second, keys, "front of the second")
    n_first = n_first - less_first
    n_second = n_second - less_second

    # `in_first` and `in_second` count each position from the start of the first and of the second segment. They are
    # negative before the segment, and at least its length after it.
    places = np.arange(seq_len)
    in_first = places - 1
    in_second = in_first - (n_first + 1)[:, None]
    is_first = (in_first >= 0) & (in_first < n_first[:, None])
    is_second = (in_second >= 0) & (in_second < n_second[:, None])
    padding = places >= (n_first + n_second + N_SPECIAL)[:, None]
    tokens = np.where(padding, specials.pad, specials.sep)
    tokens[:, 0] = specials.cls
    tokens[is_first] = text[(first[:, None] + in_first)[is_first]]
    tokens[is_second] = text[(second[:, None] + in_second)[is_second]]
    types = ((in_second >= 0) & ~padding).astype(np.int64)
    return Pairs(tokens, is_first + 2 * is_second, types, padding, swapped, keys)


def _shares(
    n_first: NDArray[np.int64], n_second: NDArray[np.int64], surplus: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Numbers of tokens that the first and the second segment lose when `surplus` tokens are dropped, [B] each.

    Megatron drops one token at a time, from the longer segment, or from the second segment if both are equally long.
    """
    surplus = np.maximum(surplus, 0)
    difference = n_first - n_second
    # At first only the longer segment loses tokens. Once both segments are equally long, they lose tokens
    # alternately.
    alone = np.minimum(surplus, np.abs(difference))
    in_turn = surplus - alone
    less_first = np.where(difference > 0, alone, 0) + in_turn // 2
    return less_first, surplus - less_first


def _from_the_front(lost: NDArray[np.int64], keys: NDArray[np.uint64], name: str) -> NDArray[np.int64]:
    """Number of tokens to drop from the front of a segment, [B].

    The segment loses `lost` tokens in total, each from the front with probability 1/2 and otherwise from the end.
    """
    index = np.arange(lost.max())
    front = keyed.below(keyed.draws(keys[:, None], name, index), 2) == 1
    return (front & (index < lost[:, None])).sum(1)
