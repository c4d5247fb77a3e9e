"""Facts about transformers families, as data: one entry per family.

An entry lists the module that holds the blocks, the modules that only the first or last pipeline stage keeps, the style
in which tensor parallelism shards each module, and the config.json keys that affect the sharding. Module names follow
`transformers` 5.x and are relative to the base model (`model.base_model_prefix`); `*` stands for a block number.
`model.py` uses `FamilyFacts.ends`, and `tp/plan.py` uses `FamilyFacts.styles`.

If a family has no entry here, or an entry without `styles`, transformers' own plan (`tp/native.py`) shards the family's
models. A family without an entry cannot run in a pipeline.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TypeAlias

# Tensor-parallel styles: ways to shard a module. `tp/plan.py` maps each style to its class.
VOCAB, COLUMN, ENTERING_COLUMN, KV_COLUMN, ROW = "vocab", "column", "entering column", "kv column", "row"
CONV_COLUMN, CONV_ROW, CONV_PACKED, HEAD_COLUMNS = "conv column", "conv row", "packed conv column", "head columns"
# Style of a linear layer that fuses q, k and v. The rows are either q, k and v of each head in turn, or the queries of
# all heads followed by one shared k and v.
QUERIES_AND_KEYS = "queries and keys"
NORM, HEAD_NORM, FEED_FORWARD = "norm", "norm of heads", "feed-forward"
EACH_HEADS_NORM, WHOLE = "a norm for each head", "whole"

# Row orders in a weight that fuses several matrices: q, k and v of each head in turn; all of q, then all of k, then all
# of v; or all of the gate, then all of the values.
BY_HEAD, Q_K_V, GATE_UP = "by head", "q, k, v", "gate, up"

# Stand-ins that replace a module on pipeline stages that lack the module.
NOTHING = "nothing"  # None, because nothing calls the module on these stages
PASS_ON = "pass on"  # a module that returns its input
ZERO = "zero"  # a module that returns 0, because the first stage has already added position embeddings

# Keys of config.json. Each line lists the keys under which different families store the same value.
LAYER_KEYS = ("num_hidden_layers", "num_layers", "num_decoder_layers", "n_layer", "n_layers")
HEAD_KEYS = ("num_attention_heads", "num_heads", "n_head", "n_heads")
HIDDEN_KEYS = ("hidden_size", "d_model", "n_embd")
FEED_FORWARD_KEYS = ("intermediate_size", "ffn_dim", "d_ff", "n_inner")
POSITION_KEYS = ("max_position_embeddings", "max_seq_len")
EXPERT_KEYS = ("num_local_experts", "num_experts", "n_routed_experts")

# Families whose models are always causal, even if config.json has `is_decoder` = false.
ALWAYS_CAUSAL = ("gpt_neox", "gpt_neox_japanese")

# Families that support context parallelism ([mesh] cp), which shards each sequence over ranks. In these families,
# each layer passes everything that affects attention through transformers' attention interface, and the model accepts
# the positions of a rank's tokens.
OVER_CP = ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "olmo", "olmo2", "olmo3", "cohere")
OVER_CP += ("cohere2", "phi", "phi3", "granite", "glm", "glm4", "smollm3", "arcee", "ernie4_5", "exaone4", "starcoder2")
OVER_CP += ("gpt2", "gpt_neox", "gpt_bigcode", "opt", "stablelm", "mixtral", "olmoe", "qwen3_moe")
# Family that does not support context parallelism -> reason.
WHOLE_SEQUENCES = {
    "bloom": "its class has no attention interface (name = 'bloom' trains the same model over cp)",
    "gpt_oss": "its attention has sinks, which it passes as 's_aux'",
    "deepseek_v3": "its heads of values have another size than its heads of queries and keys",
}

# Family in which conversations cannot share a row ([data] pack) -> reason. For every other family, a run checks at
# startup that attention restarts wherever positions restart (`rows_proof.py`).
DOES_NOT_PACK = {
    "bloom": "its class takes no positions (name = 'bloom' with init_from trains the same model)",
    "opt": "its mask ignores the positions",
}
# Families whose results are bit-identical on all layouts ([run] exact), as benchmarks/exact.py and
# tests/fsdp/test_exact.py prove.
EXACT = ("llama",)
# model_type -> ends of the names of layers whose adapters peft 0.21 cannot load. In these mixtures, peft takes layers
# with such names for stacked experts, whatever they are.
_LIKE_EXPERTS = ("gate", "gate_proj", "up_proj", "down_proj")
NOT_IN_PEFT: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("afmoe", "deepseek_v2", "deepseek_v3", "ernie4_5_moe", "glm4_moe"), _LIKE_EXPERTS),
    **dict.fromkeys(("glm4_moe_lite", "longcat_flash", "qwen3_moe", "qwen3_next", "solar_open"), _LIKE_EXPERTS),
    **dict.fromkeys(("mamba", "mamba2", "falcon_mamba", "falcon_h1", "nemotron_h"), ("out_proj",)),
    "inkling2_text": ("weight_proj",),
}
# Mixtures whose experts can be divided over ranks with different tokens, as tests/interop/hf/tp/test_experts.py proves.
OVER_EP = (
    *("deepseek_v3", "ernie4_5_moe", "flex_olmo", "glm4_moe", "gpt_oss", "granitemoe", "minimax", "mixtral", "olmoe"),
    *("phimoe", "qwen2_moe", "qwen3_moe", "qwen3_next"),
)


@dataclass(frozen=True)
class Attention:
    """Style of an attention module whose projections share one input; see `regions.EnterHeads`.

    Attributes:
        also: names of further keyword arguments that hold hidden states.
        alibi: name of the keyword argument with one bias per head; `divide[0]` then names the attribute that counts the
            heads.
        divide: names of attributes that count heads or features; each count is divided by tp.
        groups: name of the attribute that holds the number of query heads per kv head.
        kv_heads: name of the attribute that holds the number of kv heads.
    """

    also: tuple[str, ...] = ()
    alibi: str | None = None
    divide: tuple[str, ...] = ()
    groups: str | None = None
    kv_heads: str | None = None


@dataclass(frozen=True)
class Packed:
    """Style of a linear layer that fuses equally sized matrices. Each rank gets its own heads from every matrix.

    Attributes:
        parts: number of matrices.
        by_input: whether the matrices are side by side along the input, as in attention's output projection;
            if not, the matrices are side by side along the output.
    """

    parts: int
    by_input: bool = False


StyleSpec: TypeAlias = str | Attention | Packed


@dataclass(frozen=True)
class PipelineEnds:
    """The base model's modules that only the first or only the last pipeline stage holds.

    A family may have ends only if its base model's forward has just these steps: call the modules in `first` on the
    tokens, make masks and rotary tables for the hidden state's length, run the blocks, and call the modules in `last`.
    If the forward changes the hidden state before the blocks in any other way, an attribute must control that change,
    and `later` must give the attribute a value that switches the change off.

    Attributes:
        first: stand-in on later stages for each module that only the first stage holds, keyed by module name. All
            modules that only the first stage holds are children of the module that runs the blocks.
        last: stand-in on earlier stages for each module that only the last stage holds, keyed by module name.
        later: attribute values on later stages for the module that runs the blocks, keyed by attribute name.
    """

    first: dict[str, str]
    last: dict[str, str]
    later: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class FamilyFacts:
    """The facts about one family.

    Attributes:
        stacks: name of the block list in each module that runs blocks, keyed by module name.
        ends: modules that only the first or last pipeline stage holds; None if the family cannot be split into stages.
            A family with ends has exactly one stack.
        styles: style for each module name pattern. A pattern without a match is skipped: a model may lack an optional
            norm, and an encoder-only model has no decoder. A model is refused if a module inside a block matches no
            pattern. A module outside the blocks that matches no pattern is replicated on every rank.
        in_embedding_dtype: names of parameterless modules whose fp32 output is cast to the embeddings' dtype and then
            added to the embeddings.
        heads: config key for the number of heads.
        kv_heads: config key for the number of kv heads; None if each query head has its own kv head.
        head_blocks: number of equal groups into which the stored weights divide the heads; tp must divide the number of
            heads per group.
        fused: row order (BY_HEAD, Q_K_V or GATE_UP) of each weight that fuses several matrices, keyed by layer name.
        sizes: further config keys whose values tp must divide.
        refused: reason for each config key that must not be set, keyed by config key.
    """

    stacks: dict[str, str]
    ends: PipelineEnds | None = None
    styles: dict[str, StyleSpec] = field(default_factory=dict)
    in_embedding_dtype: tuple[str, ...] = ()
    heads: str = "num_attention_heads"
    kv_heads: str | None = None
    head_blocks: int = 1
    fused: dict[str, str] = field(default_factory=dict)
    sizes: tuple[str, ...] = ("intermediate_size",)
    refused: dict[str, str] = field(default_factory=dict)

    @property
    def owner(self) -> str:
        """Name of the module that runs the blocks; only for families with one stack."""
        (owner,) = self.stacks
        return owner


_LLAMA_STYLES: dict[str, StyleSpec] = {
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
_LLAMA = FamilyFacts(
    stacks={"": "layers"},
    ends=PipelineEnds(first={"embed_tokens": NOTHING}, last={"norm": PASS_ON}),
    styles=_LLAMA_STYLES,
    kv_heads="num_key_value_heads",
)
# Families that have Llama's ends, but are sharded over tp by transformers' own plan. These families differ from Llama
# only in settings that the modules themselves hold, so each stage has the settings of its modules. For example, Gemma's
# embedding factor is in embed_tokens. Each layer's window and rotation are set in the layer and in layer_types; a
# stage keeps only the entries of layer_types for its own layers.
_LIKE_LLAMA = replace(_LLAMA, styles={})
_NO_CROSS = {"add_cross_attention": "cross-attention of this family is not cut"}


def _gptj_styles(projections: dict[str, StyleSpec]) -> dict[str, StyleSpec]:
    """Styles of GPT-J and its descendants, in which attention and feed-forward both read the output of one norm."""
    return {
        "wte": VOCAB,
        "h.*.ln_1": NORM,
        "h.*.attn": Attention(divide=("num_attention_heads",)),
        **{f"h.*.attn.{name}": style for name, style in projections.items()},
        "h.*.mlp": FEED_FORWARD,
        "h.*.mlp.fc_in": COLUMN,
        "h.*.mlp.fc_out": ROW,
    }


_GPT2_ENDS = PipelineEnds(first={"wte": NOTHING, "wpe": ZERO}, last={"ln_f": PASS_ON})
_GPTJ = FamilyFacts(
    stacks={"": "h"},
    ends=PipelineEnds(first={"wte": NOTHING}, last={"ln_f": PASS_ON}),
    heads="n_head",
    sizes=("n_inner",),
    styles=_gptj_styles({"q_proj": COLUMN, "k_proj": COLUMN, "v_proj": COLUMN, "out_proj": ROW}),
)


def _t5_styles(stack: str) -> dict[str, StyleSpec]:
    """Styles of T5's encoder or decoder; both stacks have the same structure."""
    styles: dict[str, StyleSpec] = {"embed_tokens": VOCAB}
    for attention, also in (("0.SelfAttention", ()), ("1.EncDecAttention", ("key_value_states",))):
        module = f"block.*.layer.{attention}"
        styles[module] = Attention(divide=("n_heads",), also=also)
        styles |= {f"{module}.{name}": COLUMN for name in ("q", "k", "v")}
        styles[f"{module}.o"] = ROW
        styles[f"{module}.relative_attention_bias"] = HEAD_COLUMNS
    styles |= {f"block.*.layer.{i}.layer_norm": NORM for i in range(3)}
    for i in (1, 2):
        module = f"block.*.layer.{i}.DenseReluDense"
        styles[module] = FEED_FORWARD
        styles |= {f"{module}.{name}": COLUMN for name in ("wi", "wi_0", "wi_1")}
        styles[f"{module}.wo"] = ROW
    return {f"{stack}.{name}": style for name, style in styles.items()}


