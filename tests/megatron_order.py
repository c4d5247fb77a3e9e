"""The originals' order of samples, said again from their description, one sample after the other: nothing of dtmega.

    run = Run(fork="megatron-core", seq_len=5, seed=1234)
    run.indices(sizes, (0, 12), n=40)       # doc, sample and shuffle index of one corpus
    run.blend([0.7, 0.3], 100)              # (corpus, sample of it) for each sample

Forks: Megatron-LM of January 2022, BigScience's Megatron-DeepSpeed, megatron-core 0.16.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

CUTOFF = {"megatron-lm": 0.80, "megatron-deepspeed": 0.95, "megatron-core": 0.80}


class Run(NamedTuple):
    fork: str
    seq_len: int
    seed: int

    def split(self, size: int, weights: Sequence[float]) -> list[tuple[int, int]]:
        """Documents of train, valid and test."""
        if self.fork == "megatron-core":
            vector = (np.array(weights, np.float64) / np.sum(np.array(weights, np.float64))).tolist()
            ends = [0.0]
            for share in vector:
                ends.append(ends[-1] + share)
            bounds = [round(end * float(size)) for end in ends]
        else:
            shares = [weight / sum(weights) for weight in weights]
            bounds = [0]
            for i, share in enumerate(shares):
                bounds.append(bounds[i] + round(share * float(size)))
            surplus = bounds[-1] - size
            for i in range(1, len(bounds)):
                bounds[i] -= surplus
        return [(bounds[0], bounds[1]), (bounds[1], bounds[2]), (bounds[2], bounds[3])]

    def indices(self, sizes: Sequence[int], documents: tuple[int, int], n: int) -> tuple[list, list, list]:
        part = list(range(*documents))
        tokens = sum(sizes[d] for d in part)
        epochs = 0
        while True:  # enough for n samples and the token after the last one
            epochs += 1
            if (epochs * tokens - 1) // self.seq_len >= n:
                break
        apart, before = False, 0
        if epochs > 1:
            before = ((epochs - 1) * tokens - 1) // self.seq_len
            of_an_epoch = (tokens - 1) // self.seq_len
            apart = n - before < int(CUTOFF[self.fork] * of_an_epoch)
        random = np.random.RandomState(self.seed)
        if apart:
            doc_idx = self._documents(part, epochs - 1, random) + self._documents(part, 1, random)
        else:
            doc_idx = self._documents(part, epochs, random)
        sample_idx = self._samples(sizes, doc_idx, (epochs * tokens - 1) // self.seq_len)
        total = len(sample_idx) - 1
        first = np.arange(before if apart else total, dtype=np.uint32)
        random.shuffle(first)
        last = np.arange(before, total, dtype=np.uint32) if apart else np.zeros(0, np.uint32)
        if apart:
            random.shuffle(last)
        return doc_idx, sample_idx, [*first.tolist(), *last.tolist()]

    @staticmethod
    def _documents(part: list[int], epochs: int, random: np.random.RandomState) -> list[int]:
        copies = np.array(part * epochs, np.int32)
        random.shuffle(copies)
        return copies.tolist()

    def _samples(self, sizes: Sequence[int], doc_idx: list[int], n: int) -> list[list[int]]:
        found = [[0, 0]]
        entry = offset = 0
        while len(found) <= n:
            remaining = self.seq_len + 1
            while remaining:
                length = sizes[doc_idx[entry]] - offset
                remaining -= length
                if remaining <= 0:  # the next sample begins with the last token of this one
                    offset += remaining + length - 1
                    remaining = 0
                else:
                    entry += 1
                    offset = 0
            found.append([entry, offset])
        return found

    def read(self, sequences: Sequence[Sequence[int]], indices: tuple[list, list, list], g: int) -> list[int]:
        """Tokens [S + 1] of sample g."""
        doc_idx, sample_idx, shuffle_idx = indices
        k = shuffle_idx[g]
        (first, start), (last, end) = sample_idx[k], sample_idx[k + 1]
        if first == last:
            return list(sequences[doc_idx[first]][start : end + 1])
        tokens = list(sequences[doc_idx[first]][start:])
        for entry in range(first + 1, last):
            tokens += sequences[doc_idx[entry]]
        return tokens + list(sequences[doc_idx[last]][: end + 1])

    def asked(self, weights: Sequence[float], n: int) -> list[int]:
        """The number of samples that each corpus of a blend is asked for."""
        if self.fork == "megatron-core":
            shares = (np.array(weights, np.float64) / np.sum(np.array(weights, np.float64))).tolist()
            return [math.ceil(math.ceil(n * w) * (1 + 0.005)) for w in shares]
        return [math.ceil(n * w * 1.005) for w in self._shares(weights)]

    @staticmethod
    def _shares(weights: Sequence[float]) -> list[float]:
        total = 0.0
        for weight in weights:
            total += weight
        return [weight / total for weight in weights]

    def blend(self, weights: Sequence[float], n: int) -> list[tuple[int, int]]:
        """(corpus, sample of that corpus) for each of the first n samples."""
        if self.fork == "megatron-core":
            once = np.array(weights, np.float64)
            once = once / np.sum(once)
        else:
            once = np.array(self._shares(weights), np.float64)
        shares = (once / np.sum(once)).tolist()
        return greedy(shares, n)


def greedy(shares: Sequence[float], n: int) -> list[tuple[int, int]]:
    """The corpus that is furthest behind, the first of those that are equal."""
    taken = [0] * len(shares)
    found = []
    for i in range(n):
        at = max(float(i), 1.0)
        best, most = 0, shares[0] * at - taken[0]
        for j in range(1, len(shares)):
            error = shares[j] * at - taken[j]
            if error > most:
                best, most = j, error
        found.append((best, taken[best]))
        taken[best] += 1
    return found


def wanted(train: int, steps: int, interval: int, eval_steps: int, batch: int) -> tuple[int, int, int]:
    """Samples of train, valid and test: `megatron/training.py`."""
    return train, (steps // interval + 1) * eval_steps * batch, eval_steps * batch
