"""Megatron-LM's names of a model's tensors, one table for each family: what `formats["megatron"]` of a record is.

The names are those of a *whole* model: shards of tensor parallelism joined, layers numbered over all stages, heads of
a fused QKV outermost ([H, (q, k, v), K], as in checkpoint version 3), padding rows of the vocabulary included. Beside
each name stands how tensor parallelism cuts it. Both directions go by these tables, and so do shards: whoever joins or
cuts them asks `cut_dim` and `fused` and knows no family.

A file nests the same names in dicts (`{"language_model": {"encoder": {"layers.0. ..."}}}`) and numbers layers by stage;
`flat_name` brings a path in it, older ones included, to the name here. Source: Megatron-LM of 2022-02.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, Literal, NamedTuple

from dtmega import config
from dtmega.formats.format import Format, Key
from dtmega.formats.rules import Rule

# How tensor parallelism cuts a module: its outputs, weight and bias; its inputs, with whole copies of the bias; rows of
# the vocabulary; or nothing, and each rank has a copy.
Cut = Literal["column", "row", "vocabulary", "copies"]


class Row(NamedTuple):
    """One name of a table, a rule and what there is to know of shards.

    Attributes:
        ours, theirs, form: as of a `Rule`.
        parts: how many tensors stand side by side in each head of theirs.
    """

    ours: str | tuple[str, ...]
    theirs: str
    cut: Cut = "copies"
    form: str = "same"
    parts: int = 1

    @property
    def rule(self) -> Rule:
        return Rule(self.ours, self.theirs, self.form)


def _block(ours: str, theirs: str) -> tuple[Row, ...]:
    """Rows of a layer of a family whose own QKV is by head, too."""
    return (
        Row(f"{ours}.attn_norm.", f"{theirs}.input_layernorm."),
        Row(f"{ours}.attn.qkv.", f"{theirs}.self_attention.query_key_value.", "column", parts=3),
        Row(f"{ours}.attn.out.", f"{theirs}.self_attention.dense.", "row"),
        Row(f"{ours}.mlp_norm.", f"{theirs}.post_attention_layernorm."),
        *_feed_forward(ours, theirs),
    )


def _feed_forward(ours: str, theirs: str) -> tuple[Row, ...]:
    return (
        Row(f"{ours}.mlp.up.", f"{theirs}.mlp.dense_h_to_4h.", "column"),
        Row(f"{ours}.mlp.down.", f"{theirs}.mlp.dense_4h_to_h.", "row"),
    )


def _block_of_t5(stack: str) -> tuple[Row, ...]:
    """Rows of a layer of one of T5's stacks, whose queries, keys and values are apart here."""
    ours = f"{stack}.{{}}"
    theirs = f"{stack}.layers.{{}}"
    apart = tuple(f"{ours}.attn.{name}." for name in "qkv")
    across = tuple(f"{ours}.cross.{name}." for name in "kv")
    # The norm after attention stands before what comes next: in a decoder attention to the encoder's output.
    between = (Row(f"{ours}.mlp_norm.", f"{theirs}.post_attention_layernorm."),)
    if stack == "decoder":
        between = (
            Row(f"{ours}.cross_norm.", f"{theirs}.post_attention_layernorm."),
            Row(f"{ours}.cross.q.", f"{theirs}.inter_attention.query.", "column"),
            Row(across, f"{theirs}.inter_attention.key_value.", "column", "heads", parts=2),
            Row(f"{ours}.cross.out.", f"{theirs}.inter_attention.dense.", "row"),
            Row(f"{ours}.mlp_norm.", f"{theirs}.post_inter_attention_layernorm."),
        )
    return (
        Row(f"{ours}.attn_norm.", f"{theirs}.input_layernorm."),
        Row(apart, f"{theirs}.self_attention.query_key_value.", "column", "heads", parts=3),
        Row(f"{ours}.attn.out.", f"{theirs}.self_attention.dense.", "row"),
        *between,
        *_feed_forward(ours, theirs),
        Row(f"{stack}_norm.", f"{stack}.final_layernorm."),
    )


