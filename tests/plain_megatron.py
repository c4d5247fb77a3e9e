"""Megatron's GPT, BERT, T5 and BLOOM on one device, in plain torch and by its names: the forward passes of its sources.

Weights are those of a whole model, flat names, heads of a fused QKV outermost, [H, (q, k, v), K].
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Weights = Mapping[str, Tensor]


class Plain:
    """One model.

    Args:
        slopes: of ALiBi, one per head; none: positions are learned.
    """

    def __init__(self, weights: Weights, heads: int, slopes: tuple[float, ...] = ()) -> None:
        self.weights = {name: tensor.float() for name, tensor in weights.items()}
        self.heads = heads
        self.slopes = slopes

    def linear(self, x: Tensor, name: str) -> Tensor:
        return F.linear(x, self.weights[f"{name}.weight"], self.weights[f"{name}.bias"])

    def norm(self, x: Tensor, name: str) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], self.weights[f"{name}.weight"], self.weights[f"{name}.bias"], 1e-5)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        """[B, S, H, K] each -> [B, T, D]"""
        scores = torch.einsum("bthk,bshk->bhts", q, k) / math.sqrt(q.shape[-1])
        if self.slopes:
            scores = scores + torch.tensor(self.slopes)[:, None, None] * torch.arange(k.shape[1])
        if causal:
            scores = scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1).bool(), -10_000.0)
        return torch.einsum("bhts,bshk->bthk", scores.softmax(-1), v).flatten(2)

    def layer(self, h: Tensor, name: str, causal: bool, memory: Tensor | None = None) -> Tensor:
        x = self.norm(h, f"{name}.input_layernorm")
        qkv = self.linear(x, f"{name}.self_attention.query_key_value").unflatten(-1, (self.heads, 3, -1))
        h = h + self.linear(self.attend(*qkv.unbind(-2), causal), f"{name}.self_attention.dense")
        x = self.norm(h, f"{name}.post_attention_layernorm")
        if memory is not None:
            q = self.linear(x, f"{name}.inter_attention.query").unflatten(-1, (self.heads, -1))
            kv = self.linear(memory, f"{name}.inter_attention.key_value").unflatten(-1, (self.heads, 2, -1))
            h = h + self.linear(self.attend(q, *kv.unbind(-2), False), f"{name}.inter_attention.dense")
            x = self.norm(h, f"{name}.post_inter_attention_layernorm")
        inner = F.gelu(self.linear(x, f"{name}.mlp.dense_h_to_4h"), approximate="tanh")
        return h + self.linear(inner, f"{name}.mlp.dense_4h_to_h")

    def stack(self, h: Tensor, name: str, causal: bool, memory: Tensor | None = None) -> Tensor:
        n_layers = len([key for key in self.weights if key.startswith(f"{name}.") and "input_layernorm.weight" in key])
        for i in range(n_layers):
            h = self.layer(h, f"{name}.layers.{i}", causal, memory)
        return self.norm(h, f"{name}.final_layernorm")

    def embedded(self, tokens: Tensor) -> Tensor:
        h = F.embedding(tokens, self.weights["embedding.word_embeddings.weight"])
        if self.slopes:
            return self.norm(h, "embedding.word_embeddings.norm")
        return h + self.weights["embedding.position_embeddings.weight"][: tokens.shape[1]]

    def head(self, h: Tensor) -> Tensor:
        return F.linear(h, self.weights["embedding.word_embeddings.weight"], self.weights.get("lm_head.bias"))

    def decoder(self, tokens: Tensor) -> dict[str, Tensor]:
        """GPT's and BLOOM's logits."""
        return {"lm": self.head(self.stack(self.embedded(tokens), "encoder", causal=True))}

    def bert(self, tokens: Tensor, types: Tensor) -> dict[str, Tensor]:
        h = self.embedded(tokens) + F.embedding(types, self.weights["embedding.tokentype_embeddings.weight"])
        h = self.stack(h, "encoder", causal=False)
        words = self.norm(F.gelu(self.linear(h, "lm_head.dense")), "lm_head.layernorm")
        pooled = torch.tanh(self.linear(h[:, 0], "pooler.dense"))
        return {"logits": self.head(words), "order": self.linear(pooled, "binary_head")}

    def t5(self, tokens: Tensor, decoder_tokens: Tensor) -> dict[str, Tensor]:
        memory = self.stack(self.embedded(tokens), "encoder", causal=False)
        return {"lm": self.head(self.stack(self.embedded(decoder_tokens), "decoder", True, memory))}


def shapes(kind: str, D: int, inner: int, V: int, S: int, L: int) -> dict[str, Any]:
    """Shape of each tensor of a model."""

    def linear(name: str, rows: int, columns: int) -> dict[str, Any]:
        return {f"{name}.weight": (rows, columns), f"{name}.bias": (rows,)}

    def norm(name: str) -> dict[str, Any]:
        return {f"{name}.weight": (D,), f"{name}.bias": (D,)}

    def stack(stack: str) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for i in range(L):
            name = f"{stack}.layers.{i}"
            found |= norm(f"{name}.input_layernorm") | linear(f"{name}.self_attention.query_key_value", 3 * D, D)
            found |= linear(f"{name}.self_attention.dense", D, D) | norm(f"{name}.post_attention_layernorm")
            if stack == "decoder":
                found |= linear(f"{name}.inter_attention.query", D, D)
                found |= linear(f"{name}.inter_attention.key_value", 2 * D, D)
                found |= linear(f"{name}.inter_attention.dense", D, D)
                found |= norm(f"{name}.post_inter_attention_layernorm")
            found |= linear(f"{name}.mlp.dense_h_to_4h", inner, D) | linear(f"{name}.mlp.dense_4h_to_h", D, inner)
        return found | norm(f"{stack}.final_layernorm")

    found: dict[str, Any] = {"embedding.word_embeddings.weight": (V, D)}
    found |= (
        norm("embedding.word_embeddings.norm") if kind == "bloom" else {"embedding.position_embeddings.weight": (S, D)}
    )
    found |= {"embedding.tokentype_embeddings.weight": (2, D)} if kind == "bert" else {}
    found |= stack("encoder")
    if kind == "t5":
        found |= stack("decoder")
    if kind == "bert":
        found |= linear("lm_head.dense", D, D) | norm("lm_head.layernorm")
        found |= linear("pooler.dense", D, D) | linear("binary_head", 2, D)
    return found | ({"lm_head.bias": (V,)} if kind in ("bert", "t5") else {})
