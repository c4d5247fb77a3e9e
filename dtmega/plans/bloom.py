"""BLOOM over the tp axis: how each module of `models/bloom.py` is sharded."""

from __future__ import annotations

from dtmega import config
from dtmega.plans.styles import Column, Enter, Norm, Plan, Row, SequenceShard, ShardBuffer
from dtmega.plans.vocabulary import VocabEmbedding, VocabHead


def plan(model: config.Model, sequence_parallel: bool = True) -> Plan:
    """The plan for a BLOOM model. Heads and feed-forward are sharded evenly; the last vocabulary shard may be smaller.

    With sequence parallelism, a layer needs two all-gathers and two reduce-scatters in forward. Backward needs two
    all-gathers and two reduce-scatters as well, and also repeats the two all-gathers of forward. Without sequence
    parallelism, a layer needs two all-reduces in forward and two all-reduces in backward.
    """
    sp, heads, ffn = sequence_parallel, {"n_heads": model.n_heads}, {"ffn_hidden_size": model.ffn}
    return {
        "embed": VocabEmbedding(sp),
        "embed_norm": Norm(sp),
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
        "slopes": ShardBuffer(model.n_heads),
        # Attention dropout is keyed by global head index. Other dropout sites get only this rank's slice of a sequence.
        "head_ids": ShardBuffer(model.n_heads),
        "embed_dropout": SequenceShard(sp),
        "layers.*.attn_dropout": SequenceShard(sp),
        "layers.*.mlp_dropout": SequenceShard(sp),
    }
