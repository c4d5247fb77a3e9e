"""The record of T5: [model] name = "t5"."""

from __future__ import annotations

from dtmega import rooms
from dtmega.families.built_in import BuiltIn
from dtmega.models.show_spans import ANSWERS
from dtmega.models.t5 import T5

RECORD = BuiltIn(
    T5,
    plan=lambda keys, sequence_parallel: rooms.t5_plan().plan(keys, sequence_parallel),
    objectives={"auto": "spans", "separate-spans": "separate-spans"},
    show=ANSWERS,
    exact=("eager",),
)
