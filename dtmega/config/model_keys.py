"""The keys of [model]: one class per family, chosen by `name`. Base classes declare the shared keys."""

from __future__ import annotations

from fractions import Fraction
from typing import Any, Literal

from pydantic import model_validator

from dtmega.config.schema import LocalPath, PathOrUrl, Section, key


class Model(Section):
    """The keys that every family has.

    To add a family, write a class below with the family's `name` and list the class in `Config.model`.
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


class Bloom(DropoutModel):
    """BLOOM: ALiBi, a LayerNorm after the embedding, and a tied head."""

    name: Literal["bloom"] = key("bloom", "the family of models")
    layer_norm_eps: float = key(1e-5, "epsilon of every LayerNorm", gt=0)
    apply_residual_connection_post_layernorm: bool = key(
        False, "take the residual after the LayerNorm instead of before it"
    )


class GPT(DropoutModel):
    """GPT-2 and GPT-3: learned positions."""

    name: Literal["gpt"] = key("gpt", "the family of models")
    layer_norm_eps: float = key(1e-5, "epsilon of every LayerNorm", gt=0)
    max_position_embeddings: int = key(1024, "number of learned positions: the longest sequence", ge=1)
    tied: bool = key(True, "share the weights of the embedding and the head")


class Bert(DropoutModel):
    """BERT, with LayerNorms in Megatron's order or in the original order."""

    name: Literal["bert"] = key("bert", "the family of models")
    layer_norm_eps: float = key(1e-5, "epsilon of every LayerNorm", gt=0)
    norm: Literal["pre", "post"] = key(
        "pre", "pre: LayerNorms before attention and feed-forward, as in Megatron; post: after them, as in the paper"
    )
    apply_residual_connection_post_layernorm: bool = key(
        False, "take the residual after the LayerNorm instead of before it"
    )
    gelu: Literal["erf", "tanh"] = key(
        "erf", "GELU of the feed-forward: exact (erf), or the tanh approximation, as in Megatron's fused kernel"
    )
    head_gelu: Literal["erf", "tanh"] = key("erf", "GELU in the head; Megatron always uses erf here")
    max_position_embeddings: int = key(512, "number of learned positions: the longest sequence", ge=1)

    @model_validator(mode="after")
    def _check_norm(self) -> Bert:
        if self.norm == "post" and self.apply_residual_connection_post_layernorm:
            raise ValueError(
                "norm='post' has a LayerNorm's output for its residual already: expected "
                "apply_residual_connection_post_layernorm=false, got true "
                "([model] norm, [model] apply_residual_connection_post_layernorm)"
            )
        return self


