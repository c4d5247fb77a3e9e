"""megatron-core's `Format`s for GPT and Llama: tensor names, and how a run's arguments map to [model] keys.

The records in interop/formats/ list these formats as "megatron-core". They use the names of a distributed checkpoint
with one entry per layer; `core.py` splits stacked tensors into such entries, and `write_core.py` stacks the entries.
Row order does not depend on the layout of the run that saved the checkpoint: the QKV is [groups, (the group's q heads,
k, v), K], and in the first matrix of a gated feed-forward, all gate rows precede all value rows. A LayerNorm is named
after the linear layer that follows, even if the two are not fused.

Source: `models/gpt/gpt_layer_specs.py` and `transformer/mlp.py` of megatron-core 0.16.1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from dtmega import config
from dtmega.config.families.gpt import GPTKeys
from dtmega.config.families.llama import LlamaKeys
from dtmega.interop.formats.format import Format, Key
from dtmega.interop.formats.rules import Heads, Rule
from dtmega.interop.megatron.forms import EPS, GPT_FORM, INIT_STD, LENGTH, PLAIN, SIZES

LAYERS = "decoder.layers."
_LAYER = f"{LAYERS}{{}}."
WORDS = "embedding.word_embeddings.weight"
# Tensors with one row per vocabulary token, followed by padding rows.
BY_TOKEN = (WORDS, "output_layer.weight")
# Modules that have an extra state in Transformer Engine; the state is empty except in fp8. A model made of these
# modules (Megatron-LM's default on a GPU) cannot load a checkpoint without the extra states.
STATEFUL_IN_LAYER = (
    *("self_attention.core_attention", "self_attention.linear_proj", "self_attention.linear_qkv"),
    *("mlp.linear_fc1", "mlp.linear_fc2"),
)
NORMS_OF_HEADS = ("self_attention.q_layernorm", "self_attention.k_layernorm")  # extra state here too
STATEFUL_AT_END = "decoder.final_layernorm"

# Arguments that change the model, in addition to those in PLAIN. Only the values listed here are supported.
FURTHER_PLAIN: Mapping[str, Any] = {
    **{"apply_residual_connection_post_layernorm": False, "num_experts": None, "mtp_num_layers": None},
    **{"heterogeneous_layers_config_path": None, "experimental_attention_variant": None, "window_size": None},
    **{"softmax_type": "vanilla", "attention_output_gate": False, "qk_l2_norm": False, "add_qkv_bias": False},
    **{"softmax_scale": None, "quick_geglu": False, "glu_linear_offset": 0.0, "activation_func_clamp_value": None},
    **{"linear_attention_freq": None, "use_mup": False},
}
ROTARY: Mapping[str, Any] = {
    **{"position_embedding_type": "rope", "rotary_percent": 1.0, "rotary_interleaved": False},
    **{"rotary_seq_len_interpolation_factor": None, "no_rope_freq": None},
}
# Arguments in PLAIN and FURTHER_PLAIN that may have other values for a Llama: dtmega reads some of these arguments, and
# `use_rotary_position_embeddings` only repeats `position_embedding_type`.
READ_FOR_LLAMA = ("group_query_attention", "use_rotary_position_embeddings", "qk_layernorm", "window_size")
# megatron-core scales rotary frequencies as Llama 3.1 does, with these values; a flag can set only the factor.
SCALING: Mapping[str, Any] = {
    "rope_low_freq_factor": 1.0,
    "rope_high_freq_factor": 4.0,
    "rope_original_length": 8192,
}
DEFAULT_FACTOR = 8.0  # default of --rope-scaling-factor

ENDS = (
    Rule("embed.", "embedding.word_embeddings."),
    Rule("norm.", "decoder.final_layernorm."),
    # A model with a tied head stores only the embedding.
    Rule("head.", "output_layer."),
)
BLOCK = (
    Rule("layers.{}.attn_norm.weight", f"{_LAYER}self_attention.linear_qkv.layer_norm_weight"),
    Rule("layers.{}.attn.out.", f"{_LAYER}self_attention.linear_proj."),
    Rule("layers.{}.mlp_norm.weight", f"{_LAYER}mlp.linear_fc1.layer_norm_weight"),
    Rule("layers.{}.mlp.down.", f"{_LAYER}mlp.linear_fc2."),
)
GPT_RULES = (
    *(*ENDS, *BLOCK),
    Rule("positions.", "embedding.position_embeddings."),
    Rule("layers.{}.attn_norm.bias", f"{_LAYER}self_attention.linear_qkv.layer_norm_bias"),
    Rule("layers.{}.attn.qkv.", f"{_LAYER}self_attention.linear_qkv."),
    Rule("layers.{}.mlp_norm.bias", f"{_LAYER}mlp.linear_fc1.layer_norm_bias"),
    Rule("layers.{}.mlp.up.", f"{_LAYER}mlp.linear_fc1."),
)
LLAMA_RULES = (
    *(*ENDS, *BLOCK),
    Rule(tuple(f"layers.{{}}.attn.{name}." for name in "qkv"), f"{_LAYER}self_attention.linear_qkv.", "heads"),
    Rule(("layers.{}.mlp.gate.", "layers.{}.mlp.up."), f"{_LAYER}mlp.linear_fc1.", "concat"),
)
QK_NORMS = (
    Rule("layers.{}.attn.q_norm.", f"{_LAYER}{NORMS_OF_HEADS[0]}."),
    Rule("layers.{}.attn.k_norm.", f"{_LAYER}{NORMS_OF_HEADS[1]}."),
)


def _tensors_in_layer() -> frozenset[str]:
    """The names of all tensors in a layer, without the layer prefix."""
    names: set[str] = set()
    for rule in (*GPT_RULES, *LLAMA_RULES, *QK_NORMS):
        assert isinstance(rule.theirs, str)
        if rule.theirs.startswith(_LAYER):
            ends = ("weight", "bias") if rule.theirs.endswith(".") else ("",)
            names |= {rule.theirs.removeprefix(_LAYER) + end for end in ends}
    return frozenset(names)


TENSORS_IN_LAYER = _tensors_in_layer()


def _args_of_gpt(model: config.Model) -> dict[str, Any]:
    assert isinstance(model, GPTKeys)
    return {
        **GPT_FORM.from_section(model),
        **{"position_embedding_type": "learned_absolute", "norm_epsilon": model.layer_norm_eps},
    }


def windows(size: Any, frequency: Any, n_layers: int) -> dict[str, Any]:
    """The [model] keys for attention windows.

    Source: `is_layer_window_attention` in megatron-core's `transformer/utils.py`.

    Args:
        size: value of `window_size`, i.e. the numbers of tokens that a query sees before and after its own token (-1
            means all tokens); None if there is no window. A causal query sees no token after its own.
        frequency: value of `window_attn_skip_freq`, which is None if all layers have the window, a number N if every
            N-th layer lacks the window, or a list with one entry per layer (1 with the window, 0 without it).
        n_layers: number of layers.

    Raises:
        ValueError: `size` or `frequency` has any other value.
    """
    if size is not None and (type(size) not in (tuple, list) or len(size) != 2 or {*map(type, size)} != {int}):
        raise ValueError(f"window_size={size!r:.80}, expected two numbers ([model] window)")
    layers = list(range(n_layers))
    if isinstance(frequency, list) and len(frequency) == n_layers:
        layers = [layer for layer in layers if frequency[layer]]
    elif type(frequency) is int and frequency > 0:
        layers = [layer for layer in layers if (layer + 1) % frequency]
    elif frequency is not None:
        raise ValueError(
            f"window_attn_skip_freq={frequency!r:.80}, expected a number above 0 or a list of {n_layers} numbers "
            f"([model] window_layers)"
        )
    if size is None or size[0] < 0 or not layers:
        return {"window": 0, "window_layers": []}
    return {"window": size[0] + 1, "window_layers": [] if len(layers) == n_layers else layers}


def _llama(args: Mapping[str, Any]) -> dict[str, Any]:
    """The [model] keys that are computed from a Llama's arguments, rather than copied."""
    n_heads = args["num_attention_heads"]
    is_scaled = bool(args.get("use_rope_scaling"))
    scaling = {"rope_factor": args.get("rope_scaling_factor", DEFAULT_FACTOR), **SCALING}
    return {
        "tied": not args.get("untie_embeddings_and_output_weights"),
        "n_kv_heads": args.get("num_query_groups", n_heads) if args.get("group_query_attention") else n_heads,
        "rope_theta": args.get("rotary_base", 10_000),
        **(scaling if is_scaled else {"rope_factor": 1.0}),
        **windows(args.get("window_size"), args.get("window_attn_skip_freq"), args["num_layers"]),
    }


