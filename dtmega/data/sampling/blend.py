"""Corpora blended by weight. Sample g is a function of g, and for every n, each corpus has its share of n samples.

    splits = build_samples(NEXT_TOKEN, config.data, parts_of(config.data, datasets), config.run.seed)
    splits.samples["train"][g]  # [S + 1] token ids

Megatron walks through the whole run, always takes the corpus that is furthest behind its share, and stores the choices
in a table. Here nothing is walked through and nothing is stored: the corpora are the leaves of a binary tree, and each
node deals its samples to its two sides in proportion to their weights, by a formula.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from itertools import pairwise
from typing import Any, NamedTuple

from dtmega.config import Data
from dtmega.config.mixtures import Mixture
from dtmega.data.indexed_files.dataset import IndexedDataset
from dtmega.data.objectives.objective import Objective
from dtmega.data.sampling.samples import AnySamples

SPLITS = ("train", "valid", "test")


def split_documents(n_documents: int, weights: Sequence[float]) -> list[tuple[int, int]]:
    """The (start, stop) range of documents for each weight, rounded as in Megatron's `get_train_valid_test_split_`."""
    total = sum(weights)
    bounds = [0]
    for weight in weights:
        bounds.append(bounds[-1] + round(weight / total * n_documents))
    # The rounded parts may add up to a few documents too many or too few. As in Megatron, all bounds except the first
    # are shifted by that number.
    surplus = bounds[-1] - n_documents
    bounds[1:] = [bound - surplus for bound in bounds[1:]]
    return list(pairwise(bounds))


class Node(NamedTuple):
    """A node in the tree of a blend: one corpus, or a group of corpora with two sides.

    Attributes:
        weight: sum of the weights of its corpora, an integer.
        corpus: number of the corpus, or -1 for a group.
        left, right: the two sides of a group, None for a corpus.
    """

    weight: int
    corpus: int
    left: Node | None = None
    right: Node | None = None


def huffman(weights: Sequence[float]) -> Node:
    """The tree made by joining the two lightest groups until one is left. Heavy corpora end up near the root."""
    # A float is exactly a fraction, so integer weights in these proportions need no rounding.
    exact = [Fraction(weight) for weight in weights]
    unit = math.lcm(*(weight.denominator for weight in exact))
    groups = [(int(weight * unit), k, Node(int(weight * unit), k)) for k, weight in enumerate(exact)]
    heapq.heapify(groups)
    # The number in the middle of each entry makes the order of groups with equal weights definite.
    for number in range(len(weights), 2 * len(weights) - 1):
        light, _, left = heapq.heappop(groups)
        heavy, _, right = heapq.heappop(groups)
        heapq.heappush(groups, (light + heavy, number, Node(light + heavy, -1, left, right)))
    return groups[0][2]


def deal(tree: Node, g: int) -> tuple[int, int]:
    """The corpus that sample g of the blend comes from, and the number of samples it has given before."""
    node = tree
    while node.left is not None and node.right is not None:
        # Of the first n samples of a node, its left side gets its share, rounded. So sample g goes to the left if that
        # share rises from n = g to n = g + 1.
        before = _share(g, node.left.weight, node.weight)
        after = _share(g + 1, node.left.weight, node.weight)
        if after > before:
            node, g = node.left, before
        else:
            node, g = node.right, g - before
    return node.corpus, g


def _share(n: int, part: int, whole: int) -> int:
    """n part / whole, rounded half up; in integers, so that n may be of any size."""
    return (2 * n * part + whole) // (2 * whole)


class Blend:
    """Samples of several corpora, blended by weight. Like those of each corpus they are endless and pure functions.

    After any number of samples, each corpus has given its share to within 1.7 samples. Each node on the way to the
    corpus rounds by at most half a sample, and the error of a node counts by the share that the corpus has in it; that
    adds up to less than 1.7 in any Huffman tree.

    Args:
        parts: the samples of each corpus.
        weights: a positive number for each part; empty to weigh parts by their number of tokens.
    """

    def __init__(self, parts: Sequence[AnySamples], weights: Sequence[float]) -> None:
        self.parts, self.weights = list(parts), list(weights)
        self.n_tokens = sum(part.n_tokens for part in parts)
        self.n_samples = sum(part.n_samples for part in parts)
        self.note = ""
        self._tree = huffman(weights or [part.n_tokens for part in parts])

    def __getitem__(self, g: int) -> Any:
        """Sample g >= 0, in the token type of its own corpus."""
        corpus, sample = deal(self._tree, g)
        return self.parts[corpus][sample]

    def __reduce__(self) -> tuple[type[Blend], tuple[list[AnySamples], list[float]]]:
        # The tree is rebuilt instead of pickled, because it may be too deep for pickle's recursion.
        return Blend, (self.parts, self.weights)


