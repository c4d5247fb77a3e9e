"""Reproduce the sample order of a Megatron run (`[data] order`), so that dtmega can continue the run.

    rule = FORKS[cfg.data.order].rule
    splits = ordered(cfg, parts_of(cfg.data, datasets, rule))

Training reads entry g of the order as its sample g, regardless of the parallel layout. Megatron's three forks differ in
how they round the parts of a split, how many samples they request from each corpus of a blend, and when they shuffle
the last epoch separately. Each order depends on the number of samples that the run was started for, so this number must
not change when the run is continued.

Only next-token models can follow Megatron's order, because Megatron draws this order from numpy's generator. For BERT
and T5, Megatron draws from a generator in compiled code while it splits documents into samples.
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
from dtmega.data.megatron.index import OrderSettings, index_of
from dtmega.data.objectives.objective import Objective
from dtmega.data.sampling.blend import SPLITS, CorpusPart, SplitRule, Splits, split_documents
from dtmega.data.sampling.samples import AnySamples

MOST_CORPORA = 254  # maximum number of corpora in a blend of Megatron-LM or Megatron-DeepSpeed (one-byte indices)


class Fork(NamedTuple):
    """One of Megatron's three forks: the rules that affect the sample order.

    Attributes:
        cutoff: share of an epoch's samples. If the order needs less than this share of the last epoch, that epoch is
            shuffled separately.
        split: function from a number of sequences and the splits' weights to a (start, stop) range for each split.
        shares: function from the weights of a blend to shares that add up to 1.
        n_asked: function from the blend's sample count and a corpus's share to the number of samples that the corpus
            must provide, which is a little more than the blend will use.
        is_core: whether the fork is megatron-core, which has caches with descriptions, stores corpus numbers in two
            bytes and does not allow a split without sequences.
    """

    cutoff: float
    split: Callable[[int, Sequence[float]], list[tuple[int, int]]]
    shares: Callable[[Sequence[float]], list[float]]
    n_asked: Callable[[int, float], int]
    is_core: bool = False

    @property
    def rule(self) -> SplitRule:
        """The fork's split rule, which counts sequences instead of documents."""
        return SplitRule(len, self.split)


def _shares(weights: Sequence[float]) -> list[float]:
    """The weights divided by their sum, which is computed from left to right.

    Source: `get_datasets_weights_and_num_samples` in `megatron/data/dataset_utils.py`.
    """
    # Use a loop, as Megatron does: from Python 3.12 on, `sum` rounds floats less, and the last bit could differ.
    total = 0.0
    for weight in weights:
        total += weight
    return [weight / total for weight in weights]


def _core_shares(weights: Sequence[float]) -> list[float]:
    """The weights divided by their sum, as numpy computes it.

    numpy adds eight or more numbers in a different order than `_shares` does, so the last bit may differ.

    Source: `normalize` in `megatron/core/datasets/utils.py`.
    """
    array = np.array(weights, np.float64)
    return (array / np.sum(array)).tolist()


def _core_ends(weights: Sequence[float]) -> list[float]:
    """The bounds of the splits as fractions of the corpus, from 0 to 1."""
    return [0, *accumulate(_core_shares(weights))]


def _core_split(n: int, weights: Sequence[float]) -> list[tuple[int, int]]:
    """The range (start, end) of each split of n items; the bounds are cumulative shares of n, each rounded.

    Source: `_build_megatron_dataset_splits` in megatron-core.
    """
    return list(pairwise(round(end * float(n)) for end in _core_ends(weights)))


def _core_matrix(weights: Sequence[float]) -> list[tuple[float, float] | None]:
    """The range (start, end) of each split, as fractions of the corpus; None for an empty split.

    megatron-core writes this list into the description of each index cache.

    Source: `convert_split_vector_to_split_matrix` in megatron-core.
    """
    return [(start, end) if start < end else None for start, end in pairwise(_core_ends(weights))]


def _n_asked(n: int, share: float) -> int:
    """The number of samples that a corpus must provide for a blend of n samples: 0.5 % more than its share of n."""
    return math.ceil(n * share * 1.005)


def _core_n_asked(n: int, share: float) -> int:
    """The number of samples that a corpus must provide: like `_n_asked`, but rounded up twice, as in megatron-core."""
    return math.ceil(math.ceil(n * share) * (1 + 0.005))


