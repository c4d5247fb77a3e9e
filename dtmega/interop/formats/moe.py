"""Names of the mixtures' weights and config keys in transformers' classes for Mixtral, Qwen3-MoE and DeepSeek-V3.

transformers directories store the experts one by one, and each rank reads only the rows that it holds. The keys for
router-balancing losses belong to training, not to these formats. Only DeepSeek-V3 has a router bias.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from dtmega import config
from dtmega.config.families.moe import MoEKeys
from dtmega.interop.formats.format import Key
from dtmega.interop.formats.llama import (
    LLAMA,
    QK_NORMS,
    RULES,
    config_entries,
    keys_of_class,
    mistral_entries,
    positions,
)
from dtmega.interop.formats.own import OwnFormats
from dtmega.interop.formats.rules import Rule

# [model] values for a softmax over all experts, without the features that only DeepSeek-V3 has.
PLAIN = {
    **{"router_scores": "softmax", "router_bias": False, "routed_scale": 1.0},
    **{"expert_groups": 1, "groups_per_token": 1, "shared_experts": 0, "kv_latent_size": 0},
}
OF_EXPERTS = (Key("experts_per_token", ("num_experts_per_tok",)),)


def _mixtral(theirs: Mapping[str, Any]) -> dict[str, Any]:
    """The [model] keys for positions and window, read from the config.json of a Mixtral model."""
    return positions({"rope_theta": 1e6, **theirs}) | {"window": theirs.get("sliding_window") or 0}


def _qwen3(theirs: Mapping[str, Any]) -> dict[str, Any]:
    """The [model] keys for positions, window and dense layers, read from the config.json of a Qwen3-MoE model.

    Raises:
        ValueError: a layer without experts comes after a layer with experts.
    """
    dense, step = theirs.get("mlp_only_layers") or [], theirs.get("decoder_sparse_step", 1)
    if step != 1 or type(dense) is not list or dense != [*range(len(dense))]:
        raise ValueError(
            f"config.json has mlp_only_layers={dense!r:.120} and decoder_sparse_step={step!r:.40}, expected the "
            f"numbers of the first layers, from 0, and 1 ([model] dense_layers)"
        )
    window = theirs.get("sliding_window", 4096) if theirs.get("use_sliding_window", False) else 0
    return positions(theirs) | {"window": window or 0, "dense_layers": len(dense)}


def _qwen3_entries(model: config.Model) -> dict[str, Any]:
    """The config.json entries that an export writes for positions, window and dense layers."""
    assert isinstance(model, MoEKeys)
    return config_entries(model) | {
        "use_sliding_window": model.window > 0,
        "sliding_window": model.window or None,
        "mlp_only_layers": [*range(model.dense_layers)],
        "decoder_sparse_step": 1,
    }


def _deepseek(theirs: Mapping[str, Any]) -> dict[str, Any]:
    """The [model] keys for positions, queries and keys, read from the config.json of a DeepSeek-V3 model.

    Raises:
        ValueError: a width is not a number.
    """
    names = ("qk_nope_head_dim", "qk_rope_head_dim", "q_lora_rank")
    plain, rotated, latent = widths = [theirs.get(name) or 0 for name in names]
    for name, width in zip(names, widths, strict=True):
        if type(width) is not int:
            raise ValueError(f"config.json has {name}={width!r:.80}, expected a number ([model] kv_channels)")
    return positions(theirs) | {"kv_channels": plain + rotated, "q_latent_size": latent}


def _deepseek_entries(model: config.Model) -> dict[str, Any]:
    """The config.json entries that an export writes for positions, queries and keys."""
    assert isinstance(model, MoEKeys)
    return config_entries(model) | {
        "q_lora_rank": model.q_latent_size or None,
        "qk_nope_head_dim": model.head_dim - model.rotary_channels,
        "num_nextn_predict_layers": 0,
    }


def _refuse_others(model: config.Model) -> None:
    """Raise an error for a mixture that transformers' DeepSeek-V3 cannot represent.

    Raises:
        ValueError: the model has no latent attention or no shared experts.
    """
    assert isinstance(model, MoEKeys)
    if not (model.kv_latent_size and model.shared_experts):
        raise ValueError(
            f"Hugging Face's DeepSeek-V3 has latent attention and shared experts: expected kv_latent_size and "
            f"shared_experts above 0, got {model.kv_latent_size} and {model.shared_experts} "
            f"([model] kv_latent_size, [model] shared_experts)"
        )


def _experts(router: str, gate: str, up: str, down: str) -> tuple[Rule, ...]:
    """The rules for a router and its experts; the arguments are transformers' names within a layer."""
    theirs = "model.layers.{}."
    return (
        Rule("layers.{}.mixture.router.weight", f"{theirs}{router}.weight"),
        Rule("layers.{}.mixture.experts.gate", f"{theirs}{gate}.weight", "stack"),
        Rule("layers.{}.mixture.experts.up", f"{theirs}{up}.weight", "stack"),
        Rule("layers.{}.mixture.experts.down", f"{theirs}{down}.weight", "stack"),
    )