class SplitRule(NamedTuple):
    """The rule by which a corpus is cut into parts for the splits.

    Attributes:
        size: function from a corpus to the number of units that are dealt out: its documents, or its sequences.
        split: function from that number and the splits' weights to a (start, stop) range for each weight.
    """

    size: Callable[[IndexedDataset], int]
    split: Callable[[int, Sequence[float]], list[tuple[int, int]]]


BY_DOCUMENT = SplitRule(lambda dataset: len(dataset.document_index) - 1, split_documents)


class CorpusPart(NamedTuple):
    """A range of documents of one corpus, for one split.

    Attributes:
        corpus: position among the corpora of the split, which gives each corpus its own shuffle.
        dataset: the corpus.
        documents: (start, stop), in the units of `SplitRule`.
        weight: weight among the parts of the split; None to weigh by number of tokens.
    """

    corpus: int
    dataset: IndexedDataset
    documents: tuple[int, int]
    weight: float | None = None


class Splits(NamedTuple):
    """The samples that a run is trained and evaluated on.

    Attributes:
        samples: samples by split ("train", "valid", "test" and other validation sets); None for a split without any.
        notes: lines for the user about text that is left out.
    """

    samples: dict[str, AnySamples | None]
    notes: list[str]


def parts_of(
    data: Data, datasets: Sequence[IndexedDataset], rule: SplitRule = BY_DOCUMENT
) -> dict[str, list[CorpusPart]]:
    """The parts of each split, from the corpora of [data] path. A split with weight 0 has no parts."""
    parts: dict[str, list[CorpusPart]] = {split: [] for split in SPLITS}
    for corpus, dataset in enumerate(datasets):
        ranges = rule.split(rule.size(dataset), data.split_weights)
        weight = data.weights[corpus] if data.weights else None
        for split, split_weight, documents in zip(SPLITS, data.split_weights, ranges, strict=True):
            if split_weight > 0:
                parts[split].append(CorpusPart(corpus, dataset, documents, weight))
    return parts


def parts_of_mixture(
    mixture: Mixture, open_corpus: Callable[[str], IndexedDataset], rule: SplitRule = BY_DOCUMENT
) -> list[CorpusPart]:
    """The parts of a mixture. A part that is alone has no weight.

    Args:
        mixture: names, ranges and weights of corpora.
        open_corpus: function from a prefix to the opened corpus.
        rule: the units that ranges of a corpus are counted in.
    """
    parts = []
    for corpus, share in enumerate(mixture.shares):
        dataset = open_corpus(share.prefix)
        weight = share.weight if len(mixture.shares) > 1 else None
        parts.append(CorpusPart(corpus, dataset, share.documents(rule.size(dataset)), weight))
    return parts


def build_samples(objective: Objective, data: Data, splits: Mapping[str, Sequence[CorpusPart]], seed: int) -> Splits:
    """The samples of each split, blended if the split has several parts.

    A small corpus may be too short for a single sample in a split other than "train"; the others are then blended
    without it, and a note says so.

    Args:
        objective: objective that makes the samples.
        data: the section [data] of the configuration.
        splits: parts by split.
        seed: the run's seed.

    Raises:
        ValueError: a corpus is too short for a single sample in "train", or all corpora are in another split.
    """
    built = Splits(dict.fromkeys(SPLITS), [])
    for split, parts in splits.items():
        if parts:
            _build_split(objective, data, split, parts, seed, built)
    return built


def _build_split(
    objective: Objective, data: Data, split: str, parts: Sequence[CorpusPart], seed: int, built: Splits
) -> None:
    """Add the samples of one split, and the notes about it, to `built`."""
    samples: list[AnySamples] = []
    weights: list[float] = []
    refusals: list[tuple[CorpusPart, ValueError]] = []
    for part in parts:
        try:
            samples.append(objective.samples(part.dataset, part.documents, data, seed, split, part.corpus))
        except ValueError as error:
            if split == "train":
                raise
            refusals.append((part, error))
        else:
            if part.weight is not None:
                weights.append(part.weight)
    if not samples:
        raise refusals[0][1]
    built.samples[split] = Blend(samples, weights) if len(parts) > 1 else samples[0]
    built.notes.extend(part_samples.note for part_samples in samples if part_samples.note)
    for part, _ in refusals:
        built.notes.append(f"'{split}' is blended without {part.dataset.prefix}: its part has less than one sample")
