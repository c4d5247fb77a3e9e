"""GPT as Megatron trains it, and GPT-2 (Radford et al. 2019): learned positions, LayerNorm first, GELU, a tied head.

The model is BLOOM with learned position embeddings instead of ALiBi, and without the LayerNorm after the embedding.
Both models use attention and feed-forward from layers.py. bloom.py explains how a model written for one device also
runs as pipeline stages and with tensor parallelism.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dtmega.config.families.gpt import GPTKeys
from dtmega.models.layers import (
    MLP,
    FusedAttention,
    KeyedDropout,
    LMHead,
    finish,
    residual_stream,
    set_dropout_keys,
    stream_norm,
)
from dtmega.models.model import Model
from dtmega.ops.attention_rule import AttentionRule, attention_rule
from dtmega.ops.key_value_cache import KeyValueCache


class Block(nn.Module):
    """One layer: h + drop(attn(LN h)), then h + drop(mlp(LN h))."""

    def __init__(self, cfg: GPTKeys, number: int) -> None:
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
    """The whole model, or one pipeline stage of the model.

    Attributes:
        head_ids: global index of each head, which keys attention dropout. The indices are stored as a buffer, so that
            a plan can shard them along with the heads.
    """

    cfg: GPTKeys
    runs_layers = True
    has_cache = True
    head_ids: Tensor  # [H] int32

    def __init__(self, cfg: GPTKeys) -> None:
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
        cache: KeyValueCache | None = None,
    ) -> Tensor | dict[str, Tensor]:
        """Run one microbatch through the layers that this stage holds.

        Args:
            tokens: token ids, [B, S] int64.
            labels: token to predict at each position, [B, S] int64; the loss ignores labels of -100.
            sample_ids: global sample indices, [B] int64, which key the dropout masks; needed for training with dropout.
            position_ids: index of each token in the position embedding, [B, S] int64, below `longest`; None to use
                `places` as the indices.
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

        Raises:
            ValueError: sample_ids is None in training with dropout.
        """
        fused = self.may_fuse(labels, self.cfg.attention_dropout)
        rule = attention_rule(
            places,
            causal=True,
            document_ids=document_ids,
            prefix=prefix,
            cache=cache,
            context=self.context,
            fused=fused,
        )
        if self.embed is not None and self.positions is not None and self.embed_dropout is not None:
            embedded = self.embed(tokens) + self.positions(places if position_ids is None else position_ids)
            hidden = residual_stream(self.embed_dropout(embedded, sample_ids, places), self.cfg)
        assert hidden is not None
        hidden = self.run_layers(self.blocks(), hidden, rule, self.head_ids, sample_ids, places)
        return finish(hidden, self.norm, self.head, labels, label_weights)

    def init_buffers(self, seed: int) -> None:
        self.head_ids.copy_(torch.arange(self.cfg.n_heads))
        set_dropout_keys(self, seed)
