"""Prefix language models: the beginning of each text is given, and the model goes on from there.

    tokens      a b c d e f      a prefix of 3, drawn for each sample, or for each document
    sees        each of a b c all three, d e f all before it and itself
    has a loss  d e f, for what comes next

Megatron-DeepSpeed's `pretrain_prefix_lm.py` and `get_prefix_indices`, with `--loss-on-targets-only`: without it tokens
of a prefix would be asked for what they see.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dtmega import keyed
from dtmega.data.samples import Samples


class PrefixSample(NamedTuple):
    """Tokens [S + 1], and 64 bits of which its prefixes are a function."""

    tokens: NDArray[Any]
    key: int


class PrefixSamples(Samples):
    """The samples of `Samples`, each with a key of its own."""

    def __getitem__(self, g: int) -> PrefixSample:
        return PrefixSample(self.tokens(g), keyed.key64(f"{self._stream}/{g}/prefix"))


def prefixes(ends: NDArray[np.bool_], keys: NDArray[np.uint64]) -> NDArray[np.bool_]:
    """Mark the tokens that are in the prefix of their document.

    The length of a prefix is uniform from 0 to all of the document but its end; of the last document, which goes on
    behind the sample, it may be all that is there.

    Args:
        ends: [B, S], tokens that are the last one of their document. Where a sample counts as one
            document, its last token is.
        keys: uint64 [B], of the samples.
    """
    n_tokens = ends.shape[1]
    place = np.arange(n_tokens)
    starts_here = np.ones_like(ends)
    starts_here[:, 1:] = ends[:, :-1]
    document = starts_here.cumsum(axis=1) - 1
    start = np.maximum.accumulate(np.where(starts_here, place, 0), axis=1)
    # From behind: the nearest end at or after each place, or the sample's.
    behind = np.where(ends, place, n_tokens)[:, ::-1]
    end = np.minimum.accumulate(behind, axis=1)[:, ::-1]
    drawn = keyed.draws(keys[:, None], "length", document)
    first_target = start + keyed.below(drawn, end - start + 1)
    return place < first_target


def weights(n_tokens: int) -> NDArray[np.float32]:
    """[S]: 2 (S - i) / (S + 1) at place i.

    With prefixes of uniform length place i is a target in (i + 1) / S of the samples, late ones more often (Megatron-
    DeepSpeed's `--reweight-loss-based-on-position-frequency`).
    """
    place = np.arange(n_tokens)
    return (2 * (n_tokens - place) / (n_tokens + 1)).astype(np.float32)
