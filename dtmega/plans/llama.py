"""Llama over the tp axis: how each module of `models/llama.py` is sharded."""

from __future__ import annotations

from dtmega.config.families.llama import LlamaKeys
from dtmega.plans.styles import Column, Enter, KVColumn, Norm, Plan, Row
from dtmega.plans.vocabulary import VocabEmbedding, VocabHead


def plan(model: LlamaKeys, sequence_parallel: bool = True) -> Plan:
    """The plan for a Llama model. Heads and feed-forward are sharded evenly; the last vocabulary shard may be smaller.

    If there are fewer key/value heads than ranks, several ranks share one key/value head. The collectives are the same
    as in `plans/bloom.py`.
    """
    sp, heads, ffn = sequence_parallel, {"n_heads": model.n_heads}, {"ffn_hidden_size": model.ffn}
    # These norms see only this rank's heads, even without sequence parallelism, so their gradients are always partial.
    norms = {f"layers.*.attn.{name}": Norm(sp, of_heads=True) for name in ("q_norm", "k_norm")}
    return {
        "embed": VocabEmbedding(sp),
        "layers.*.attn_norm": Norm(sp),
        "layers.*.attn": Enter(sp),
        "layers.*.attn.q": Column(sp, **heads),
        "layers.*.attn.k": KVColumn(model.kv_heads, sp),
        "layers.*.attn.v": KVColumn(model.kv_heads, sp),
        **(norms if model.qk_norm else {}),
        "layers.*.attn.out": Row(sp, **heads),
        "layers.*.mlp_norm": Norm(sp),
        "layers.*.mlp": Enter(sp),
        "layers.*.mlp.gate": Column(sp, **ffn),
        "layers.*.mlp.up": Column(sp, **ffn),
        "layers.*.mlp.down": Row(sp, **ffn),
        "norm": Norm(sp),
        "head": VocabHead(sp),
    }