WORDS = Row("embed.", "embedding.word_embeddings.", "vocabulary")
POSITIONS = Row("positions.", "embedding.position_embeddings.")
FINAL_NORM = Row("norm.", "encoder.final_layernorm.")
# The embedding once more, which the last of several stages has for its logits.
COPY_FOR_HEAD = "word_embeddings_for_head."
TIED_HEAD = Row("head.", COPY_FOR_HEAD, "vocabulary")
OWN_HEAD = Row("head.", "output_layer.", "vocabulary")

GPT_ROWS = (WORDS, POSITIONS, *_block("layers.{}", "encoder.layers.{}"), FINAL_NORM)
BERT_ROWS = (
    *(WORDS, POSITIONS, Row("types.", "embedding.tokentype_embeddings.")),
    *_block("layers.{}", "encoder.layers.{}"),
    FINAL_NORM,
    Row("head.dense.", "lm_head.dense."),
    Row("head.norm.", "lm_head.layernorm."),
    Row("head.output.weight", f"{COPY_FOR_HEAD}weight", "vocabulary"),
    Row("head.output.bias", "lm_head.bias", "vocabulary"),
    Row("order.pooler.", "pooler.dense."),
    Row("order.classifier.", "binary_head."),
)
# The stage where the decoder begins has copies of both embeddings. In its file they stand under `embedding`, as on the
# first stage; here they have a name of their own.
T5_ROWS = (
    *(WORDS, POSITIONS, *_block_of_t5("encoder")),
    Row("decoder_embed.", "decoder_embedding.word_embeddings.", "vocabulary"),
    Row("decoder_positions.", "decoder_embedding.position_embeddings."),
    *_block_of_t5("decoder"),
    Row("head.weight", f"{COPY_FOR_HEAD}weight", "vocabulary"),
    Row("head.bias", "lm_head.bias", "vocabulary"),
)
BLOOM_ROWS = (
    *(WORDS, Row("embed_norm.", "embedding.word_embeddings.norm.")),
    *_block("layers.{}", "encoder.layers.{}"),
    *(FINAL_NORM, TIED_HEAD),
)
_ALL_ROWS = (*GPT_ROWS, OWN_HEAD, *BERT_ROWS, *T5_ROWS, *BLOOM_ROWS)


# ----------------------------------------------------------------------------------------------------------- shards


def cut_dim(name: str) -> int | None:
    """The dim of a tensor that tensor parallelism cuts; None: each rank has all of it.

    Raises:
        ValueError: no family has a tensor of that name.
    """
    row = _row(name)
    if row.cut == "row":
        return 1 if name.endswith("weight") else None
    return None if row.cut == "copies" else 0


def fused(name: str) -> int:
    """How many of q, k and v stand side by side in each head of a tensor; 1: it is not of that kind.

    Of these the files of versions below 2 have rows in another order, in each shard.

    Raises:
        ValueError: no family has a tensor of that name.
    """
    return _row(name).parts


def by_token(name: str) -> bool:
    """Is there a row of the tensor for each token of the vocabulary, and rows of padding behind them?

    Raises:
        ValueError: no family has a tensor of that name.
    """
    return _row(name).cut == "vocabulary"


def _row(name: str) -> Row:
    row = _ROWS.get(pattern_of(name))
    if row is None:
        raise ValueError(f"{name!a:.200} is no name of a tensor of Megatron's GPT, BERT, T5 or BLOOM")
    return row


def pattern_of(name: str) -> str:
    """The name with `{}` for the number of its layer."""
    return re.sub(r"\.layers\.\d+\.", ".layers.{}.", name)


