"""The cost of a BLOOM by the formulas of the papers: the truth for what the code counts on a model."""

from __future__ import annotations

from dtmega.config.families.bloom import BloomKeys


def layer_elements(model: BloomKeys) -> int:
    """Two LayerNorms 4D, QKV 3D^2 + 3D, output D^2 + D, MLP 2DF + F + D."""
    d, f = model.hidden_size, model.ffn
    return 4 * d + (3 * d * d + 3 * d) + (d * d + d) + (2 * d * f + f + d)


def elements(model: BloomKeys) -> int:
    """Embedding VD and its LayerNorm 2D, the layers, the last LayerNorm 2D; the head is the embedding."""
    d = model.hidden_size
    return model.vocab_size * d + 2 * d + model.n_layers * layer_elements(model) + 2 * d


def layer_flops_per_token(model: BloomKeys, seq_len: int) -> int:
    """Forward and backward: 6 for each of 4 D^2 + 2 DF weights, and for half of S keys 6 S D."""
    d = model.hidden_size
    return 6 * (4 * d * d + 2 * d * model.ffn) + 6 * seq_len * d


def flops_per_token(model: BloomKeys, seq_len: int) -> int:
    """The layers, and 6 VD of the head."""
    return model.n_layers * layer_flops_per_token(model, seq_len) + 6 * model.vocab_size * model.hidden_size


def megatron_flops_per_token(model: BloomKeys, seq_len: int) -> float:
    """Hardware FLOPs with full recompute, which Megatron's and BLOOM's logs call FLOPs.

    96 L D^2 (1 + S / 6D + V / 16LD), Narayanan et al. 2021, equation 3: the layers' forward runs twice, attention is
    counted over all S keys, and F = 4D.
    """
    layers, d = model.n_layers, model.hidden_size
    return 96 * layers * d * d * (1 + seq_len / (6 * d) + model.vocab_size / (16 * layers * d))
