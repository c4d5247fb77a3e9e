"""The families we know, as data: module names of `transformers` 5.x and the word for each; plan.py makes styles.

Names are relative to the base model (`model.base_model_prefix`), `*` is the number of a block. A row that matches
nothing in a model (a norm it has not, the decoder of an encoder) is left out; a module of a block that no row names is
refused. Modules outside of the blocks that no row names are computed whole on every rank.
"""

from __future__ import annotations

from dataclasses import dataclass, field

VOCAB, HEAD, COLUMN, ENTERING_COLUMN, KV_COLUMN, ROW = "vocab", "head", "column", "entering column", "kv column", "row"
CONV_COLUMN, CONV_ROW, CONV_PACKED, HEAD_COLUMNS = "conv column", "conv row", "packed conv column", "head columns"
NORM, HEAD_NORM, FEED_FORWARD = "norm", "norm of heads", "feed-forward"


@dataclass(frozen=True)
class Attention:
    """The module whose input all projections share; see `regions.EnterHeads` for the rest."""

    also: tuple[str, ...] = ()
    alibi: bool = False
    divide: tuple[str, ...] = ()
    groups: str | None = None  # attribute with query heads per key head


@dataclass(frozen=True)
class Family:
    """
    Attributes:
        stacks: module that runs the blocks -> name of their list in it. Relative to the base model.
        heads, kv_heads: keys of the config.
        rows: module -> word.
        sizes: keys of the config that tp must divide, besides heads.
        refused: key of the config -> why a truthy value cannot be.
    """

    stacks: dict[str, str]
    rows: dict[str, str | Attention]
    heads: str = "num_attention_heads"
    kv_heads: str | None = None
    sizes: tuple[str, ...] = ("intermediate_size",)
    refused: dict[str, str] = field(default_factory=dict)


_LLAMA: dict[str, str | Attention] = {
    "embed_tokens": VOCAB,
    "layers.*.input_layernorm": NORM,
    "layers.*.self_attn": Attention(groups="num_key_value_groups"),
    "layers.*.self_attn.q_proj": COLUMN,
    "layers.*.self_attn.k_proj": KV_COLUMN,
    "layers.*.self_attn.v_proj": KV_COLUMN,
    "layers.*.self_attn.q_norm": HEAD_NORM,
    "layers.*.self_attn.k_norm": HEAD_NORM,
    "layers.*.self_attn.o_proj": ROW,
    "layers.*.post_attention_layernorm": NORM,
    "layers.*.mlp": FEED_FORWARD,
    "layers.*.mlp.gate_proj": COLUMN,
    "layers.*.mlp.up_proj": COLUMN,
    "layers.*.mlp.down_proj": ROW,
}
_LIKE_LLAMA = Family(stacks={"": "layers"}, rows=_LLAMA, kv_heads="num_key_value_heads")
_NO_CROSS = {"add_cross_attention": "cross-attention of this family is not cut"}

