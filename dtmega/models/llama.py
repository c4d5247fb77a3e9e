"""Llama 2 and 3 (arXiv:2307.09288, arXiv:2407.21783): rotary positions, RMSNorm, a gated feed-forward, shared keys.

Written as if for one device. The first and last modules are optional, so that one forward serves every stage of a
pipeline; head counts come from tensors, so that a sharded weight just works.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dtmega import config
from dtmega.attention import attention
from dtmega.formats.format import Format, Key
from dtmega.formats.rules import Rule
from dtmega.models.layers import LMHead, finish
from dtmega.models.model import Model
from dtmega.past import Past
from dtmega.rule import AttentionRule, attention_rule


class Rotation(NamedTuple):
    """The rotation of queries and keys: cosine and sine of the angles, [B, S, 1, K / 2] fp32 each."""

    cos: Tensor
    sin: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        """x: [B, S, H, K], of which channels i and i + K / 2 are a pair, as in transformers' files."""
        first, second = x.float().chunk(2, dim=-1)
        turned = torch.cat([first * self.cos - second * self.sin, second * self.cos + first * self.sin], dim=-1)
        return turned.to(x.dtype)


class Attention(nn.Module):
    """Self-attention of H heads of queries, groups of which share one of `n_kv_heads` heads of keys and values."""

    def __init__(self, cfg: config.Llama) -> None:
        super().__init__()
        self.head_dim = cfg.head_dim
        self.q = nn.Linear(cfg.hidden_size, cfg.n_heads * cfg.head_dim, bias=False)
        self.k = nn.Linear(cfg.hidden_size, cfg.kv_heads * cfg.head_dim, bias=False)
        self.v = nn.Linear(cfg.hidden_size, cfg.kv_heads * cfg.head_dim, bias=False)
        self.out = nn.Linear(cfg.n_heads * cfg.head_dim, cfg.hidden_size, bias=False)

    def forward(self, x: Tensor, rule: AttentionRule, rotation: Rotation) -> Tensor:
        q = rotation(self.q(x).unflatten(-1, (-1, self.head_dim)))  # [B, S, H, K]
        k = rotation(self.k(x).unflatten(-1, (-1, self.head_dim)))  # [B, S, n_kv_heads, K]
        v = self.v(x).unflatten(-1, (-1, self.head_dim))
        # Transposed only here, after the rotation: a kernel's result and gradients then lie as the products write and
        # read them, and nothing is copied.
        out = attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), rule)  # [B, H, S, K]
        return self.out(out.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """SwiGLU (arXiv:2002.05202)."""

    def __init__(self, cfg: config.Llama) -> None:
        super().__init__()
        self.gate = nn.Linear(cfg.hidden_size, cfg.ffn, bias=False)
        self.up = nn.Linear(cfg.hidden_size, cfg.ffn, bias=False)
        self.down = nn.Linear(cfg.ffn, cfg.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, cfg: config.Llama) -> None:
        super().__init__()
        self.attn_norm = nn.RMSNorm(cfg.hidden_size, cfg.rms_norm_eps)
        self.attn = Attention(cfg)
        self.mlp_norm = nn.RMSNorm(cfg.hidden_size, cfg.rms_norm_eps)
        self.mlp = MLP(cfg)

    def forward(self, h: Tensor, rule: AttentionRule, rotation: Rotation) -> Tensor:
        h = h + self.attn(self.attn_norm(h), rule, rotation)
        return h + self.mlp(self.mlp_norm(h))


class Llama(Model):
    """The model, or the part of it that one pipeline stage holds.

    Attributes:
        frequencies: buffer of the angle per position of each pair of channels.
    """

    cfg: config.Llama
    runs_layers = True
    has_past = True
    frequencies: Tensor  # [K / 2] fp32

    def __init__(self, cfg: config.Llama) -> None:
        super().__init__()
        self.cfg = cfg
        self.longest = cfg.max_position_embeddings
        self.ties = (("embed.weight", "head.weight"),) if cfg.tied else ()
        self.embed: nn.Embedding | None = nn.Embedding(cfg.padded_vocab_size, cfg.hidden_size)
        self.layers = nn.ModuleDict({str(i): Block(cfg) for i in range(cfg.n_layers)})
        self.norm: nn.RMSNorm | None = nn.RMSNorm(cfg.hidden_size, cfg.rms_norm_eps)
        self.head: LMHead | None = LMHead(cfg)
        self.tie()
        self.register_buffer("frequencies", torch.empty(cfg.head_dim // 2), persistent=False)

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
        past: Past | None = None,
    ) -> Tensor | dict[str, Tensor]:
        """One microbatch through the layers this stage holds.

        Args:
            tokens: [B, S] int64.
            labels: [B, S] int64; -100 takes no part in the loss.
            sample_ids: of no effect: nothing is dropped.
            position_ids: [B, S] int64, by which queries and keys are turned; None: `places`.
            document_ids: [B, S] int64; attention stays inside a document.
            prefix: [B, S] bool, of tokens that those before them in their document see too.
            label_weights: [B, S] fp32, of each token in the sum; None: 1.
            hidden: on stages without the embedding the hidden state [B, S, D], or its part under a plan that cuts S.
            places: [B, S] int64, the global index of each token in its sample.
            past: of the tokens before these, which it takes in, too.

        Returns:
            lm, the fp32 sum of token losses; on earlier stages hidden. Without labels the logits [B, S, V].
        """
        # Logits are for a look at sequences of any length, each of which would have a kernel made for it.
        rule = attention_rule(
            places, causal=True, document_ids=document_ids, prefix=prefix, past=past, fused=labels is not None
        )
        positions = places if position_ids is None else position_ids
        angles = (positions.unsqueeze(-1) * self.frequencies).unsqueeze(2)
        rotation = Rotation(angles.cos(), angles.sin())
        if self.embed is not None:
            hidden = self.embed(tokens)
        assert hidden is not None
        hidden = self.run_layers(self.blocks(), hidden, rule, rotation)
        return finish(hidden, self.norm, self.head, labels, label_weights)

    def init_buffers(self, seed: int) -> None:
        self.frequencies.copy_(rotary_frequencies(self.cfg))


def rotary_frequencies(cfg: config.Llama) -> Tensor:
    """[K / 2] fp32: theta^(-2i / K) (Su et al., arXiv:2104.09864), the slow ones divided by `rope_factor`.

    Llama 3.1 reaches further by that: a frequency that turns fewer than `rope_low_freq_factor` times within
    `rope_original_length` is divided, one that turns more than `rope_high_freq_factor` times stays, and those between
    go from one to the other (github.com/meta-llama/llama-models, models/llama3/model.py `apply_scaling`).
    """
    frequencies = 1.0 / cfg.rope_theta ** (torch.arange(0, cfg.head_dim, 2, dtype=torch.float32) / cfg.head_dim)
    turns = cfg.rope_original_length * frequencies / (2 * math.pi)
    width = cfg.rope_high_freq_factor - cfg.rope_low_freq_factor
    stays = ((turns - cfg.rope_low_freq_factor) / width).clamp(0, 1)
    return frequencies * (stays + (1 - stays) / cfg.rope_factor)


# Keys of [model] -> what config.json calls them where it scales rotary positions.
SCALING = {
    "rope_factor": "factor",
    "rope_low_freq_factor": "low_freq_factor",
    "rope_high_freq_factor": "high_freq_factor",
    "rope_original_length": "original_max_position_embeddings",
}


def _positions(theirs: Mapping[str, Any]) -> dict[str, Any]:
    """Keys of [model] for rotary positions, of a config.json.

    Raises:
        ValueError: it describes a Llama that computes something else.
    """
    head_dim = theirs["hidden_size"] // theirs["num_attention_heads"]
    if theirs.get("head_dim") not in (None, head_dim):
        raise ValueError(
            f"config.json has head_dim={theirs['head_dim']!r:.80}, expected hidden_size / num_attention_heads = "
            f"{head_dim} ([model] name)"
        )
    # transformers 5 says it in one object; before, theta stood outside of it.
    said = theirs.get("rope_parameters") or theirs.get("rope_scaling") or {}
    theta = {"rope_theta": said.get("rope_theta", theirs.get("rope_theta", 10_000.0))}
    kind = said.get("rope_type", said.get("type", "default"))
    if kind == "default":
        return theta | {"rope_factor": 1.0}
    if kind != "llama3" or not said.keys() >= {*SCALING.values()}:
        raise ValueError(
            f"config.json scales rotary positions by {said!r:.200}, expected rope_type 'llama3' with "
            f"{', '.join(SCALING.values())} ([model] name)"
        )
    return theta | {ours: said[name] for ours, name in SCALING.items()}


def _described(model: config.Model) -> dict[str, Any]:
    """The same for a config.json of ours, which transformers 4 reads too."""
    assert isinstance(model, config.Llama)
    scaling = {name: getattr(model, ours) for ours, name in SCALING.items()}
    return {
        "rope_theta": model.rope_theta,
        "rope_scaling": None if model.rope_factor == 1 else {"rope_type": "llama3", **scaling},
    }


# transformers' LlamaForCausalLM.
HF = Format(
    rules=(
        Rule("embed.", "model.embed_tokens."),
        Rule("layers.{}.attn_norm.", "model.layers.{}.input_layernorm."),
        Rule("layers.{}.attn.q.", "model.layers.{}.self_attn.q_proj."),
        Rule("layers.{}.attn.k.", "model.layers.{}.self_attn.k_proj."),
        Rule("layers.{}.attn.v.", "model.layers.{}.self_attn.v_proj."),
        Rule("layers.{}.attn.out.", "model.layers.{}.self_attn.o_proj."),
        Rule("layers.{}.mlp_norm.", "model.layers.{}.post_attention_layernorm."),
        Rule("layers.{}.mlp.gate.", "model.layers.{}.mlp.gate_proj."),
        Rule("layers.{}.mlp.up.", "model.layers.{}.mlp.up_proj."),
        Rule("layers.{}.mlp.down.", "model.layers.{}.mlp.down_proj."),
        Rule("norm.", "model.norm."),
        Rule("head.", "lm_head."),
    ),
    base="model.",
    ignored=r"rotary_emb\.inv_freq",  # a buffer that old versions of transformers stored
    fixed={
        **{"architectures": ["LlamaForCausalLM"], "model_type": "llama"},
        **{"hidden_act": "silu", "attention_bias": False, "mlp_bias": False},
    },
    keys=(
        Key("vocab_size", ("vocab_size",)),
        Key("hidden_size", ("hidden_size",)),
        Key("n_layers", ("num_hidden_layers",)),
        Key("n_heads", ("num_attention_heads",)),
        Key("n_kv_heads", ("num_key_value_heads",), 0, resolved="kv_heads"),
        Key("ffn_hidden_size", ("intermediate_size",), resolved="ffn"),
        Key("rms_norm_eps", ("rms_norm_eps",), 1e-6),
        Key("tied", ("tie_word_embeddings",), False),
        Key("max_position_embeddings", ("max_position_embeddings",), 2048, free=True),
        Key("init_std", ("initializer_range",), 0.02, free=True),
    ),
    to_section=_positions,
    from_section=_described,
)
