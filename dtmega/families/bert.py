"""The record of BERT: [model] name = "bert"."""

from __future__ import annotations

from dtmega import rooms
from dtmega.families.built_in import BuiltIn
from dtmega.models.bert import Bert
from dtmega.models.show_masks import FILLS

RECORD = BuiltIn(
    Bert,
    plan=lambda keys, sequence_parallel: rooms.bert_plan().plan(keys, sequence_parallel),
    objectives={"auto": "masked"},
    show=FILLS,
    exact=("eager", "tp with pp"),
)