FAMILIES: dict[str, Family] = {
    "llama": _LIKE_LLAMA,
    "mistral": _LIKE_LLAMA,
    "qwen2": _LIKE_LLAMA,
    "qwen3": _LIKE_LLAMA,
    "bloom": Family(
        stacks={"": "h"},
        heads="n_head",
        sizes=(),
        refused={"slow_but_exact": "it slices whole weights; leave it false"},
        rows={
            "word_embeddings": VOCAB,
            "h.*.input_layernorm": NORM,
            # BloomModel.num_heads stays: it makes the slopes of all heads, of which a rank takes its own.
            "h.*.self_attention": Attention(alibi=True, divide=("num_heads",)),
            "h.*.self_attention.query_key_value": COLUMN,  # rows [head, (q, k, v), K]: a contiguous cut has whole heads
            "h.*.self_attention.dense": ROW,
            "h.*.post_attention_layernorm": NORM,
            "h.*.mlp": FEED_FORWARD,
            "h.*.mlp.dense_h_to_4h": COLUMN,
            "h.*.mlp.dense_4h_to_h": ROW,
        },
    ),
    "gpt2": Family(
        stacks={"": "h"},
        heads="n_head",
        sizes=("n_inner",),
        refused=_NO_CROSS,
        rows={
            "wte": VOCAB,
            "h.*.ln_1": NORM,
            "h.*.attn": Attention(divide=("split_size",)),
            "h.*.attn.c_attn": CONV_PACKED,
            "h.*.attn.c_proj": CONV_ROW,
            "h.*.ln_2": NORM,
            "h.*.mlp": FEED_FORWARD,
            "h.*.mlp.c_fc": CONV_COLUMN,
            "h.*.mlp.c_proj": CONV_ROW,
        },
    ),
    "gpt_neox": Family(
        stacks={"": "layers"},
        rows={
            "embed_in": VOCAB,
            "layers.*.input_layernorm": NORM,
            "layers.*.post_attention_layernorm": NORM,
            "layers.*.attention": Attention(),
            "layers.*.attention.query_key_value": COLUMN,  # rows [head, (q, k, v), K]
            "layers.*.attention.dense": ROW,
            "layers.*.mlp": FEED_FORWARD,
            "layers.*.mlp.dense_h_to_4h": COLUMN,
            "layers.*.mlp.dense_4h_to_h": ROW,
        },
    ),
    "opt": Family(
        stacks={"decoder": "layers"},
        sizes=("ffn_dim",),
        refused={"layerdrop": "ranks would skip different layers; set it to 0"},
        rows={
            "decoder.embed_tokens": VOCAB,
            "decoder.layers.*.self_attn_layer_norm": NORM,
            "decoder.layers.*.self_attn": Attention(divide=("num_heads",)),
            "decoder.layers.*.self_attn.q_proj": COLUMN,
            "decoder.layers.*.self_attn.k_proj": COLUMN,
            "decoder.layers.*.self_attn.v_proj": COLUMN,
            "decoder.layers.*.self_attn.out_proj": ROW,
            "decoder.layers.*.final_layer_norm": NORM,
            "decoder.layers.*.fc1": ENTERING_COLUMN,
            "decoder.layers.*.fc2": ROW,
        },
    ),
    "bert": Family(
        stacks={"": "encoder.layer"},
        refused={**_NO_CROSS, "chunk_size_feed_forward": "its chunks are of the whole sequence; set it to 0"},
        rows={
            "embeddings.word_embeddings": VOCAB,
            "encoder.layer.*.attention.self": Attention(),
            "encoder.layer.*.attention.self.query": COLUMN,
            "encoder.layer.*.attention.self.key": COLUMN,
            "encoder.layer.*.attention.self.value": COLUMN,
            "encoder.layer.*.attention.output.dense": ROW,
            "encoder.layer.*.attention.output.LayerNorm": NORM,
            "encoder.layer.*.intermediate.dense": ENTERING_COLUMN,
            "encoder.layer.*.output.dense": ROW,
            "encoder.layer.*.output.LayerNorm": NORM,
        },
    ),
    "t5": Family(
        stacks={"encoder": "block", "decoder": "block"},
        heads="num_heads",
        sizes=("d_ff",),
        rows={
            "shared": VOCAB,
            **{
                f"{stack}.{name}": word
                for stack in ("encoder", "decoder")
                for name, word in {
                    "embed_tokens": VOCAB,
                    "block.*.layer.0.SelfAttention": Attention(divide=("n_heads",)),
                    "block.*.layer.1.EncDecAttention": Attention(divide=("n_heads",), also=("key_value_states",)),
                    **{
                        f"block.*.layer.{attention}.{name}": word
                        for attention in ("0.SelfAttention", "1.EncDecAttention")
                        for name, word in {
                            "q": COLUMN,
                            "k": COLUMN,
                            "v": COLUMN,
                            "o": ROW,
                            "relative_attention_bias": HEAD_COLUMNS,
                        }.items()
                    },
                    **{f"block.*.layer.{i}.layer_norm": NORM for i in range(3)},
                    **{
                        f"block.*.layer.{i}.DenseReluDense{name}": word
                        for i in (1, 2)
                        for name, word in {
                            "": FEED_FORWARD,
                            ".wi": COLUMN,
                            ".wi_0": COLUMN,
                            ".wi_1": COLUMN,
                            ".wo": ROW,
                        }.items()
                    },
                }.items()
            },
        },
    ),
}
