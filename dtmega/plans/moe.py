"""Mixtures of experts over the tp axis: how each module of `models/moe.py` is cut."""

from __future__ import annotations

from dtmega import config
from dtmega.plans.experts import ExpertRows, TokenRouter
from dtmega.plans.llama import plan as llama_plan
from dtmega.plans.styles import Column, Enter, Plan, Row


def plan(model: config.MoE, sequence_parallel: bool = True) -> Plan:
    """The plan for a mixture of experts: Llama's plan, with each expert cut inside, like a feed-forward network.

    A mixture's input is gathered once, for the router, the experts and the shared experts.
    """
    sp, width = sequence_parallel, {"expert_ffn_hidden_size": model.expert_ffn}
    return {
        **llama_plan(model, sp),
        "layers.*.mixture": Enter(sp),
        "layers.*.mixture.router": TokenRouter(sp),
        "layers.*.mixture.experts": ExpertRows(sp, **width),
        "layers.*.mixture.shared.gate": Column(sp, **width),
        "layers.*.mixture.shared.up": Column(sp, **width),
        "layers.*.mixture.shared.down": Row(sp, **width),
    }
