"""GPT over the tp axis: how each module of `models/gpt.py` is sharded."""

from __future__ import annotations

from dtmega.config.families.gpt import GPTKeys
from dtmega.plans.styles import Column, Enter, Norm, Plan, Row, SequenceShard, ShardBuffer
from dtmega.plans.vocabulary import VocabEmbedding, VocabHead, WholeEmbedding


def plan(model: GPTKeys, sequence_parallel: bool = True) -> Plan:
    """The plan for a GPT model: BLOOM's plan, plus a position embedding that is replicated on every rank."""
    sp, heads, ffn = sequence_parallel, {"n_heads": model.n_heads}, {"ffn_hidden_size": model.ffn}
    return {
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
        # Attention dropout is keyed by global head index. Other dropout sites get only this rank's slice of a sequence.
        "head_ids": ShardBuffer(model.n_heads),
        "embed_dropout": SequenceShard(sp),
        "layers.*.attn_dropout": SequenceShard(sp),
        "layers.*.mlp_dropout": SequenceShard(sp),
    }
