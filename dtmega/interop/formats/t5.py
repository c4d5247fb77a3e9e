"""Names of T5's weights and config keys in transformers' T5ForConditionalGeneration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from dtmega import config
from dtmega.checkpoint.sources import Source
from dtmega.config.families.t5 import T5Keys
from dtmega.data.tokenizers import exported
from dtmega.interop.formats.format import Format, Key
from dtmega.interop.formats.own import OwnFormats
from dtmega.interop.formats.rules import Rule
from dtmega.interop.megatron.forms import T5_FORM

# Kind of feed-forward in transformers -> (our name for the activation, whether the feed-forward is gated).
FEED_FORWARDS = {
    "relu": ("relu", False),
    "gated-relu": ("relu", True),
    "gelu": ("gelu_erf", False),
    "gelu_new": ("gelu_tanh", False),
    "gated-gelu": ("gelu_tanh", True),
}


def _section(theirs: Mapping[str, Any]) -> dict[str, Any]:
    """The [model] keys for the feed-forward and for the head's input, read from a config.json.

    The original T5 scales the head's input; v1.1 does not. transformers 5 stores the choice as `scale_decoder_outputs`.
    In a config.json from transformers 4, `tie_word_embeddings` = false means that the input is not scaled.

    Raises:
        ValueError: the kind of feed-forward is unknown.
    """
    feed_forward = theirs.get("feed_forward_proj", "relu")
    if feed_forward not in FEED_FORWARDS:
        raise ValueError(
            f"config.json has feed_forward_proj={feed_forward!r:.80}, expected one of {', '.join(FEED_FORWARDS)} "
            f"([model] activation, [model] gated)"
        )
    activation, gated = FEED_FORWARDS[feed_forward]
    scaled = theirs.get("scale_decoder_outputs", theirs.get("tie_word_embeddings") is not False)
    return {"activation": activation, "gated": gated, "scale_head": scaled}


def _of_tensors(stored: Source) -> dict[str, Any]:
    """The [model] key `tied`: True if no head is stored, or if the stored head equals the stored embedding.

    config.json does not show whether the head is tied: transformers 5 writes `tie_word_embeddings` = true for every T5.
    transformers 5 also compares the tensors when it loads a T5 (`tie_weights` in modeling_utils.py).
    """
    embedding, head = "shared.weight", "lm_head.weight"
    if head not in stored.tensors or embedding not in stored.tensors:
        return {"tied": head not in stored.tensors}
    return {"tied": torch.equal(stored.read(embedding).float(), stored.read(head).float())}


def _config_entries(model: config.Model) -> dict[str, Any]:
    """The config.json entries that an export writes for the feed-forward, the head and `generate`'s first token."""
    assert isinstance(model, T5Keys)
    names = {ours: theirs for theirs, ours in FEED_FORWARDS.items()}
    return {
        "feed_forward_proj": names[model.activation, model.gated],
        "tie_word_embeddings": model.tied,
        "scale_decoder_outputs": model.scale_head,
        "decoder_start_token_id": 0,
    }


def _refuse(model: config.Model) -> None:
    assert isinstance(model, T5Keys)
    theirs = {"positions": "relative", "norm": "rms", "bias": False, "scale_scores": False}
    if wrong := {key: value for key, value in theirs.items() if getattr(model, key) != value}:
        raise ValueError(
            f"Hugging Face's T5 has {', '.join(f'{key}={value}' for key, value in wrong.items())}, this model has "
            f"{', '.join(str(getattr(model, key)) for key in wrong)} ([model] {', [model] '.join(wrong)})"
        )
    if (model.activation, model.gated) not in FEED_FORWARDS.values():
        raise ValueError(
            f"Hugging Face's T5 has no feed-forward with activation='{model.activation}' and gated={model.gated} "
            f"([model] activation, [model] gated)"
        )


