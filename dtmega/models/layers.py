"""Pieces that models share: keyed dropout, and the language-model head that owns the loss."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dtmega import config, keyed
from dtmega.attention import Dropout
from dtmega.loss import linear_cross_entropy


class KeyedDropout(nn.Module):
    """Dropout whose mask is a function of (site key, sample id, global place, channel), never of a generator.

    Attributes:
        key: int32 scalar buffer, set from (seed, site name) by the model's `init_buffers`.
    """

    key: Tensor

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p
        self.register_buffer("key", torch.zeros((), dtype=torch.int32), persistent=False)

    def forward(self, x: Tensor, sample_ids: Tensor | None, places: Tensor) -> Tensor:
        """x: [B, S, D]; sample_ids: [B] int64, absent only where nothing is dropped; places: [B, S] int.

        A plan that cuts the sequence of x, and not the places, gives this the places of its part.
        """
        if self.p == 0.0 or not self.training:
            return x
        assert sample_ids is not None
        channels = torch.arange(x.shape[2], device=x.device, dtype=torch.int32)
        rows = keyed.mix(keyed.fold(sample_ids) ^ self.key).unsqueeze(1) ^ places.to(torch.int32)
        return torch.where(keyed.keep(self.p, keyed.mix(rows), channels), x / (1 - self.p), 0.0)

    def of_probabilities(self, head_ids: Tensor, sample_ids: Tensor | None) -> Dropout | None:
        """The same for `attention`, whose rule has the places. head_ids: [H] int32, global numbers of these heads."""
        if self.p == 0.0 or not self.training:
            return None
        assert sample_ids is not None
        return Dropout(self.p, self.key, head_ids, sample_ids)


class LMHead(nn.Module):
    """Logits, or the sum of token losses, from the last hidden state; bias-free as BLOOM's and GPT's.

    The weight may have more rows than the vocabulary (`[model] pad_vocab_to_multiple`); they give no logits.
    """

    def __init__(self, cfg: config.OwnModel) -> None:
        super().__init__()
        self.vocab_size = cfg.vocab_size
        self.label_smoothing = cfg.label_smoothing
        self.z_loss = cfg.z_loss
        self.weight = nn.Parameter(torch.empty(cfg.padded_vocab_size, cfg.hidden_size))

    def forward(self, h: Tensor, labels: Tensor | None = None) -> Tensor:
        """h: [B, S, D]. Returns logits [B, S, V], or with labels [B, S] the fp32 scalar sum (-100 is ignored)."""
        if labels is None:
            return F.linear(h, self.weight[: self.vocab_size])
        return linear_cross_entropy(h.flatten(0, 1), self.weight, labels.flatten(), **self.loss_terms())

    def loss_terms(self) -> dict[str, Any]:
        """What `linear_cross_entropy` should count; the extra terms in training only, so evaluations are comparable."""
        terms = {"label_smoothing": self.label_smoothing, "z_loss": self.z_loss} if self.training else {}
        return {"n_valid": self.vocab_size, **terms}
