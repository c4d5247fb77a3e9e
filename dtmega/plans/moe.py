"""Mixtures of experts over the tp axis: how each module of `models/moe.py` is sharded."""

from __future__ import annotations

from dtmega.config.families.moe import MoEKeys
from dtmega.plans.experts import ExpertRows, TokenRouter
from dtmega.plans.llama import plan as llama_plan
from dtmega.plans.styles import Column, Enter, KVColumn, Norm, Plan, Row


def plan(model: MoEKeys, sequence_parallel: bool = True) -> Plan:
    """The plan for a mixture of experts: Llama's plan, with each expert sharded like a feed-forward network.

    In each layer, the input of the mixture is gathered once, for the router, the experts and the shared experts.
    """
    sp, width = sequence_parallel, {"expert_ffn_hidden_size": model.expert_ffn}
    rest = dict(llama_plan(model, sp))
    if model.kv_latent_size:
        del rest["layers.*.attn.k"], rest["layers.*.attn.v"]
        rest |= _latent(model, sp)
    return {
        **rest,
        "layers.*.mixture": Enter(sp),
        "layers.*.mixture.router": TokenRouter(sp),
        "layers.*.mixture.experts": ExpertRows(sp, **width),
        "layers.*.mixture.shared.gate": Column(sp, **width),
        "layers.*.mixture.shared.up": Column(sp, **width),
        "layers.*.mixture.shared.down": Row(sp, **width),
    }


def _latent(model: MoEKeys, sp: bool) -> Plan:
    """The plan for all projections of latent attention except the output projection.

    Every rank computes the full latent vectors, and computes its own heads from these vectors. The gradients of the
    modules that compute the latent vectors are therefore all-reduced over tp, like the gradients of a key head that all
    ranks share.
    """
    heads, attn = {"n_heads": model.n_heads}, "layers.*.attn"
    return {
        f"{attn}.q_down": KVColumn(1, sp),
        f"{attn}.q_norm": Norm(sp, of_heads=True),
        f"{attn}.q_up": Column(sp, **heads),
        f"{attn}.kv_down": KVColumn(1, sp),
        f"{attn}.kv_norm": Norm(sp, of_heads=True),
        f"{attn}.kv_up": Column(sp, **heads),
    }
