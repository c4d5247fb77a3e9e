"""The keys of T5."""

from __future__ import annotations

from typing import Literal

from pydantic import model_validator

from dtmega.config.model_keys import NativeModel
from dtmega.config.schema import key


class T5Keys(NativeModel):
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
    def _check(self) -> T5Keys:
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
