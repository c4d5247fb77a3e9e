"""BERT over the tp axis: how each module of `models/bert.py` is sharded."""

from __future__ import annotations

from dtmega.config.families.bert import BertKeys
from dtmega.plans.styles import Column, Enter, Norm, Plan, Row, SequenceShard, ShardBuffer, Whole
from dtmega.plans.vocabulary import Rejoin, VocabEmbedding, VocabHead, WholeEmbedding


def plan(model: BertKeys, sequence_parallel: bool = True) -> Plan:
    """The plan for a BERT model. Blocks are sharded as in BLOOM. In the two heads, only the vocabulary is sharded.

    With sequence parallelism, the masked-word head gathers its whole input [B, S, D], because labelled tokens are
    selected from whole sequences. The sentence-order head gathers only the first position of each rank's slice. From
    there up to the vocabulary projection, all ranks compute identical results for the N labelled tokens, [N, D]. The
    gradient of the projection's input, [N, D], is all-reduced over tp. This all-reduce sends 15 % of the bytes that a
    reduce-scatter over all tokens would send. After it, all gradients in `head` and `order` are complete on every rank,
    so no parameter in `head` or `order` has a partial gradient.
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
        # Attention dropout is keyed by global head index. Other dropout sites get only this rank's slice of a sequence.
        "head_ids": ShardBuffer(model.n_heads),
        "embed_dropout": SequenceShard(sp),
        "layers.*.attn_dropout": SequenceShard(sp),
        "layers.*.mlp_dropout": SequenceShard(sp),
    }
