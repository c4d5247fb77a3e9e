"""The record of GPT-2 and GPT-3: [model] name = "gpt"."""

from __future__ import annotations

from dtmega import rooms
from dtmega.families.built_in import BuiltIn
from dtmega.models.gpt import GPT

RECORD = BuiltIn(
    GPT,
    plan=lambda keys, sequence_parallel: rooms.gpt_plan().plan(keys, sequence_parallel),
    exact=("eager", "tp with pp"),
)
