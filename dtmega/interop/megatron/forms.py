"""Megatron's `Format` for each model family: tensor names, and how a run's arguments map to [model] keys.

The records in interop/formats/ list these formats as "megatron". Arguments are plain values; an enum member is given as
its name. Older versions and forks lack some of the arguments, so each argument has a default here. Source:
`megatron/arguments.py` in Megatron-LM's versions from 2019 to 2022, and in BigScience's Megatron-DeepSpeed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal

from dtmega import config
from dtmega.config.families.bert import BertKeys
from dtmega.config.families.gpt import GPTKeys
from dtmega.config.families.t5 import T5Keys
from dtmega.interop.formats.format import Format, Key
from dtmega.interop.formats.rules import Rule
from dtmega.interop.megatron.names import BERT_ROWS, BLOOM_ROWS, GPT_ROWS, OWN_HEAD, T5_ROWS, TIED_HEAD, TableRow

# Arguments of later versions and forks that change the model. Only the values below are supported. If a file lacks an
# argument, the version or fork that wrote the file has no such argument, and all models of that version or fork have
# the value below.
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
    Key("ffn_hidden_size", ("ffn_hidden_size",), 0, resolved="ffn"),  # always 4 D before version 3
)
INIT_STD = Key("init_std", ("init_method_std",), 0.02, free=True)
RATES = (
    Key("hidden_dropout", ("hidden_dropout",), 0.1, free=True),
    Key("attention_dropout", ("attention_dropout",), 0.1, free=True),
    INIT_STD,
)
LENGTH = Key("max_position_embeddings", ("max_position_embeddings",))
EPS = ("norm_epsilon", "layernorm_epsilon")
FP32_RESIDUAL = Key("fp32_residual", ("fp32_residual_connection",), False, free=True)
# Values of position_embedding_type: member names of BigScience's enum, and Megatron-LM's string since 2023.
ABSOLUTE = (None, "absolute", "learned_absolute")
ALIBI = ("alibi",)
WORDPIECE = "BertWordPieceLowerCase"


def feed_forward_gelu(args: Mapping[str, Any]) -> Literal["erf", "tanh"]:
    """The GELU variant in the feed-forward. The fused kernel computes the tanh variant.

    Files from before October 2020 have no argument for the fusion, because the fusion did not exist yet.
    """
    return "tanh" if args.get("bias_gelu_fusion") or args.get("openai_gelu") else "erf"


def head_gelu(args: Mapping[str, Any]) -> Literal["erf", "tanh"]:
    """The GELU variant in BERT's language-model head, which is never fused."""
    return "tanh" if args.get("openai_gelu") else "erf"


def _gelu_args(feed_forward: str, head: str = "") -> dict[str, Any]:
    """Megatron's arguments that select the given GELU variants.

    Args:
        feed_forward: variant in the feed-forward, "erf" or "tanh".
        head: variant in BERT's language-model head; '' for a model without this head.
    """
    # openai_gelu selects the tanh variant in the feed-forward and in the head; the fused kernel does so only in the
    # feed-forward.
    openai = head == "tanh"
    return {"bias_gelu_fusion": feed_forward == "tanh" and not openai, "openai_gelu": openai, "onnx_safe": None}


def _scaling(args: Mapping[str, Any]) -> dict[str, Any]:
    """The [model] key for query-key layer scaling. Megatron's default is to scale, but only in float16."""
    return {"query_key_layer_scaling": bool(args.get("fp16") and args.get("apply_query_key_layer_scaling"))}


def _refuse_other_positions(args: Mapping[str, Any], known: tuple[Any, ...]) -> None:
    positions = args.get("position_embedding_type")
    if positions not in known:
        raise ValueError(
            f"the arguments in the file have position_embedding_type={positions!r:.80}, expected one of "
            f"{', '.join(map(repr, known))} ([model] name)"
        )


def _refuse_head_width(args: Mapping[str, Any]) -> None:
    """Refuse heads whose width is not D / H.

    Raises:
        ValueError: the widths of all heads do not add up to D.
    """
    width = args.get("kv_channels")
    if width is not None and width * args["num_attention_heads"] != args["hidden_size"]:
        raise ValueError(
            f"the arguments in the file have kv_channels={width!r:.80} of {args['num_attention_heads']} heads, "
            f"expected hidden_size / num_attention_heads, {args['hidden_size']} / {args['num_attention_heads']}"
        )


