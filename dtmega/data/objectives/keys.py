"""The keys of [data] that each objective reads, and a check that refuses those that only other objectives read."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from types import MappingProxyType

from dtmega.config import Data
from dtmega.data.objectives.objective import Objective

_ENDS = ("eod_mask_loss", "reset_position_ids", "reset_attention_mask")
# Name of an objective, as `known.objective` opens it -> the keys of [data] that it reads and some others ignore.
READS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "next-token": _ENDS,
        "prefix-lm": (*_ENDS, "objective", "reweight_positions"),
        "conversations": ("objective", "pack", "too_long"),
        "masked": ("short_seq_prob", "mask_prob", "max_ngram"),
        "spans": ("decoder_seq_len", "mask_prob", "mean_span", "sentinels"),
        "separate-spans": ("objective", "decoder_seq_len", "short_seq_prob", "mask_prob", "max_span", "sentinels"),
    }
)


def check_keys(data: Data, objective: Objective) -> None:
    """Refuse [data] keys that only other objectives read.

    Raises:
        ValueError: a key that only other objectives read differs from its default.
    """
    foreign = {*chain.from_iterable(READS.values())} - {*objective.reads}
    for key, field in Data.model_fields.items():
        if key in foreign and getattr(data, key) != field.default:
            raise ValueError(
                f"{key}={getattr(data, key)} means nothing to a model that is trained on {objective.aim}: expected "
                f"{field.default}, or another objective or model ([data] {key}, [data] objective, [model] name)"
            )
