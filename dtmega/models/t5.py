"""T5 (Raffel et al., arXiv:1910.10683) and T5 v1.1: an encoder, and a decoder that reads the encoder's output.

Positions are relative: each stack learns one number per head and distance bucket, and all layers of the stack add these
numbers to their attention scores. With different [model] keys, the classes in this file form Megatron's T5, which has
learned positions, LayerNorm, biases everywhere and scaled scores. bloom.py explains how a model written for
one device also runs sharded over tp, or split into pipeline stages.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dtmega.config.families.t5 import T5Keys
from dtmega.models.layers import KeyedDropout, LMHead, gelu, set_dropout_keys
from dtmega.models.model import Model, Per, consecutive
from dtmega.ops.attention import attention
from dtmega.ops.attention_rule import AttentionRule, attention_rule, distance_buckets
from dtmega.ops.key_value_cache import KeyValueCache


def _norm(cfg: T5Keys) -> nn.Module:
    kind = nn.RMSNorm if cfg.norm == "rms" else nn.LayerNorm
    return kind(cfg.hidden_size, cfg.norm_eps)


class Attention(nn.Module):
    """Self-attention, or cross-attention of the decoder to the encoder's output."""

    def __init__(self, cfg: T5Keys) -> None:
        super().__init__()
        inner = cfg.n_heads * cfg.head_dim
        self.head_dim = cfg.head_dim
        # None means 1 / sqrt(K). T5 does not scale scores; `init_std` makes the initial queries smaller instead.
        self.scale = None if cfg.scale_scores else 1.0
        self.q = nn.Linear(cfg.hidden_size, inner, bias=cfg.bias)
        self.k = nn.Linear(cfg.hidden_size, inner, bias=cfg.bias)
        self.v = nn.Linear(cfg.hidden_size, inner, bias=cfg.bias)
        self.out = nn.Linear(inner, cfg.hidden_size, bias=cfg.bias)
        self.dropout = KeyedDropout(cfg.attention_dropout)

    def forward(
        self,
        x: Tensor,
        rule: AttentionRule,
        head_ids: Tensor,
        sample_ids: Tensor | None,
        encoded: Tensor | None = None,
    ) -> Tensor:
        """Attend from x to itself, or to the encoder's output.

        Args:
            x: source of the queries, [B, T, D].
            rule: attention rule, which defines the mask and the bias of the scores.
            head_ids: global indices of this rank's heads, [H] int32.
            sample_ids: global sample indices, [B] int64, which key the dropout masks.
            encoded: encoder's output as the source of keys and values, [B, S, D]; None to compute both from x.
        """
        # All layers of the decoder read `encoded`. With a separate view for each layer, autograd first sums the
        # gradients within each layer. Then autograd adds these sums, from the last layer to the first. FSDP and
        # pipelines also add in this order.
        source = x if encoded is None else encoded.view_as(encoded)
        q = self.q(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)  # [B, H, T, K]
        k = self.k(source).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)  # [B, H, S, K]
        v = self.v(source).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        dropout = self.dropout.of_probabilities(head_ids, sample_ids)
        return self.out(attention(q, k, v, rule, dropout, self.scale).transpose(1, 2).flatten(2))

    def unseen(self) -> dict[str, Tensor]:
        """The unseen elements of the key projection's bias: bias name -> bool mask [H K] (`Model.unseen`)."""
        return {} if self.k.bias is None else {"k.bias": torch.ones(len(self.k.bias), dtype=torch.bool)}


