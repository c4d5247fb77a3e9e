"""The keys of [model]: what all families have, what some share, and one class for each family, told by its `name`."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import model_validator

from dtmega.declared import Section, key


class Model(Section):
    """The keys of every family. A family of its own is a class below with its `name`, and its place in `Config.model`.

    Attributes:
        directory: the one that the model is read from; '' where it is written here.
    """

    name: Any  # the Literal of each family
    init_from: str = key("", "weights to start with: a Hugging Face folder or a checkpoint's; empty = random")
    vocab_size: int = key(8192, "V; at least the tokenizer's vocabulary", ge=1)
    hidden_size: int = key(256, "D", ge=1)
    n_layers: int = key(4, "L", ge=1)
    n_heads: int = key(8, "H; must divide hidden_size", ge=1)
    ffn_hidden_size: int = key(0, "F; 0 = 4 D, or for llama 8/3 D up to a multiple of 256", ge=0)
    label_smoothing: float = key(0.0, "of the training loss", ge=0, lt=1)

    @property
    def directory(self) -> str:
        return ""

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding."""
        return self.vocab_size

    @property
    def ffn(self) -> int:
        return self.ffn_hidden_size or 4 * self.hidden_size


class OwnModel(Model):
    """The keys of every family that is written here."""

    pad_vocab_to_multiple: int = key(1, "rows of the embedding; rows beyond V never enter the softmax", ge=1)
    init_std: float = key(0.02, "std of N(0, std); the layers that write to the residual get std / sqrt(2 L)", gt=0)
    z_loss: float = key(0.0, "weight of log(Z)^2 in the training loss (PaLM: 1e-4)", ge=0)

    @model_validator(mode="after")
    def _check_heads(self) -> OwnModel:
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
        return self.hidden_size // self.n_heads


class DroppingModel(OwnModel):
    """The keys of every family with Megatron's layers, which may be trained with dropout."""

    hidden_dropout: float = key(0.0, "on the embedding and on each residual branch", ge=0, lt=1)
    attention_dropout: float = key(0.0, "on the attention probabilities", ge=0, lt=1)
    glu: Literal["none", "geglu", "swiglu", "reglu", "liglu"] = key(
        "none", "a gated feed-forward: half of what `up` gives, times this of the other half; twice the weights in `up`"
    )
    fp32_residual: bool = key(False, "the residual stream stays fp32, whatever [precision] params is")
    query_key_layer_scaling: bool = key(
        False, "scores are divided by the layer's number, from 1, and multiplied back in fp32: float16 holds more"
    )

    @model_validator(mode="after")
    def _check_residual(self) -> DroppingModel:
        normed = getattr(self, "apply_residual_connection_post_layernorm", False)
        if self.fp32_residual and (normed or getattr(self, "norm", "pre") == "post"):
            raise ValueError(
                "the residual is a LayerNorm's output, which is not fp32: expected fp32_residual=false, got true "
                "([model] fp32_residual, [model] apply_residual_connection_post_layernorm, [model] norm)"
            )
        return self


class Bloom(DroppingModel):
    name: Literal["bloom"] = key("bloom", "the family of models")
    layer_norm_eps: float = key(1e-5, "epsilon of every LayerNorm", gt=0)
    apply_residual_connection_post_layernorm: bool = key(False, "the residual is the LayerNorm's output (BERT's order)")


class GPT(DroppingModel):
    name: Literal["gpt"] = key("gpt", "the family of models")
    layer_norm_eps: float = key(1e-5, "epsilon of every LayerNorm", gt=0)
    max_position_embeddings: int = key(1024, "learned positions, so the longest sequence that it can read", ge=1)
    tied: bool = key(True, "the head is the embedding")


class Bert(DroppingModel):
    name: Literal["bert"] = key("bert", "the family of models")
    layer_norm_eps: float = key(1e-5, "epsilon of every LayerNorm", gt=0)
    norm: Literal["pre", "post"] = key(
        "pre", "LayerNorms before attention and feed-forward, as Megatron's, or after them, as the first BERT's"
    )
    apply_residual_connection_post_layernorm: bool = key(False, "the residual is the LayerNorm's output (BERT's order)")
    gelu: Literal["erf", "tanh"] = key("erf", "of the feed-forward; tanh is an approximation, Megatron's when it fuses")
    head_gelu: Literal["erf", "tanh"] = key("erf", "of the head's transform; Megatron's is erf whatever the other is")
    max_position_embeddings: int = key(512, "learned positions, so the longest sequence that it can read", ge=1)

    @model_validator(mode="after")
    def _check_norm(self) -> Bert:
        if self.norm == "post" and self.apply_residual_connection_post_layernorm:
            raise ValueError(
                "norm='post' has a LayerNorm's output for its residual already: expected "
                "apply_residual_connection_post_layernorm=false, got true "
                "([model] norm, [model] apply_residual_connection_post_layernorm)"
            )
        return self


