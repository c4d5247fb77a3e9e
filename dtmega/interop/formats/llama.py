"""Names of Llama's weights and config keys in transformers' LlamaForCausalLM, MistralForCausalLM and Qwen3ForCausalLM.

The three classes use the same names. Mistral's attention may have a window. Qwen3 has norms on queries and keys, and
may have a window in some layers. A model with neither windows nor these norms is written as a Llama, even if it was
read from a Mistral directory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from dtmega import config
from dtmega.config.families.llama import LlamaKeys
from dtmega.interop.formats.format import Format, Key
from dtmega.interop.formats.own import OwnFormats
from dtmega.interop.formats.rules import Rule
from dtmega.interop.megatron.core_forms import LLAMA_FORMS

# [model] keys for scaled rotary positions -> names of these keys in config.json.
SCALING = {
    "rope_factor": "factor",
    "rope_low_freq_factor": "low_freq_factor",
    "rope_high_freq_factor": "high_freq_factor",
    "rope_original_length": "original_max_position_embeddings",
}


def positions(theirs: Mapping[str, Any]) -> dict[str, Any]:
    """The [model] keys for rotary positions, read from a config.json.

    Raises:
        ValueError: config.json scales the positions in a way that dtmega does not support.
    """
    # transformers 5 stores all these values in one object; earlier versions store theta outside the object.
    rope = theirs.get("rope_parameters") or theirs.get("rope_scaling") or {}
    if not isinstance(rope, Mapping):
        raise ValueError(
            f"config.json has {rope!r:.80} as rope_parameters (or rope_scaling), expected an object ([model] name)"
        )
    theta = {"rope_theta": rope.get("rope_theta", theirs.get("rope_theta", 10_000.0))}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return theta | {"rope_factor": 1.0}
    if kind != "llama3" or not rope.keys() >= {*SCALING.values()}:
        raise ValueError(
            f"config.json scales rotary positions by {rope!r:.200}, expected rope_type 'llama3' with "
            f"{', '.join(SCALING.values())} ([model] name)"
        )
    return theta | {ours: rope[name] for ours, name in SCALING.items()}


def config_entries(model: config.Model) -> dict[str, Any]:
    """The config.json entries that an export writes for rotary positions; transformers 4 can read these entries too."""
    assert isinstance(model, LlamaKeys)
    scaling = {name: getattr(model, ours) for ours, name in SCALING.items()}
    return {
        "rope_theta": model.rope_theta,
        "rope_scaling": None if model.rope_factor == 1 else {"rope_type": "llama3", **scaling},
    }


SLIDING, FULL = "sliding_attention", "full_attention"  # entries of `layer_types` in config.json


def _check_layer_types(layer_types: Any, n_layers: int, allowed: tuple[str, ...]) -> None:
    """Check the entry `layer_types` of a config.json, if the entry exists.

    Raises:
        ValueError: `layer_types` is not a list with one of the allowed words for each layer.
    """
    if layer_types is None:
        return
    if type(layer_types) is not list or len(layer_types) != n_layers or any(k not in allowed for k in layer_types):
        raise ValueError(
            f"config.json has layer_types={layer_types!r:.120}, expected {n_layers} entries, each "
            f"{' or '.join(allowed)} by sliding_window and use_sliding_window ([model] window, [model] window_layers)"
        )


def _mistral(theirs: Mapping[str, Any]) -> dict[str, Any]:
    """The [model] keys for positions and window, read from the config.json of a Mistral model.

    Raises:
        ValueError: `layer_types`, which transformers' Mistral ignores, contradicts `sliding_window`.
    """
    window = theirs.get("sliding_window", 4096) or 0
    _check_layer_types(theirs.get("layer_types"), theirs["num_hidden_layers"], (SLIDING if window else FULL,))
    return positions(theirs) | {"window": window}


def _qwen3(theirs: Mapping[str, Any]) -> dict[str, Any]:
    """The [model] keys for positions and windows, read from the config.json of a Qwen3 model.

    Raises:
        ValueError: `layer_types` contains an unknown word or contradicts the other entries, or `max_window_layers` is
            not an integer.
    """
    n_layers, layer_types = theirs["num_hidden_layers"], theirs.get("layer_types")
    window = theirs.get("sliding_window", 4096) or 0
    if not theirs.get("use_sliding_window", False):
        window = 0
    _check_layer_types(layer_types, n_layers, (SLIDING, FULL) if window else (FULL,))
    first = theirs.get("max_window_layers", 28)
    if type(first) is not int:
        raise ValueError(f"config.json has max_window_layers={first!r:.80}, expected a number ([model] window_layers)")
    layers: list[int] = []
    for layer in range(n_layers if window else 0):
        if layer >= first if layer_types is None else layer_types[layer] == SLIDING:
            layers.append(layer)
    return positions(theirs) | {
        "window": window if layers else 0,
        "window_layers": [] if len(layers) == n_layers else layers,
    }


def mistral_entries(model: config.Model) -> dict[str, Any]:
    """The config.json entries that an export writes for positions and window."""
    assert isinstance(model, LlamaKeys)
    return config_entries(model) | {"sliding_window": model.window or None}


def _qwen3_entries(model: config.Model) -> dict[str, Any]:
    """The config.json entries that an export writes for positions and windows."""
    assert isinstance(model, LlamaKeys)
    has_window = [model.window_of(layer) > 0 for layer in range(model.n_layers)]
    # Versions of transformers without `layer_types` apply the window to layer `first` and all later layers.
    first = has_window.index(True) if True in has_window else model.n_layers
    return config_entries(model) | {
        "use_sliding_window": model.window > 0,
        "sliding_window": model.window or None,
        "max_window_layers": first,
        "layer_types": [SLIDING if has else FULL for has in has_window],
    }


RULES = (
    Rule("embed.", "model.embed_tokens."),
    Rule("layers.{}.attn_norm.", "model.layers.{}.input_layernorm."),
    Rule("layers.{}.attn.q.", "model.layers.{}.self_attn.q_proj."),
    Rule("layers.{}.attn.k.", "model.layers.{}.self_attn.k_proj."),
    Rule("layers.{}.attn.v.", "model.layers.{}.self_attn.v_proj."),
    Rule("layers.{}.attn.out.", "model.layers.{}.self_attn.o_proj."),
    Rule("layers.{}.mlp_norm.", "model.layers.{}.post_attention_layernorm."),
    Rule("layers.{}.mlp.gate.", "model.layers.{}.mlp.gate_proj."),
    Rule("layers.{}.mlp.up.", "model.layers.{}.mlp.up_proj."),
    Rule("layers.{}.mlp.down.", "model.layers.{}.mlp.down_proj."),
    Rule("norm.", "model.norm."),
    Rule("head.", "lm_head."),
)
QK_NORMS = (
    Rule("layers.{}.attn.q_norm.", "model.layers.{}.self_attn.q_norm."),
    Rule("layers.{}.attn.k_norm.", "model.layers.{}.self_attn.k_norm."),
)
# Format for transformers' LlamaForCausalLM.
LLAMA = Format(
    rules=RULES,
    base="model.",
    ignored=r"rotary_emb\.inv_freq",  # a buffer that old versions of transformers stored
    implied={"qk_norm": False, "window": 0},
    fixed={
        **{"architectures": ["LlamaForCausalLM"], "model_type": "llama"},
        **{"hidden_act": "silu", "attention_bias": False, "mlp_bias": False},
    },
    keys=(
        Key("vocab_size", ("vocab_size",)),
        Key("hidden_size", ("hidden_size",)),
        Key("n_layers", ("num_hidden_layers",)),
        Key("n_heads", ("num_attention_heads",)),
        Key("n_kv_heads", ("num_key_value_heads",), 0, resolved="kv_heads"),
        Key("kv_channels", ("head_dim",), 0, resolved="head_dim"),
        Key("ffn_hidden_size", ("intermediate_size",), resolved="ffn"),
        Key("rms_norm_eps", ("rms_norm_eps",), 1e-6),
        Key("tied", ("tie_word_embeddings",), False),
        Key("max_position_embeddings", ("max_position_embeddings",), 2048, free=True),
        Key("init_std", ("initializer_range",), 0.02, free=True),
    ),
    to_section=positions,
    from_section=config_entries,
)


def keys_of_class(*, without: tuple[str, ...] = (), **defaults: Any) -> tuple[Key, ...]:
    """Llama's keys with the defaults of another class.

    Args:
        without: [model] keys that the class does not have.
        **defaults: defaults of the class, keyed by [model] key; None if a configuration must have the key.
    """
    kept = [key for key in LLAMA.keys if key.ours not in without]
    return tuple(key._replace(default=defaults.get(key.ours, key.default)) for key in kept)


# Format for transformers' MistralForCausalLM. If the number of key/value heads is missing, transformers assumes 8; if
# the number is null, transformers uses the number of query heads. dtmega refuses a directory without the number.
MISTRAL = replace(
    LLAMA,
    implied={"qk_norm": False, "window_layers": []},
    fixed={"architectures": ["MistralForCausalLM"], "model_type": "mistral", "hidden_act": "silu"},
    keys=keys_of_class(n_kv_heads=None, max_position_embeddings=131_072),
    to_section=_mistral,
    from_section=mistral_entries,
)
# Format for transformers' Qwen3ForCausalLM.
QWEN3 = replace(
    LLAMA,
    rules=(*RULES, *QK_NORMS),
    implied={"qk_norm": True},
    fixed={
        **{"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"},
        **{"hidden_act": "silu", "attention_bias": False},
    },
    keys=keys_of_class(n_kv_heads=None, kv_channels=128, max_position_embeddings=32_768),
    to_section=_qwen3,
    from_section=_qwen3_entries,
)
# All of transformers' formats for Llama models. An export uses the first format that fits.
HF = (LLAMA, MISTRAL, QWEN3)

STORED = OwnFormats({"hf": HF, **LLAMA_FORMS})