def _tensors(rows: Iterable[Row]) -> dict[str, Row]:
    """Name of each tensor with `{}` for the number of a layer -> its row."""
    found = {}
    for row in rows:
        for end in ("weight", "bias") if row.theirs.endswith(".") else ("",):
            found[row.theirs + end] = row
    return found


_ROWS = _tensors(_ALL_ROWS)


# -------------------------------------------------------------------------------------------------- names in a file


_OLDER = (
    (re.compile(r"^language_model\."), ""),
    # Up to tag v2.0, of January 2021.
    (re.compile(r"^transformer\."), "encoder."),
    (re.compile(r"(\.layers\.\d+)\.attention\."), r"\1.self_attention."),
    # Older still.
    (re.compile(r"^(word|position|tokentype)_embeddings\."), r"embedding.\1_embeddings."),
)


def flat_name(path: str) -> str:
    """The name here of a tensor in a file, given by its keys there joined with dots; its layer's number stays.

    language_model.transformer.layers.0.attention.dense.weight -> encoder.layers.0.self_attention.dense.weight
    """
    for pattern, today in _OLDER:
        path = pattern.sub(today, path)
    return path


def layer_file_prefix(number: int, n_layers: int) -> str | None:
    """What to put before the names in `layer_NUMBER-model_*` of Megatron-DeepSpeed; None: there is no such file.

    The embedding is 1, layers are from 3 on, the last LayerNorm is 4 behind them; between them stand functions, and
    after it the tied head, which has no file.
    """
    if number == 1:
        return "embedding."
    if 3 <= number < 3 + n_layers:
        return f"encoder.layers.{number - 3}."
    return "encoder.final_layernorm." if number == n_layers + 4 else None


# ---------------------------------------------------------------------------------------------------- args -> [model]


# Arguments of later versions, and of forks, that make another model; a file without one has this value.
PLAIN: Mapping[str, Any] = {
    **{"add_bias_linear": True, "normalization": "LayerNorm", "group_query_attention": False},
    **{"swiglu": False, "squared_relu": False, "glu_activation": None, "apply_layernorm_1p": False},
    **{"qk_layernorm": False, "multi_latent_attention": False, "use_rotary_position_embeddings": False},
}
POST_LAYERNORM = "apply_residual_connection_post_layernorm"
SIZES = (
    Key("vocab_size", ("padded_vocab_size",)),
    Key("hidden_size", ("hidden_size",)),
    Key("n_layers", ("num_layers",)),
    Key("n_heads", ("num_attention_heads",)),
    Key("ffn_hidden_size", ("ffn_hidden_size",), 0, resolved="ffn"),  # 4 D before version 3
)
RATES = (
    Key("hidden_dropout", ("hidden_dropout",), 0.1, free=True),
    Key("attention_dropout", ("attention_dropout",), 0.1, free=True),
    Key("init_std", ("init_method_std",), 0.02, free=True),
)
LENGTH = Key("max_position_embeddings", ("max_position_embeddings",))
EPS = ("norm_epsilon", "layernorm_epsilon")
FP32_RESIDUAL = Key("fp32_residual", ("fp32_residual_connection",), False, free=True)
# The names of BigScience's enum, and the word of Megatron-LM of 2023 and later.
ABSOLUTE = (None, "absolute", "learned_absolute")
ALIBI = ("alibi",)
WORDPIECE = "BertWordPieceLowerCase"


def feed_forward_gelu(args: Mapping[str, Any]) -> Literal["erf", "tanh"]:
    """The form of GELU in the feed-forward: of the fused kernel tanh. Files of before October 2020 know no fusion."""
    return "tanh" if args.get("bias_gelu_fusion") or args.get("openai_gelu") else "erf"


def head_gelu(args: Mapping[str, Any]) -> Literal["erf", "tanh"]:
    """The form of GELU in BERT's head for words, which no kernel fuses."""
    return "tanh" if args.get("openai_gelu") else "erf"


