"""The families of transformers that are known, as data: a row each, with all that is known of it.

A row says where the blocks stand, what a pipeline must know of the two ends, how tensor parallelism cuts each module,
and which keys of config.json it has to look at. Names are those of `transformers` 5.x, relative to the base model
(`model.base_model_prefix`); `*` is the number of a block. `model.py` acts on the ends, `tp/plan.py` on the words.

A family without `words` is cut as the plan says that transformers brings (`tp/native.py`), and a family that has no row
at all too, but in no pipeline.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TypeAlias

# Words of tensor parallelism: how a module is cut.
VOCAB, COLUMN, ENTERING_COLUMN, KV_COLUMN, ROW = "vocab", "column", "entering column", "kv column", "row"
CONV_COLUMN, CONV_ROW, CONV_PACKED, HEAD_COLUMNS = "conv column", "conv row", "packed conv column", "head columns"
QUERIES_AND_KEYS = "queries and keys"  # in one linear: an equal share for each head, or one head of keys for all
NORM, HEAD_NORM, FEED_FORWARD = "norm", "norm of heads", "feed-forward"
EACH_HEADS_NORM, WHOLE = "a norm for each head", "whole"

# Words of a pipeline: what stands in the place of a module on a stage that does not have it.
NOTHING = "nothing"  # nobody calls it there
PASS_ON = "pass on"  # a module that gives what it is given
ZERO = "zero"  # a module that gives 0: learned positions, which the first stage has added already

# Keys of config.json that say one thing, each as some families call it.
LAYER_KEYS = ("num_hidden_layers", "num_layers", "num_decoder_layers", "n_layer", "n_layers")
HEAD_KEYS = ("num_attention_heads", "num_heads", "n_head", "n_heads")
HIDDEN_KEYS = ("hidden_size", "d_model", "n_embd")
FEED_FORWARD_KEYS = ("intermediate_size", "ffn_dim", "d_ff", "n_inner")
POSITION_KEYS = ("max_position_embeddings", "max_seq_len")
EXPERT_KEYS = ("num_local_experts", "num_experts", "n_routed_experts")

# Causal whatever `is_decoder` says, which their config.json has too.
ALWAYS_CAUSAL = ("gpt_neox", "gpt_neox_japanese")


@dataclass(frozen=True)
class Attention:
    """The module whose input all projections share; see `regions.EnterHeads` for the rest."""

    also: tuple[str, ...] = ()
    alibi: str | None = (
        None  # keyword argument with a bias for each head, of which the first of `divide` counts those here
    )
    divide: tuple[str, ...] = ()
    groups: str | None = None  # attribute with query heads per key head
    kv_heads: str | None = None  # attribute with the number of key heads


@dataclass(frozen=True)
class Packed:
    """A linear that is `parts` matrices of the same size, of each of which a rank has its heads.

    Attributes:
        by_input: they stand side by side along the input (of what leaves the heads), not along the output.
    """

    parts: int
    by_input: bool = False


Word: TypeAlias = str | Attention | Packed


@dataclass(frozen=True)
class PipelineEnds:
    """The parts of a base model that not every stage of a pipeline has.

    They are right for a family if its base model's forward does nothing but this: it calls what `first` names on the
    tokens, makes masks and rotary tables of the hidden state's length, runs the list of blocks, and calls what `last`
    names. Whatever else it does to the hidden state before the blocks is an attribute that `later` switches off.

    Attributes:
        first: children of the module that runs the blocks, which only the first stage has -> word for the others.
        last: likewise of the last stage.
        later: attributes of that module -> their values on every stage but the first.
    """

    first: dict[str, str]
    last: dict[str, str]
    later: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Known:
    """All that is known of a family.

    Attributes:
        stacks: module that runs blocks -> name of their list in it.
        ends: what a pipeline needs to know; None: the family is not cut into stages. With it there is one stack.
        words: module -> how tp cuts it. A line that matches nothing in a model (a norm that it has not, the decoder of
            an encoder) is left out; a module of a block that no line names is refused. Modules outside of the blocks
            that no line names are computed whole on every rank.
        heads, kv_heads: keys of the config.
        as_embedded: modules without parameters whose fp32 output is added to the embeddings, in their dtype.
        head_blocks: number of blocks that heads are stored in, each of which tp shares.
        sizes: keys of the config that tp must divide, besides heads.
        refused: key of the config -> why a truthy value cannot be.
    """

    stacks: dict[str, str]
    ends: PipelineEnds | None = None
    words: dict[str, Word] = field(default_factory=dict)
    as_embedded: tuple[str, ...] = ()
    heads: str = "num_attention_heads"
    kv_heads: str | None = None
    head_blocks: int = 1
    sizes: tuple[str, ...] = ("intermediate_size",)
    refused: dict[str, str] = field(default_factory=dict)

    @property
    def owner(self) -> str:
        """The module that runs the blocks, of a family with one stack."""
        (owner,) = self.stacks
        return owner


_WORDS_OF_LLAMA: dict[str, Word] = {
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
_LLAMA = Known(
    stacks={"": "layers"},
    ends=PipelineEnds(first={"embed_tokens": NOTHING}, last={"norm": PASS_ON}),
    words=_WORDS_OF_LLAMA,
    kv_heads="num_key_value_heads",
)
# Its ends, and cut over tp by transformers' own plan. The factor of Gemma's embeddings is in embed_tokens; which layers
# see a window, or have no rotation, in the layers and in layer_types, of which a stage keeps its own.
_LIKE_LLAMA = replace(_LLAMA, words={})
_NO_CROSS = {"add_cross_attention": "cross-attention of this family is not cut"}


def _like_gptj(projections: dict[str, Word]) -> dict[str, Word]:
    """The words of GPT-J and what was made of it: attention and feed-forward read one norm, side by side."""
    return {
        "wte": VOCAB,
        "h.*.ln_1": NORM,
        "h.*.attn": Attention(divide=("num_attention_heads",)),
        **{f"h.*.attn.{name}": word for name, word in projections.items()},
        "h.*.mlp": FEED_FORWARD,
        "h.*.mlp.fc_in": COLUMN,
        "h.*.mlp.fc_out": ROW,
    }


_ENDS_OF_GPT2 = PipelineEnds(first={"wte": NOTHING, "wpe": ZERO}, last={"ln_f": PASS_ON})
_GPTJ = Known(
    stacks={"": "h"},
    ends=PipelineEnds(first={"wte": NOTHING}, last={"ln_f": PASS_ON}),
    heads="n_head",
    sizes=("n_inner",),
    words=_like_gptj({"q_proj": COLUMN, "k_proj": COLUMN, "v_proj": COLUMN, "out_proj": ROW}),
)


def _stack_of_t5(stack: str) -> dict[str, Word]:
    """The words of T5's encoder or decoder, which are built alike."""
    words: dict[str, Word] = {"embed_tokens": VOCAB}
    for attention, also in (("0.SelfAttention", ()), ("1.EncDecAttention", ("key_value_states",))):
        module = f"block.*.layer.{attention}"
        words[module] = Attention(divide=("n_heads",), also=also)
        words |= {f"{module}.{name}": COLUMN for name in ("q", "k", "v")}
        words[f"{module}.o"] = ROW
        words[f"{module}.relative_attention_bias"] = HEAD_COLUMNS
    words |= {f"block.*.layer.{i}.layer_norm": NORM for i in range(3)}
    for i in (1, 2):
        module = f"block.*.layer.{i}.DenseReluDense"
        words[module] = FEED_FORWARD
        words |= {f"{module}.{name}": COLUMN for name in ("wi", "wi_0", "wi_1")}
        words[f"{module}.wo"] = ROW
    return {f"{stack}.{name}": word for name, word in words.items()}


