"""Names of GPT's weights and config keys in transformers' GPT2LMHeadModel."""

from __future__ import annotations

from typing import Any

from dtmega import config
from dtmega.config.families.gpt import GPTKeys
from dtmega.interop.formats.format import Format, Key
from dtmega.interop.formats.gated import refuse_gated
from dtmega.interop.formats.own import OwnFormats
from dtmega.interop.formats.rules import Rule
from dtmega.interop.megatron.core_forms import GPT_FORMS


def _config_entries(model: config.Model) -> dict[str, Any]:
    """The config.json entry for the embedding's dropout rate, which config.json stores under a separate key."""
    assert isinstance(model, GPTKeys)
    return {"embd_pdrop": model.hidden_dropout}


# Format for transformers' GPT2LMHeadModel, whose linears are Conv1D with weights [in, out]. GPT2LMHeadModel's fused QKV
# holds q for all heads, then k, then v; our fused QKV holds q, k and v of head 0, then of head 1, and so on.
HF = Format(
    rules=(
        Rule("embed.", "transformer.wte."),
        Rule("positions.", "transformer.wpe."),
        Rule("layers.{}.attn_norm.", "transformer.h.{}.ln_1."),
        Rule("layers.{}.attn.qkv.", "transformer.h.{}.attn.c_attn.", "transpose heads"),
        Rule("layers.{}.attn.out.", "transformer.h.{}.attn.c_proj.", "transpose"),
        Rule("layers.{}.mlp_norm.", "transformer.h.{}.ln_2."),
        Rule("layers.{}.mlp.up.", "transformer.h.{}.mlp.c_fc.", "transpose"),
        Rule("layers.{}.mlp.down.", "transformer.h.{}.mlp.c_proj.", "transpose"),
        Rule("norm.", "transformer.ln_f."),
        Rule("head.", "lm_head."),
    ),
    base="transformer.",
    ignored=r"\.attn\.(masked_)?bias",  # causal masks that old versions of transformers stored
    fixed={
        **{"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "activation_function": "gelu_new"},
        **{"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False},
    },
    keys=(
        Key("vocab_size", ("vocab_size",)),
        Key("max_position_embeddings", ("n_positions",)),
        Key("hidden_size", ("n_embd",)),
        Key("n_layers", ("n_layer",)),
        Key("n_heads", ("n_head",)),
        Key("ffn_hidden_size", ("n_inner",), 0, resolved="ffn"),
        Key("layer_norm_eps", ("layer_norm_epsilon",), 1e-5),
        Key("tied", ("tie_word_embeddings",), True),
        Key("hidden_dropout", ("embd_pdrop", "resid_pdrop"), 0.1, free=True),
        Key("attention_dropout", ("attn_pdrop",), 0.1, free=True),
        Key("init_std", ("initializer_range",), 0.02, free=True),
    ),
    from_section=_config_entries,
    refuse=refuse_gated,
)

STORED = OwnFormats({"hf": [HF], **GPT_FORMS})