def _gelu_args(feed_forward: str, head: str = "") -> dict[str, Any]:
    """The arguments that give these two forms; `head`: of a model without such a head the same as `feed_forward`."""
    openai = head == "tanh"
    return {"bias_gelu_fusion": feed_forward == "tanh" and not openai, "openai_gelu": openai, "onnx_safe": None}


def _scaling(args: Mapping[str, Any]) -> dict[str, Any]:
    """On by default in theirs, where it changes products of float16 alone."""
    return {"query_key_layer_scaling": bool(args.get("fp16") and args.get("apply_query_key_layer_scaling"))}


def _refuse_other_positions(args: Mapping[str, Any], known: tuple[Any, ...]) -> None:
    said = args.get("position_embedding_type")
    if said not in known:
        raise ValueError(
            f"the arguments in the file have position_embedding_type={said!r:.80}, expected one of "
            f"{', '.join(map(repr, known))} ([model] name)"
        )


def _refuse_head_width(args: Mapping[str, Any]) -> None:
    """Raises:
    ValueError: heads that do not make up D.
    """
    width = args.get("kv_channels")
    if width is not None and width * args["num_attention_heads"] != args["hidden_size"]:
        raise ValueError(
            f"the arguments in the file have kv_channels={width!r:.80} of {args['num_attention_heads']} heads, "
            f"expected hidden_size / num_attention_heads, {args['hidden_size']} / {args['num_attention_heads']}"
        )


def _refuse_erf(args: Mapping[str, Any]) -> None:
    if feed_forward_gelu(args) == "erf":
        raise ValueError(
            "the arguments in the file ask for the GELU with erf (no bias_gelu_fusion, no openai_gelu), and this "
            "family has its approximation by tanh; the two differ by up to 5e-4 in each activation ([model] name)"
        )


def _decoder(args: Mapping[str, Any]) -> dict[str, Any]:
    """What GPT and BLOOM have in common."""
    _refuse_head_width(args)
    _refuse_erf(args)
    return _scaling(args)


def _gpt(args: Mapping[str, Any]) -> dict[str, Any]:
    _refuse_other_positions(args, ABSOLUTE)
    return {**_decoder(args), "tied": not args.get("untie_embeddings_and_output_weights")}


def _bloom(args: Mapping[str, Any]) -> dict[str, Any]:
    _refuse_other_positions(args, ALIBI)
    return _decoder(args)


def _bert(args: Mapping[str, Any]) -> dict[str, Any]:
    _refuse_other_positions(args, ABSOLUTE)
    _refuse_head_width(args)
    return {**_scaling(args), "gelu": feed_forward_gelu(args), "head_gelu": head_gelu(args)}


def _t5(args: Mapping[str, Any]) -> dict[str, Any]:
    _refuse_other_positions(args, ABSOLUTE)
    return {"activation": f"gelu_{feed_forward_gelu(args)}", "inner_dropout": 0.0}


def _args_of_bloom(model: config.Model) -> dict[str, Any]:
    said = {"position_embedding_type": "alibi", "tokenizer_type": "PretrainedFromHF"}
    return {**_args(model), **_gelu_args("tanh"), **said}


def _args_of_gpt(model: config.Model) -> dict[str, Any]:
    assert isinstance(model, config.GPT)
    return {
        **_args(model),
        **_gelu_args("tanh"),
        "untie_embeddings_and_output_weights": not model.tied,
        "tokenizer_type": "GPT2BPETokenizer",
    }


def _args_of_bert(model: config.Model) -> dict[str, Any]:
    assert isinstance(model, config.Bert)
    return {
        **_args(model),
        **_gelu_args(model.gelu, model.head_gelu),
        "bert_binary_head": True,
        "tokenizer_type": WORDPIECE,
    }


def _args_of_t5(model: config.Model) -> dict[str, Any]:
    assert isinstance(model, config.T5)
    return {**_args(model), **_gelu_args(model.activation.removeprefix("gelu_")), "tokenizer_type": WORDPIECE}


