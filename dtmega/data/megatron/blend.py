"""Megatron's blend: each sample comes from the corpus that is furthest behind its share.

    choices = greedy(np.array([0.7, 0.2, 0.1]), 1000)  # the corpus of each sample

For sample i it is the first j with the largest w_j max(i, 1) - c_j, where c_j samples of corpus j have been taken
(`build_blending_indices` in Megatron-LM's, Megatron-DeepSpeed's and megatron-core's `helpers.cpp`, which are compiled).

That has to be gone through from the beginning. Here some thousand stretches of it are gone through side by side, each
from counts that are guessed. What is guessed wrong is put right: a stretch whose true counts turn out to be others is
gone through again, up to where it has the counts that it had before. That is a few samples on, because the sum of the
differences between two such counts never grows (of two corpora that are chosen differently, each count comes nearer to
the other's). In the end each stretch begins with the counts with which the one before it ends, so that the result is
theirs, floating point included, whatever was guessed.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dtmega.data import cache_dir
from dtmega.data.indexed_files.shared_file import SharedFile
from dtmega.data.sampling.samples import AnySamples

FORMAT = 1  # raise it when the same weights give other choices
LONG = 1 << 20  # samples from which on choices are worth a file
STRETCHES = 4096  # side by side, at most
SHORTEST = 256  # samples of a stretch, at least
COUNTED = 4096  # samples after which counts are kept
LOOKS = 8  # samples after which a stretch that is gone through again is compared


class MegatronBlend:
    """The samples of several corpora in Megatron's order of them: the first `n` of the blend.

    Args:
        weights: fp64 [corpora], as the original normalises them.

    Raises:
        ValueError: a corpus does not have as many samples as the blend would take of it.
    """

    note = ""

    def __init__(self, parts: Sequence[Any], weights: Sequence[float], n: int) -> None:
        self.parts, self.weights, self.n = list(parts), list(weights), n
        self.n_tokens = sum(part.n_tokens for part in parts)
        self.n_samples = sum(part.n_samples for part in parts)
        self._choices = blend_choices(np.array(self.weights), n)
        self._counts = _counts(self._choices, len(self.parts))
        for part, taken in zip(self.parts, self._counts[-1], strict=True):
            if taken > len(part):
                raise ValueError(
                    f"{part.dataset.prefix}: the blend of {n} samples takes {taken} of its {len(part)}; Megatron's own "
                    f"ends with an IndexError there ([data] weights, order_samples)"
                )

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, g: int) -> Any:
        """Sample 0 <= g < n."""
        corpus, sample = self.place(g)
        return self.parts[corpus][sample]

    def place(self, g: int) -> tuple[int, int]:
        """The corpus that gives sample g, and how many it has given before."""
        if not 0 <= g < self.n:
            raise IndexError(f"sample {g} of the {self.n} of a blend in Megatron's order")
        corpus = int(self._choices[g])
        start = g // COUNTED * COUNTED
        before = np.count_nonzero(self._choices[start:g] == corpus)
        return corpus, int(self._counts[g // COUNTED, corpus]) + int(before)

    def __reduce__(self) -> tuple[type[MegatronBlend], tuple[list[AnySamples], list[float], int]]:
        return MegatronBlend, (self.parts, self.weights, self.n)


def _counts(choices: NDArray[Any], n_corpora: int) -> NDArray[np.int64]:
    """[n / COUNTED + 1, corpora]: samples taken of each corpus before every COUNTED-th one, and in the end."""
    rows = [np.zeros(n_corpora, np.int64)]
    rows += [np.bincount(choices[i : i + COUNTED], minlength=n_corpora) for i in range(0, len(choices), COUNTED)]
    return np.cumsum(rows, axis=0)


def blend_choices(weights: NDArray[np.float64], n: int) -> NDArray[Any]:
    """`greedy`, of which a long result is made once per node, in a file that every process there maps."""
    if n >= LONG and len(weights) > 1:
        try:
            return _from_file(weights, n)
        except (OSError, ValueError) as error:  # no cache directory, or no room in it
            print(f"dtmega: {error}: the blend is kept in the memory of this process", file=sys.stderr)
    return greedy(weights, n)


def _from_file(weights: NDArray[np.float64], n: int) -> NDArray[Any]:
    """The choices in the cache directory.

    Raises:
        OSError, ValueError: no cache directory, or no room in it.
    """
    made_from = f"{weights.tolist()} {n} {FORMAT}"
    path = cache_dir() / f"megatron-blend-{hashlib.sha256(made_from.encode()).hexdigest()[:16]}.bin"

    def pieces() -> Iterator[NDArray[Any]]:
        yield greedy(weights, n)

    SharedFile(path, made_from, pieces, f"blending {n} samples as Megatron does").read_or_make()
    return np.asarray(np.memmap(path, _dtype(len(weights)), "r", shape=(n,)))


def greedy(weights: NDArray[np.float64], n: int) -> NDArray[Any]:
    """[n] the corpus of each sample."""
    n_stretches = max(1, min(STRETCHES, n // SHORTEST))
    length = -(-n // n_stretches)
    n_stretches = -(-n // length)
    firsts = np.arange(n_stretches) * length
    choices = np.empty((length, n_stretches), _dtype(len(weights)))
    begins = _guessed(weights, firsts)
    ends = begins.copy()
    _go_through(weights, firsts, ends, choices)
    while True:
        wrong = 1 + np.flatnonzero((begins[1:] != ends[:-1]).any(1))
        if not len(wrong):
            return np.ascontiguousarray(choices.T).reshape(-1)[:n]
        differences = ends[wrong - 1] - begins[wrong]
        begins[wrong] += differences
        _go_through_again(weights, firsts, wrong, begins[wrong], differences, choices)
        ends[wrong] += differences


def _dtype(n_corpora: int) -> np.dtype[Any]:
    return np.dtype(np.uint8 if n_corpora <= 255 else np.uint16)


def _guessed(weights: NDArray[np.float64], firsts: NDArray[np.int64]) -> NDArray[np.float64]:
    """[stretches, corpora] counts near the true ones, which add up to `firsts`: the largest remainders are filled."""
    shares = firsts[:, None] * weights
    counts = np.floor(shares)
    missing = firsts - counts.sum(1)
    rank = np.argsort(np.argsort(counts - shares, axis=1, kind="stable"), axis=1)
    return counts + (rank < missing[:, None])


def _chosen(weights: NDArray[np.float64], at: NDArray[np.int64], counts: NDArray[np.float64]) -> NDArray[np.int64]:
    """The corpus of the samples `at`, each with its counts [stretches, corpora]."""
    errors = np.maximum(at, 1).astype(np.float64)[:, None] * weights
    errors -= counts
    return errors.argmax(1)


def _go_through(
    weights: NDArray[np.float64], firsts: NDArray[np.int64], counts: NDArray[np.float64], choices: NDArray[Any]
) -> None:
    """Fill `choices` [length, stretches]; `counts` become those at the stretches' ends."""
    stretches = np.arange(len(firsts))
    for i, row in enumerate(choices):
        row[:] = chosen = _chosen(weights, firsts + i, counts)
        counts[stretches, chosen] += 1


def _go_through_again(
    weights: NDArray[np.float64],
    firsts: NDArray[np.int64],
    stretches: NDArray[np.int64],
    counts: NDArray[np.float64],
    differences: NDArray[np.float64],
    choices: NDArray[Any],
) -> None:
    """Put some stretches right, which begin with other counts than were taken.

    Args:
        differences: [wrong, corpora] by which the counts differ; become those at the stretches' ends.
    """
    going = np.arange(len(stretches))  # those of them that are not yet as they were
    for i, row in enumerate(choices):
        if i % LOOKS == 0:
            going = going[(differences[going] != 0).any(1)]
            if not len(going):
                return
        where = stretches[going]
        chosen = _chosen(weights, firsts[where] + i, counts[going])
        counts[going, chosen] += 1
        differences[going, chosen] += 1
        differences[going, row[where]] -= 1
        row[where] = chosen
