"""Llama 2 and 3 (arXiv:2307.09288, arXiv:2407.21783): rotary positions, RMSNorm, SwiGLU, grouped-query attention.

Mistral (arXiv:2310.06825) is a Llama whose attention has a window. Qwen3 (arXiv:2505.09388) is a Llama with an RMSNorm
on each query and key.

bloom.py explains how a model written for one device also runs sharded over many.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dtmega.config.families.llama import LlamaKeys
from dtmega.models.layers import LMHead, finish
from dtmega.models.model import Model
from dtmega.ops.attention import attention
from dtmega.ops.attention_rule import AttentionRule, attention_rule
from dtmega.ops.key_value_cache import KeyValueCache

Rules: TypeAlias = Mapping[int, AttentionRule]  # window (0 for no window) -> attention rule of the batch


class Rotation(NamedTuple):
    """The rotation of queries and keys by their positions (Su et al., arXiv:2104.09864).

    Attributes:
        cos, sin: cosine and sine of each channel pair's rotation angle, [B, S, 1, K / 2] fp32.
    """

    cos: Tensor
    sin: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        """Rotate x, [B, S, H, K]; channels i and i + K / 2 are a pair, as in transformers' checkpoints."""
        # Compute in fp32, the dtype of cos and sin, and round once at the end.
        first, second = x.float().chunk(2, dim=-1)
        turned = torch.cat([first * self.cos - second * self.sin, second * self.cos + first * self.sin], dim=-1)
        return turned.to(x.dtype)


