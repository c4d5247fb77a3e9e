"""The keys of Llama 2 and 3, Mistral and Qwen3."""

from __future__ import annotations

from typing import Literal

from pydantic import model_validator

from dtmega.config.model_keys import NativeModel
from dtmega.config.schema import key


class LlamaKeys(NativeModel):
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
    def _check(self) -> LlamaKeys:
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