def _args_of_llama(model: config.Model) -> dict[str, Any]:
    assert isinstance(model, LlamaKeys)
    is_whole = model.rope_theta == int(model.rope_theta)
    is_scaled = model.rope_factor != 1
    layers = model.window_layers
    return {
        "untie_embeddings_and_output_weights": not model.tied,
        "group_query_attention": model.kv_heads != model.n_heads,
        "num_query_groups": model.kv_heads,
        "window_size": (model.window - 1, 0) if model.window else None,
        "window_attn_skip_freq": [int(layer in layers) for layer in range(model.n_layers)] if layers else None,
        "rotary_base": int(model.rope_theta) if is_whole else model.rope_theta,  # the flag accepts only a whole number
        "use_rope_scaling": is_scaled,
        "rope_scaling_factor": model.rope_factor if is_scaled else DEFAULT_FACTOR,
        "padded_vocab_size": model.padded_vocab_size,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "apply_query_key_layer_scaling": False,
        "tokenizer_type": "HuggingFaceTokenizer",
    }


def _refuse_scaling(model: config.Model) -> None:
    """Refuse a model if megatron-core's flags cannot express how the model scales its rotary frequencies.

    Raises:
        ValueError: the model scales its frequencies with values that differ from those in SCALING.
    """
    assert isinstance(model, LlamaKeys)
    for key, expected in SCALING.items():
        value = getattr(model, key)
        if model.rope_factor != 1 and value != expected:
            raise ValueError(
                f"megatron-core scales rotary frequencies with {key}={expected}, which no flag changes; got {value} "
                f"([model] {key})"
            )


