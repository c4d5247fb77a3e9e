"""The record of BLOOM: [model] name = "bloom"."""

from __future__ import annotations

from dtmega import rooms
from dtmega.families.built_in import BuiltIn
from dtmega.models.bloom import Bloom

RECORD = BuiltIn(
    Bloom,
    plan=lambda keys, sequence_parallel: rooms.bloom_plan().plan(keys, sequence_parallel),
    exact=("eager", "compiled", "tp with pp"),
)
