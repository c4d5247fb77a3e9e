"""Names of BERT's weights and config keys in transformers' BertForPreTraining and MegatronBertForPreTraining."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

from dtmega import config
from dtmega.config.families.bert import BertKeys
from dtmega.interop.formats.format import Format, Key
from dtmega.interop.formats.gated import refuse_gated
from dtmega.interop.formats.own import OwnFormats
from dtmega.interop.formats.rules import Rule
from dtmega.interop.megatron.forms import BERT_FORM
from dtmega.models.bert import N_TYPES

# Form of GELU -> names of this form in transformers. Exports write the first name.
ACTIVATIONS = {"erf": ("gelu",), "tanh": ("gelu_pytorch_tanh", "gelu_new")}


def _activation(theirs: Mapping[str, Any]) -> dict[str, Any]:
    """The [model] keys for the GELU in the feed-forward and in the head; config.json has one key for both.

    Raises:
        ValueError: the activation is not a GELU.
    """
    activation = theirs.get("hidden_act", "gelu")
    for form, names in ACTIVATIONS.items():
        if activation in names:
            return {"gelu": form, "head_gelu": form}
    known_names = ", ".join(itertools.chain(*ACTIVATIONS.values()))
    raise ValueError(f"config.json has hidden_act={activation!r:.80}, expected one of {known_names} ([model] gelu)")


def _config_entries(model: config.Model) -> dict[str, Any]:
    """The config.json entry that an export writes for the feed-forward's GELU."""
    assert isinstance(model, BertKeys)
    return {"hidden_act": ACTIVATIONS[model.gelu][0]}


def _refuse(model: config.Model) -> None:
    refuse_gated(model)
    assert isinstance(model, BertKeys)
    if model.gelu != model.head_gelu:
        raise ValueError(
            f"Hugging Face's BERT has one form of GELU in the feed-forward and in the head, this model has "
            f"gelu='{model.gelu}' and head_gelu='{model.head_gelu}', which differ by up to 5e-4 in each activation "
            f"([model] gelu, [model] head_gelu)"
        )
    if model.apply_residual_connection_post_layernorm:
        raise ValueError(
            "Hugging Face's BERT adds to a LayerNorm's input, this model to its output "
            "([model] apply_residual_connection_post_layernorm)"
        )


def _format(model_class: str, model_type: str, order: str, norms: tuple[Rule, ...]) -> Format:
    """The format for one of transformers' two BERT classes, which place their LayerNorms differently."""
    attention = "bert.encoder.layer.{}.attention."
    apart = tuple(f"{attention}self.{name}." for name in ("query", "key", "value"))
    return Format(
        rules=(
            Rule("embed.", "bert.embeddings.word_embeddings."),
            Rule("positions.", "bert.embeddings.position_embeddings."),
            Rule("types.", "bert.embeddings.token_type_embeddings."),
            Rule("layers.{}.attn.qkv.", apart, "heads"),
            Rule("layers.{}.attn.out.", f"{attention}output.dense."),
            Rule("layers.{}.mlp.up.", "bert.encoder.layer.{}.intermediate.dense."),
            Rule("layers.{}.mlp.down.", "bert.encoder.layer.{}.output.dense."),
            *norms,
            Rule("head.dense.", "cls.predictions.transform.dense."),
            Rule("head.norm.", "cls.predictions.transform.LayerNorm."),
            Rule("head.output.weight", "cls.predictions.decoder.weight"),
            Rule("head.output.bias", "cls.predictions.bias"),
            Rule("order.pooler.", "bert.pooler.dense."),
            Rule("order.classifier.", "cls.seq_relationship."),
        ),
        base="bert.",
        older={"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"},
        ignored=r"embeddings\.position_ids",  # a buffer that old versions of transformers stored
        implied={"norm": order},
        fixed={
            **{"architectures": [model_class], "model_type": model_type, "type_vocab_size": N_TYPES},
            **{"position_embedding_type": "absolute", "tie_word_embeddings": True},
            **{"is_decoder": False, "add_cross_attention": False},
        },
        keys=(
            Key("vocab_size", ("vocab_size",)),
            Key("max_position_embeddings", ("max_position_embeddings",)),
            Key("hidden_size", ("hidden_size",)),
            Key("n_layers", ("num_hidden_layers",)),
            Key("n_heads", ("num_attention_heads",)),
            Key("ffn_hidden_size", ("intermediate_size",), resolved="ffn"),
            Key("layer_norm_eps", ("layer_norm_eps",), 1e-12),
            Key("hidden_dropout", ("hidden_dropout_prob",), 0.1, free=True),
            Key("attention_dropout", ("attention_probs_dropout_prob",), 0.1, free=True),
            Key("init_std", ("initializer_range",), 0.02, free=True),
        ),
        refuse=_refuse,
        to_section=_activation,
        from_section=_config_entries,
    )


# Formats for transformers' BertForPreTraining and MegatronBertForPreTraining.
HF = (
    _format(
        *("BertForPreTraining", "bert", "post"),
        norms=(
            Rule("embed_norm.", "bert.embeddings.LayerNorm."),
            Rule("layers.{}.attn_norm.", "bert.encoder.layer.{}.attention.output.LayerNorm."),
            Rule("layers.{}.mlp_norm.", "bert.encoder.layer.{}.output.LayerNorm."),
        ),
    ),
    _format(
        *("MegatronBertForPreTraining", "megatron-bert", "pre"),
        norms=(
            Rule("layers.{}.attn_norm.", "bert.encoder.layer.{}.attention.ln."),
            Rule("layers.{}.mlp_norm.", "bert.encoder.layer.{}.ln."),
            Rule("norm.", "bert.encoder.ln."),
        ),
    ),
)

STORED = OwnFormats({"hf": HF, "megatron": [BERT_FORM]})