def _args(model: config.Model) -> dict[str, Any]:
    """Arguments that are no key of [model], or have another value than the key."""
    assert isinstance(model, (config.DroppingModel, config.T5))
    scaling = getattr(model, "query_key_layer_scaling", False)
    return {
        "padded_vocab_size": model.padded_vocab_size,
        "kv_channels": model.head_dim,
        "apply_query_key_layer_scaling": scaling,
        "attention_softmax_in_fp32": scaling,
    }


def _refuse_gated(model: config.Model) -> None:
    """Raises:
    ValueError: each rank of theirs has its values before its gates, so the order of rows depends on the layout.
    """
    assert isinstance(model, config.DroppingModel)
    if model.glu != "none":
        raise ValueError(
            f"Megatron orders the rows of a gated feed-forward by its ranks, which is not read or written here: "
            f"expected glu='none', got '{model.glu}' ([model] glu)"
        )


def _refuse_bert(model: config.Model) -> None:
    _refuse_gated(model)
    assert isinstance(model, config.Bert)
    if (model.gelu, model.head_gelu) == ("erf", "tanh"):
        raise ValueError(
            "Megatron's BERT has the GELU with erf in the feed-forward only if its head has it, too: expected "
            "head_gelu='erf', got 'tanh' ([model] head_gelu, [model] gelu)"
        )


def _rules(rows: Iterable[Row]) -> tuple[Rule, ...]:
    return tuple(row.rule for row in rows)


def _head_of_gpt(model: config.Model) -> tuple[Rule, ...]:
    assert isinstance(model, config.GPT)
    return (TIED_HEAD.rule if model.tied else OWN_HEAD.rule,)


GPT = Format(
    rules=_rules(GPT_ROWS),
    rules_of=_head_of_gpt,
    fixed={**PLAIN, POST_LAYERNORM: False},
    keys=(*SIZES, LENGTH, Key("layer_norm_eps", EPS, 1e-5), FP32_RESIDUAL, *RATES),
    refuse=_refuse_gated,
    to_section=_gpt,
    from_section=_args_of_gpt,
)
BERT = Format(
    rules=_rules(BERT_ROWS),
    implied={"norm": "pre"},
    fixed={**PLAIN, "bert_binary_head": True},
    keys=(
        *(*SIZES, LENGTH, Key("layer_norm_eps", EPS, 1e-5), FP32_RESIDUAL, *RATES),
        Key(POST_LAYERNORM, (POST_LAYERNORM,), False),
    ),
    refuse=_refuse_bert,
    to_section=_bert,
    from_section=_args_of_bert,
)
# Megatron's own, which shares a name with transformers' and little else.
T5 = Format(
    rules=_rules(T5_ROWS),
    implied={
        **{"positions": "learned", "norm": "layer", "bias": True, "gated": False, "tied": True},
        **{"scale_head": False, "scale_scores": True, "init": "normal"},
    },
    fixed={**PLAIN, POST_LAYERNORM: False},
    keys=(
        *(*SIZES, LENGTH, Key("norm_eps", EPS, 1e-5), *RATES),
        Key("n_decoder_layers", ("decoder_num_layers",), 0, resolved="decoder_layers"),
        Key("kv_channels", ("kv_channels",), 0, resolved="head_dim"),
    ),
    to_section=_t5,
    from_section=_args_of_t5,
)
# BigScience's Megatron-DeepSpeed, trained by ALiBi and with a LayerNorm after the embedding.
BLOOM = Format(
    rules=_rules(BLOOM_ROWS),
    fixed={**PLAIN, "embed_layernorm": True},
    keys=(
        *(*SIZES, Key("layer_norm_eps", EPS, 1e-5), FP32_RESIDUAL, *RATES),
        Key(POST_LAYERNORM, (POST_LAYERNORM,), False),
    ),
    refuse=_refuse_gated,
    to_section=_bloom,
    from_section=_args_of_bloom,
)