def _attention(ours: str, theirs: str) -> tuple[Rule, ...]:
    names = {"q": "q", "k": "k", "v": "v", "out": "o"}
    return tuple(Rule(f"{ours}.{our_name}.", f"{theirs}.{their_name}.") for our_name, their_name in names.items())


def _stack(stack: str, feed_forward: int) -> tuple[Rule, ...]:
    """The rules for one stack; `feed_forward` is the index of the feed-forward in transformers' list `layer`."""
    ours, theirs = f"{stack}.{{}}", f"{stack}.block.{{}}.layer"
    return (
        Rule(f"{stack}_bias.", f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias."),
        Rule(f"{ours}.attn_norm.", f"{theirs}.0.layer_norm."),
        *_attention(f"{ours}.attn", f"{theirs}.0.SelfAttention"),
        Rule(f"{ours}.mlp_norm.", f"{theirs}.{feed_forward}.layer_norm."),
        Rule(f"{ours}.mlp.gate.", f"{theirs}.{feed_forward}.DenseReluDense.wi_0."),
        Rule(f"{ours}.mlp.down.", f"{theirs}.{feed_forward}.DenseReluDense.wo."),
        Rule(f"{stack}_norm.", f"{stack}.final_layer_norm."),
    )


def _up(model: config.Model) -> tuple[Rule, ...]:
    """The rules for `up`, which has a different name in transformers if the feed-forward is gated."""
    assert isinstance(model, T5Keys)
    name = "wi_1" if model.gated else "wi"
    layers = {"encoder": 1, "decoder": 2}
    return tuple(
        Rule(f"{stack}.{{}}.mlp.up.", f"{stack}.block.{{}}.layer.{i}.DenseReluDense.{name}.")
        for stack, i in layers.items()
    )


# Format for transformers' T5ForConditionalGeneration; the format covers the original T5 and v1.1.
HF = Format(
    rules=(
        Rule("embed.", "shared."),
        *_stack("encoder", 1),
        Rule("decoder_embed.", "decoder.embed_tokens."),
        *_stack("decoder", 2),
        Rule("decoder.{}.cross_norm.", "decoder.block.{}.layer.1.layer_norm."),
        *_attention("decoder.{}.cross", "decoder.block.{}.layer.1.EncDecAttention"),
        Rule("head.", "lm_head."),
    ),
    rules_of=_up,
    # A copy of the embedding, and a cross-attention bias that old versions of transformers stored but never used.
    ignored=r"encoder\.embed_tokens\.weight|EncDecAttention\.relative_attention_bias\.weight",
    fixed={"architectures": ["T5ForConditionalGeneration"], "model_type": "t5", "is_encoder_decoder": True},
    keys=(
        Key("vocab_size", ("vocab_size",)),
        Key("hidden_size", ("d_model",)),
        Key("kv_channels", ("d_kv",), resolved="head_dim"),
        Key("ffn_hidden_size", ("d_ff",), resolved="ffn"),
        Key("n_layers", ("num_layers",)),
        Key("n_decoder_layers", ("num_decoder_layers",), 0, resolved="decoder_layers"),
        Key("n_heads", ("num_heads",)),
        Key("relative_buckets", ("relative_attention_num_buckets",), 32),
        Key("relative_max_distance", ("relative_attention_max_distance",), 128),
        Key("norm_eps", ("layer_norm_epsilon",), 1e-6),
        # transformers has a single rate for all three keys. An export writes the rate of the last key,
        # `hidden_dropout`.
        Key("attention_dropout", ("dropout_rate",), 0.1, free=True),
        Key("inner_dropout", ("dropout_rate",), 0.1, free=True),
        Key("hidden_dropout", ("dropout_rate",), 0.1, free=True),
    ),
    refuse=_refuse,
    to_section=_section,
    section_from_tensors=_of_tensors,
    from_section=_config_entries,
)

STORED = OwnFormats({"hf": [HF], "megatron": [T5_FORM]}, vocabulary_of=exported.of_spans)