KNOWN: dict[str, Known] = {
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "qwen2": _LLAMA,
    "qwen3": _LLAMA,
    "bloom": Known(
        stacks={"": "h"},
        ends=PipelineEnds(
            first={"word_embeddings": NOTHING, "word_embeddings_layernorm": PASS_ON},
            last={"ln_f": PASS_ON},
        ),
        heads="n_head",
        sizes=(),
        refused={"slow_but_exact": "it slices whole weights; leave it false"},
        words={
            "word_embeddings": VOCAB,
            "h.*.input_layernorm": NORM,
            # BloomModel.num_heads stays: it makes the slopes of all heads, of which a rank takes its own.
            "h.*.self_attention": Attention(alibi="alibi", divide=("num_heads",)),
            "h.*.self_attention.query_key_value": COLUMN,  # rows [head, (q, k, v), K]: a contiguous cut has whole heads
            "h.*.self_attention.dense": ROW,
            "h.*.post_attention_layernorm": NORM,
            "h.*.mlp": FEED_FORWARD,
            "h.*.mlp.dense_h_to_4h": COLUMN,
            "h.*.mlp.dense_4h_to_h": ROW,
        },
    ),
    "gpt2": Known(
        stacks={"": "h"},
        ends=_ENDS_OF_GPT2,
        heads="n_head",
        sizes=("n_inner",),
        refused=_NO_CROSS,
        words={
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
    "gpt_neox": Known(
        stacks={"": "layers"},
        ends=PipelineEnds(first={"embed_in": NOTHING}, last={"final_layer_norm": PASS_ON}),
        words={
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
    "opt": Known(
        stacks={"decoder": "layers"},
        ends=PipelineEnds(
            first={"embed_tokens": NOTHING, "embed_positions": ZERO, "project_in": NOTHING},
            last={"final_layer_norm": NOTHING, "project_out": NOTHING},
        ),
        sizes=("ffn_dim",),
        refused={"layerdrop": "ranks would skip different layers; set it to 0"},
        words={
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
    "xglm": Known(
        stacks={"": "layers"},
        # Its embedding multiplies by itself, and its positions are a table that is no parameter.
        ends=PipelineEnds(first={"embed_tokens": NOTHING, "embed_positions": ZERO}, last={"layer_norm": PASS_ON}),
        as_embedded=("embed_positions",),
        heads="attention_heads",
        sizes=("ffn_dim",),
        refused={**_NO_CROSS, "layerdrop": "ranks would skip different layers; set it to 0"},
        words={
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
    # Trained on four cores, whose shares are still there: heads in 4 blocks, each [q | v | k] of a quarter of them.
    "codegen": replace(
        _GPTJ,
        head_blocks=4,
        words=_like_gptj({"qkv_proj": Packed(4 * 3), "out_proj": Packed(4, by_input=True)}),
    ),
    "gpt_bigcode": Known(
        stacks={"": "h"},
        ends=_ENDS_OF_GPT2,
        heads="n_head",
        kv_heads="num_key_value_heads",
        sizes=("n_inner",),
        refused=_NO_CROSS,
        words={
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
    "mpt": Known(
        stacks={"": "blocks"},
        ends=PipelineEnds(first={"wte": NOTHING}, last={"norm_f": PASS_ON}),
        heads="n_heads",
        sizes=(),
        words={
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
        words={
            **_WORDS_OF_LLAMA,
            "layers.*.self_attn": Attention(
                divide=("num_heads",), groups="num_key_value_groups", kv_heads="num_key_value_heads"
            ),
            "layers.*.self_attn.q_layernorm": EACH_HEADS_NORM,
            "layers.*.self_attn.q_layernorm.norms.*": WHOLE,
            "layers.*.self_attn.k_layernorm": EACH_HEADS_NORM,
            "layers.*.self_attn.k_layernorm.norms.*": WHOLE,
        },
    ),
    "bert": Known(
        stacks={"": "encoder.layer"},
        refused={**_NO_CROSS, "chunk_size_feed_forward": "its chunks are of the whole sequence; set it to 0"},
        words={
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
    "t5": Known(
        stacks={"encoder": "block", "decoder": "block"},
        heads="num_heads",
        sizes=("d_ff",),
        words={"shared": VOCAB, **_stack_of_t5("encoder"), **_stack_of_t5("decoder")},
    ),
    **dict.fromkeys(("gemma", "gemma2", "gemma3_text", "olmo", "olmo2", "olmo3"), _LIKE_LLAMA),
    **dict.fromkeys(("cohere", "cohere2", "glm", "glm4", "phi3", "smollm3"), _LIKE_LLAMA),
    **dict.fromkeys(("arcee", "ernie4_5", "exaone4", "starcoder2"), _LIKE_LLAMA),
    **dict.fromkeys(("mixtral", "olmoe", "qwen3_moe", "deepseek_v3"), _LIKE_LLAMA),
    "phi": replace(_LIKE_LLAMA, ends=PipelineEnds(first={"embed_tokens": NOTHING}, last={"final_layernorm": PASS_ON})),
    # Its base model multiplies whatever comes in, embeddings or a hidden state.
    "granite": replace(
        _LIKE_LLAMA,
        ends=PipelineEnds(first={"embed_tokens": NOTHING}, last={"norm": PASS_ON}, later={"embedding_multiplier": 1.0}),
    ),
}
