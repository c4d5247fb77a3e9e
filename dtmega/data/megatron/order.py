"""The order of samples of a run of Megatron's, so that it can be continued here: `[data] order`.

    rule = FORKS[cfg.data.order].rule
    splits = ordered(cfg, parts_of(cfg.data, datasets, rule))

Sample g of training is entry g of the order, whatever the layout. The three originals differ in how they round the
parts of a split, how many samples they ask of each corpus of a blend, and when the last epoch is shuffled apart. Each
order depends on how many samples the run was started for: a run that is to go on must be given the same number.

Only for the next token, where the order is numpy's. Megatron's BERT and T5 draw from a compiled generator while they
cut documents.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from dtmega.config import Config
from dtmega.data.megatron.blend import MegatronBlend
from dtmega.data.megatron.cache import OrderName
from dtmega.data.megatron.index import Asked, index_of
from dtmega.data.sampling.blend import SPLITS, CorpusPart, SplitRule, Splits, split_documents
from dtmega.data.sampling.samples import AnySamples

MOST_CORPORA = 254  # Megatron-LM's and Megatron-DeepSpeed's, which keep their number in a byte


class Fork(NamedTuple):
    """One of the originals.

    Attributes:
        cutoff: see `index.Asked`.
        split: n sequences, weights -> (start, stop) of each part.
        normalised: weights of a blend -> their shares.
        asked: of a corpus with this share, for n samples of the blend.
        is_core: caches have descriptions, not names; corpora are numbered in two bytes; each split has sequences.
    """

    cutoff: float
    split: Callable[[int, Sequence[float]], list[tuple[int, int]]]
    normalised: Callable[[Sequence[float]], list[float]]
    asked: Callable[[int, float], int]
    is_core: bool = False

    @property
    def rule(self) -> SplitRule:
        return SplitRule(len, self.split)


def _shares(weights: Sequence[float]) -> list[float]:
    """`get_datasets_weights_and_num_samples` in `megatron/data/dataset_utils.py`: Python's sum, from the left."""
    total = 0.0
    for weight in weights:
        total += weight
    return [weight / total for weight in weights]


def _core_shares(weights: Sequence[float]) -> list[float]:
    """`normalize` in `megatron/core/datasets/utils.py`: numpy's sum, which adds eight or more in another order."""
    array = np.array(weights, np.float64)
    return (array / np.sum(array)).tolist()


def _core_ends(weights: Sequence[float]) -> list[float]:
    return [0, *accumulate(_core_shares(weights))]


def _core_split(n: int, weights: Sequence[float]) -> list[tuple[int, int]]:
    """The cumulated shares, each rounded (`_build_megatron_dataset_splits`)."""
    return list(pairwise(round(end * float(n)) for end in _core_ends(weights)))


def _core_matrix(weights: Sequence[float]) -> list[tuple[float, float] | None]:
    """(start, end) of each split, None of an empty one, as a cache's description has it.

    Source: `convert_split_vector_to_split_matrix` of megatron-core.
    """
    return [(start, end) if start < end else None for start, end in pairwise(_core_ends(weights))]


def _surplus(n: int, share: float) -> int:
    return math.ceil(n * share * 1.005)


def _core_surplus(n: int, share: float) -> int:
    return math.ceil(math.ceil(n * share) * (1 + 0.005))


FORKS = {
    "megatron-lm": Fork(0.80, split_documents, _shares, _surplus),
    "megatron-deepspeed": Fork(0.95, split_documents, _shares, _surplus),
    "megatron-core": Fork(0.80, _core_split, _core_shares, _core_surplus, is_core=True),
}


class MegatronSamples:
    """Samples of one part of one corpus in the original's order of them.

    Args:
        asked: all that the order is a function of.
        place: the name under which the original would have kept it.
    """

    def __init__(self, asked: Asked, place: OrderName) -> None:
        self.asked, self.place = asked, place
        self.dataset = asked.dataset
        self.n_tokens = asked.epoch_tokens
        self.n_samples = self.n_tokens / asked.seq_len
        found = place.find(asked)
        self.note = f"{self.dataset.prefix}: {found.note}" if found.note else ""
        self.indices = index_of(asked) if found.indices is None else found.indices

    def __len__(self) -> int:
        return len(self.indices.shuffle)

    def __getitem__(self, g: int) -> NDArray[Any]:
        """Tokens [S + 1] of sample 0 <= g < len."""
        if not 0 <= g < len(self):
            raise IndexError(f"sample {g} of the {len(self)} that Megatron's order of '{self.place.name}' has")
        documents, samples, shuffle = self.indices
        k = int(shuffle[g])
        (first, start), (last, end) = samples[k : k + 2].tolist()
        pieces = [self.dataset.get(sequence) for sequence in documents[first : last + 1].tolist()]
        pieces[-1] = pieces[-1][: end + 1]
        pieces[0] = pieces[0][start:]
        tokens = np.concatenate(pieces)
        if len(tokens) != self.asked.seq_len + 1:
            raise ValueError(
                f"expected sample {k} to have {self.asked.seq_len + 1} tokens, got {len(tokens)}: its index is damaged "
                f"or of other data ({self.note})"
            )
        return tokens

    def __reduce__(self) -> tuple[type[MegatronSamples], tuple[Asked, OrderName]]:
        # A worker process opens the same files; indices that are in no file are made there again.
        return MegatronSamples, (self.asked, self.place)


