"""The samples of each split (train, valid, test and the sets in [data] validation), from parts of the run's corpora.

    splits = build_samples(NEXT_TOKEN, config.data, parts_of(config.data, datasets), config.run.seed)
    splits.samples["train"][g]  # [S + 1] token ids

A corpus is cut by whole documents. Several corpora of a split are blended (`blend.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from dtmega import rooms
from dtmega.config import Data
from dtmega.data.indexed_files.dataset import IndexedDataset
from dtmega.data.objectives.objective import Objective
from dtmega.data.sampling.samples import AnySamples

if TYPE_CHECKING:
    from dtmega.config.mixtures import Mixture

SPLITS = ("train", "valid", "test")


def split_documents(n_documents: int, weights: Sequence[float]) -> list[tuple[int, int]]:
    """The (start, stop) range of documents for each weight, rounded as in Megatron's `get_train_valid_test_split_`."""
    total = sum(weights)
    bounds = [0]
    for weight in weights:
        bounds.append(bounds[-1] + round(weight / total * n_documents))
    # The rounded parts may add up to a few documents too many or too few. As in Megatron, all bounds except the first
    # are shifted by the difference.
    surplus = bounds[-1] - n_documents
    bounds[1:] = [bound - surplus for bound in bounds[1:]]
    return list(pairwise(bounds))


class SplitRule(NamedTuple):
    """A rule that cuts a corpus into parts for the splits.

    Attributes:
        size: function that returns the number of units (documents or sequences) in a corpus.
        split: function that takes the number of units and the splits' weights, and returns a (start, stop) range of
            units for each weight.
    """

    size: Callable[[IndexedDataset], int]
    split: Callable[[int, Sequence[float]], list[tuple[int, int]]]


BY_DOCUMENT = SplitRule(lambda dataset: len(dataset.document_index) - 1, split_documents)


class CorpusPart(NamedTuple):
    """A range of documents of one corpus, for one split.

    Attributes:
        corpus: position of the corpus among the split's corpora; each position has its own shuffle.
        dataset: the corpus.
        documents: range (start, stop) of units; the `SplitRule` defines the unit (document or sequence).
        weight: weight of this part in its split; None to weigh the parts by their token counts.
    """

    corpus: int
    dataset: IndexedDataset
    documents: tuple[int, int]
    weight: float | None = None


class Splits(NamedTuple):
    """The samples for training and evaluation.

    Attributes:
        samples: samples, keyed by split name ("train", "valid", "test", other validation sets); None for a split
            without samples.
        notes: lines for the user about text that is left out.
    """

    samples: dict[str, AnySamples | None]
    notes: list[str]


def parts_of(
    data: Data, datasets: Sequence[IndexedDataset], rule: SplitRule = BY_DOCUMENT
) -> dict[str, list[CorpusPart]]:
    """The parts of each split, cut from the corpora in [data] path. A split with weight 0 has no parts."""
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
    """The part of each corpus in a mixture, with its weight; if there is only one corpus, its weight is None.

    Args:
        mixture: prefix, range and weight of each corpus.
        open_corpus: function that opens the corpus with a given prefix.
        rule: rule that defines the unit of the ranges (document or sequence).
    """
    parts = []
    for corpus, share in enumerate(mixture.shares):
        dataset = open_corpus(share.prefix)
        weight = share.weight if len(mixture.shares) > 1 else None
        parts.append(CorpusPart(corpus, dataset, share.documents(rule.size(dataset)), weight))
    return parts


def build_samples(objective: Objective, data: Data, splits: Mapping[str, Sequence[CorpusPart]], seed: int) -> Splits:
    """The samples of each split, blended if the split has several parts.

    In a split other than "train", a small corpus may be too short for a single sample. The other corpora are then
    blended without the small corpus, and the split's notes mention this.

    Args:
        objective: objective that makes the samples.
        data: the configuration's [data] section.
        splits: corpus parts, keyed by split name.
        seed: the run's seed.

    Raises:
        ValueError: a corpus of "train" is too short for a single sample, or all corpora of another split are too short.
    """
    built = Splits(dict.fromkeys(SPLITS), [])
    for split, parts in splits.items():
        if parts:
            _build_split(objective, data, split, parts, seed, built)
    return built


def _build_split(
    objective: Objective, data: Data, split: str, parts: Sequence[CorpusPart], seed: int, built: Splits
) -> None:
    """Add the samples and notes of one split to `built`."""
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
    built.samples[split] = rooms.blends().Blend(samples, weights) if len(parts) > 1 else samples[0]
    built.notes.extend(part_samples.note for part_samples in samples if part_samples.note)
    for part, _ in refusals:
        built.notes.append(f"'{split}' is blended without {part.dataset.prefix}: its part has less than one sample")
