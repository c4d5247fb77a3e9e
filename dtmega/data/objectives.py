"""Objectives of training: named sums over a batch, each divided by a count of the global batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from dtmega.config import Data
from dtmega.data.indexed import IndexedDataset
from dtmega.data.masking import Vocabulary
from dtmega.data.pairs import PairSamples, Specials
from dtmega.data.prefixes import PrefixSamples
from dtmega.data.rows import IGNORED, MaskedRows, NextTokenRows, PrefixRows, Rows
from dtmega.data.samples import AnySamples, Samples
from dtmega.data.tokenizer import Tokenizer

NO_COUNTS: Mapping[str, float] = MappingProxyType({})


class Sum(NamedTuple):
    """One number of a step: a model gives its sum over a microbatch, a step reports its mean over the global batch.

    Attributes:
        name: in what the model returns, and in the metrics.
        per: the count that divides it.
        weight: of the mean in the loss; 0 for what is only reported and has no gradient, like an accuracy.
    """

    name: str
    per: str
    weight: float = 1.0


class Objective(Protocol):
    """An aim of training.

    Attributes:
        sums: all that a model returns with labels, whichever stages have them.
        aim: for people, what its models are trained on.
        reads: keys of [data] that it reads and not every objective does; the samples depend on them.
        sentences: it reads texts that are split into sentences, each a sequence of the data set.
        order: raise it when sample g of the same data, keys and seed becomes another: older runs are then refused.
    """

    @property
    def sums(self) -> tuple[Sum, ...]: ...

    @property
    def aim(self) -> str: ...

    @property
    def reads(self) -> tuple[str, ...]: ...

    @property
    def sentences(self) -> bool: ...

    @property
    def order(self) -> int: ...

    def counts(self, microbatch: Mapping[str, Tensor]) -> dict[str, float]:
        """The part of each divisor that a microbatch adds; every microbatch has the same names, in the same order."""
        ...

    def check(self, tokenizer: Tokenizer) -> None:
        """Refuse a tokenizer that lacks what the objective needs of it.

        Raises:
            ValueError: names the token that is missing, and the key.
        """
        ...

    def samples(
        self, dataset: IndexedDataset, documents: tuple[int, int], data: Data, seed: int, split: str, corpus: int
    ) -> AnySamples:
        """The samples of documents (start, stop) of one corpus of a split.

        Raises:
            ValueError: there is not one.
        """
        ...

    def rows(self, samples: AnySamples, data: Data, tokenizer: Tokenizer) -> Rows:
        """The rows of such samples, or of several mixed."""
        ...


class NextToken:
    """Cross-entropy of the next token, as a mean over the tokens that have a label."""

    sums = (Sum("lm", "tokens"),)
    aim = "next tokens"
    reads = ("eod_mask_loss", "reset_position_ids", "reset_attention_mask")
    sentences = False
    order = 2

    def counts(self, microbatch: Mapping[str, Tensor]) -> dict[str, float]:
        return {"tokens": _labelled(microbatch)}

    def check(self, tokenizer: Tokenizer) -> None:
        pass

    def samples(
        self, dataset: IndexedDataset, documents: tuple[int, int], data: Data, seed: int, split: str, corpus: int
    ) -> Samples:
        return Samples(dataset, documents, data.seq_len, seed, split, corpus)

    def rows(self, samples: AnySamples, data: Data, tokenizer: Tokenizer) -> NextTokenRows:
        return NextTokenRows(samples, data, tokenizer.eod_id)


class Prefix(NextToken):
    """The next token behind a prefix that is given, as a mean over those tokens, weighted or not."""

    aim = "next tokens behind a prefix"
    reads = (*NextToken.reads, "objective", "reweight_positions")
    order = 1

    def counts(self, microbatch: Mapping[str, Tensor]) -> dict[str, float]:
        if "label_weights" not in microbatch:
            return super().counts(microbatch)
        targets = microbatch["labels"] != IGNORED
        return {"tokens": float(microbatch["label_weights"][targets].sum(dtype=torch.float64))}

    def samples(
        self, dataset: IndexedDataset, documents: tuple[int, int], data: Data, seed: int, split: str, corpus: int
    ) -> Samples:
        return PrefixSamples(dataset, documents, data.seq_len, seed, split, corpus)

    def rows(self, samples: AnySamples, data: Data, tokenizer: Tokenizer) -> PrefixRows:
        return PrefixRows(samples, data, tokenizer.eod_id)


class Masked:
    """BERT's: the masked tokens as a mean over them, and which of two segments came first, as a mean over sequences."""

    sums = (
        Sum("lm", "tokens"),
        Sum("order", "sequences"),
        Sum("order_right", "sequences", weight=0.0),
    )
    aim = "masked tokens and the order of sentences"
    reads = ("short_seq_prob", "mask_prob", "max_ngram")
    sentences = True
    order = 1

    def counts(self, microbatch: Mapping[str, Tensor]) -> dict[str, float]:
        return {"tokens": _labelled(microbatch), "sequences": len(microbatch["labels"])}

    def check(self, tokenizer: Tokenizer) -> None:
        specials(tokenizer)

    def samples(
        self, dataset: IndexedDataset, documents: tuple[int, int], data: Data, seed: int, split: str, corpus: int
    ) -> PairSamples:
        return PairSamples(dataset, documents, data.seq_len, data.short_seq_prob, seed, split, corpus)

    def rows(self, samples: AnySamples, data: Data, tokenizer: Tokenizer) -> MaskedRows:
        ids = np.arange(tokenizer.vocab_size)
        continuing = np.array(sorted(tokenizer.continuing_ids), np.int64)
        ordinary = ids[~np.isin(ids, [*tokenizer.special_ids])]
        return MaskedRows(samples, data, Vocabulary(specials(tokenizer), continuing, ordinary))