# Format for transformers' MixtralForCausalLM.
MIXTRAL = replace(
    LLAMA,
    rules=(
        *RULES,
        *_experts(
            "block_sparse_moe.gate",
            "block_sparse_moe.experts.{}.w1",
            "block_sparse_moe.experts.{}.w3",
            "block_sparse_moe.experts.{}.w2",
        ),
    ),
    implied={**PLAIN, "qk_norm": False, "window_layers": [], "dense_layers": 0, "normalize_weights": True},
    fixed={
        **{"architectures": ["MixtralForCausalLM"], "model_type": "mixtral"},
        **{"hidden_act": "silu", "router_jitter_noise": 0.0},
    },
    keys=(
        *keys_of_class(
            without=("ffn_hidden_size",), n_kv_heads=None, rms_norm_eps=1e-5, max_position_embeddings=131_072
        ),
        *OF_EXPERTS,
        Key("n_experts", ("num_local_experts",)),
        Key("expert_ffn_hidden_size", ("intermediate_size",), resolved="expert_ffn"),
    ),
    to_section=_mixtral,
    from_section=mistral_entries,
)
# Format for transformers' Qwen3MoeForCausalLM.
QWEN3 = replace(
    LLAMA,
    rules=(
        *RULES,
        *QK_NORMS,
        *_experts("mlp.gate", "mlp.experts.{}.gate_proj", "mlp.experts.{}.up_proj", "mlp.experts.{}.down_proj"),
    ),
    implied={**PLAIN, "qk_norm": True, "window_layers": []},
    fixed={
        **{"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe"},
        **{"hidden_act": "silu", "attention_bias": False},
    },
    keys=(
        *keys_of_class(n_kv_heads=None, max_position_embeddings=32_768),
        *OF_EXPERTS,
        Key("n_experts", ("num_local_experts", "num_experts")),
        Key("expert_ffn_hidden_size", ("moe_intermediate_size",), resolved="expert_ffn"),
        Key("normalize_weights", ("norm_topk_prob",), False),
    ),
    to_section=_qwen3,
    from_section=_qwen3_entries,
)
ATTENTION = "layers.{}.attn."
THEIR_LAYER = "model.layers.{}."
# Format for transformers' DeepseekV3ForCausalLM.
DEEPSEEK = replace(
    LLAMA,
    rules=(
        *RULES,
        Rule(f"{ATTENTION}q_down.", f"{THEIR_LAYER}self_attn.q_a_proj."),
        Rule(f"{ATTENTION}q_norm.", f"{THEIR_LAYER}self_attn.q_a_layernorm."),
        Rule(f"{ATTENTION}q_up.", f"{THEIR_LAYER}self_attn.q_b_proj."),
        Rule(f"{ATTENTION}kv_down.", f"{THEIR_LAYER}self_attn.kv_a_proj_with_mqa."),
        Rule(f"{ATTENTION}kv_norm.", f"{THEIR_LAYER}self_attn.kv_a_layernorm."),
        Rule(f"{ATTENTION}kv_up.", f"{THEIR_LAYER}self_attn.kv_b_proj."),
        *_experts("mlp.gate", "mlp.experts.{}.gate_proj", "mlp.experts.{}.up_proj", "mlp.experts.{}.down_proj"),
        Rule("layers.{}.mixture.router.bias", f"{THEIR_LAYER}mlp.gate.e_score_correction_bias"),
        Rule("layers.{}.mixture.shared.gate.", f"{THEIR_LAYER}mlp.shared_experts.gate_proj."),
        Rule("layers.{}.mixture.shared.up.", f"{THEIR_LAYER}mlp.shared_experts.up_proj."),
        Rule("layers.{}.mixture.shared.down.", f"{THEIR_LAYER}mlp.shared_experts.down_proj."),
    ),
    implied={
        **{"router_scores": "sigmoid", "router_bias": True},
        **{"qk_norm": False, "window": 0, "window_layers": []},
    },
    fixed={
        **{"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3"},
        **{"hidden_act": "silu", "attention_bias": False, "rope_interleave": True},
        **{"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1},
    },
    keys=(
        *keys_of_class(without=("kv_channels",), n_kv_heads=None, max_position_embeddings=4096),
        *OF_EXPERTS,
        Key("n_experts", ("num_local_experts", "n_routed_experts")),
        Key("expert_ffn_hidden_size", ("moe_intermediate_size",), resolved="expert_ffn"),
        Key("shared_experts", ("n_shared_experts",)),
        Key("kv_latent_size", ("kv_lora_rank",)),
        Key("rotary_channels", ("qk_rope_head_dim",)),
        Key("v_channels", ("v_head_dim",), 128, resolved="v_dim"),
        Key("dense_layers", ("first_k_dense_replace",), 3),
        Key("expert_groups", ("n_group",)),
        Key("groups_per_token", ("topk_group",)),
        Key("routed_scale", ("routed_scaling_factor",), 2.5),
        Key("normalize_weights", ("norm_topk_prob",), True),
    ),
    refuse=_refuse_others,
    to_section=_deepseek,
    from_section=_deepseek_entries,
)
# All of transformers' formats for mixtures.
HF = (MIXTRAL, QWEN3, DEEPSEEK)

STORED = OwnFormats({"hf": HF})
