"""GPT over the tp axis: what `models/gpt.py` names, and how each is cut."""

from __future__ import annotations

from dtmega import config
from dtmega.plans.styles import Column, Enter, Norm, Plan, Row, SequenceShard, ShardBuffer
from dtmega.plans.vocabulary import VocabEmbedding, VocabHead, WholeEmbedding


def plan(model: config.GPT, sequence_parallel: bool = True) -> Plan:
    """The table of a model, as BLOOM's; positions are whole on every rank."""
    sp, heads, ffn = sequence_parallel, {"n_heads": model.n_heads}, {"ffn_hidden_size": model.ffn}
    table: Plan = {
        "embed": VocabEmbedding(sp),
        "positions": WholeEmbedding(sp),
        "layers.*.attn_norm": Norm(sp),
        "layers.*.attn": Enter(sp),
        "layers.*.attn.qkv": Column(sp, **heads),
        "layers.*.attn.out": Row(sp, **heads),
        "layers.*.mlp_norm": Norm(sp),
        "layers.*.mlp": Enter(sp),
        "layers.*.mlp.up": Column(sp, **ffn),
        "layers.*.mlp.down": Row(sp, **ffn),
        "norm": Norm(sp),
        "head": VocabHead(sp),
        "head_ids": ShardBuffer(model.n_heads),
    }
    if sp:
        # Attention drops by global head, which head_ids says; all other sites see a part of the sequence.
        sites = ("embed_dropout", "layers.*.attn_dropout", "layers.*.mlp_dropout")
        table = {**table, **{site: SequenceShard() for site in sites}}
    return table
