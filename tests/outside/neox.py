"""GPT-NeoX (arXiv:2204.06745), as someone outside of dtmega would write it by docs/adding-a-model.md.

Attention and feed-forward of a layer read the same hidden state (parallel block), each through a LayerNorm of its own.
The first channels of each head are rotated (partial rotary positions). Linear layers have biases, the head has none and
is not tied. No file of dtmega knows this family: `train_neox.py` registers its record.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from pydantic import model_validator
from torch import Tensor, nn

from dtmega.config import NativeModel
from dtmega.config.schema import key
from dtmega.families.built_in import BuiltIn
from dtmega.models.layers import LMHead, finish
from dtmega.models.model import Model
from dtmega.ops.attention import attention
from dtmega.ops.attention_rule import AttentionRule, attention_rule
from dtmega.ops.key_value_cache import KeyValueCache
from dtmega.plans.styles import Column, Enter, Norm, Plan, Row
from dtmega.plans.vocabulary import VocabEmbedding, VocabHead


class NeoXKeys(NativeModel):
    """The keys of [model] for GPT-NeoX."""

    name: Literal["neox"] = key("neox", "the family of models")
    layer_norm_eps: float = key(1e-5, "epsilon of every LayerNorm", gt=0)
    max_position_embeddings: int = key(2048, "the longest sequence", ge=1)
    rotary_share: float = key(0.25, "share of a head's channels that are rotated, the first ones", gt=0, le=1)
    rope_theta: float = key(10_000.0, "base of the rotary frequencies", gt=0)

    @model_validator(mode="after")
    def _check(self) -> NeoXKeys:
        if self.rotary_dim < 2 or self.rotary_dim % 2:
            raise ValueError(
                f"rotary positions turn pairs of channels: expected an even number of them, got {self.rotary_dim} of "
                f"{self.head_dim} ([model] rotary_share, [model] hidden_size, [model] n_heads)"
            )
        return self

    @property
    def rotary_dim(self) -> int:
        """P: rotated channels of each head."""
        return int(self.head_dim * self.rotary_share)


def rotated(x: Tensor, angles: Tensor) -> Tensor:
    """Rotate the first P channels of x, [B, S, H, K]; channels i and i + P / 2 turn by `angles`, [B, S, 1, P / 2]."""
    n = angles.shape[-1]
    first, second, rest = x.float().split([n, n, x.shape[-1] - 2 * n], dim=-1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1).to(x.dtype)


class Attention(nn.Module):
    """Attention with one projection, whose rows are [head, (q, k, v), K], and partial rotary positions."""

    def __init__(self, cfg: NeoXKeys) -> None:
        super().__init__()
        self.head_dim, self.rotary_dim = cfg.head_dim, cfg.rotary_dim
        self.qkv = nn.Linear(cfg.hidden_size, 3 * cfg.hidden_size)
        self.out = nn.Linear(cfg.hidden_size, cfg.hidden_size)

    def forward(self, x: Tensor, rule: AttentionRule, angles: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (-1, 3, self.head_dim)).unbind(-2)  # [B, S, H, K] each
        q, k = rotated(q, angles), rotated(k, angles)
        attended = attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), rule)
        return self.out(attended.transpose(1, 2).flatten(2))

    def unseen(self) -> dict[str, Tensor]:
        """The bias of the key channels that are not rotated, to which the softmax is blind."""
        rows = torch.arange(len(self.qkv.bias))
        is_key, channel = rows // self.head_dim % 3 == 1, rows % self.head_dim
        return {"qkv.bias": is_key & (channel >= self.rotary_dim)}


class MLP(nn.Module):
    """The feed-forward: down(gelu(up x))."""

    def __init__(self, cfg: NeoXKeys) -> None:
        super().__init__()
        self.up = nn.Linear(cfg.hidden_size, cfg.ffn)
        self.down = nn.Linear(cfg.ffn, cfg.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    """One layer: h + attn(LN h) + mlp(LN' h)."""

    def __init__(self, cfg: NeoXKeys) -> None:
        super().__init__()
        self.attn_norm = nn.LayerNorm(cfg.hidden_size, cfg.layer_norm_eps)
        self.attn = Attention(cfg)
        self.mlp_norm = nn.LayerNorm(cfg.hidden_size, cfg.layer_norm_eps)
        self.mlp = MLP(cfg)

    def forward(self, h: Tensor, rule: AttentionRule, angles: Tensor) -> Tensor:
        return h + self.attn(self.attn_norm(h), rule, angles) + self.mlp(self.mlp_norm(h))


class NeoX(Model):
    """The whole model, or one pipeline stage of it."""

    cfg: NeoXKeys
    runs_layers = True
    has_cache = True
    frequencies: Tensor  # [P / 2] fp32

    def __init__(self, cfg: NeoXKeys) -> None:
        super().__init__()
        self.cfg = cfg
        self.longest = cfg.max_position_embeddings
        self.embed: nn.Embedding | None = nn.Embedding(cfg.padded_vocab_size, cfg.hidden_size)
        self.layers = nn.ModuleDict({str(i): Block(cfg) for i in range(cfg.n_layers)})
        self.norm: nn.LayerNorm | None = nn.LayerNorm(cfg.hidden_size, cfg.layer_norm_eps)
        self.head: LMHead | None = LMHead(cfg)
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
        """Run one microbatch through the layers that this stage holds; the arguments are those of `models/llama.py`."""
        options = {"document_ids": document_ids, "prefix": prefix, "cache": cache, "fused": self.may_fuse(labels)}
        rule = attention_rule(places, causal=True, context=self.context, **options)
        positions = places if position_ids is None else position_ids
        angles = (positions.unsqueeze(-1) * self.frequencies).unsqueeze(2)  # [B, S, 1, P / 2]
        if self.embed is not None:
            hidden = self.embed(tokens)
        assert hidden is not None
        hidden = self.run_layers(self.blocks(), hidden, rule, angles)
        return finish(hidden, self.norm, self.head, labels, label_weights)

    def init_buffers(self, seed: int) -> None:
        exponents = torch.arange(0, self.cfg.rotary_dim, 2, dtype=torch.float32) / self.cfg.rotary_dim
        self.frequencies.copy_(1.0 / self.cfg.rope_theta**exponents)


def plan(model: NeoXKeys, sequence_parallel: bool = True) -> Plan:
    """How tp divides the modules: heads and feed-forward evenly, the vocabulary by rows."""
    sp, heads, ffn = sequence_parallel, {"n_heads": model.n_heads}, {"ffn_hidden_size": model.ffn}
    return {
        "embed": VocabEmbedding(sp),
        "layers.*.attn_norm": Norm(sp),
        "layers.*.attn": Enter(sp),
        "layers.*.attn.qkv": Column(sp, **heads),
        "layers.*.attn.out": Row(sp, **heads),
        "layers.*.mlp_norm": Norm(sp),
        "layers.*.mlp": Enter(sp),
        "layers.*.mlp.up": Column(sp, **ffn),
        "layers.*.mlp.down": Row(sp, **ffn),
        "norm": Norm(sp),
        "head": VocabHead(sp),
    }


RECORD = BuiltIn(NeoX, plan, NeoXKeys)