class Attention(nn.Module):
    """Grouped-query attention (arXiv:2305.13245): each of the `n_kv_heads` KV heads serves a group of query heads.

    Args:
        cfg: sizes of the model.
        layer: number of the layer, from 0.
    """

    def __init__(self, cfg: LlamaKeys, layer: int) -> None:
        super().__init__()
        self.head_dim = cfg.head_dim
        self.window = cfg.window_of(layer)
        self.q = nn.Linear(cfg.hidden_size, cfg.n_heads * cfg.head_dim, bias=False)
        self.k = nn.Linear(cfg.hidden_size, cfg.kv_heads * cfg.head_dim, bias=False)
        self.v = nn.Linear(cfg.hidden_size, cfg.kv_heads * cfg.head_dim, bias=False)
        self.out = nn.Linear(cfg.n_heads * cfg.head_dim, cfg.hidden_size, bias=False)
        self.q_norm = nn.RMSNorm(cfg.head_dim, cfg.rms_norm_eps) if cfg.qk_norm else None
        self.k_norm = nn.RMSNorm(cfg.head_dim, cfg.rms_norm_eps) if cfg.qk_norm else None

    def forward(self, x: Tensor, rules: Rules, rotation: Rotation) -> Tensor:
        q = self.q(x).unflatten(-1, (-1, self.head_dim))  # [B, S, H, K]
        k = self.k(x).unflatten(-1, (-1, self.head_dim))  # [B, S, n_kv_heads, K]
        v = self.v(x).unflatten(-1, (-1, self.head_dim))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = rotation(q), rotation(k)
        # Transpose only after the rotation. The tensors then keep the memory order [B, S, H, K], in which the linear
        # layers write and read tensors in forward and backward, so nothing is copied.
        out = attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), rules[self.window])  # [B, H, S, K]
        return self.out(out.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """The SwiGLU gated feed-forward layer (arXiv:2002.05202): down(silu(gate x) * up x).

    Args:
        hidden_size: width of the hidden state, D.
        ffn: width inside the layer, F.
    """

    def __init__(self, hidden_size: int, ffn: int) -> None:
        super().__init__()
        self.gate = nn.Linear(hidden_size, ffn, bias=False)
        self.up = nn.Linear(hidden_size, ffn, bias=False)
        self.down = nn.Linear(ffn, hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """One layer: h + attn(norm h), then h + mlp(norm h).

    Args:
        cfg: sizes of the model.
        layer: number of the layer, from 0.
    """

    def __init__(self, cfg: LlamaKeys, layer: int) -> None:
        super().__init__()
        self.attn_norm = nn.RMSNorm(cfg.hidden_size, cfg.rms_norm_eps)
        self.attn = Attention(cfg, layer)
        self.mlp_norm = nn.RMSNorm(cfg.hidden_size, cfg.rms_norm_eps)
        self.mlp = MLP(cfg.hidden_size, cfg.ffn)

    def forward(self, h: Tensor, rules: Rules, rotation: Rotation) -> Tensor:
        h = h + self.attn(self.attn_norm(h), rules, rotation)
        return h + self.mlp(self.mlp_norm(h))


class Llama(Model):
    """The whole model, or one pipeline stage of the model.

    Attributes:
        block: class of a layer, called with the sizes of the model and the number of the layer.
        frequencies: rotation angle per position, one for each channel pair. All heads use the same frequencies, so no
            plan shards them.
    """

    cfg: LlamaKeys
    runs_layers = True
    has_cache = True
    block: ClassVar[type[nn.Module]] = Block
    frequencies: Tensor  # [K / 2] fp32; K is the number of rotated channels

    def __init__(self, cfg: LlamaKeys) -> None:
        super().__init__()
        self.cfg = cfg
        self.longest = cfg.max_position_embeddings
        self.ties = (("embed.weight", "head.weight"),) if cfg.tied else ()
        self.embed: nn.Embedding | None = nn.Embedding(cfg.padded_vocab_size, cfg.hidden_size)
        self.layers = nn.ModuleDict({str(i): self.block(cfg, i) for i in range(cfg.n_layers)})
        self.norm: nn.RMSNorm | None = nn.RMSNorm(cfg.hidden_size, cfg.rms_norm_eps)
        self.head: LMHead | None = LMHead(cfg)
        self.tie()
        self.register_buffer("frequencies", torch.empty(cfg.rotary_dim // 2), persistent=False)

    def forward(
        self,
        tokens: Tensor,
        labels: Tensor | None = None,
        sample_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        document_ids: Tensor | None = None,
        prefix: Tensor | None = None,
        label_weights: Tensor | None = None,
        hidden: Tensor | None = None,
        *,
        places: Tensor,
        cache: KeyValueCache | None = None,
    ) -> Tensor | dict[str, Tensor]:
        """Run one microbatch through the layers that this stage holds.

        Args:
            tokens: token ids, [B, S] int64.
            labels: token to predict at each position, [B, S] int64; the loss ignores labels of -100.
            sample_ids: global sample indices, [B] int64, ignored because Llama has no dropout.
            position_ids: positions for the rotation of queries and keys, [B, S] int64; None to use `places`.
            document_ids: index of each token's document, [B, S] int64; a token attends only to its own document.
            prefix: mask of the prefix, [B, S] bool; a token attends to its document's whole prefix, even later tokens.
            label_weights: weight of each token's loss in the sum, [B, S] fp32; None if all weights are 1.
            hidden: hidden state from the previous stage, for stages without the embedding: [B, S, D], or [B, S/tp, D]
                with sequence parallelism.
            places: global position of each token in its sample, [B, S] int64.
            cache: key/value cache of the earlier tokens; this call adds `tokens` to the cache.

        Returns:
            {"lm": fp32 sum of token losses} on the last stage, or the logits [B, S, V] if there are no labels.
            {"hidden": hidden state} on earlier stages.
        """
        rules, rotation = self.rules_and_rotation(
            places, position_ids, document_ids=document_ids, prefix=prefix, cache=cache, fused=self.may_fuse(labels)
        )
        if self.embed is not None:
            hidden = self.embed(tokens)
        assert hidden is not None
        hidden = self.run_layers(self.blocks(), hidden, rules, rotation)
        return finish(hidden, self.norm, self.head, labels, label_weights)

    def rules_and_rotation(self, places: Tensor, position_ids: Tensor | None, **options: Any) -> tuple[Rules, Rotation]:
        """The attention rules for this stage's layers, and the rotation of queries and keys.

        Args:
            places, position_ids: arguments of `forward`.
            **options: remaining arguments of `attention_rule`.
        """
        first, *others = sorted({self.cfg.window_of(int(layer)) for layer in self.layers}) or [0]
        rule = attention_rule(places, window=first, causal=True, context=self.context, **options)
        rules = {first: rule} | {window: rule.with_window(window) for window in others}
        positions = places if position_ids is None else position_ids
        angles = (positions.unsqueeze(-1) * self.frequencies).unsqueeze(2)
        return rules, Rotation(angles.cos(), angles.sin())

    def attention_window(self, piece: str) -> int:
        kind, _, number = piece.partition(".")
        return self.cfg.window_of(int(number)) if kind == "layers" else 0

    def init_buffers(self, seed: int) -> None:
        self.frequencies.copy_(rotary_frequencies(self.cfg))


def rotary_frequencies(cfg: LlamaKeys) -> Tensor:
    """The rotary frequencies theta^(-2i / K) (Su et al., arXiv:2104.09864), [K / 2] fp32, with Llama 3.1's scaling.

    Llama 3.1 extends its context by reducing the low frequencies. A frequency with fewer than `rope_low_freq_factor`
    turns within `rope_original_length` positions is divided by `rope_factor`. A frequency with more than
    `rope_high_freq_factor` turns does not change. Frequencies between these two bounds are interpolated
    (github.com/meta-llama/llama-models, models/llama3/model.py `apply_scaling`).
    """
    frequencies = 1.0 / cfg.rope_theta ** (torch.arange(0, cfg.rotary_dim, 2, dtype=torch.float32) / cfg.rotary_dim)
    turns = cfg.rope_original_length * frequencies / (2 * math.pi)
    width = cfg.rope_high_freq_factor - cfg.rope_low_freq_factor
    # 1 for a frequency that does not change, 0 for a frequency that is divided by the full factor.
    stays = ((turns - cfg.rope_low_freq_factor) / width).clamp(0, 1)
    return frequencies * (stays + (1 - stays) / cfg.rope_factor)
