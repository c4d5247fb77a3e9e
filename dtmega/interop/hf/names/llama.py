"""Names of Llama's weights and config keys in transformers' LlamaForCausalLM."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dtmega import config
from dtmega.formats.format import Format, Key
from dtmega.formats.rules import Rule

# [model] keys for scaled rotary positions -> names of these keys in config.json.
SCALING = {
    "rope_factor": "factor",
    "rope_low_freq_factor": "low_freq_factor",
    "rope_high_freq_factor": "high_freq_factor",
    "rope_original_length": "original_max_position_embeddings",
}


def _positions(theirs: Mapping[str, Any]) -> dict[str, Any]:
    """The [model] keys for rotary positions, read from a config.json.

    Raises:
        ValueError: config.json describes a Llama that dtmega would compute differently.
    """
    head_dim = theirs["hidden_size"] // theirs["num_attention_heads"]
    if theirs.get("head_dim") not in (None, head_dim):
        raise ValueError(
            f"config.json has head_dim={theirs['head_dim']!r:.80}, expected hidden_size / num_attention_heads = "
            f"{head_dim} ([model] name)"
        )
    # transformers 5 stores all these values in one object; earlier versions store theta outside the object.
    rope = theirs.get("rope_parameters") or theirs.get("rope_scaling") or {}
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


def _config_entries(model: config.Model) -> dict[str, Any]:
    """The config.json entries for rotary positions, for an export; transformers 4 can read these entries too."""
    assert isinstance(model, config.Llama)
    scaling = {name: getattr(model, ours) for ours, name in SCALING.items()}
    return {
        "rope_theta": model.rope_theta,
        "rope_scaling": None if model.rope_factor == 1 else {"rope_type": "llama3", **scaling},
    }


# Format for transformers' LlamaForCausalLM.
HF = Format(
    rules=(
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
    ),
    base="model.",
    ignored=r"rotary_emb\.inv_freq",  # a buffer that old versions of transformers stored
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
        Key("ffn_hidden_size", ("intermediate_size",), resolved="ffn"),
        Key("rms_norm_eps", ("rms_norm_eps",), 1e-6),
        Key("tied", ("tie_word_embeddings",), False),
        Key("max_position_embeddings", ("max_position_embeddings",), 2048, free=True),
        Key("init_std", ("initializer_range",), 0.02, free=True),
    ),
    to_section=_positions,
    from_section=_config_entries,
)
