"""The keys of [model] that several families have. `families/` has a class per family, chosen by `name`."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import model_validator

from dtmega.config.schema import PathOrUrl, Section, key


class Model(Section):
    """The keys that every family has.

    To add a family, write a subclass with the family's `name` in a file of `families/`; from outside of dtmega,
    `families.register` adds it.
    """

    name: Any  # each family declares a Literal with its own name
    init_from: PathOrUrl = key(
        "", "folder with the weights to start from: a Hugging Face model or a checkpoint; empty = random weights"
    )
    vocab_size: int = key(8192, "V: size of the vocabulary, at least the tokenizer's", ge=1)
    hidden_size: int = key(256, "D: width of the hidden state", ge=1)
    n_layers: int = key(4, "L: layers", ge=1)
    n_heads: int = key(8, "H: attention heads; must divide hidden_size", ge=1)
    ffn_hidden_size: int = key(
        0, "F: width inside the feed-forward; 0 = 4 D, or for llama and moe 8/3 D rounded up to a multiple of 256", ge=0
    )
    label_smoothing: float = key(0.0, "label smoothing in the training loss", ge=0, lt=1)

    @property
    def directory(self) -> str:
        """The directory that the model is read from; '' for a family that is implemented in dtmega."""
        return ""

    @property
    def padded_vocab_size(self) -> int:
        """Number of rows in the embedding, including padding."""
        return self.vocab_size

    @property
    def ffn(self) -> int:
        """F: inner width of the feed-forward, with the default resolved."""
        return self.ffn_hidden_size or 4 * self.hidden_size


class NativeModel(Model):
    """The keys shared by all families that dtmega implements itself, rather than through transformers."""

    pad_vocab_to_multiple: int = key(
        1, "pad the embedding's rows to a multiple of this; rows beyond V never enter the softmax", ge=1
    )
    init_std: float = key(
        0.02,
        "initial weights are N(0, init_std), or N(0, init_std / sqrt(2 L)) in layers that write to the residual",
        gt=0,
    )
    z_loss: float = key(0.0, "weight of log(Z)^2 in the training loss, where Z is the softmax's sum (PaLM: 1e-4)", ge=0)

    @model_validator(mode="after")
    def _check_heads(self) -> NativeModel:
        # A family may set the width of a head separately (kv_channels), so D need not be a multiple of H.
        if self.hidden_size % self.n_heads and not getattr(self, "kv_channels", 0):
            raise ValueError(
                f"n_heads={self.n_heads} does not divide hidden_size={self.hidden_size} "
                f"([model] n_heads, [model] hidden_size)"
            )
        return self

    @property
    def padded_vocab_size(self) -> int:
        return -(-self.vocab_size // self.pad_vocab_to_multiple) * self.pad_vocab_to_multiple

    @property
    def head_dim(self) -> int:
        """K: width of one head."""
        return getattr(self, "kv_channels", 0) or self.hidden_size // self.n_heads


class DropoutModel(NativeModel):
    """The keys shared by the families that use Megatron's layers with dropout (`models/layers.py`)."""

    hidden_dropout: float = key(0.0, "dropout on the embedding and on each residual branch", ge=0, lt=1)
    attention_dropout: float = key(0.0, "dropout on the attention probabilities", ge=0, lt=1)
    glu: Literal["none", "geglu", "swiglu", "reglu", "liglu"] = key(
        "none",
        "gated feed-forward with this activation on the gate; `up` then has 2 F outputs, so twice the weights",
    )
    fp32_residual: bool = key(False, "keep the residual stream in float32, whatever [precision] params is")
    query_key_layer_scaling: bool = key(
        False,
        "divide attention scores by the layer's number (from 1) and multiply them back in float32, so that they do not "
        "overflow in float16",
    )

    @model_validator(mode="after")
    def _check_residual(self) -> DropoutModel:
        normed = getattr(self, "apply_residual_connection_post_layernorm", False)
        if self.fp32_residual and (normed or getattr(self, "norm", "pre") == "post"):
            raise ValueError(
                "the residual is a LayerNorm's output, which is not fp32: expected fp32_residual=false, got true "
                "([model] fp32_residual, [model] apply_residual_connection_post_layernorm, [model] norm)"
            )
        return self
