"""Megatron's blend: each sample comes from the corpus that is furthest behind its share.

    choices = greedy(np.array([0.7, 0.2, 0.1]), 1000)  # the corpus of each sample

Sample i comes from the first corpus j with the largest w_j max(i, 1) - c_j, where w_j is the weight of corpus j, and
c_j is the number of samples taken from corpus j so far (`build_blending_indices` in the compiled `helpers.cpp` of
Megatron-LM, Megatron-DeepSpeed and megatron-core).

The rule works sample by sample, which is slow in numpy. So the samples are divided into at most STRETCHES stretches of
consecutive samples. All stretches are computed in parallel, each from a guess of the counts at its beginning. If the
counts at the end of the previous stretch differ from the guess, the stretch is repaired: its samples are computed again
from those end counts, up to the sample where the new counts equal those of the previous pass. That is only a few
samples, because the sum of the absolute differences between two sets of counts never grows: wherever the two sets
choose different corpora, the differences for both corpora shrink. In the end, each stretch begins with the counts at
the end of the previous stretch. So for any guess, the result equals Megatron's result, including rounding.
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

FORMAT = 1  # increase this number when a change alters the choices for the same weights
LONG = 1 << 20  # choices for at least this many samples are kept in a file
STRETCHES = 4096  # maximum number of stretches computed in parallel
MIN_STRETCH = 256  # minimum number of samples in a stretch
COUNT_EVERY = 4096  # number of samples between two rows of the running counts
COMPARE_EVERY = 8  # number of samples between two comparisons during a repair


class MegatronBlend:
    """The first `n` samples of a blend of several corpora, in Megatron's order.

    Args:
        parts: samples of each corpus, in the order of `weights`.
        weights: share of each corpus, normalised as in Megatron.
        n: number of samples.

    Raises:
        ValueError: a corpus has fewer samples than the blend would take from it.
    """

    note = ""

    def __init__(self, parts: Sequence[Any], weights: Sequence[float], n: int) -> None:
        self.parts, self.weights, self.n = list(parts), list(weights), n
        self.n_tokens = sum(part.n_tokens for part in parts)
        self.n_samples = sum(part.n_samples for part in parts)
        self._choices = blend_choices(np.array(self.weights), n)
        self._counts = _running_counts(self._choices, len(self.parts))
        for part, n_taken in zip(self.parts, self._counts[-1], strict=True):
            if n_taken > len(part):
                raise ValueError(
                    f"{part.dataset.prefix}: the blend of {n} samples takes {n_taken} of its {len(part)}; Megatron's "
                    f"own ends with an IndexError there ([data] weights, order_samples)"
                )

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, g: int) -> Any:
        """Sample g, with 0 <= g < n."""
        corpus, sample = self.locate(g)
        return self.parts[corpus][sample]

    def locate(self, g: int) -> tuple[int, int]:
        """The corpus of sample g, and the number of earlier samples from the same corpus."""
        if not 0 <= g < self.n:
            raise IndexError(f"sample {g} of the {self.n} of a blend in Megatron's order")
        corpus = int(self._choices[g])
        # The running counts cover the samples before `start`, so count only the choices from `start` to g.
        start = g // COUNT_EVERY * COUNT_EVERY
        before = np.count_nonzero(self._choices[start:g] == corpus)
        return corpus, int(self._counts[g // COUNT_EVERY, corpus]) + int(before)

    def __reduce__(self) -> tuple[type[MegatronBlend], tuple[list[AnySamples], list[float], int]]:
        return MegatronBlend, (self.parts, self.weights, self.n)


def _running_counts(choices: NDArray[Any], n_corpora: int) -> NDArray[np.int64]:
    """Count the samples taken from each corpus before samples 0, COUNT_EVERY, 2 * COUNT_EVERY, and so on.

    The last row holds the counts after the last sample.

    Returns:
        Running counts, int64 [ceil(n / COUNT_EVERY) + 1, corpora].
    """
    rows = [np.zeros(n_corpora, np.int64)]
    for i in range(0, len(choices), COUNT_EVERY):
        rows.append(np.bincount(choices[i : i + COUNT_EVERY], minlength=n_corpora))
    return np.cumsum(rows, axis=0)


def blend_choices(weights: NDArray[np.float64], n: int) -> NDArray[Any]:
    """The result of `greedy`. A long result is stored once per node, in a file that all processes map."""
    if n >= LONG and len(weights) > 1:
        try:
            return _from_file(weights, n)
        except (OSError, ValueError) as error:  # no cache directory is writable, or the disk is full
            print(f"dtmega: {error}: the blend is kept in the memory of this process", file=sys.stderr)
    return greedy(weights, n)


def _from_file(weights: NDArray[np.float64], n: int) -> NDArray[Any]:
    """Memory-map the choices from a file in the cache directory; create the file first if it is missing.

    Raises:
        OSError, ValueError: no cache directory is writable, or the disk is full.
    """
    made_from = f"{weights.tolist()} {n} {FORMAT}"
    path = cache_dir() / f"megatron-blend-{hashlib.sha256(made_from.encode()).hexdigest()[:16]}.bin"

    def pieces() -> Iterator[NDArray[Any]]:
        yield greedy(weights, n)

    SharedFile(path, made_from, pieces, f"blending {n} samples as Megatron does").read_or_make()
    return np.asarray(np.memmap(path, _dtype(len(weights)), "r", shape=(n,)))


def greedy(weights: NDArray[np.float64], n: int) -> NDArray[Any]:
    """The corpus of each sample, uint8 or uint16 [n].

    Args:
        weights: share of each corpus, fp64 [corpora]; the shares add up to 1.
        n: number of samples.
    """
    n_stretches = max(1, min(STRETCHES, n // MIN_STRETCH))
    length = -(-n // n_stretches)
    n_stretches = -(-n // length)  # rounding the length up may leave fewer stretches
    firsts = np.arange(n_stretches) * length
    choices = np.empty((length, n_stretches), _dtype(len(weights)))
    begins = _guess_counts(weights, firsts)
    ends = begins.copy()
    _compute(weights, firsts, ends, choices)
    # A repair may change the counts at the end of a stretch, and so the counts at the beginning of the next stretch.
    # Repeat until each stretch begins with the counts at the end of the previous stretch.
    while True:
        wrong = 1 + np.flatnonzero((begins[1:] != ends[:-1]).any(1))
        if not len(wrong):
            return np.ascontiguousarray(choices.T).reshape(-1)[:n]
        differences = ends[wrong - 1] - begins[wrong]
        begins[wrong] += differences
        _repair(weights, firsts, wrong, begins[wrong], differences, choices)
        ends[wrong] += differences


def _dtype(n_corpora: int) -> np.dtype[Any]:
    return np.dtype(np.uint8 if n_corpora <= 255 else np.uint16)


def _guess_counts(weights: NDArray[np.float64], firsts: NDArray[np.int64]) -> NDArray[np.float64]:
    """Guess the counts at the beginning of each stretch, fp64 [stretches, corpora].

    Shares are rounded down, and the corpora with the largest remainders get one more sample. So each row adds up to the
    number of samples before the stretch, as the true counts do.

    Args:
        weights: share of each corpus, fp64 [corpora].
        firsts: index of each stretch's first sample, int64 [stretches].
    """
    shares = firsts[:, None] * weights
    counts = np.floor(shares)
    missing = firsts - counts.sum(1)
    rank = np.argsort(np.argsort(counts - shares, axis=1, kind="stable"), axis=1)
    return counts + (rank < missing[:, None])


def _choose(weights: NDArray[np.float64], at: NDArray[np.int64], counts: NDArray[np.float64]) -> NDArray[np.int64]:
    """Choose the corpus of one sample in each stretch, int64 [stretches].

    Args:
        weights: share of each corpus, fp64 [corpora].
        at: index of each stretch's sample in the whole blend, int64 [stretches].
        counts: number of samples taken from each corpus before each stretch's sample, fp64 [stretches, corpora].
    """
    # The operations and their order are the same as in Megatron's C++, because rounding may decide a tie.
    errors = np.maximum(at, 1).astype(np.float64)[:, None] * weights
    errors -= counts
    return errors.argmax(1)


def _compute(
    weights: NDArray[np.float64], firsts: NDArray[np.int64], counts: NDArray[np.float64], choices: NDArray[Any]
) -> None:
    """Compute the choices of all stretches in parallel.

    Args:
        weights: share of each corpus, fp64 [corpora].
        firsts: index of each stretch's first sample, int64 [stretches].
        counts: counts at the beginning of each stretch, fp64 [stretches, corpora]; on return, the counts at the end of
            each stretch.
        choices: array to fill with the corpus of each sample, [length, stretches].
    """
    stretches = np.arange(len(firsts))
    for i, row in enumerate(choices):
        chosen = _choose(weights, firsts + i, counts)
        row[:] = chosen
        counts[stretches, chosen] += 1


def _repair(
    weights: NDArray[np.float64],
    firsts: NDArray[np.int64],
    stretches: NDArray[np.int64],
    counts: NDArray[np.float64],
    differences: NDArray[np.float64],
    choices: NDArray[Any],
) -> None:
    """Recompute some stretches from new counts until the new counts equal the counts of the previous pass.

    Args:
        weights: share of each corpus, fp64 [corpora].
        firsts: index of each stretch's first sample, int64 [stretches].
        stretches: indices of the stretches to repair, int64 [wrong].
        counts: new counts at the beginning of the stretches to repair, fp64 [wrong, corpora]; changed in place.
        differences: new counts minus the counts of the previous pass at the beginning of each stretch, fp64 [wrong,
            corpora]; on return, the differences at the end of each stretch.
        choices: corpus of each sample, [length, stretches]; corrected in place.
    """
    differing = np.arange(len(stretches))  # stretches whose new counts still differ
    for i, row in enumerate(choices):
        if i % COMPARE_EVERY == 0:
            differing = differing[(differences[differing] != 0).any(1)]
            if not len(differing):
                return
        columns = stretches[differing]
        chosen = _choose(weights, firsts[columns] + i, counts[differing])
        counts[differing, chosen] += 1
        differences[differing, chosen] += 1
        differences[differing, row[columns]] -= 1
        row[columns] = chosen
