"""The record of mixtures of experts: [model] name = "moe"."""

from __future__ import annotations

from dtmega import rooms
from dtmega.data.objectives.routed import with_router_losses
from dtmega.families.built_in import BuiltIn
from dtmega.models.moe import MoE

RECORD = BuiltIn(
    MoE,
    plan=lambda keys, sequence_parallel: rooms.moe_plan().plan(keys, sequence_parallel),
    completed=with_router_losses,
    exact=("eager", "tp with pp"),
)
