"""BLOOM from its definitions alone, in fp64, with everything in memory: what the tests compare numbers with.

Nothing of dtmega is called: of a configuration the numbers are read, of a model its parameters, by their names.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

Weights = dict[str, Tensor]


def mixed(x: np.ndarray) -> np.ndarray:
    """lowbias32 (Wellons, "Prospecting for Hash Functions", 2018) of uint32."""
    x = (x ^ x >> 16) * np.uint32(0x7FEB352D)
    x = (x ^ x >> 15) * np.uint32(0x846CA68B)
    return x ^ x >> 16


def folded(numbers: Tensor) -> np.ndarray:
    """int64 to uint32: the lower half, with the hash of the upper one."""
    wide = numbers.numpy().astype(np.uint64)
    return wide.astype(np.uint32) ^ mixed((wide >> np.uint64(32)).astype(np.uint32))


def key(seed: int, name: str) -> np.uint32:
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=4).digest()
    return np.uint32(int.from_bytes(digest, "little"))


def kept(p: float, seed: int, site: str, sample_ids: Tensor, *sizes: int) -> Tensor:
    """[B, *sizes]: what dropout of probability p keeps; each index is hashed into what the ones before it gave."""
    *places, last = (np.arange(size, dtype=np.uint32) for size in sizes)
    state = mixed(folded(sample_ids) ^ key(seed, site))
    for place in places:
        state = mixed(state[..., None] ^ place)
    state = mixed(state[..., None] ^ mixed(last))
    return torch.from_numpy(state.view(np.int32) >= round(p * 2**32) - 2**31)


def normal(seed: int, name: str, shape: tuple[int, ...]) -> Tensor:
    """N(0, 1): element i is the inverse normal distribution of a hash of i."""
    number = torch.arange(math.prod(shape))
    hashed = mixed(mixed(folded(number) ^ key(seed, name)) ^ key(seed, name + "#"))
    uniform = (hashed.view(np.int32) + (2.0**31 + 0.5)) / 2.0**32
    return torch.special.ndtri(torch.from_numpy(uniform)).view(shape)


def initial(cfg: Any, seed: int) -> Weights:
    """The initial values of training, in fp32: N(0, std), and std / sqrt(2 L) for what writes to the residual."""
    d, ffn = cfg.hidden_size, cfg.ffn_hidden_size or 4 * cfg.hidden_size
    rows = -(-cfg.vocab_size // cfg.pad_vocab_to_multiple) * cfg.pad_vocab_to_multiple
    matrices = {"embed": (rows, d)}
    norms = ["embed_norm", "norm"]
    for layer in (f"layers.{i}." for i in range(cfg.n_layers)):
        matrices |= {layer + "attn.qkv": (3 * d, d), layer + "attn.out": (d, d)}
        matrices |= {layer + "mlp.up": (ffn, d), layer + "mlp.down": (d, ffn)}
        norms += [layer + "attn_norm", layer + "mlp_norm"]
    weights = {}
    for name, shape in matrices.items():
        scaled = name.endswith(("attn.out", "mlp.down"))
        std = cfg.init_std / math.sqrt(2 * cfg.n_layers) if scaled else cfg.init_std
        weights[f"{name}.weight"] = normal(seed, f"{name}.weight", shape) * std
        if name != "embed":
            weights[f"{name}.bias"] = torch.zeros(shape[0])
    for name in norms:
        weights |= {f"{name}.weight": torch.ones(d), f"{name}.bias": torch.zeros(d)}
    return {name: weight.float() for name, weight in weights.items()}


def slopes(n: int) -> list[float]:
    """`get_slopes` of Megatron-DeepSpeed's `ParallelTransformerLayer._build_alibi_tensor`, as it is there."""

    def get_slopes_power_of_2(n: int) -> list[float]:
        start = 2 ** (-(2 ** -(math.log2(n) - 3)))
        return [start * start**i for i in range(n)]

    if math.log2(n).is_integer():
        return get_slopes_power_of_2(n)
    closest = 2 ** math.floor(math.log2(n))
    return get_slopes_power_of_2(closest) + slopes(2 * closest)[0::2][: n - closest]