class Llama(OwnModel):
    name: Literal["llama"] = key("llama", "the family of models")
    n_kv_heads: int = key(0, "heads of keys and values, which groups of heads share; 0 = n_heads", ge=0)
    rms_norm_eps: float = key(1e-5, "epsilon of every RMSNorm", gt=0)
    tied: bool = key(False, "the head is the embedding")
    max_position_embeddings: int = key(4096, "the longest sequence that it is for", ge=1)
    rope_theta: float = key(10_000.0, "base of the rotary frequencies", gt=0)
    rope_factor: float = key(1.0, "divides low rotary frequencies, as in Llama 3.1; 1 = none", ge=1)
    rope_low_freq_factor: float = key(1.0, "a low one turns fewer times than this in rope_original_length", gt=0)
    rope_high_freq_factor: float = key(4.0, "a high one turns more often than this, and is not divided", gt=0)
    rope_original_length: int = key(8192, "the longest sequence before low ones were divided", ge=1)

    @model_validator(mode="after")
    def _check(self) -> Llama:
        if self.n_heads % self.kv_heads:
            raise ValueError(
                f"n_kv_heads={self.n_kv_heads} does not divide n_heads={self.n_heads} "
                f"([model] n_kv_heads, [model] n_heads)"
            )
        if self.head_dim % 2:
            raise ValueError(
                f"rotary positions turn pairs of channels, and hidden_size / n_heads = {self.head_dim} is odd "
                f"([model] hidden_size, [model] n_heads)"
            )
        if self.rope_low_freq_factor >= self.rope_high_freq_factor:
            raise ValueError(
                f"rope_low_freq_factor={self.rope_low_freq_factor} is not below rope_high_freq_factor="
                f"{self.rope_high_freq_factor} ([model] rope_low_freq_factor, [model] rope_high_freq_factor)"
            )
        return self

    @property
    def ffn(self) -> int:
        return self.ffn_hidden_size or -(-8 * self.hidden_size // (3 * 256)) * 256

    @property
    def kv_heads(self) -> int:
        return self.n_kv_heads or self.n_heads


class T5(OwnModel):
    """An encoder and a decoder; by default the first T5's, by other values of the keys v1.1's or Megatron's."""

    name: Literal["t5"] = key("t5", "the family of models")
    n_decoder_layers: int = key(0, "of the decoder; 0 = n_layers, which the encoder has", ge=0)
    kv_channels: int = key(0, "K, of one head; 0 = D / H", ge=0)
    positions: Literal["relative", "learned"] = key(
        "relative", "a number for each head and bucket of distances, or a vector for each place, as Megatron's"
    )
    relative_buckets: int = key(32, "buckets of distances, of each stack", ge=4)
    relative_max_distance: int = key(128, "all distances from here on are one", ge=2)
    max_position_embeddings: int = key(512, "learned positions, so the longest sequence that it can read", ge=1)
    norm: Literal["rms", "layer"] = key("rms", "RMSNorm, or Megatron's LayerNorm, which has a bias")
    norm_eps: float = key(1e-6, "epsilon of every norm", gt=0)
    bias: bool = key(False, "linears and the head have one, as Megatron's")
    activation: Literal["relu", "gelu_erf", "gelu_tanh"] = key("relu", "of the feed-forward; v1.1 has gelu_tanh")
    gated: bool = key(False, "the feed-forward is gated, as v1.1's")
    tied: bool = key(True, "the head is the embedding, which v1.1's is not")
    scale_head: bool = key(True, "what enters the head is times D^-0.5; neither v1.1's nor Megatron's is")
    scale_scores: bool = key(False, "scores of attention are divided by sqrt(K), as Megatron's")
    init: Literal["fan_in", "normal"] = key(
        "fan_in", "initial values by the inputs of each matrix, or N(0, init_std), as Megatron's"
    )
    hidden_dropout: float = key(0.0, "on the embedding and on each residual branch", ge=0, lt=1)
    attention_dropout: float = key(0.0, "on the attention probabilities", ge=0, lt=1)
    inner_dropout: float = key(
        0.0, "inside the feed-forward, and on what each stack gives; Megatron's has neither", ge=0, lt=1
    )

    @model_validator(mode="after")
    def _check(self) -> T5:
        if self.relative_max_distance <= self.relative_buckets // 2:
            raise ValueError(
                f"relative_max_distance={self.relative_max_distance} is within the buckets of one distance each, "
                f"expected more than relative_buckets / 2 = {self.relative_buckets // 2} "
                f"([model] relative_max_distance, [model] relative_buckets)"
            )
        unread = ["max_position_embeddings"]
        if self.positions == "learned":
            unread = ["relative_buckets", "relative_max_distance"]
        if self.init == "fan_in":
            unread.append("init_std")
        fields = type(self).model_fields
        if idle := [key for key in unread if getattr(self, key) != fields[key].default]:
            raise ValueError(
                f"[model] {', '.join(idle)} would not be read with positions='{self.positions}' and init='{self.init}' "
                f"([model] positions, [model] init)"
            )
        return self

    @property
    def head_dim(self) -> int:
        return self.kv_channels or self.hidden_size // self.n_heads

    @property
    def decoder_layers(self) -> int:
        return self.n_decoder_layers or self.n_layers


class Transformers(Model):
    """A model of transformers, which decides its sizes."""

    name: Literal["hf"] = key("hf", "the family of models")
    path: str = key("", "a directory with config.json, weights and tokenizer.json; sizes above are its own")

    @property
    def directory(self) -> str:
        return self.path
