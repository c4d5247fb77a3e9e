"""Modules that the models share: keyed dropout, Megatron's attention and feed-forward, and the head with the loss."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dtmega import config
from dtmega.models.model import Fused
from dtmega.ops import keyed
from dtmega.ops.attention import Dropout, attention
from dtmega.ops.attention_rule import AttentionRule
from dtmega.ops.cross_entropy import linear_cross_entropy
from dtmega.ops.softmax import Passes

Gelu = Literal["erf", "tanh"]


class KeyedDropout(nn.Module):
    """Dropout whose mask is a function of (site key, sample id, global position, channel), not of a generator's state.

    The dropped elements therefore do not depend on the layout, and recomputation needs no saved generator state.

    Attributes:
        key: key of this site, an int32 scalar buffer; `init_buffers` sets the key from the seed and the site's name.
    """

    key: Tensor

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p
        self.register_buffer("key", torch.zeros((), dtype=torch.int32), persistent=False)

    def forward(
        self, x: Tensor, sample_ids: Tensor | None, places: Tensor, channel_ids: Tensor | None = None
    ) -> Tensor:
        """Drop elements of x, [B, S, D], and multiply the remaining elements by 1 / (1 - p).

        Args:
            x: activations, [B, S, D], or this rank's shard along S or D.
            sample_ids: global sample indices, [B] int64; may be None only if nothing is dropped.
            places: global position of each token of x, [B, S] int. If x is a shard along S, the plan replaces the
                positions of the full sequence with those of the shard.
            channel_ids: global indices of the channels of x, [D] int32; None if x has all channels.
        """
        if self.p == 0.0 or not self.training:
            return x
        sample_ids = _needed(sample_ids)
        channels = channel_ids
        if channels is None:
            channels = torch.arange(x.shape[2], device=x.device, dtype=torch.int32)
        # One hash per token, [B, S]; `keep` combines these hashes with the channel indices into the mask [B, S, D].
        rows = keyed.mix(keyed.fold(sample_ids) ^ self.key).unsqueeze(1) ^ places.to(torch.int32)
        return torch.where(keyed.keep(self.p, keyed.mix(rows), channels), x / (1 - self.p), 0.0)

    def of_probabilities(self, head_ids: Tensor, sample_ids: Tensor | None) -> Dropout | None:
        """This site's dropout as an argument for `attention`; None if nothing is dropped.

        Args:
            head_ids: global indices of this rank's heads, [H] int32.
            sample_ids: global sample indices, [B] int64; may be None only if nothing is dropped.
        """
        if self.p == 0.0 or not self.training:
            return None
        return Dropout(self.p, self.key, head_ids, _needed(sample_ids))


def _needed(sample_ids: Tensor | None) -> Tensor:
    if sample_ids is None:
        raise ValueError("dropout in training is keyed by sample_ids [B]: pass them with the tokens")
    return sample_ids


def set_dropout_keys(model: nn.Module, seed: int) -> None:
    """Set the key of each dropout site of a model, or of a stage, from the seed and the site's name."""
    for name, module in model.named_modules():
        if isinstance(module, KeyedDropout):
            module.key.fill_(keyed.key(seed, name))


def residual_stream(embedded: Tensor, cfg: config.DropoutModel) -> Tensor:
    """The embedding's output in the dtype of the residual stream: fp32 if `cfg.fp32_residual` is set."""
    return embedded.float() if cfg.fp32_residual else embedded


class MixedLayerNorm(nn.LayerNorm):
    """A LayerNorm that reads the fp32 residual stream and returns its result in the dtype of the weight.

    The norm is computed in fp32 and rounded once, at the end, as in Megatron's `MixedFusedLayerNorm`.
    """

    def forward(self, input: Tensor) -> Tensor:
        wide = input.dtype
        normed = F.layer_norm(input, self.normalized_shape, self.weight.to(wide), self.bias.to(wide), self.eps)
        return normed.to(self.weight.dtype)


