"""BERT (Devlin et al., arXiv:1810.04805), by default in Megatron's order (arXiv:1909.08053): LayerNorm first.

BERT is an encoder: every token attends to all tokens of its sample except padding. BERT is trained to fill in masked
tokens and to detect whether the two segments of a sample were swapped. bloom.py explains how a model written for one
device also runs sharded over many.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dtmega.config.families.bert import BertKeys
from dtmega.models.layers import (
    MLP,
    FusedAttention,
    Gelu,
    KeyedDropout,
    LMHead,
    gelu,
    residual_stream,
    set_dropout_keys,
    stream_norm,
)
from dtmega.models.model import Model
from dtmega.ops import host
from dtmega.ops.attention_rule import AttentionRule, attention_rule
from dtmega.ops.cross_entropy import IGNORED

N_TYPES = 2  # token types: 0 in segment A with its [CLS] and [SEP], and 1 in segment B
IGNORED_SAMPLE = -100  # label of a sample whose first token is on another cp rank


class Block(nn.Module):
    """One layer: attention, then a feed-forward. `[model] norm` selects the place of the LayerNorms.

    Each sublayer f (attention or feed-forward) computes:

    - `pre`: h + drop(f(LN h)), or LN h + drop(f(LN h)) with `apply_residual_connection_post_layernorm`
    - `post`: LN(h + drop(f(h)))
    """

    def __init__(self, cfg: BertKeys, number: int) -> None:
        super().__init__()
        self.norm_comes_last = cfg.norm == "post"
        self.residual_is_normed = cfg.apply_residual_connection_post_layernorm
        self.attn_norm = stream_norm(cfg, cfg.layer_norm_eps)
        self.attn = FusedAttention(cfg, number)
        self.attn_dropout = KeyedDropout(cfg.hidden_dropout)
        self.mlp_norm = stream_norm(cfg, cfg.layer_norm_eps)
        self.mlp = MLP(cfg, cfg.gelu)
        self.mlp_dropout = KeyedDropout(cfg.hidden_dropout)

    def forward(
        self, h: Tensor, rule: AttentionRule, head_ids: Tensor, sample_ids: Tensor | None, places: Tensor
    ) -> Tensor:
        if self.norm_comes_last:
            h = self.attn_norm(h + self.attn_dropout(self.attn(h, rule, head_ids, sample_ids), sample_ids, places))
            return self.mlp_norm(h + self.mlp_dropout(self.mlp(h), sample_ids, places))
        x = self.attn_norm(h)
        residual = x if self.residual_is_normed else h
        h = residual + self.attn_dropout(self.attn(x, rule, head_ids, sample_ids), sample_ids, places)
        x = self.mlp_norm(h)
        residual = x if self.residual_is_normed else h
        return residual + self.mlp_dropout(self.mlp(x), sample_ids, places)


class WordHead(nn.Module):
    """Head that predicts the masked tokens: LN(gelu(dense(h))), then logits from the tied embedding and a bias."""

    def __init__(self, cfg: BertKeys) -> None:
        super().__init__()
        self.form: Gelu = cfg.head_gelu
        self.dense = nn.Linear(cfg.hidden_size, cfg.hidden_size)
        self.norm = nn.LayerNorm(cfg.hidden_size, cfg.layer_norm_eps)
        self.output = LMHead(cfg, bias=True)

    def forward(self, hidden: Tensor, labels: Tensor | None = None) -> Tensor:
        """Map hidden [B, S, D] to logits [B, S, V]. With labels [B, S], return the fp32 sum of token losses instead."""
        if labels is not None:
            # Only about 15 % of the tokens are masked and have a label. Remove all other tokens before the large
            # matrix products.
            labelled = host.true_indices(labels.flatten() != IGNORED)  # [N]
            hidden = hidden.flatten(0, 1)[labelled]  # [N, D]
            labels = labels.flatten()[labelled]
        return self.output(self.norm(gelu(self.dense(hidden), self.form)), labels)


class OrderHead(nn.Module):
    """Head that predicts the order of a sample's two segments from the hidden state of its first token, [CLS]."""

    def __init__(self, cfg: BertKeys) -> None:
        super().__init__()
        self.pooler = nn.Linear(cfg.hidden_size, cfg.hidden_size)
        self.classifier = nn.Linear(cfg.hidden_size, 2)

    def forward(self, hidden: Tensor) -> Tensor:
        """Compute logits [B, 2] from hidden [B, S, D]: column 0 for ordered, column 1 for swapped segments."""
        return self.classifier(torch.tanh(self.pooler(hidden[:, 0])))


