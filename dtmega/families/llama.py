"""The record of Llama, Mistral and Qwen3: [model] name = "llama"."""

from __future__ import annotations

from dtmega import rooms
from dtmega.families.built_in import BuiltIn
from dtmega.models.llama import Llama

RECORD = BuiltIn(
    Llama,
    plan=lambda keys, sequence_parallel: rooms.llama_plan().plan(keys, sequence_parallel),
    exact=("eager", "compiled", "tp with pp"),
)