def specials(tokenizer: Tokenizer) -> Specials:
    """The ids of the special tokens that BERT's samples have.

    Raises:
        ValueError: the vocabulary lacks one.
    """
    found = {
        "[CLS]": tokenizer.cls_id,
        "[SEP]": tokenizer.sep_id,
        "[MASK]": tokenizer.mask_id,
        "[PAD]": tokenizer.pad_id,
    }
    for name, i in found.items():
        if i is None:
            raise ValueError(
                f"tokenizer '{tokenizer.name}': expected {', '.join(found)} in its vocabulary, {name} is missing; take "
                f"stdlib-wordpiece or bert:PATH of a vocab.txt ([data] tokenizer)"
            )
    return Specials(*(i for i in found.values() if i is not None))


NEXT_TOKEN = NextToken()
PREFIX = Prefix()
MASKED = Masked()
OBJECTIVES: tuple[Objective, ...] = (NEXT_TOKEN, PREFIX, MASKED)


def check_keys(data: Data, objective: Objective) -> None:
    """Refuse keys of [data] that the objective would not read.

    Raises:
        ValueError: one of them is set.
    """
    foreign = {key for other in OBJECTIVES for key in other.reads} - {*objective.reads}
    for key, field in Data.model_fields.items():
        if key in foreign and getattr(data, key) != field.default:
            raise ValueError(
                f"{key}={getattr(data, key)} means nothing to a model that is trained on {objective.aim}: expected "
                f"{field.default}, or another model ([data] {key}, [model] name)"
            )


def _labelled(microbatch: Mapping[str, Tensor]) -> int:
    return int((microbatch["labels"] != IGNORED).sum())


class Tally:
    """The sums that this rank finds in a step or an evaluation.

    Args:
        counts: of the global batch; an evaluation needs none.
        scale: of the loss, by which backward multiplies all gradients.

    Attributes:
        totals: [sums] fp64; the totals of all ranks of the `loss` group add up to those of the global batch.
    """

    def __init__(
        self, sums: Sequence[Sum], device: torch.device, counts: Mapping[str, float] = NO_COUNTS, scale: float = 1.0
    ) -> None:
        self.totals = torch.zeros(len(sums), dtype=torch.float64, device=device)
        self._sums, self._counts, self._scale = sums, counts, scale

    def factors(self) -> dict[str, float]:
        """The derivative of the scaled loss by each sum, by name: scale x weight / count."""
        return {one.name: self._scale * one.weight / self._counts[one.per] for one in self._sums}

    def add_all(self, found: Mapping[str, Tensor]) -> list[tuple[Tensor, float]]:
        """`add` what a whole model has returned: it has every sum."""
        return self.add({one.name: found[one.name] for one in self._sums})

    def add(self, found: Mapping[str, Tensor]) -> list[tuple[Tensor, float]]:
        """Add the sums among what a stage has returned for a microbatch.

        Returns:
            Those of them that are in the loss and have a gradient, each with its factor.
        """
        factors = self.factors() if self._counts else {}
        in_loss = []
        for i, one in enumerate(self._sums):
            if one.name in found:
                self.totals[i] += found[one.name].detach()
                if one.weight and found[one.name].requires_grad:
                    in_loss.append((found[one.name], factors[one.name]))
        return in_loss


def means(sums: Sequence[Sum], totals: Tensor, counts: Mapping[str, float]) -> dict[str, float]:
    """Each sum over the global batch by its count.

    Args:
        totals: [sums], over the global batch.
        counts: of the global batch.
    """
    return {one.name: total / counts[one.per] for one, total in zip(sums, totals.tolist(), strict=True)}


def loss(sums: Sequence[Sum], by_name: Mapping[str, float]) -> float:
    """The weighted sum of the means; what is only reported may be any number."""
    return sum(one.weight * by_name[one.name] for one in sums if one.weight)