def stream_norm(cfg: config.DropoutModel, eps: float) -> nn.LayerNorm:
    """A LayerNorm for the residual stream: `MixedLayerNorm` if the stream is in fp32, otherwise `nn.LayerNorm`."""
    kind = MixedLayerNorm if cfg.fp32_residual else nn.LayerNorm
    return kind(cfg.hidden_size, eps)


class FusedAttention(nn.Module):
    """Self-attention with one fused projection, whose rows are ordered [head, (q, k, v), K] as in Megatron and BLOOM.

    With query-key layer scaling, queries are divided by `number` x sqrt(K), and scores are multiplied by `number` in
    fp32. The scores do not change mathematically, but the products q k^T stay below the largest float16 number. The
    scaling matters only with attention dropout, where the plain formula stores the products in float16; all other
    kernels keep the products in fp32.

    Args:
        cfg: sizes and dropout rate of the model.
        number: index of the layer, from 1.
    """

    def __init__(self, cfg: config.DropoutModel, number: int) -> None:
        super().__init__()
        self.head_dim = cfg.head_dim
        self.coefficient = float(number) if cfg.query_key_layer_scaling else None
        self.qkv = nn.Linear(cfg.hidden_size, 3 * cfg.hidden_size)
        self.out = nn.Linear(cfg.hidden_size, cfg.hidden_size)
        self.dropout = KeyedDropout(cfg.attention_dropout)

    def forward(self, x: Tensor, rule: AttentionRule, head_ids: Tensor, sample_ids: Tensor | None) -> Tensor:
        # The -1 stands for the number of heads, because under tp the projection has only this rank's heads.
        q, k, v = self.qkv(x).unflatten(-1, (-1, 3, self.head_dim)).transpose(1, 2).unbind(3)  # [B, H, S, K] each
        dropout = self.dropout.of_probabilities(head_ids, sample_ids)
        if self.coefficient is not None:
            q = q / (self.coefficient * math.sqrt(self.head_dim))
        attended = attention(q, k, v, rule, dropout, scale=self.coefficient)
        return self.out(attended.transpose(1, 2).flatten(2))

    def fused(self) -> dict[str, Fused]:
        """The matrices of q, k and v in the fused projection's weight (`Model.matrices`)."""
        return {"qkv.weight": (0, (self.head_dim,) * 3)}

    def unseen(self) -> dict[str, Tensor]:
        """Mask of the fused bias's key rows, which affect no output: bias name -> bool [3 D] (`Model.unseen`)."""
        rows = torch.arange(len(self.qkv.bias)) // self.head_dim
        return {"qkv.bias": rows % 3 == 1}


def gelu(x: Tensor, form: Gelu) -> Tensor:
    """GELU (arXiv:1606.08415): `erf` is the exact form, and `tanh` is the paper's approximation."""
    if form == "tanh" and x.device.type == "cpu" and torch.compiler.is_compiling():
        # Replace the tanh with a sigmoid, 1 + tanh(u) = 2 sigmoid(2 u): Inductor's CPU kernel then takes half the time.
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        twice_u = math.sqrt(8 / math.pi) * (wide + 0.044715 * wide * wide * wide)
        return (wide * torch.sigmoid(twice_u)).to(x.dtype)
    return F.gelu(x, approximate="none" if form == "erf" else "tanh")


# Activation functions for the gate of a gated feed-forward (arXiv:2002.05202; Megatron-DeepSpeed's glu_activations).
GATES: dict[str, Callable[[Tensor], Tensor]] = {
    "geglu": F.gelu,
    "swiglu": F.silu,
    "reglu": F.relu,
    "liglu": lambda x: x,
}