class MLP(nn.Module):
    """The feed-forward layers, which may be gated (arXiv:2002.05202).

    Without a gate, the result is down(drop(act(up x))). With a gate, the result is down(drop(act(gate x) * up x)).
    """

    def __init__(self, cfg: T5Keys) -> None:
        super().__init__()
        self.activation = cfg.activation
        self.gate = nn.Linear(cfg.hidden_size, cfg.ffn, bias=cfg.bias) if cfg.gated else None
        self.up = nn.Linear(cfg.hidden_size, cfg.ffn, bias=cfg.bias)
        self.dropout = KeyedDropout(cfg.inner_dropout)
        self.down = nn.Linear(cfg.ffn, cfg.hidden_size, bias=cfg.bias)

    def forward(self, x: Tensor, channel_ids: Tensor, sample_ids: Tensor | None, places: Tensor) -> Tensor:
        """Apply the feed-forward layers to x.

        Args:
            x: input, [B, T, D].
            channel_ids: global indices of this rank's channels, [F] int32.
            sample_ids: global sample indices, [B] int64, which key the dropout masks.
            places: position of each token in its whole sample, [B, T] int64.
        """
        up = self.up(x)
        inner = self._act(up) if self.gate is None else self._act(self.gate(x)) * up
        return self.down(self.dropout(inner, sample_ids, places, channel_ids))

    def _act(self, x: Tensor) -> Tensor:
        if self.activation == "relu":
            return F.relu(x)
        return gelu(x, "erf" if self.activation == "gelu_erf" else "tanh")


class Block(nn.Module):
    """One layer: self-attention, cross-attention in the decoder, and feed-forward, each as h + drop(f(norm h))."""

    def __init__(self, cfg: T5Keys, decodes: bool) -> None:
        super().__init__()
        self.attn_norm = _norm(cfg)
        self.attn = Attention(cfg)
        self.attn_dropout = KeyedDropout(cfg.hidden_dropout)
        self.cross_norm = _norm(cfg) if decodes else None
        self.cross = Attention(cfg) if decodes else None
        self.cross_dropout = KeyedDropout(cfg.hidden_dropout) if decodes else None
        self.mlp_norm = _norm(cfg)
        self.mlp = MLP(cfg)
        self.mlp_dropout = KeyedDropout(cfg.hidden_dropout)

    def forward(
        self,
        h: Tensor,
        rule: AttentionRule,
        head_ids: Tensor,
        sample_ids: Tensor | None,
        places: Tensor,
        channel_ids: Tensor,
        cross_rule: AttentionRule | None = None,
        encoded: Tensor | None = None,
    ) -> Tensor:
        attended = self.attn(self.attn_norm(h), rule, head_ids, sample_ids)
        h = h + self.attn_dropout(attended, sample_ids, places)
        if self.cross is not None and self.cross_norm is not None and self.cross_dropout is not None:
            attended = self.cross(self.cross_norm(h), cross_rule, head_ids, sample_ids, encoded)
            h = h + self.cross_dropout(attended, sample_ids, places)
        transformed = self.mlp(self.mlp_norm(h), channel_ids, sample_ids, places)
        return h + self.mlp_dropout(transformed, sample_ids, places)


class _Text(NamedTuple):
    """The tokens that one stack reads.

    Attributes:
        tokens: token ids, [B, S] int64.
        places: position of each token in its whole sample, [B, S] int64.
        document_ids: index of each token's document, [B, S] int64. A token attends only to tokens of its own
            document, and padding counts as a separate document. None if all tokens belong to one document.
    """

    tokens: Tensor
    places: Tensor
    document_ids: Tensor | None


