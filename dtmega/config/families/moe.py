"""The keys of mixtures of experts."""

from __future__ import annotations

from fractions import Fraction
from typing import Literal

from pydantic import model_validator

from dtmega.config.families.llama import LlamaKeys
from dtmega.config.schema import key


class MoEKeys(LlamaKeys):
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
    def _check_experts(self) -> MoEKeys:
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
    def _check_latent(self) -> MoEKeys:
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
