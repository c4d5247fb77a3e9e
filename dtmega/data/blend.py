"""Corpora mixed by weight: sample g is a function of g, and each corpus has its share of any prefix.

    splits = build_samples(NEXT_TOKEN, config.data, parts_of(config.data, datasets), config.run.seed)
    splits.samples["train"][g]  # [S + 1] token ids

Megatron goes through the run from its beginning and always takes the corpus that is furthest behind, with a compiled
helper and a table of the whole run. Here nothing is gone through and nothing is stored: the corpora are the leaves of a
binary tree, and each node deals the samples it is given to its two sides in proportion, by a formula.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from itertools import pairwise
from typing import Any, NamedTuple

from dtmega.config import Data
from dtmega.data.indexed import IndexedDataset
from dtmega.data.objectives import Objective
from dtmega.data.samples import AnySamples
from dtmega.mixture import Mixture

SPLITS = ("train", "valid", "test")


def split_documents(n_documents: int, weights: Sequence[float]) -> list[tuple[int, int]]:
    """A (start, stop) range of documents for each weight, rounded as Megatron's `get_train_valid_test_split_` does."""
    total = sum(weights)
    bounds = [0]
    for weight in weights:
        bounds.append(bounds[-1] + round(weight / total * n_documents))
    surplus = bounds[-1] - n_documents
    bounds[1:] = [bound - surplus for bound in bounds[1:]]
    return list(pairwise(bounds))


class Node(NamedTuple):
    """Some of the corpora of a blend: one, or two groups.

    Attributes:
        weight: of all of them, an integer.
        corpus: which one it is, where it is one.
    """

    weight: int
    corpus: int
    left: Node | None = None
    right: Node | None = None


def huffman(weights: Sequence[float]) -> Node:
    """The tree that joins the two lightest groups until one is left: what is read often is near the root."""
    exact = [Fraction(weight) for weight in weights]  # a float is a fraction, so nothing is rounded
    unit = math.lcm(*(weight.denominator for weight in exact))
    groups = [(int(weight * unit), k, Node(int(weight * unit), k)) for k, weight in enumerate(exact)]
    heapq.heapify(groups)
    for number in range(len(weights), 2 * len(weights) - 1):  # tells groups of one weight apart
        (light, _, left), (heavy, _, right) = heapq.heappop(groups), heapq.heappop(groups)
        heapq.heappush(groups, (light + heavy, number, Node(light + heavy, -1, left, right)))
    return groups[0][2]


def deal(tree: Node, g: int) -> tuple[int, int]:
    """The corpus that gives sample g of the blend, and how many it has given before."""
    node = tree
    while node.left is not None and node.right is not None:
        before, after = (_share(n, node.left.weight, node.weight) for n in (g, g + 1))
        node, g = (node.left, before) if after > before else (node.right, g - before)
    return node.corpus, g


def _share(n: int, part: int, whole: int) -> int:
    """n part / whole, rounded: in integers, which have no largest n."""
    return (2 * n * part + whole) // (2 * whole)


class Blend:
    """Samples of several corpora, mixed by weight; endless and pure like each of them.

    At every prefix each corpus is within a sample or so of its share: a node is off by half a sample at most, and what
    is above it counts by the share that the corpus has there. That sums to less than 1.7 in any Huffman tree.

    Args:
        weights: one positive number per part; empty = by number of tokens.
    """

    def __init__(self, parts: Sequence[AnySamples], weights: Sequence[float]) -> None:
        self.parts, self.weights = list(parts), list(weights)
        self.n_tokens = sum(part.n_tokens for part in parts)
        self.n_samples = sum(part.n_samples for part in parts)
        self.note = ""
        self._tree = huffman(weights or [part.n_tokens for part in parts])

    def __getitem__(self, g: int) -> Any:
        """Sample g >= 0, as the corpus has it that it comes from."""
        corpus, sample = deal(self._tree, g)
        return self.parts[corpus][sample]

    def __reduce__(self) -> tuple[type[Blend], tuple[list[AnySamples], list[float]]]:
        # The tree is made again: it may be deeper than pickle can go.
        return Blend, (self.parts, self.weights)


class SplitRule(NamedTuple):
    """The rule by which a corpus is cut into parts.

    Attributes:
        size: how many documents it has, whatever counts as one.
        split: n documents, weights -> (start, stop) for each weight.
    """

    size: Callable[[IndexedDataset], int]
    split: Callable[[int, Sequence[float]], list[tuple[int, int]]]


BY_DOCUMENT = SplitRule(lambda dataset: len(dataset.document_index) - 1, split_documents)


class CorpusPart(NamedTuple):
    """Some documents of one corpus, in a split.

    Attributes:
        corpus: its place among the others of its name, by which shuffles differ.
        documents: (start, stop).
        weight: among the parts of the split; None: by number of tokens.
    """

    corpus: int
    dataset: IndexedDataset
    documents: tuple[int, int]
    weight: float | None = None


class Splits(NamedTuple):
    """The samples that a run trains and is evaluated on.

    Attributes:
        samples: of "train", "valid" and "test", and of other names; None where there are none.
        notes: for people, what is left out of which split.
    """

    samples: dict[str, AnySamples | None]
    notes: list[str]


def parts_of(
    data: Data, datasets: Sequence[IndexedDataset], rule: SplitRule = BY_DOCUMENT
) -> dict[str, list[CorpusPart]]:
    """The corpora of [data] path, each split by document; a split with weight 0 has no parts."""
    parts: dict[str, list[CorpusPart]] = {split: [] for split in SPLITS}
    for corpus, dataset in enumerate(datasets):
        ranges = rule.split(rule.size(dataset), data.split_weights)
        weight = data.weights[corpus] if data.weights else None
        for split, split_weight, documents in zip(SPLITS, data.split_weights, ranges, strict=True):
            if split_weight > 0:
                parts[split].append(CorpusPart(corpus, dataset, documents, weight))
    return parts


def parts_of_mixture(
    mixture: Mixture, opened: Callable[[str], IndexedDataset], rule: SplitRule = BY_DOCUMENT
) -> list[CorpusPart]:
    """The parts of a mixture; `opened`: prefix -> data set. A single one has no weight."""
    parts = []
    for corpus, share in enumerate(mixture.shares):
        dataset = opened(share.prefix)
        weight = share.weight if len(mixture.shares) > 1 else None
        parts.append(CorpusPart(corpus, dataset, share.documents(rule.size(dataset)), weight))
    return parts


def build_samples(objective: Objective, data: Data, splits: Mapping[str, Sequence[CorpusPart]], seed: int) -> Splits:
    """The samples of each split, blended where it has several parts.

    A small corpus may have no sample in the validation or the test part; the others are then blended without it.

    Raises:
        ValueError: a corpus has less than one sample to train on, or no corpus has one for another split.
    """
    found = Splits(dict.fromkeys(SPLITS), [])
    for split, parts in splits.items():
        if parts:
            _blend(objective, data, split, parts, seed, found)
    return found


def _blend(objective: Objective, data: Data, split: str, parts: Sequence[CorpusPart], seed: int, found: Splits) -> None:
    """Add the samples of one split, and what is to be said of them."""
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
            weights += [] if part.weight is None else [part.weight]
    if not samples:
        raise refusals[0][1]
    found.samples[split] = Blend(samples, weights) if len(parts) > 1 else samples[0]
    found.notes.extend(one.note for one in samples if one.note)
    found.notes.extend(
        f"'{split}' is blended without {part.dataset.prefix}: its part has less than one sample" for part, _ in refusals
    )
