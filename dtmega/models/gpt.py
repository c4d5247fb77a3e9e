"""GPT as Megatron trains it, and GPT-2 (Radford et al. 2019): learned positions, LayerNorm first, GELU, a tied head.

BLOOM with an embedding of positions where that has ALiBi and a LayerNorm; attention and feed-forward are the same, and
stand in layers.py. Written as if for one device, as all models here: first and last modules are optional, and head
counts come from tensors.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from dtmega import config
from dtmega.formats.format import Format, Key
from dtmega.formats.rules import Rule
from dtmega.models.layers import (
    MLP,
    FusedAttention,
    KeyedDropout,
    LMHead,
    finish,
    refuse_gated,
    residual_stream,
    set_dropout_keys,
    stream_norm,
)
from dtmega.models.model import Model
from dtmega.past import Past
from dtmega.rule import AttentionRule, attention_rule


class Block(nn.Module):
    """x + drop(attn(LN x)), then x + drop(mlp(LN x))."""

    def __init__(self, cfg: config.GPT, number: int) -> None:
        super().__init__()
        self.attn_norm = stream_norm(cfg, cfg.layer_norm_eps)
        self.attn = FusedAttention(cfg, number)
        self.attn_dropout = KeyedDropout(cfg.hidden_dropout)
        self.mlp_norm = stream_norm(cfg, cfg.layer_norm_eps)
        self.mlp = MLP(cfg)
        self.mlp_dropout = KeyedDropout(cfg.hidden_dropout)

    def forward(
        self, h: Tensor, rule: AttentionRule, head_ids: Tensor, sample_ids: Tensor | None, places: Tensor
    ) -> Tensor:
        attended = self.attn(self.attn_norm(h), rule, head_ids, sample_ids)
        h = h + self.attn_dropout(attended, sample_ids, places)
        return h + self.mlp_dropout(self.mlp(self.mlp_norm(h)), sample_ids, places)


class GPT(Model):
    """The model, or the part of it that one pipeline stage holds.

    Attributes:
        head_ids: a buffer with one entry per head; a plan shards it as it shards the heads.
    """

    cfg: config.GPT
    runs_layers = True
    has_past = True
    head_ids: Tensor  # [H] int32

    def __init__(self, cfg: config.GPT) -> None:
        super().__init__()
        self.cfg = cfg
        self.longest = cfg.max_position_embeddings
        self.embed: nn.Embedding | None = nn.Embedding(cfg.padded_vocab_size, cfg.hidden_size)
        self.positions: nn.Embedding | None = nn.Embedding(cfg.max_position_embeddings, cfg.hidden_size)
        self.embed_dropout: KeyedDropout | None = KeyedDropout(cfg.hidden_dropout)
        self.layers = nn.ModuleDict({str(i): Block(cfg, number=i + 1) for i in range(cfg.n_layers)})
        self.norm: nn.LayerNorm | None = stream_norm(cfg, cfg.layer_norm_eps)
        self.head: LMHead | None = LMHead(cfg)
        self.ties = (("embed.weight", "head.weight"),) if cfg.tied else ()
        self.tie()
        self.register_buffer("head_ids", torch.empty(cfg.n_heads, dtype=torch.int32), persistent=False)

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
            sample_ids: [B] int64, global sample numbers; needed in training if anything is dropped.
            position_ids: [B, S] int64, which of the learned positions each token has; None: its place.
            document_ids: [B, S] int64; attention stays inside a document.
            prefix: [B, S] bool, of tokens that those before them in their document see too.
            label_weights: [B, S] fp32, of each token in the sum; None: 1.
            hidden: on stages without the embedding the hidden state [B, S, D], or its part under a plan that cuts S.
            places: [B, S] int64, the global index of each token in its sample, below `longest`.
            past: of the tokens before these, which it takes in, too.

        Returns:
            lm, the fp32 sum of token losses; on earlier stages hidden. Without labels the logits [B, S, V].

        Raises:
            ValueError: dropout in training without sample_ids.
        """
        # Logits are for a look at sequences of any length, each of which would have a kernel made for it.
        fused = labels is not None and not (self.training and self.cfg.attention_dropout > 0)
        rule = attention_rule(places, causal=True, document_ids=document_ids, prefix=prefix, past=past, fused=fused)
        if self.embed is not None and self.positions is not None and self.embed_dropout is not None:
            embedded = self.embed(tokens) + self.positions(places if position_ids is None else position_ids)
            hidden = residual_stream(self.embed_dropout(embedded, sample_ids, places), self.cfg)
        assert hidden is not None
        hidden = self.run_layers(self.blocks(), hidden, rule, self.head_ids, sample_ids, places)
        return finish(hidden, self.norm, self.head, labels, label_weights)

    def init_buffers(self, seed: int) -> None:
        self.head_ids.copy_(torch.arange(self.cfg.n_heads))
        set_dropout_keys(self, seed)


def _described(model: config.Model) -> dict[str, Any]:
    """The rate of the embedding's dropout, which has a key of its own there."""
    assert isinstance(model, config.GPT)
    return {"embd_pdrop": model.hidden_dropout}


# transformers' GPT2LMHeadModel. Its linears are Conv1D, [in, out], and its fused QKV is not by head.
HF = Format(
    rules=(
        Rule("embed.", "transformer.wte."),
        Rule("positions.", "transformer.wpe."),
        Rule("layers.{}.attn_norm.", "transformer.h.{}.ln_1."),
        Rule("layers.{}.attn.qkv.", "transformer.h.{}.attn.c_attn.", "transpose heads"),
        Rule("layers.{}.attn.out.", "transformer.h.{}.attn.c_proj.", "transpose"),
        Rule("layers.{}.mlp_norm.", "transformer.h.{}.ln_2."),
        Rule("layers.{}.mlp.up.", "transformer.h.{}.mlp.c_fc.", "transpose"),
        Rule("layers.{}.mlp.down.", "transformer.h.{}.mlp.c_proj.", "transpose"),
        Rule("norm.", "transformer.ln_f."),
        Rule("head.", "lm_head."),
    ),
    base="transformer.",
    ignored=r"\.attn\.(masked_)?bias",  # causal masks that old versions of transformers stored
    fixed={
        **{"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "activation_function": "gelu_new"},
        **{"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False},
    },
    keys=(
        Key("vocab_size", ("vocab_size",)),
        Key("max_position_embeddings", ("n_positions",)),
        Key("hidden_size", ("n_embd",)),
        Key("n_layers", ("n_layer",)),
        Key("n_heads", ("n_head",)),
        Key("ffn_hidden_size", ("n_inner",), 0, resolved="ffn"),
        Key("layer_norm_eps", ("layer_norm_epsilon",), 1e-5),
        Key("tied", ("tie_word_embeddings",), True),
        Key("hidden_dropout", ("embd_pdrop", "resid_pdrop"), 0.1, free=True),
        Key("attention_dropout", ("attn_pdrop",), 0.1, free=True),
        Key("init_std", ("initializer_range",), 0.02, free=True),
    ),
    from_section=_described,
    refuse=refuse_gated,
)