class Bert(Model):
    """The whole model, or one pipeline stage of the model.

    Attributes:
        head_ids: global index of each head, which keys attention dropout. The indices are stored as a buffer, so that
            a plan can shard them along with the heads.
    """

    cfg: BertKeys
    runs_layers = True
    both_ways = frozenset({"seq_len"})
    ties = (("embed.weight", "head.output.weight"),)
    outputs = ("head.output.weight", "order.classifier.weight")
    head_ids: Tensor  # [H] int32

    def __init__(self, cfg: BertKeys) -> None:
        super().__init__()
        self.cfg = cfg
        self.longest = cfg.max_position_embeddings
        # For the FLOP counter: WordHead runs on labelled tokens only, and OrderHead runs once per sample.
        self.works_per = {"head": "label", "order": "sequence"}

        # With norm = "post" the embedding and each layer end in a LayerNorm, so no norm follows the last layer.
        def norm_if(order: str) -> nn.LayerNorm | None:
            return stream_norm(cfg, cfg.layer_norm_eps) if cfg.norm == order else None

        self.embed: nn.Embedding | None = nn.Embedding(cfg.padded_vocab_size, cfg.hidden_size)
        self.positions: nn.Embedding | None = nn.Embedding(cfg.max_position_embeddings, cfg.hidden_size)
        self.types: nn.Embedding | None = nn.Embedding(N_TYPES, cfg.hidden_size)
        self.embed_norm = norm_if("post")
        self.embed_dropout: KeyedDropout | None = KeyedDropout(cfg.hidden_dropout)
        self.layers = nn.ModuleDict({str(i): Block(cfg, number=i + 1) for i in range(cfg.n_layers)})
        self.norm = norm_if("pre")
        self.head: WordHead | None = WordHead(cfg)
        self.order: OrderHead | None = OrderHead(cfg)
        self.tie()
        self.register_buffer("head_ids", torch.empty(cfg.n_heads, dtype=torch.int32), persistent=False)

    def forward(
        self,
        tokens: Tensor,
        labels: Tensor | None = None,
        sample_ids: Tensor | None = None,
        token_types: Tensor | None = None,
        swapped: Tensor | None = None,
        document_ids: Tensor | None = None,
        hidden: Tensor | None = None,
        *,
        places: Tensor,
    ) -> dict[str, Tensor]:
        """Run one microbatch through the layers that this stage holds.

        Args:
            tokens: token ids, [B, S] int64, in which [MASK] replaces some tokens.
            labels: original token at each masked position, [B, S] int64; the loss ignores labels of -100.
            sample_ids: global sample indices, [B] int64, which key the dropout masks; needed for training with dropout.
            token_types: segment of each token, 0 or 1, [B, S] int64; None if all tokens are in segment 0.
            swapped: flag for each sample, [B] int64: 1 if its segments are swapped, otherwise 0; needed with labels.
            document_ids: index of each token's document, [B, S] int64; a token attends only to its own document.
                Padding counts as a separate document.
            hidden: hidden state from the previous stage, for stages without the embedding: [B, S, D], or [B, S/tp, D]
                with sequence parallelism.
            places: global position of each token in its sample, [B, S] int64, below `longest`.

        Returns:
            - {"lm": token losses, "order": segment-order losses, "order_right": number of samples whose order is
              predicted correctly (has no gradient)} as fp32 sums over the microbatch, on the last stage with labels.
            - {"logits": logits of the tokens [B, S, V], "order": logits of the segments' order [B, 2]}, on the last
              stage without labels.
            - {"hidden": hidden state}, on earlier stages.

        Raises:
            ValueError: sample_ids is None in training with dropout, or labels are given without swapped.
        """
        fused = self.may_fuse(labels, self.cfg.attention_dropout)
        rule = attention_rule(places, document_ids=document_ids, fused=fused, context=self.context)
        if self.embed is not None and self.positions is not None and self.types is not None:
            types = torch.zeros_like(tokens) if token_types is None else token_types
            embedded = self.embed(tokens) + self.positions(places) + self.types(types)
            if self.embed_norm is not None:
                embedded = self.embed_norm(embedded)
            assert self.embed_dropout is not None
            hidden = residual_stream(self.embed_dropout(embedded, sample_ids, places), self.cfg)
        assert hidden is not None
        hidden = self.run_layers(self.blocks(), hidden, rule, self.head_ids, sample_ids, places)
        if self.head is None or self.order is None:
            return {"hidden": hidden}
        if self.norm is not None:
            hidden = self.norm(hidden)
        if labels is None:
            return {"logits": self.head(hidden), "order": self.order(hidden)}
        if swapped is None:
            raise ValueError("labels need swapped [B] with them, 1 where the segments of a sample were swapped")
        order = self.order(hidden).float()
        # OrderHead reads a sample's first token. Under cp, only one rank has that token.
        swapped = swapped.masked_fill(places[:, 0] != 0, IGNORED_SAMPLE)
        return {
            "lm": self.head(hidden, labels),
            "order": F.cross_entropy(order, swapped, reduction="sum", ignore_index=IGNORED_SAMPLE),
            "order_right": (order.detach().argmax(-1) == swapped).sum(dtype=torch.float32),
        }

    def init_buffers(self, seed: int) -> None:
        self.head_ids.copy_(torch.arange(self.cfg.n_heads))
        set_dropout_keys(self, seed)

    def attention_flops(self, piece: str) -> int:
        """The `Piece.attention_flops` of the piece with this name, such as "layers.0". Padding is counted like text.

        Tokens attend in both directions, which takes twice the FLOPs of a causal decoder.
        """
        return 2 * super().attention_flops(piece)