class Llama(NativeModel):
    """Llama 2 and 3, Mistral and Qwen3: rotary positions, RMSNorm, a gated feed-forward, grouped key/value heads."""

    name: Literal["llama"] = key("llama", "the family of models")
    n_kv_heads: int = key(0, "heads of keys and values, each shared by a group of query heads; 0 = n_heads", ge=0)
    kv_channels: int = key(0, "K: width of one attention head; 0 = D / H", ge=0)
    qk_norm: bool = key(False, "an RMSNorm over the K channels of each query and key, before the rotation, as in Qwen3")
    window: int = key(0, "a token attends only to its last `window` tokens, itself included; 0 = no limit", ge=0)
    window_layers: list[int] = key(
        [], "numbers of the layers whose attention has the window, from 0; empty = all layers"
    )
    rms_norm_eps: float = key(1e-5, "epsilon of every RMSNorm", gt=0)
    tied: bool = key(False, "share the weights of the embedding and the head")
    max_position_embeddings: int = key(4096, "the longest sequence", ge=1)
    rope_theta: float = key(10_000.0, "base of the rotary frequencies", gt=0)
    rope_factor: float = key(1.0, "divide low rotary frequencies by this, as Llama 3.1 does; 1 = no change", ge=1)
    rope_low_freq_factor: float = key(
        1.0, "low frequencies are those with fewer turns than this in rope_original_length tokens", gt=0
    )
    rope_high_freq_factor: float = key(
        4.0, "frequencies with more turns than this stay as they are; in between, rope_factor fades in", gt=0
    )
    rope_original_length: int = key(8192, "the longest sequence before the context was extended by rope_factor", ge=1)

    @model_validator(mode="after")
    def _check(self) -> Llama:
        if self.n_heads % self.kv_heads:
            raise ValueError(
                f"n_kv_heads={self.n_kv_heads} does not divide n_heads={self.n_heads} "
                f"([model] n_kv_heads, [model] n_heads)"
            )
        if self.head_dim % 2:
            raise ValueError(
                f"rotary positions turn pairs of channels, and a head has an odd number of channels: {self.head_dim} "
                f"([model] kv_channels, [model] hidden_size, [model] n_heads)"
            )
        if self.rope_low_freq_factor >= self.rope_high_freq_factor:
            raise ValueError(
                f"rope_low_freq_factor={self.rope_low_freq_factor} is not below rope_high_freq_factor="
                f"{self.rope_high_freq_factor} ([model] rope_low_freq_factor, [model] rope_high_freq_factor)"
            )
        self._check_window()
        return self

    def _check_window(self) -> None:
        """Check `window_layers`.

        Raises:
            ValueError: layers are listed although no window is set, the list has all layers, the list is not strictly
                ascending, or a listed number belongs to no layer.
        """
        layers = self.window_layers
        if layers and not self.window:
            raise ValueError(f"window_layers={layers} without a window: expected window > 0, got 0 ([model] window)")
        if len(layers) == self.n_layers:
            raise ValueError(f"window_layers={layers} are all layers: expected [] ([model] window_layers)")
        if layers != sorted(set(layers) & set(range(self.n_layers))):
            raise ValueError(
                f"window_layers={layers}: expected rising numbers from 0 to n_layers - 1 = {self.n_layers - 1} "
                f"([model] window_layers, [model] n_layers)"
            )

    @property
    def ffn(self) -> int:
        """F: inner width of the feed-forward.

        The default is 8/3 D: a gated feed-forward of width 8/3 D has as many weights as an ungated feed-forward of
        width 4 D.
        """
        return self.ffn_hidden_size or -(-8 * self.hidden_size // (3 * 256)) * 256

    @property
    def kv_heads(self) -> int:
        """Number of key/value heads, with the default resolved."""
        return self.n_kv_heads or self.n_heads

    @property
    def rotary_dim(self) -> int:
        """Number of rotated channels in each query and key."""
        return self.head_dim

    def window_of(self, layer: int) -> int:
        """The attention window of layer `layer`, counted from layer 0; a result of 0 means that there is no window."""
        return self.window if not self.window_layers or layer in self.window_layers else 0


class MoE(Llama):
    """Mixture-of-experts models: Llama, with a router and several experts in place of each layer's feed-forward."""

    name: Literal["moe"] = key("moe", "the family of models")  # pyright: ignore[reportIncompatibleVariableOverride]
    kv_latent_size: int = key(
        0,
        "latent attention (MLA), as in DeepSeek-V3: width of the vector that keys and values of all heads are computed "
        "from; 0 = Llama's attention",
        ge=0,
    )
    q_latent_size: int = key(
        0, "latent attention: width of the vector that queries are computed from; 0 = from the hidden state", ge=0
    )
    rotary_channels: int = key(
        0, "latent attention: P: of the K channels, the last P are rotated, and all heads share them in keys", ge=0
    )
    v_channels: int = key(0, "latent attention: width of one head's values, at most K; 0 = K - P", ge=0)
    n_experts: int = key(8, "E: routed experts in each layer", ge=1)
    experts_per_token: int = key(2, "k: routed experts that each token uses", ge=1)
    expert_ffn_hidden_size: int = key(0, "width inside one expert; 0 = the same as ffn_hidden_size", ge=0)
    shared_experts: int = key(
        0, "experts that every token uses besides its routed ones: one feed-forward, as wide as these together", ge=0
    )
    dense_layers: int = key(0, "first layers that have a feed-forward of width ffn_hidden_size, and no experts", ge=0)
    router_scores: Literal["softmax", "sigmoid"] = key(
        "softmax", "scores of the experts: softmax over all experts, or sigmoid of each, as in DeepSeek-V3"
    )
    normalize_weights: bool = key(True, "divide the weights of a token's experts by their sum")
    routed_scale: float = key(1.0, "factor of the weights of a token's experts", gt=0)
    expert_groups: int = key(1, "groups of consecutive experts; a token uses only experts of its best groups", ge=1)
    groups_per_token: int = key(1, "groups whose experts a token may use", ge=1)
    router_bias: bool = key(
        False,
        "balance by a number for each expert that is added to its score for the choice, and that each step moves by "
        "router_bias_rate towards an even load of the global batch, as in DeepSeek-V3",
    )
    router_bias_rate: float = key(0.001, "step of router_bias", ge=0)
    balance_loss: float = key(
        0.0,
        "weight of each layer's balance loss, counted per document over tokens with a label (DeepSeek-V3: 1e-4)",
        ge=0,
    )
    router_z_loss: float = key(
        0.0, "weight of each layer's mean of log(Z)^2, where Z is the router's softmax's sum (ST-MoE: 1e-3)", ge=0
    )
    capacity_factor: float = key(
        0.0,
        "largest load of an expert as a multiple of the mean, counted per document over tokens with a label; an expert "
        "drops later tokens; 0 = no limit",
        ge=0,
    )

    @model_validator(mode="after")
    def _check_experts(self) -> MoE:
        if self.dense_layers >= self.n_layers:
            raise ValueError(
                f"dense_layers={self.dense_layers} of n_layers={self.n_layers} leave no layer for experts: expected "
                f"fewer ([model] dense_layers, [model] n_layers)"
            )
        if self.n_experts % self.expert_groups or self.groups_per_token > self.expert_groups:
            raise ValueError(
                f"expert_groups={self.expert_groups} and groups_per_token={self.groups_per_token}: expected a divisor "
                f"of n_experts={self.n_experts}, and no more groups per token than groups "
                f"([model] expert_groups, [model] groups_per_token, [model] n_experts)"
            )
        eligible = self.n_experts // self.expert_groups * self.groups_per_token
        if self.experts_per_token > eligible:
            raise ValueError(
                f"experts_per_token={self.experts_per_token} is more than the {eligible} experts that a token may use "
                f"([model] experts_per_token, [model] n_experts, [model] groups_per_token)"
            )
        if self.router_bias_rate != 0.001 and not self.router_bias:
            raise ValueError(
                f"router_bias_rate={self.router_bias_rate} without a bias: expected router_bias=true, got false "
                f"([model] router_bias, [model] router_bias_rate)"
            )
        if (Fraction(str(self.capacity_factor)) * 10**6).denominator != 1:
            raise ValueError(
                f"capacity_factor={self.capacity_factor} has more digits than are counted with: expected at most six "
                f"after the point ([model] capacity_factor)"
            )
        return self

    @model_validator(mode="after")
    def _check_latent(self) -> MoE:
        if not self.kv_latent_size:
            latent_keys = ("q_latent_size", "rotary_channels", "v_channels")
            if unread := [name for name in latent_keys if getattr(self, name)]:
                raise ValueError(
                    f"[model] {', '.join(unread)} would not be read: expected kv_latent_size > 0, got 0 "
                    f"([model] kv_latent_size)"
                )
            return self
        if self.kv_heads != self.n_heads or self.qk_norm:
            raise ValueError(
                f"latent attention computes keys for each head, and has no norms of heads: expected "
                f"n_kv_heads={self.n_heads} and qk_norm=false, got {self.kv_heads} and qk_norm={self.qk_norm} "
                f"([model] n_kv_heads, [model] qk_norm, [model] kv_latent_size)"
            )
        if self.rotary_channels % 2 or not 0 < self.rotary_channels < self.head_dim:
            raise ValueError(
                f"rotary_channels={self.rotary_channels}: expected an even number above 0 and below the "
                f"{self.head_dim} channels of a head ([model] rotary_channels, [model] kv_channels)"
            )
        if self.v_dim > self.head_dim:
            raise ValueError(
                f"v_channels={self.v_channels} is more than the {self.head_dim} channels of a head's keys: expected at "
                f"most as many ([model] v_channels, [model] kv_channels)"
            )
        return self

    @property
    def rotary_dim(self) -> int:
        return self.rotary_channels or self.head_dim

    @property
    def v_dim(self) -> int:
        """Width of one head's values, with the default resolved."""
        return self.v_channels or self.head_dim - self.rotary_channels

    @property
    def expert_ffn(self) -> int:
        """F: inner width of one expert, with the default resolved."""
        return self.expert_ffn_hidden_size or self.ffn

    @property
    def n_mixtures(self) -> int:
        """Number of layers with experts."""
        return self.n_layers - self.dense_layers


class T5(NativeModel):
    """T5: an encoder and a decoder.

    The defaults describe the original T5. The configurations `t5-v1.1-*.toml` and `t5-megatron.toml` have the values of
    T5 v1.1 and of Megatron's own T5.
    """

    name: Literal["t5"] = key("t5", "the family of models")
    n_decoder_layers: int = key(0, "layers of the decoder; 0 = n_layers, the layers of the encoder", ge=0)
    kv_channels: int = key(0, "K: width of one attention head; 0 = D / H", ge=0)
    positions: Literal["relative", "learned"] = key(
        "relative",
        "relative: a learned bias on the scores for each head and bucket of distances; learned: a vector for each "
        "position, as in Megatron",
    )
    relative_buckets: int = key(32, "number of buckets of distances in each stack", ge=4)
    relative_max_distance: int = key(128, "all distances of at least this share one bucket", ge=2)
    max_position_embeddings: int = key(512, "number of learned positions: the longest sequence", ge=1)
    norm: Literal["rms", "layer"] = key("rms", "rms: RMSNorm; layer: LayerNorm with bias, as in Megatron")
    norm_eps: float = key(1e-6, "epsilon of every norm", gt=0)
    bias: bool = key(False, "biases in linear layers and the head, as in Megatron")
    activation: Literal["relu", "gelu_erf", "gelu_tanh"] = key(
        "relu", "activation of the feed-forward; v1.1 has gelu_tanh"
    )
    gated: bool = key(False, "gated feed-forward, as in v1.1")
    tied: bool = key(True, "share the weights of the embedding and the head; false in v1.1")
    scale_head: bool = key(True, "multiply the head's input by D^-0.5; false in v1.1 and Megatron")
    scale_scores: bool = key(False, "divide attention scores by sqrt(K), as in Megatron")
    init: Literal["fan_in", "normal"] = key(
        "fan_in",
        "standard deviation of initial weights; fan_in: from the number of inputs of each matrix; normal: init_std, as "
        "in Megatron",
    )
    hidden_dropout: float = key(0.0, "dropout on the embedding and on each residual branch", ge=0, lt=1)
    attention_dropout: float = key(0.0, "dropout on the attention probabilities", ge=0, lt=1)
    inner_dropout: float = key(
        0.0, "dropout inside the feed-forward and on the output of each stack; Megatron has none there", ge=0, lt=1
    )

    @model_validator(mode="after")
    def _check(self) -> T5:
        # In a decoder, each bucket in the first half holds one distance. Each bucket in the second half holds a range
        # of larger distances, up to the maximum.
        if self.relative_max_distance <= self.relative_buckets // 2:
            raise ValueError(
                f"relative_max_distance={self.relative_max_distance} is within the buckets of one distance each, "
                f"expected more than relative_buckets / 2 = {self.relative_buckets // 2} "
                f"([model] relative_max_distance, [model] relative_buckets)"
            )
        useless = ["max_position_embeddings"]
        if self.positions == "learned":
            useless = ["relative_buckets", "relative_max_distance"]
        if self.init == "fan_in":
            useless.append("init_std")
        fields = type(self).model_fields
        if unread := [name for name in useless if getattr(self, name) != fields[name].default]:
            raise ValueError(
                f"[model] {', '.join(unread)} would not be read with positions='{self.positions}' and "
                f"init='{self.init}' ([model] positions, [model] init)"
            )
        return self

    @property
    def decoder_layers(self) -> int:
        """Number of layers in the decoder, with the default resolved."""
        return self.n_decoder_layers or self.n_layers


class Transformers(Model):
    """A model that transformers implements, with sizes from `config.json` in the model's directory."""

    name: Literal["hf"] = key("hf", "the family of models")
    n_heads: int = key(8, "H: attention heads; 0 = none, as in Mamba", ge=0)  # its config.json sets the number
    path: LocalPath = key(
        "", "local directory of the model: config.json, weights, tokenizer.json; its config.json sets the sizes"
    )

    @property
    def directory(self) -> str:
        return self.path
