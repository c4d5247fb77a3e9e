"""Blends of corpora by weight.

Sample g is a function of g alone. For every n, each corpus supplies its share of the first n samples, up to rounding.

    blend = Blend([samples_of_a, samples_of_b], [0.7, 0.3])
    blend[g]  # [S + 1] token ids

Megatron loops over all samples of the run, takes each sample from the corpus that is furthest behind its share, and
stores the choices in a table. Here there is no loop and no table. The corpora are the leaves of a binary tree, and a
formula deals each node's samples to its two children in proportion to the children's weights.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any, NamedTuple

from dtmega.data.sampling.samples import AnySamples


class Node(NamedTuple):
    """A node in the tree of a blend: a leaf, which is one corpus, or a group of corpora, which has two children.

    Attributes:
        weight: sum of the weights of the node's corpora, an integer.
        corpus: index of the corpus; -1 for a group.
        left, right: the two children of a group; None for a corpus.
    """

    weight: int
    corpus: int
    left: Node | None = None
    right: Node | None = None


def huffman(weights: Sequence[float]) -> Node:
    """Build the tree: join the two lightest groups until one group is left. Heavy corpora end up near the root."""
    # Every float is a fraction, so the weights can be scaled to integers without rounding.
    exact = [Fraction(weight) for weight in weights]
    unit = math.lcm(*(weight.denominator for weight in exact))
    groups = [(int(weight * unit), k, Node(int(weight * unit), k)) for k, weight in enumerate(exact)]
    heapq.heapify(groups)
    # The number in the middle of each entry breaks ties between groups of equal weight.
    for number in range(len(weights), 2 * len(weights) - 1):
        light, _, left = heapq.heappop(groups)
        heavy, _, right = heapq.heappop(groups)
        heapq.heappush(groups, (light + heavy, number, Node(light + heavy, -1, left, right)))
    return groups[0][2]


def deal(tree: Node, g: int) -> tuple[int, int]:
    """The corpus of sample g in the blend, and the number of earlier samples from the same corpus."""
    node = tree
    while node.left is not None and node.right is not None:
        # The left child gets its share of the node's first n samples, rounded. So sample g goes to the left child if
        # this share rises from n = g to n = g + 1.
        before = _share(g, node.left.weight, node.weight)
        after = _share(g + 1, node.left.weight, node.weight)
        if after > before:
            node, g = node.left, before
        else:
            node, g = node.right, g - before
    return node.corpus, g


def _share(n: int, part: int, whole: int) -> int:
    """The share `n * part / whole`, rounded half up. Integer arithmetic makes the result exact for any n."""
    return (2 * n * part + whole) // (2 * whole)


class Blend:
    """An endless sequence of samples from several corpora, blended by weight. Sample g is a pure function of g.

    After any number of samples, the number taken from each corpus differs from the corpus's share by less than 1.7.
    Each node on the path from the root to the corpus rounds by at most half a sample, and the error of a node is scaled
    by the corpus's share of the node. In any Huffman tree, these scaled errors add up to less than 1.7.

    Args:
        parts: the samples of each corpus.
        weights: positive weights, one per part; if `weights` is empty, a part's weight is its number of tokens.
    """

    def __init__(self, parts: Sequence[AnySamples], weights: Sequence[float]) -> None:
        self.parts, self.weights = list(parts), list(weights)
        self.n_tokens = sum(part.n_tokens for part in parts)
        self.n_samples = sum(part.n_samples for part in parts)
        self.note = ""
        self._tree = huffman(weights or [part.n_tokens for part in parts])

    def __getitem__(self, g: int) -> Any:
        """Sample g >= 0; its tokens have the dtype of the corpus that the sample comes from."""
        corpus, sample = deal(self._tree, g)
        return self.parts[corpus][sample]

    def __reduce__(self) -> tuple[type[Blend], tuple[list[AnySamples], list[float]]]:
        # The tree is rebuilt instead of pickled, because it may be too deep for pickle's recursion.
        return Blend, (self.parts, self.weights)
