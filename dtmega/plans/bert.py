"""BERT over the tp axis: what `models/bert.py` names, and how each is cut."""

from __future__ import annotations

from dtmega import config
from dtmega.plans.styles import Column, Enter, Norm, Plan, Row, SequenceShard, ShardBuffer, Whole
from dtmega.plans.vocabulary import Rejoin, VocabEmbedding, VocabHead, WholeEmbedding


def plan(model: config.Bert, sequence_parallel: bool = True) -> Plan:
    """The table of a model: blocks as BLOOM's, and of the heads nothing is cut but the vocabulary.

    With sequence parallelism each head has its input whole, [B, S, D], since which tokens have a label is known of
    whole rows; the order head of the first place only. All ranks then do the same work on the labelled tokens [N, D],
    up to the vocabulary, behind which the gradient [N, D] is summed over tp: 15 % of what a reduce-scatter for every
    token would be. So gradients are whole in all of `head` and `order`, and none of their parameters is a partial sum.
    """
    sp, heads, ffn = sequence_parallel, {"n_heads": model.n_heads}, {"ffn_hidden_size": model.ffn}
    return {
        "embed": VocabEmbedding(sp),
        "positions": WholeEmbedding(sp),
        "types": WholeEmbedding(sp),
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
        "head": Rejoin(sp),
        "head.dense": Whole(False),
        "head.norm": Norm(False),
        "head.output": VocabHead(False),
        "order": Rejoin(sp, first_only=True),
        "order.pooler": Whole(False),
        "order.classifier": Whole(False),
        # Attention drops by global head; all other sites see a part of the sequence.
        "head_ids": ShardBuffer(model.n_heads),
        "embed_dropout": SequenceShard(sp),
        "layers.*.attn_dropout": SequenceShard(sp),
        "layers.*.mlp_dropout": SequenceShard(sp),
    }
