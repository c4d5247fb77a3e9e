"""BLOOM (arXiv:2211.05100): Megatron's GPT with ALiBi, a LayerNorm after the embedding, and a tied head.

Like every model in this package, BLOOM is written as if for one device. Two conventions let it run sharded over many:

- The first and last modules may be None, so that one `forward` serves every stage of a pipeline.
- The number of heads is taken from tensor shapes, so that weights sharded over tp need no special case.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dtmega.config.families.bloom import BloomKeys
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
from dtmega.ops.attention_rule import AttentionRule, alibi_slopes, attention_rule
from dtmega.ops.key_value_cache import KeyValueCache


class Block(nn.Module):
    """One layer: h + drop(attn(LN h)), then h + drop(mlp(LN h)).

    With `apply_residual_connection_post_layernorm` both sums start from LN h instead of h, as in the original BERT.
    """

    def __init__(self, cfg: BloomKeys, number: int) -> None:
        super().__init__()
        self.residual_is_normed = cfg.apply_residual_connection_post_layernorm
        self.attn_norm = stream_norm(cfg, cfg.layer_norm_eps)
        self.attn = FusedAttention(cfg, number)
        self.attn_dropout = KeyedDropout(cfg.hidden_dropout)
        self.mlp_norm = stream_norm(cfg, cfg.layer_norm_eps)
        self.mlp = MLP(cfg)
        self.mlp_dropout = KeyedDropout(cfg.hidden_dropout)

    def forward(
        self, h: Tensor, rule: AttentionRule, head_ids: Tensor, sample_ids: Tensor | None, places: Tensor
    ) -> Tensor:
        x = self.attn_norm(h)
        residual = x if self.residual_is_normed else h
        h = residual + self.attn_dropout(self.attn(x, rule, head_ids, sample_ids), sample_ids, places)
        x = self.mlp_norm(h)
        residual = x if self.residual_is_normed else h
        return residual + self.mlp_dropout(self.mlp(x), sample_ids, places)


class Bloom(Model):
    """The whole model, or one pipeline stage of the model.

    Attributes:
        slopes: ALiBi slope of each head (arXiv:2108.12409). The slopes are stored as a buffer, so that a plan can shard
            them along with the heads.
        head_ids: global index of each head, which keys attention dropout. The indices are stored as a buffer, so that
            a plan can shard them along with the heads.
    """

    cfg: BloomKeys
    runs_layers = True
    has_cache = True
    ties = (("embed.weight", "head.weight"),)
    slopes: Tensor  # [H] fp32
    head_ids: Tensor  # [H] int32

    def __init__(self, cfg: BloomKeys) -> None:
        super().__init__()
        self.cfg = cfg
        self.embed: nn.Embedding | None = nn.Embedding(cfg.padded_vocab_size, cfg.hidden_size)
        self.embed_norm: nn.LayerNorm | None = nn.LayerNorm(cfg.hidden_size, cfg.layer_norm_eps)
        self.embed_dropout: KeyedDropout | None = KeyedDropout(cfg.hidden_dropout)
        self.layers = nn.ModuleDict({str(i): Block(cfg, number=i + 1) for i in range(cfg.n_layers)})
        self.norm: nn.LayerNorm | None = stream_norm(cfg, cfg.layer_norm_eps)
        self.head: LMHead | None = LMHead(cfg)
        self.tie()
        self.register_buffer("slopes", torch.empty(cfg.n_heads), persistent=False)
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
            position_ids: positions, [B, S] int64, ignored because ALiBi uses the distances between `places`, as in
                Megatron.
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
            slopes=self.slopes,
            cache=cache,
            context=self.context,
            fused=fused,
        )
        if self.embed is not None and self.embed_norm is not None and self.embed_dropout is not None:
            embedded = self.embed_dropout(self.embed_norm(self.embed(tokens)), sample_ids, places)
            hidden = residual_stream(embedded, self.cfg)
        assert hidden is not None
        hidden = self.run_layers(self.blocks(), hidden, rule, self.head_ids, sample_ids, places)
        return finish(hidden, self.norm, self.head, labels, label_weights)

    def init_buffers(self, seed: int) -> None:
        self.slopes.copy_(alibi_slopes(self.cfg.n_heads))
        self.head_ids.copy_(torch.arange(self.cfg.n_heads))
        set_dropout_keys(self, seed)