FORKS = {
    "megatron-lm": Fork(0.80, split_documents, _shares, _n_asked),
    "megatron-deepspeed": Fork(0.95, split_documents, _shares, _n_asked),
    "megatron-core": Fork(0.80, _core_split, _core_shares, _core_n_asked, is_core=True),
}


class MegatronSamples:
    """Samples from one part of a corpus, in Megatron's order.

    Args:
        settings: settings that determine the order.
        order_name: name under which Megatron would have cached the order.

    Raises:
        ValueError: a cached order is damaged, or the part has no tokens.
    """

    def __init__(self, settings: OrderSettings, order_name: OrderName) -> None:
        self.settings, self.order_name = settings, order_name
        self.dataset = settings.dataset
        self.n_tokens = settings.epoch_tokens
        self.n_samples = self.n_tokens / settings.seq_len
        cached = order_name.find(settings)
        self.note = f"{self.dataset.prefix}: {cached.note}" if cached.note else ""
        self.indices = index_of(settings) if cached.indices is None else cached.indices

    def __len__(self) -> int:
        return len(self.indices.shuffle)

    def __getitem__(self, g: int) -> NDArray[Any]:
        """Tokens [S + 1] of sample g, with 0 <= g < len.

        Raises:
            IndexError: g is out of range.
            ValueError: the index is damaged.
        """
        if not 0 <= g < len(self):
            raise IndexError(f"sample {g} of the {len(self)} that Megatron's order of '{self.order_name.name}' has")
        documents, samples, shuffle = self.indices
        # Stream sample k runs from its first token to the first token of sample k + 1, inclusive.
        k = int(shuffle[g])
        (first, start), (last, end) = samples[k : k + 2].tolist()
        sequences = documents[first : last + 1]
        bounds = self.dataset.tokens_before(np.stack([sequences, sequences + 1], 1).astype(np.int64))
        bounds[-1, 1] = min(bounds[-1, 1], bounds[-1, 0] + end + 1)
        bounds[0, 0] += start
        tokens = np.concatenate([self.dataset.tokens[begin:stop] for begin, stop in bounds.tolist()])
        if len(tokens) != self.settings.seq_len + 1:
            raise ValueError(
                f"expected sample {k} to have {self.settings.seq_len + 1} tokens, got {len(tokens)}: its index is "
                f"damaged or belongs to other data ({self.note})"
            )
        return tokens

    def __reduce__(self) -> tuple[type[MegatronSamples], tuple[OrderSettings, OrderName]]:
        # Indices are not pickled: a worker process maps the files of the indices or computes the indices itself.
        return MegatronSamples, (self.settings, self.order_name)


def check(cfg: Config, objective: Objective) -> None:
    """Check that the run can follow the sample order that [data] order names.

    Raises:
        ValueError: the objective cannot follow the order, or the run's length is given in epochs, although the order
            depends on the number of samples.
    """
    order = cfg.data.order
    if objective.not_in_megatrons_order:
        raise ValueError(
            f"[data] order = '{order}' is only for models that are trained on next tokens, not on "
            f"{objective.aim}: {objective.not_in_megatrons_order}; expected 'auto'"
        )
    if cfg.train.epochs:
        raise ValueError(
            f"[data] order = '{order}' depends on the number of samples, not of epochs: expected epochs=0, got "
            f"{cfg.train.epochs} ([train] samples, [train] epochs)"
        )