KNOWN: dict[str, FamilyFacts] = {
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "qwen2": _LLAMA,
    "qwen3": _LLAMA,
    "bloom": FamilyFacts(
        stacks={"": "h"},
        ends=PipelineEnds(
            first={"word_embeddings": NOTHING, "word_embeddings_layernorm": PASS_ON},
            last={"ln_f": PASS_ON},
        ),
        heads="n_head",
        fused={"query_key_value": BY_HEAD},
        sizes=(),
        refused={"slow_but_exact": "it slices whole weights; leave it false"},
        styles={
            "word_embeddings": VOCAB,
            "h.*.input_layernorm": NORM,
            # BloomModel.num_heads is not divided, because the model computes the slopes of all heads. Each rank then
            # takes the slopes of its own heads.
            "h.*.self_attention": Attention(alibi="alibi", divide=("num_heads",)),
            # Rows are [head, (q, k, v), K], so sharding the rows keeps each head's q, k and v on one rank.
            "h.*.self_attention.query_key_value": COLUMN,
            "h.*.self_attention.dense": ROW,
            "h.*.post_attention_layernorm": NORM,
            "h.*.mlp": FEED_FORWARD,
            "h.*.mlp.dense_h_to_4h": COLUMN,
            "h.*.mlp.dense_4h_to_h": ROW,
        },
    ),
    "gpt2": FamilyFacts(
        stacks={"": "h"},
        ends=_GPT2_ENDS,
        heads="n_head",
        fused={"c_attn": Q_K_V},
        sizes=("n_inner",),
        refused=_NO_CROSS,
        styles={
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
    "gpt_neox": FamilyFacts(
        stacks={"": "layers"},
        ends=PipelineEnds(first={"embed_in": NOTHING}, last={"final_layer_norm": PASS_ON}),
        fused={"query_key_value": BY_HEAD},
        styles={
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
    "opt": FamilyFacts(
        stacks={"decoder": "layers"},
        ends=PipelineEnds(
            first={"embed_tokens": NOTHING, "embed_positions": ZERO, "project_in": NOTHING},
            last={"final_layer_norm": NOTHING, "project_out": NOTHING},
        ),
        sizes=("ffn_dim",),
        refused={"layerdrop": "ranks would skip different layers; set it to 0"},
        styles={
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
    "xglm": FamilyFacts(
        stacks={"": "layers"},
        # The embedding itself scales its output; the positions are a fixed table, not a parameter.
        ends=PipelineEnds(first={"embed_tokens": NOTHING, "embed_positions": ZERO}, last={"layer_norm": PASS_ON}),
        in_embedding_dtype=("embed_positions",),
        heads="attention_heads",
        sizes=("ffn_dim",),
        refused={**_NO_CROSS, "layerdrop": "ranks would skip different layers; set it to 0"},
        styles={
            "embed_tokens": VOCAB,
            "layers.*.self_attn_layer_norm": NORM,
            "layers.*.self_attn": Attention(divide=("num_heads", "embed_dim")),
            "layers.*.self_attn.q_proj": COLUMN,
            "layers.*.self_attn.k_proj": COLUMN,
            "layers.*.self_attn.v_proj": COLUMN,
            "layers.*.self_attn.out_proj": ROW,
            "layers.*.final_layer_norm": NORM,
            "layers.*.fc1": ENTERING_COLUMN,
            "layers.*.fc2": ROW,
        },
    ),
    "gptj": _GPTJ,
    # CodeGen was trained on four TPU cores, and the weights still have that layout: 4 blocks, each with [q | v | k] for
    # a quarter of the heads.
    "codegen": replace(
        _GPTJ,
        head_blocks=4,
        fused={"qkv_proj": Q_K_V},
        styles=_gptj_styles({"qkv_proj": Packed(4 * 3), "out_proj": Packed(4, by_input=True)}),
    ),
    "gpt_bigcode": FamilyFacts(
        stacks={"": "h"},
        ends=_GPT2_ENDS,
        heads="n_head",
        kv_heads="num_key_value_heads",
        fused={"c_attn": BY_HEAD},
        sizes=("n_inner",),
        refused=_NO_CROSS,
        styles={
            "wte": VOCAB,
            "h.*.ln_1": NORM,
            "h.*.attn": Attention(divide=("num_heads", "embed_dim"), groups="num_key_value_groups"),
            "h.*.attn.c_attn": QUERIES_AND_KEYS,
            "h.*.attn.c_proj": ROW,
            "h.*.ln_2": NORM,
            "h.*.mlp": FEED_FORWARD,
            "h.*.mlp.c_fc": COLUMN,
            "h.*.mlp.c_proj": ROW,
        },
    ),
    "mpt": FamilyFacts(
        stacks={"": "blocks"},
        ends=PipelineEnds(first={"wte": NOTHING}, last={"norm_f": PASS_ON}),
        heads="n_heads",
        fused={"Wqkv": Q_K_V},
        sizes=(),
        styles={
            "wte": VOCAB,
            "blocks.*.norm_1": NORM,
            "blocks.*.attn": Attention(alibi="position_bias", divide=("n_heads",)),
            "blocks.*.attn.Wqkv": Packed(3),
            "blocks.*.attn.out_proj": ROW,
            "blocks.*.norm_2": NORM,
            "blocks.*.ffn": FEED_FORWARD,
            "blocks.*.ffn.up_proj": COLUMN,
            "blocks.*.ffn.down_proj": ROW,
        },
    ),
    "stablelm": replace(
        _LLAMA,
        styles={
            **_LLAMA_STYLES,
            "layers.*.self_attn": Attention(
                divide=("num_heads",), groups="num_key_value_groups", kv_heads="num_key_value_heads"
            ),
            "layers.*.self_attn.q_layernorm": EACH_HEADS_NORM,
            "layers.*.self_attn.q_layernorm.norms.*": WHOLE,
            "layers.*.self_attn.k_layernorm": EACH_HEADS_NORM,
            "layers.*.self_attn.k_layernorm.norms.*": WHOLE,
        },
    ),
    "bert": FamilyFacts(
        stacks={"": "encoder.layer"},
        refused={**_NO_CROSS, "chunk_size_feed_forward": "its chunks are of the whole sequence; set it to 0"},
        styles={
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
    "t5": FamilyFacts(
        stacks={"encoder": "block", "decoder": "block"},
        heads="num_heads",
        sizes=("d_ff",),
        styles={"shared": VOCAB, **_t5_styles("encoder"), **_t5_styles("decoder")},
    ),
    **dict.fromkeys(("gemma", "gemma2", "gemma3_text", "olmo", "olmo2", "olmo3"), _LIKE_LLAMA),
    **dict.fromkeys(("cohere", "cohere2", "smollm3"), _LIKE_LLAMA),
    **dict.fromkeys(("glm", "glm4"), replace(_LIKE_LLAMA, fused={"gate_up_proj": GATE_UP})),
    "phi3": replace(_LIKE_LLAMA, fused={"qkv_proj": Q_K_V, "gate_up_proj": GATE_UP}),
    **dict.fromkeys(("arcee", "ernie4_5", "exaone4", "starcoder2"), _LIKE_LLAMA),
    **dict.fromkeys(("mixtral", "olmoe", "qwen3_moe", "deepseek_v3"), _LIKE_LLAMA),
    "phi": replace(_LIKE_LLAMA, ends=PipelineEnds(first={"embed_tokens": NOTHING}, last={"final_layernorm": PASS_ON})),
    # Granite's base model multiplies its input by a factor, even if the input is the previous stage's hidden state. So
    # the factor is 1 on later stages.
    "granite": replace(
        _LIKE_LLAMA,
        ends=PipelineEnds(first={"embed_tokens": NOTHING}, last={"norm": PASS_ON}, later={"embedding_multiplier": 1.0}),
    ),
}