class MLP(nn.Module):
    """The feed-forward layers: down(gelu(up x)), or down(value * activation(gate)) if `[model] glu` is set.

    With a gate, the rows of `up` are ordered [F, (value, gate)], so that tp never separates a value from its gate.

    Args:
        cfg: sizes and kind of gate of the model.
        form: variant of the GELU; Megatron, BLOOM and GPT-2 use the tanh approximation.
    """

    def __init__(self, cfg: config.DropoutModel, form: Gelu = "tanh") -> None:
        super().__init__()
        self.form: Gelu = form
        self.gate = GATES.get(cfg.glu)
        self.up = nn.Linear(cfg.hidden_size, cfg.ffn if self.gate is None else 2 * cfg.ffn)
        self.down = nn.Linear(cfg.ffn, cfg.hidden_size)

    def fused(self) -> dict[str, Fused]:
        """The value and gate matrices in the weight of `up` (`Model.matrices`)."""
        return {} if self.gate is None else {"up.weight": (0, (1, 1))}

    def forward(self, x: Tensor) -> Tensor:
        x = self.up(x)
        if self.gate is None:
            return self.down(gelu(x, self.form))
        value, gate = x.unflatten(-1, (-1, 2)).unbind(-1)
        return self.down(value * self.gate(gate))


class LMHead(nn.Module):
    """The output layer. Without labels, the layer returns logits; with labels, it returns the sum of token losses.

    The head also computes the loss, so that the matrix product and the cross-entropy run chunk by chunk, and the
    logits of all tokens never exist at once. Weight and bias may have more rows than the vocabulary (`[model]
    pad_vocab_to_multiple`); the extra rows produce no logits.

    Args:
        cfg: sizes of the model and terms of its loss.
        bias: whether to add a bias to the logits. BERT has this bias; BLOOM and GPT do not.

    Attributes:
        loss_name: name of the head's loss among the sums that the model returns.
        expected: gradient that backward will pass to this loss, set by `Model.expect`.
        passes: class that computes the loss's softmax; `Model.compile_losses` exchanges it.
    """

    bias: nn.Parameter | None
    loss_name = "lm"
    expected = 1.0
    passes = Passes

    def __init__(self, cfg: config.NativeModel, bias: bool = False) -> None:
        super().__init__()
        self.vocab_size = cfg.vocab_size
        self.label_smoothing = cfg.label_smoothing
        self.z_loss = cfg.z_loss
        self.weight = nn.Parameter(torch.empty(cfg.padded_vocab_size, cfg.hidden_size))
        self.register_parameter("bias", nn.Parameter(torch.empty(cfg.padded_vocab_size)) if bias else None)

    def forward(self, h: Tensor, labels: Tensor | None = None, label_weights: Tensor | None = None) -> Tensor:
        """Map h to logits [..., V]. With labels, return the sum of token losses instead, as an fp32 scalar.

        Args:
            h: hidden states, [..., D].
            labels: tokens to predict, [...] int64; the loss ignores labels of -100.
            label_weights: weight of each token's loss in the sum, [...] fp32; None if all weights are 1.
        """
        if labels is None:
            bias = None if self.bias is None else self.bias[: self.vocab_size]
            return F.linear(h, self.weight[: self.vocab_size], bias)
        rows = h.flatten(0, -2)
        terms = self.loss_terms(label_weights)
        return linear_cross_entropy(rows, self.weight, labels.flatten(), bias=self.bias, **terms)

    def loss_terms(self, label_weights: Tensor | None = None) -> dict[str, Any]:
        """The keyword arguments for `linear_cross_entropy`."""
        # Only training adds smoothing and z-loss, so that evaluations of runs with different settings can be compared.
        terms = {"label_smoothing": self.label_smoothing, "z_loss": self.z_loss} if self.training else {}
        weights = None if label_weights is None else label_weights.flatten()
        return {
            "n_valid": self.vocab_size,
            "label_weights": weights,
            "expected": self.expected,
            "passes": self.passes,
            **terms,
        }


def finish(
    hidden: Tensor, norm: nn.Module | None, head: LMHead | None, labels: Tensor | None, label_weights: Tensor | None
) -> Any:
    """Compute the outputs of a decoder stage from the hidden state after its last layer.

    Returns:
        {"hidden": hidden} on a stage without the head; on the stage with the head, {"lm": fp32 sum of token losses} if
        there are labels, otherwise the logits [B, S, V].
    """
    if norm is None or head is None:
        return {"hidden": hidden}
    logits_or_loss = head(norm(hidden), labels, label_weights)
    return logits_or_loss if labels is None else {"lm": logits_or_loss}