def wanted_samples(cfg: Config) -> dict[str, int]:
    """The number of samples that Megatron requests for "train", "valid" and "test" (`megatron/training.py`).

    Raises:
        ValueError: the configuration does not give the number of samples that the run was started for, or the run would
            read more samples than it was started for.
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
    # Like Megatron, count the evaluations of a run with all `train` samples, even if this configuration stops earlier.
    whole_run = cfg.model_copy(
        update={"train": cfg.train.model_copy(update={"steps": 0, "samples": train, "tokens": 0})}
    )
    steps = whole_run.end(0, 0).steps
    evaluations = steps // cfg.eval.interval + 1 if cfg.eval.interval else 1
    return {
        "train": train,
        "valid": evaluations * cfg.eval.steps * size,
        "test": cfg.eval.steps * size,
    }


def ordered(cfg: Config, splits: Mapping[str, Sequence[CorpusPart]]) -> Splits:
    """The samples of each split, in Megatron's order.

    Args:
        cfg: the run's configuration.
        splits: corpus parts of each split, keyed by split name. An additional validation set is treated as "valid".

    Raises:
        ValueError: Megatron itself could not start with these data, or a cache is damaged.
    """
    wanted = wanted_samples(cfg)
    built = Splits(dict.fromkeys(SPLITS), [])
    for split, parts in splits.items():
        if parts:
            role = split if split in wanted else "valid"
            builder = _Builder(cfg, split, role, wanted[role])
            built.samples[split] = builder.samples(parts)
            built.notes.extend(builder.notes)
    return built


class _Builder:
    """A builder that puts the samples of one split in Megatron's order.

    Args:
        cfg: the run's configuration.
        split: name of the split.
        role: Megatron's name for the split: "train", "valid" or "test".
        n: number of samples that Megatron requests from the split.

    Attributes:
        notes: lines for the user.
    """

    def __init__(self, cfg: Config, split: str, role: str, n: int) -> None:
        self._cfg, self._split, self._n = cfg, split, n
        self._fork = FORKS[cfg.data.order]
        mixtures = {"train": cfg.data.train_mixture, "test": cfg.data.test_mixture}
        mixture = mixtures.get(split)
        has_split = cfg.data.train_mixture is None and split in SPLITS
        matrix = tuple(_core_matrix(cfg.data.split_weights)) if has_split else None
        name = mixture.name if mixture else split
        self._order_name = OrderName(name, role, matrix, self._fork.is_core)
        self.notes: list[str] = []

    def samples(self, parts: Sequence[CorpusPart]) -> AnySamples | None:
        """The samples of the split's parts; None if the split has no sequences and Megatron allows empty splits.

        Raises:
            ValueError: Megatron itself could not start with these parts, or a cache is damaged.
        """
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
            return self._single(parts[0], self._n)
        return self._blend(parts)

    def _single(self, part: CorpusPart, n: int) -> MegatronSamples:
        """Make at least n samples from one part."""
        cfg = self._cfg
        settings = OrderSettings(part.dataset, part.documents, n, cfg.data.seq_len, cfg.run.seed, self._fork.cutoff)
        samples = MegatronSamples(settings, self._order_name)
        if samples.note:
            self.notes.append(samples.note)
        return samples

    def _blend(self, parts: Sequence[CorpusPart]) -> MegatronBlend:
        """The samples of several parts, blended by weight."""
        weights = [part.weight for part in parts if part.weight is not None]
        order = f"[data] order = '{self._cfg.data.order}'"
        if len(weights) < len(parts):
            raise ValueError(
                f"{order} blends by weight: expected a weight for each of {len(parts)} paths ([data] weights)"
            )
        if len(parts) > MOST_CORPORA and not self._fork.is_core:
            raise ValueError(f"{order} has at most {MOST_CORPORA} corpora in a blend, got {len(parts)} ([data] path)")
        shares = self._fork.shares(weights)
        samples: list[MegatronSamples] = []
        for part, share in zip(parts, shares, strict=True):
            samples.append(self._single(part, self._fork.n_asked(self._n, share)))
        # When blending, all three forks normalise the shares once more, with numpy's sum.
        return MegatronBlend(samples, _core_shares(shares), self._n)


def digest_of_order(samples: AnySamples) -> str:
    """Hash an order to 16 hex digits. A resumed run compares digests to check that its order has not changed."""
    parts = samples.parts if isinstance(samples, MegatronBlend) else [samples]
    digest = xxhash.xxh3_64()
    for part in parts:
        assert isinstance(part, MegatronSamples)
        digest.update(part.indices.digest().encode())
    return digest.hexdigest()


def identity(cfg: Config, splits: Splits) -> dict[str, Any]:
    """The additional entries of `Text.identity` for a run that reads its samples in one of Megatron's orders."""
    train = splits.samples["train"]
    assert train is not None
    return {
        "[data] order": cfg.data.order,
        "[data] order_samples": wanted_samples(cfg)["train"],
        "digest of the order": digest_of_order(train),
    }
