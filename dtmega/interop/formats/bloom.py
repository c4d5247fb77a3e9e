"""Names of BLOOM's weights and config keys in transformers' BloomForCausalLM."""

from __future__ import annotations

from dtmega import config
from dtmega.interop.formats.format import Format, Key
from dtmega.interop.formats.gated import refuse_gated
from dtmega.interop.formats.own import OwnFormats
from dtmega.interop.formats.rules import Rule
from dtmega.interop.megatron.forms import BLOOM_FORM


def _refuse(model: config.Model) -> None:
    refuse_gated(model)
    if model.ffn != 4 * model.hidden_size:
        raise ValueError(
            f"Hugging Face's BLOOM has a feed-forward size of 4 x hidden_size = {4 * model.hidden_size}, this model "
            f"has {model.ffn} ([model] ffn_hidden_size)"
        )


# Format for transformers' BloomForCausalLM. The rows of the fused QKV are already in our order, so nothing is permuted.
HF = Format(
    rules=(
        Rule("embed.", "transformer.word_embeddings."),
        Rule("embed_norm.", "transformer.word_embeddings_layernorm."),
        Rule("layers.{}.attn_norm.", "transformer.h.{}.input_layernorm."),
        Rule("layers.{}.attn.qkv.", "transformer.h.{}.self_attention.query_key_value."),
        Rule("layers.{}.attn.out.", "transformer.h.{}.self_attention.dense."),
        Rule("layers.{}.mlp_norm.", "transformer.h.{}.post_attention_layernorm."),
        Rule("layers.{}.mlp.up.", "transformer.h.{}.mlp.dense_h_to_4h."),
        Rule("layers.{}.mlp.down.", "transformer.h.{}.mlp.dense_4h_to_h."),
        Rule("norm.", "transformer.ln_f."),
        Rule("head.", "lm_head."),
    ),
    base="transformer.",
    ignored=r"causal_mask|masked_bias",  # buffers that old versions of transformers stored
    fixed={"architectures": ["BloomForCausalLM"], "model_type": "bloom", "tie_word_embeddings": True},
    keys=(
        Key("vocab_size", ("vocab_size",)),
        Key("hidden_size", ("n_embed", "hidden_size")),
        Key("n_layers", ("num_hidden_layers", "n_layer")),
        Key("n_heads", ("num_attention_heads", "n_head")),
        Key("layer_norm_eps", ("layer_norm_epsilon",), 1e-5),
        Key("apply_residual_connection_post_layernorm", ("apply_residual_connection_post_layernorm",), False),
        Key("hidden_dropout", ("hidden_dropout",), 0.0, free=True),
        Key("attention_dropout", ("attention_dropout",), 0.0, free=True),
        Key("init_std", ("initializer_range",), 0.02, free=True),
    ),
    refuse=_refuse,
)

STORED = OwnFormats({"hf": [HF], "megatron": [BLOOM_FORM]})
