"""T5 over the tp axis: how each module of `models/t5.py` is sharded."""

from __future__ import annotations

from dtmega.config.families.t5 import T5Keys
from dtmega.plans.styles import Column, Enter, EnterOnce, Norm, Plan, Row, SequenceShard, ShardBuffer
from dtmega.plans.vocabulary import HeadColumns, VocabEmbedding, VocabHead, WholeEmbedding


def plan(model: T5Keys, sequence_parallel: bool = True) -> Plan:
    """The plan for a T5 model. The layers of encoder and decoder are sharded as in Megatron.

    The encoder's output is gathered once for all decoder layers of a stage. The output therefore needs only one
    all-gather and one reduce-scatter of [B, S, D] per microbatch, whereas Megatron needs both in every layer. The
    relative-position embeddings are sharded by heads.
    """
    sp, heads, ffn = sequence_parallel, {"n_heads": model.n_heads}, {"ffn_hidden_size": model.ffn}
    attention = {
        "": Enter(sp),
        ".q": Column(sp, **heads),
        ".k": Column(sp, **heads),
        ".v": Column(sp, **heads),
        ".out": Row(sp, **heads),
    }
    layer: Plan = {
        "attn_norm": Norm(sp),
        **{f"attn{name}": style for name, style in attention.items()},
        "mlp_norm": Norm(sp),
        "mlp": Enter(sp),
        "mlp.gate": Column(sp, **ffn),
        "mlp.up": Column(sp, **ffn),
        "mlp.down": Row(sp, **ffn),
    }
    across: Plan = {"cross_norm": Norm(sp), **{f"cross{name}": style for name, style in attention.items()}}
    # Attention dropout is keyed by global head index, and dropout in the feed-forward by global channel index.
    # Other dropout sites get only this rank's slice of the sequence.
    sites = ["embed_dropout", "encoder_dropout", "decoder_embed_dropout", "decoder_dropout", "decoder.*.cross_dropout"]
    for stack in ("encoder", "decoder"):
        sites += [f"{stack}.*.attn_dropout", f"{stack}.*.mlp_dropout"]
    return {
        "embed": VocabEmbedding(sp),
        "positions": WholeEmbedding(sp),
        "encoder_bias": HeadColumns(sp),
        **{f"encoder.*.{name}": style for name, style in layer.items()},
        "encoder_norm": Norm(sp),
        "decoder_embed": VocabEmbedding(sp),
        "decoder_positions": WholeEmbedding(sp),
        "decoder_bias": HeadColumns(sp),
        "memory": EnterOnce(sp),
        **{f"decoder.*.{name}": style for name, style in {**layer, **across}.items()},
        "decoder_norm": Norm(sp),
        "head": VocabHead(sp),
        "head_ids": ShardBuffer(model.n_heads),
        "channel_ids": ShardBuffer(model.ffn),
        **{site: SequenceShard(sp) for site in sites},
    }