def wanted_samples(cfg: Config) -> dict[str, int]:
    """The number of samples that the original asks of "train", "valid" and "test" (`megatron/training.py`).

    Raises:
        ValueError: nothing says how many the run was started for, or it is longer.
    """
    size = cfg.batch.global_batch_size
    train = cfg.data.order_samples or cfg.train.samples
    if not train and cfg.train.steps and not cfg.batch.rampup:
        train = cfg.train.steps * size
    if not train:
        raise ValueError(
            f"[data] order = '{cfg.data.order}' depends on the number of samples that the run was started for, which "
            f"[train] tokens, or steps with a ramp-up, do not say: expected [data] order_samples > 0, got 0"
        )
    if cfg.end(0, 0).samples > train:
        raise ValueError(
            f"this run reads {cfg.end(0, 0).samples} samples ([train] steps, samples, tokens), and the order is one of "
            f"{train} ([data] order_samples): Megatron's order of a longer run is another from its first sample on"
        )
    as_theirs = cfg.model_copy(
        update={"train": cfg.train.model_copy(update={"steps": 0, "samples": train, "tokens": 0})}
    )
    steps = as_theirs.end(0, 0).steps
    evaluations = steps // cfg.eval.interval + 1 if cfg.eval.interval else 1
    return {
        "train": train,
        "valid": evaluations * cfg.eval.steps * size,
        "test": cfg.eval.steps * size,
    }


def ordered(cfg: Config, splits: Mapping[str, Sequence[CorpusPart]]) -> Splits:
    """The samples of each split as the original orders them.

    Raises:
        ValueError: a case in which the original has no order either, or a damaged cache.
    """
    wanted = wanted_samples(cfg)
    found = Splits(dict.fromkeys(SPLITS), [])
    for split, parts in splits.items():
        if parts:
            role = split if split in wanted else "valid"
            builder = _Builder(cfg, split, role, wanted[role])
            found.samples[split] = builder.samples(parts)
            found.notes.extend(builder.notes)
    return found


class _Builder:
    """The samples of one split, as the original orders them.

    Attributes:
        notes: lines for people.
    """

    def __init__(self, cfg: Config, split: str, role: str, n: int) -> None:
        self._cfg, self._split, self._n = cfg, split, n
        self._fork = FORKS[cfg.data.order]
        mixtures = {"train": cfg.data.train_mixture, "test": cfg.data.test_mixture}
        mixture = mixtures.get(split)
        has_split = cfg.data.train_mixture is None and split in SPLITS
        matrix = tuple(_core_matrix(cfg.data.split_weights)) if has_split else None
        name = mixture.name if mixture else split
        self._place = OrderName(name, role, matrix, self._fork.is_core)
        self.notes: list[str] = []

    def samples(self, parts: Sequence[CorpusPart]) -> AnySamples | None:
        """The samples; None where there are no sequences, which the original allows."""
        empty = [part for part in parts if part.documents[0] >= part.documents[1]]
        if len(parts) == 1 and empty and self._split != "train" and not self._fork.is_core:
            self.notes.append(f"'{self._split}' has no sequences of {parts[0].dataset.prefix}, and is left out")
            return None
        if empty:
            raise ValueError(
                f"{empty[0].dataset.prefix}: expected sequences for '{self._split}', got 0 of {len(empty[0].dataset)}, "
                f"with which [data] order = '{self._cfg.data.order}' does not start either ([data] split, train)"
            )
        if len(parts) == 1 and parts[0].weight is None:
            return self._of(parts[0], self._n)
        return self._blend(parts)

    def _of(self, part: CorpusPart, n: int) -> MegatronSamples:
        data = self._cfg.data
        asked = Asked(part.dataset, part.documents, n, data.seq_len, self._cfg.run.seed, self._fork.cutoff)
        samples = MegatronSamples(asked, self._place)
        self.notes.extend([samples.note] if samples.note else [])
        return samples

    def _blend(self, parts: Sequence[CorpusPart]) -> MegatronBlend:
        weights = [part.weight for part in parts if part.weight is not None]
        order = f"[data] order = '{self._cfg.data.order}'"
        if len(weights) < len(parts):
            raise ValueError(
                f"{order} blends by weight: expected a weight for each of {len(parts)} paths ([data] weights)"
            )
        if len(parts) > MOST_CORPORA and not self._fork.is_core:
            raise ValueError(f"{order} has at most {MOST_CORPORA} corpora in a blend, got {len(parts)} ([data] path)")
        shares = self._fork.normalised(weights)
        samples = [self._of(part, self._fork.asked(self._n, share)) for part, share in zip(parts, shares, strict=True)]
        # All of them normalise once more when they blend, by numpy's sum.
        return MegatronBlend(samples, _core_shares(shares), self._n)


def digest_of_order(samples: AnySamples) -> str:
    """16 hex digits that tell one order of training from another, for what goes on from a checkpoint."""
    parts = samples.parts if isinstance(samples, MegatronBlend) else [samples]
    found = xxhash.xxh3_64()
    for part in parts:
        assert isinstance(part, MegatronSamples)
        found.update(part.indices.digest().encode())
    return found.hexdigest()