def logits(
    cfg: Any,
    weights: Weights,
    tokens: Tensor,
    documents: Tensor | None = None,
    prefix: Tensor | None = None,
    drop: Callable[..., Tensor] = lambda x, p, site: x,
) -> Tensor:
    """[B, S, V]. `drop` is called with x, a probability and the name of the site."""
    n, s = tokens.shape
    heads, width = cfg.n_heads, cfg.hidden_size // cfg.n_heads
    place = torch.arange(s)
    allowed = place[:, None] >= place
    if prefix is not None:
        allowed = allowed | (prefix[:, None, :, None] & prefix[:, None, None, :])
    if documents is not None:
        allowed = allowed & (documents[:, None, :, None] == documents[:, None, None, :])
    alibi = torch.tensor(slopes(heads), dtype=torch.float64)[:, None, None] * place

    def norm(x: Tensor, name: str) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        scale = (centred.square().mean(-1, keepdim=True) + cfg.layer_norm_eps).sqrt()
        return centred / scale * weights[f"{name}.weight"] + weights[f"{name}.bias"]

    def linear(x: Tensor, name: str) -> Tensor:
        return x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]

    h = drop(norm(weights["embed.weight"][tokens], "embed_norm"), cfg.hidden_dropout, "embed_dropout")
    for layer in (f"layers.{i}." for i in range(cfg.n_layers)):
        x = norm(h, layer + "attn_norm")
        q, k, v = linear(x, layer + "attn.qkv").view(n, s, heads, 3, width).permute(3, 0, 2, 1, 4)
        scores = (q @ k.mT / math.sqrt(width) + alibi).masked_fill(~allowed, -math.inf)
        probabilities = drop(scores.softmax(-1), cfg.attention_dropout, layer + "attn.dropout")
        attended = linear((probabilities @ v).transpose(1, 2).reshape(n, s, -1), layer + "attn.out")
        residual = x if cfg.apply_residual_connection_post_layernorm else h
        h = residual + drop(attended, cfg.hidden_dropout, layer + "attn_dropout")
        x = norm(h, layer + "mlp_norm")
        up = linear(x, layer + "mlp.up")
        gelu = 0.5 * up * (1 + torch.tanh(math.sqrt(2 / math.pi) * (up + 0.044715 * up**3)))
        residual = x if cfg.apply_residual_connection_post_layernorm else h
        h = residual + drop(linear(gelu, layer + "mlp.down"), cfg.hidden_dropout, layer + "mlp_dropout")
    return norm(h, "norm") @ weights["embed.weight"][: cfg.vocab_size].T


def loss(cfg: Any, weights: Weights, batch: dict[str, Tensor], seed: int, training: bool) -> Tensor:
    """The sum over tokens of the cross-entropy; in training with dropout, smoothed labels and the z-loss."""

    def drop(x: Tensor, p: float, site: str) -> Tensor:
        if not training or p == 0:
            return x
        return torch.where(kept(p, seed, site, batch["sample_ids"], *x.shape[1:]), x / (1 - p), 0)

    out = logits(cfg, weights, batch["tokens"], batch.get("document_ids"), batch.get("prefix"), drop)
    log_z = out.logsumexp(-1)
    counts = batch["labels"] != -100
    log_p = out - log_z[..., None]
    of_label = log_p.gather(-1, batch["labels"].where(counts, 0)[..., None]).squeeze(-1)
    if training:
        smooth = cfg.label_smoothing
        losses = -(1 - smooth) * of_label - smooth * log_p.mean(-1) + cfg.z_loss * log_z**2
    else:
        losses = -of_label
    return (losses * batch.get("label_weights", 1))[counts].sum()