class T5(Model):
    """The whole model, or one pipeline stage of the model.

    Attributes:
        encoder, decoder: index of a block -> block, for each stack.
        encoder_bias, decoder_bias: relative position biases, [buckets, H], shared by all layers of a stack; None if
            positions are learned.
        memory: identity module through which the encoder's output passes once, before the decoder's layers read it. The
            tp plan hooks in here to gather the output once for all layers.
        head_ids: global index of each head, which keys attention dropout. The indices are stored as a buffer, so that
            the tp plan can shard the indices along with the heads.
        channel_ids: global index of each inner channel of the feed-forward, which keys the dropout of these channels.
            The indices are stored as a buffer, so that the tp plan can shard the indices along with the channels.
    """

    cfg: T5Keys
    runs_layers = True
    has_cache = True
    lengths = ("seq_len", "decoder_seq_len")
    both_ways = frozenset({"seq_len"})
    decoder_rows = frozenset({"decoder_tokens", "decoder_places", "decoder_document_ids", "labels"})
    decoder_begins = "decoder_embed"
    read_by_layers = ("encoder_bias.weight", "decoder_bias.weight")
    head_ids: Tensor  # [H] int32
    channel_ids: Tensor  # [F] int32

    def __init__(self, cfg: T5Keys) -> None:
        super().__init__()
        self.cfg = cfg
        learned = cfg.positions == "learned"
        self.longest = cfg.max_position_embeddings if learned else None
        # Some pipeline schedules run backward for inputs first and for weights later. To find the weights, torch
        # follows the graph from each input of the stage. This would make the gradients of two weights wrong: the
        # decoder's embedding depends on no input of its stage, and all layers share the table of relative positions.
        self.one_backward = "a stage's inputs may not lead to the embedding with which the decoder begins there"
        if not learned:
            self.one_backward = "all layers of a stack add the one table that is made of its relative bias"

        def positions() -> nn.Embedding | None:
            return nn.Embedding(cfg.max_position_embeddings, cfg.hidden_size) if learned else None

        def bias() -> nn.Embedding | None:
            return None if learned else nn.Embedding(cfg.relative_buckets, cfg.n_heads)

        self.embed: nn.Embedding | None = nn.Embedding(cfg.padded_vocab_size, cfg.hidden_size)
        self.positions = positions()
        self.embed_dropout: KeyedDropout | None = KeyedDropout(cfg.hidden_dropout)
        self.encoder_bias = bias()
        self.encoder = nn.ModuleDict({str(i): Block(cfg, decodes=False) for i in range(cfg.n_layers)})
        self.encoder_norm: nn.Module | None = _norm(cfg)
        self.encoder_dropout: KeyedDropout | None = KeyedDropout(cfg.inner_dropout)
        self.decoder_embed: nn.Embedding | None = nn.Embedding(cfg.padded_vocab_size, cfg.hidden_size)
        self.decoder_positions = positions()
        self.decoder_embed_dropout: KeyedDropout | None = KeyedDropout(cfg.hidden_dropout)
        self.memory: nn.Identity | None = nn.Identity()
        self.decoder_bias = bias()
        self.decoder = nn.ModuleDict({str(i): Block(cfg, decodes=True) for i in range(cfg.decoder_layers)})
        self.decoder_norm: nn.Module | None = _norm(cfg)
        self.decoder_dropout: KeyedDropout | None = KeyedDropout(cfg.inner_dropout)
        self.head: LMHead | None = LMHead(cfg, bias=cfg.bias)
        words = ("embed.weight", "decoder_embed.weight")
        self.ties = ((*words, "head.weight") if cfg.tied else words,)
        if learned:
            self.ties = (*self.ties, ("positions.weight", "decoder_positions.weight"))
        self.tie()
        # For the FLOP counter: the decoder's modules run once per decoder token, but cross-attention computes its keys
        # and values from the encoder's tokens. Later entries override earlier entries.
        works_per: dict[str, Per] = {"decoder": "decoder", "head": "decoder"}
        for i in range(cfg.decoder_layers):
            works_per |= {f"decoder.{i}.cross.k": "token", f"decoder.{i}.cross.v": "token"}
        self.works_per = works_per
        self.register_buffer("head_ids", torch.empty(cfg.n_heads, dtype=torch.int32), persistent=False)
        self.register_buffer("channel_ids", torch.empty(cfg.ffn, dtype=torch.int32), persistent=False)

    def blocks(self) -> list[nn.Module]:
        return [*self.encoder.values(), *self.decoder.values()]

    def parts(self) -> dict[str, list[nn.Module]]:
        """The pipeline pieces of both stacks, encoder first. Each layer's piece includes the layers' shared modules."""

        def inside(*modules: nn.Module | None) -> list[nn.Module]:
            """The given modules and all nested modules. None stands for a module that this variant of T5 lacks."""
            nested: list[nn.Module] = []
            for module in modules:
                if module is not None:
                    nested += module.modules()
            return nested

        return {
            "embed": inside(self.embed, self.positions, self.embed_dropout),
            **{f"encoder.{i}": inside(layer, self.encoder_bias) for i, layer in self.encoder.items()},
            "encoder_norm": inside(self.encoder_norm, self.encoder_dropout),
            "decoder_embed": inside(self.decoder_embed, self.decoder_positions, self.decoder_embed_dropout),
            **{f"decoder.{i}": inside(layer, self.decoder_bias, self.memory) for i, layer in self.decoder.items()},
            "head": inside(self.decoder_norm, self.decoder_dropout, self.head),
        }

    def handed_on(self, after: str) -> dict[str, str]:
        """Map each tensor that a stage sends to the next stage to the key of its length, as in `Model.handed_on`.

        A stage that ends inside a stack sends the hidden state. The stage with the end of the encoder, and every later
        stage, sends the encoder's output.
        """
        if after == "embed" or after.startswith("encoder."):
            return {"hidden": "seq_len"}
        encoded = {"encoded": "seq_len"}
        return encoded if after == "encoder_norm" else {"hidden": "decoder_seq_len", **encoded}

    def __call__(self, tokens: Tensor, decoder_tokens: Tensor | None = None, *args: Any, **kwargs: Any) -> Any:
        if decoder_tokens is not None and kwargs.get("decoder_places") is None:
            kwargs["decoder_places"] = consecutive(decoder_tokens)
        return super().__call__(tokens, decoder_tokens, *args, **kwargs)

    def forward(
        self,
        tokens: Tensor,
        decoder_tokens: Tensor | None,
        labels: Tensor | None = None,
        sample_ids: Tensor | None = None,
        document_ids: Tensor | None = None,
        decoder_document_ids: Tensor | None = None,
        hidden: Tensor | None = None,
        encoded: Tensor | None = None,
        *,
        places: Tensor,
        decoder_places: Tensor | None = None,
        cache: KeyValueCache | None = None,
    ) -> Tensor | dict[str, Tensor]:
        """Run one microbatch through the layers that this stage holds.

        Args:
            tokens: tokens of the encoder's text, [B, S] int64.
            decoder_tokens: tokens of the decoder's text so far, [B, T] int64; None to run only the encoder.
            labels: token to predict at each position, [B, T] int64; the loss ignores labels of -100.
            sample_ids: global sample indices, [B] int64, which key the dropout masks; needed for training with dropout.
            document_ids, decoder_document_ids: index of each token's document, [B, S] and [B, T] int64; pass both
                arguments or neither. A token attends only to tokens of its own document, in cross-attention too.
                Padding counts as a separate document.
            hidden: hidden state from the previous stage, [B, S, D] or [B, T, D], for stages that begin inside a stack.
                Under sequence parallelism, `hidden` is only this tp rank's part of the sequence.
            encoded: encoder's output, [B, S, D], for stages after the encoder; sharded like `hidden`. A whole model
                that gets `encoded` runs only the decoder, so that generation runs the encoder once.
            places, decoder_places: position of each token in its whole sample, [B, S] and [B, T] int64.
            cache: key/value cache of the decoder's earlier tokens; this call adds `decoder_tokens` to the cache.

        Returns:
            {"lm": fp32 sum of token losses} on the last stage, or the logits [B, T, V] if there are no labels.
            {"hidden": hidden state} on earlier stages, except the stage where the encoder ends.
            {"encoded": encoder's output} on the stage where the encoder ends, or from a whole model without
            decoder_tokens.

        Raises:
            ValueError: sample_ids is None in training with dropout.
        """
        fused = self.may_fuse(labels, self.cfg.attention_dropout)
        source = _Text(tokens, places, document_ids)
        handed_on: dict[str, Tensor] = {}
        if encoded is None:
            hidden, encoded = self._encode(source, hidden, sample_ids, fused)
            if encoded is not None:
                handed_on["encoded"] = encoded
        if decoder_tokens is None:
            return handed_on
        assert decoder_places is not None
        target = _Text(decoder_tokens, decoder_places, decoder_document_ids)
        hidden = self._decode(target, hidden, source, encoded, sample_ids, cache, fused)
        if self.head is None or self.decoder_norm is None or self.decoder_dropout is None:
            if hidden is not None:
                handed_on["hidden"] = hidden
            # A stage that has received the encoder's output passes on a copy of `encoded`, the tensor that the stage's
            # own layers read. The gradients of the stage's layers are then added one by one to the gradient of the
            # later layers, as without a pipeline. If the stage passed on the received tensor itself, the gradients of
            # the stage's layers would first be summed, because FSDP's hooks lie between the received tensor and the
            # layers.
            if encoded is not None and "encoded" not in handed_on:
                handed_on["encoded"] = encoded.clone()
            return handed_on
        hidden = self.decoder_dropout(self.decoder_norm(hidden), sample_ids, decoder_places)
        if self.cfg.scale_head:
            # The original T5 ties the head to the embedding, whose std of 1 would make the logits too large.
            hidden = hidden * self.cfg.hidden_size**-0.5
        logits_or_loss = self.head(hidden, labels)
        return logits_or_loss if labels is None else {"lm": logits_or_loss}

    def _encode(
        self, source: _Text, hidden: Tensor | None, sample_ids: Tensor | None, fused: bool
    ) -> tuple[Tensor | None, Tensor | None]:
        """Run the encoder modules that this stage holds.

        Returns:
            (encoder's hidden state, None) if the encoder continues on the next stage; (None, encoder's output) if the
            encoder ends on this stage.
        """
        if self.embed is not None and self.embed_dropout is not None:
            hidden = _embedded(self.embed, self.positions, source)
            hidden = self.embed_dropout(hidden, sample_ids, source.places)
        if self.encoder:
            table = self._table(self.encoder_bias, bidirectional=True)
            rule = attention_rule(
                source.places, document_ids=source.document_ids, table=table, fused=fused, context=self.context
            )
            assert hidden is not None
            layers = list(self.encoder.values())
            hidden = self.run_layers(layers, hidden, rule, self.head_ids, sample_ids, source.places, self.channel_ids)
        if self.encoder_norm is None or self.encoder_dropout is None:
            return hidden, None
        return None, self.encoder_dropout(self.encoder_norm(hidden), sample_ids, source.places)

    def _decode(
        self,
        target: _Text,
        hidden: Tensor | None,
        source: _Text,
        encoded: Tensor | None,
        sample_ids: Tensor | None,
        cache: KeyValueCache | None,
        fused: bool,
    ) -> Tensor | None:
        """Run this stage's part of the decoder: embedding and layers, but not the norm before the head.

        Args:
            target: text of the decoder.
            hidden: decoder's hidden state from the previous stage, [B, T, D]; None if the decoder begins on this stage.
            source: text of the encoder.
            encoded: encoder's output, [B, S, D].
            sample_ids, cache: arguments of `forward`.
            fused: whether attention may use a fused kernel (`Model.may_fuse`).

        Returns:
            The decoder's hidden state [B, T, D]. A stage without any part of the decoder returns `hidden` unchanged.
        """
        if self.decoder_embed is not None and self.decoder_embed_dropout is not None:
            hidden = _embedded(self.decoder_embed, self.decoder_positions, target)
            hidden = self.decoder_embed_dropout(hidden, sample_ids, target.places)
        if not self.decoder:
            return hidden
        assert self.memory is not None
        table = self._table(self.decoder_bias, bidirectional=False)
        rule = attention_rule(
            target.places,
            causal=True,
            document_ids=target.document_ids,
            table=table,
            cache=cache,
            fused=fused,
            context=self.context,
        )
        # Cross-attention ignores positions: no bias is added to the scores, and only document indices hide keys.
        cross_rule = attention_rule(
            target.places,
            document_ids=target.document_ids,
            key_places=source.places,
            key_document_ids=source.document_ids,
            fused=fused,
            context=self.context,
        )
        assert hidden is not None
        layers = list(self.decoder.values())
        shared = (self.head_ids, sample_ids, target.places, self.channel_ids)
        return self.run_layers(layers, hidden, rule, *shared, cross_rule, self.memory(encoded))

    def run_layers(self, layers: Sequence[nn.Module], hidden: Tensor, *shared: Any) -> Tensor:
        """Apply layers of one stack to `hidden`, like `Model.run_layers`. The first item of `shared` is the rule.

        If `layers_apart` is set, each layer looks up the biases of its stack separately.
        """
        rule, *others = shared
        if not self.layers_apart or rule.table is None or not torch.is_grad_enabled():
            return super().run_layers(layers, hidden, *shared)
        encodes = any(layer in self.encoder.values() for layer in layers)
        bias = self.encoder_bias if encodes else self.decoder_bias
        for layer in layers:
            own_rule = rule.with_table(self._table(bias, bidirectional=encodes))
            hidden = layer(hidden, own_rule, *others)
        return hidden

    def _table(self, bias: nn.Embedding | None, bidirectional: bool) -> Tensor | None:
        """The biases that relative positions add to scores, [H, 2 M + 1] fp32; None with learned positions."""
        if bias is None:
            return None
        cfg = self.cfg
        buckets = distance_buckets(cfg.relative_buckets, cfg.relative_max_distance, bidirectional)
        return bias(buckets.to(self.head_ids.device)).float().T

    def init_std(self, name: str) -> float | None:
        """The standard deviation for the parameter with this full name; None if `init_constant` fills the parameter.

        With `init = "normal"`, the result is Megatron's standard deviation. Otherwise the result follows
        mesh_tensorflow and transformers: 1 / sqrt(inputs) for all weights except the embedding. Query weights have the
        additional factor 1 / sqrt(K), because scores are not divided by sqrt(K). An untied head has the std that t5x
        uses.
        """
        cfg = self.cfg
        if name.endswith(".bias") or "norm" in name:
            return None
        writes = name.endswith((".out.weight", "mlp.down.weight"))
        if cfg.init == "normal":
            n_layers = cfg.decoder_layers if name.startswith("decoder.") else cfg.n_layers
            return cfg.init_std / (2 * n_layers) ** 0.5 if writes else cfg.init_std
        if name == "embed.weight":
            return 1.0
        if name.endswith("mlp.down.weight"):
            return cfg.ffn**-0.5
        if writes:
            return (cfg.n_heads * cfg.head_dim) ** -0.5
        is_query = name.endswith(".q.weight") and not cfg.scale_scores
        return (cfg.hidden_size * (cfg.head_dim if is_query else 1)) ** -0.5

    def init_buffers(self, seed: int) -> None:
        self.head_ids.copy_(torch.arange(self.cfg.n_heads))
        self.channel_ids.copy_(torch.arange(self.cfg.ffn))
        set_dropout_keys(self, seed)

    def attention_flops(self, piece: str) -> int:
        """Count the named pipeline piece's attention FLOPs (`Piece.attention_flops`). Padding is counted like text.

        Every token of the encoder attends to all tokens of the encoder.
        """
        return 12 * self.cfg.n_heads * self.cfg.head_dim if piece.startswith("encoder.") else 0

    def decoder_attention_flops(self, piece: str) -> tuple[int, int]:
        """Count the FLOPs of the decoder's self-attention and cross-attention in the named pipeline piece.

        A decoder token attends to all earlier decoder tokens, on average half of the decoder's sequence, and to all
        encoder tokens.
        """
        if not piece.startswith("decoder."):
            return 0, 0
        causal = 6 * self.cfg.n_heads * self.cfg.head_dim
        return causal, 2 * causal


def _embedded(words: nn.Embedding, positions: nn.Embedding | None, text: _Text) -> Tensor:
    embedded = words(text.tokens)
    return embedded if positions is None else embedded + positions(text.places)
