"""All objectives, and a check that refuses [data] keys that only other objectives read."""

from __future__ import annotations

from itertools import chain

from dtmega.config import Data
from dtmega.data.objectives.continuation import LearnedTurns, Prefix
from dtmega.data.objectives.denoising.objectives import Masked, SeparateSpans, Spans
from dtmega.data.objectives.objective import NEXT_TOKEN, Objective

PREFIX = Prefix()
CONVERSATIONS = LearnedTurns()
MASKED = Masked()
SPANS = Spans()
SEPARATE_SPANS = SeparateSpans()
OBJECTIVES: tuple[Objective, ...] = (NEXT_TOKEN, PREFIX, CONVERSATIONS, MASKED, SPANS, SEPARATE_SPANS)
NAMES: tuple[str, ...] = ("next-token", "prefix-lm", "conversations", "masked", "spans", "separate-spans")


def objective(name: str) -> Objective:
    """The objective with this name."""
    return OBJECTIVES[NAMES.index(name)]


def check_keys(data: Data, objective: Objective) -> None:
    """Refuse [data] keys that only other objectives read.

    Raises:
        ValueError: a key that only other objectives read differs from its default.
    """
    keys = chain.from_iterable(other.reads for other in OBJECTIVES)
    foreign = {*keys} - {*objective.reads}
    for key, field in Data.model_fields.items():
        if key in foreign and getattr(data, key) != field.default:
            raise ValueError(
                f"{key}={getattr(data, key)} means nothing to a model that is trained on {objective.aim}: expected "
                f"{field.default}, or another objective or model ([data] {key}, [data] objective, [model] name)"
            )