GPT_CORE = replace(
    GPT_FORM,
    rules=GPT_RULES,
    rules_of=lambda model: (),
    fixed={**GPT_FORM.fixed, **FURTHER_PLAIN},
    from_section=_args_of_gpt,
)
LLAMA_CORE = Format(
    rules=LLAMA_RULES,
    # Rules that only some Llamas need are not in `rules`, because `rules` decides whether stored names belong to a
    # Llama or to a GPT.
    rules_of=lambda model: QK_NORMS if getattr(model, "qk_norm", False) else (),
    heads=lambda model: Heads(model.n_heads, getattr(model, "kv_heads", model.n_heads)),
    fixed={
        **{key: value for key, value in {**PLAIN, **FURTHER_PLAIN}.items() if key not in READ_FOR_LLAMA},
        **ROTARY,
        **{"normalization": "RMSNorm", "swiglu": True, "add_bias_linear": False},
    },
    keys=(
        *SIZES,
        LENGTH._replace(free=True),
        Key("rms_norm_eps", EPS[::-1], 1e-5),
        Key("kv_channels", ("kv_channels",), 0, resolved="head_dim"),
        Key("qk_norm", ("qk_layernorm",), False),
        INIT_STD,
    ),
    refuse=_refuse_scaling,
    to_section=_llama,
    from_section=_args_of_llama,
)
# All of Megatron's formats, keyed as in `Family.formats`.
GPT_FORMS = {"megatron": [GPT_FORM], "megatron-core": [GPT_CORE]}
LLAMA_FORMS = {"megatron-core": [LLAMA_CORE]}