def _refuse_erf(args: Mapping[str, Any]) -> None:
    """Refuse the exact GELU, for families that have only the tanh approximation.

    Raises:
        ValueError: the arguments select the erf GELU.
    """
    if feed_forward_gelu(args) == "erf":
        raise ValueError(
            "the arguments in the file ask for the GELU with erf (no bias_gelu_fusion, no openai_gelu), but this "
            "family has only its approximation with tanh; they differ by up to 5e-4 in each activation ([model] name)"
        )


def _decoder(args: Mapping[str, Any]) -> dict[str, Any]:
    """The [model] keys that GPT and BLOOM share."""
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
    return {
        **_args(model),
        **_gelu_args("tanh"),
        "position_embedding_type": "alibi",
        "tokenizer_type": "PretrainedFromHF",
    }


def _args_of_gpt(model: config.Model) -> dict[str, Any]:
    assert isinstance(model, GPTKeys)
    return {
        **_args(model),
        **_gelu_args("tanh"),
        "untie_embeddings_and_output_weights": not model.tied,
        "tokenizer_type": "GPT2BPETokenizer",
    }


def _args_of_bert(model: config.Model) -> dict[str, Any]:
    assert isinstance(model, BertKeys)
    return {
        **_args(model),
        **_gelu_args(model.gelu, model.head_gelu),
        "bert_binary_head": True,
        "tokenizer_type": WORDPIECE,
    }


def _args_of_t5(model: config.Model) -> dict[str, Any]:
    assert isinstance(model, T5Keys)
    return {**_args(model), **_gelu_args(model.activation.removeprefix("gelu_")), "tokenizer_type": WORDPIECE}


def _args(model: config.Model) -> dict[str, Any]:
    """The arguments that all families have in common and that are not plain copies of [model] keys."""
    assert isinstance(model, (config.DropoutModel, T5Keys))
    scaling = getattr(model, "query_key_layer_scaling", False)
    return {
        "padded_vocab_size": model.padded_vocab_size,
        "kv_channels": model.head_dim,
        "apply_query_key_layer_scaling": scaling,
        "attention_softmax_in_fp32": scaling,
    }


def _refuse_gated(model: config.Model) -> None:
    """Refuse a gated feed-forward.

    In Megatron, each rank stores its own value rows before its own gate rows, so the row order depends on the layout.

    Raises:
        ValueError: the model has a gated feed-forward.
    """
    assert isinstance(model, config.DropoutModel)
    if model.glu != "none":
        raise ValueError(
            f"Megatron orders the rows of a gated feed-forward by its ranks, which is not read or written here: "
            f"expected glu='none', got '{model.glu}' ([model] glu)"
        )


def _refuse_bert(model: config.Model) -> None:
    """Refuse a BERT that Megatron's arguments cannot express.

    Raises:
        ValueError: the model has a gated feed-forward, or GELU variants that Megatron cannot combine.
    """
    _refuse_gated(model)
    assert isinstance(model, BertKeys)
    if (model.gelu, model.head_gelu) == ("erf", "tanh"):
        raise ValueError(
            "Megatron's BERT has the GELU with erf in the feed-forward only if its head has it too: expected "
            "head_gelu='erf', got 'tanh' ([model] head_gelu, [model] gelu)"
        )


def _rules(rows: Iterable[TableRow]) -> tuple[Rule, ...]:
    return tuple(row.rule for row in rows)


def _head_of_gpt(model: config.Model) -> tuple[Rule, ...]:
    assert isinstance(model, GPTKeys)
    return (TIED_HEAD.rule if model.tied else OWN_HEAD.rule,)


GPT_FORM = Format(
    rules=_rules(GPT_ROWS),
    rules_of=_head_of_gpt,
    fixed={**PLAIN, POST_LAYERNORM: False},
    keys=(*SIZES, LENGTH, Key("layer_norm_eps", EPS, 1e-5), FP32_RESIDUAL, *RATES),
    refuse=_refuse_gated,
    to_section=_gpt,
    from_section=_args_of_gpt,
)
BERT_FORM = Format(
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
# Megatron's own T5, which has little in common with transformers' T5 except the name.
T5_FORM = Format(
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
# BLOOM in BigScience's Megatron-DeepSpeed, with ALiBi and a LayerNorm after the embedding.
BLOOM_FORM = Format(
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
