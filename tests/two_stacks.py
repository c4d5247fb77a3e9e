"""A small model with all that the contract allows and BLOOM does not have, as a family of its own.

Two stacks, of which the second begins in the middle of a pipeline and reads the first one's output on each of its
stages; one table of positions for all layers; a vocabulary with three names; two losses on two stages, with different
divisors, and an accuracy.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dtmega import config
from dtmega.data.objectives.rows import IGNORED
from dtmega.data.objectives.sums import Sum
from dtmega.families.built_in import BuiltIn
from dtmega.models.layers import MLP, LMHead
from dtmega.models.model import Model
from dtmega.plans.styles import Column, Enter, Norm, Plan, Row
from dtmega.plans.vocabulary import VocabEmbedding, VocabHead

V, S, T = 29, 6, 4  # words, places of the first stack and of the second


class Layer(nn.Module):
    def __init__(self, cfg: config.DropoutModel) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(cfg.hidden_size)
        self.mlp = MLP(cfg)

    def forward(self, h: Tensor, position: Tensor, encoded: Tensor | None = None) -> Tensor:
        seen = 0 if encoded is None else encoded.mean(1, keepdim=True).to(h.dtype)
        return h + self.mlp(self.norm(h) + position + seen)


class TwoStacks(Model):
    ties = (("embed.weight", "decoder_embed.weight", "head.weight"),)

    def __init__(self, cfg: config.Model) -> None:
        super().__init__()
        self.cfg = cfg
        self.embed: nn.Embedding | None = nn.Embedding(V, cfg.hidden_size)
        self.position = nn.Embedding(S, cfg.hidden_size)
        self.encoder = nn.ModuleDict({str(i): Layer(cfg) for i in range(cfg.n_layers)})
        self.norm: nn.LayerNorm | None = nn.LayerNorm(cfg.hidden_size)
        self.decoder_embed: nn.Embedding | None = nn.Embedding(V, cfg.hidden_size)
        self.decoder = nn.ModuleDict({str(i): Layer(cfg) for i in range(cfg.n_layers)})
        self.head: LMHead | None = LMHead(cfg)
        self.tie()

    def blocks(self) -> list[nn.Module]:
        return [*self.encoder.values(), *self.decoder.values()]

    def parts(self) -> dict[str, list[nn.Module]]:
        stacks = {"encoder": self.encoder, "decoder": self.decoder}
        layers = {f"{s}.{i}": [*layer.modules(), self.position] for s, of in stacks.items() for i, layer in of.items()}
        ends = {n: [self.get_submodule(n)] for n in ("embed", "norm", "decoder_embed", "head")}
        order = ["embed", *(n for n in layers if n[0] == "e"), "norm", "decoder_embed", *layers, "head"]
        return {name: (ends | layers)[name] for name in order}

    def forward(
        self,
        tokens: Tensor,
        places: Tensor,
        targets: Tensor,
        target_places: Tensor,
        labels: Tensor,
        kinds: Tensor,
        hidden: Any = None,
        encoded: Any = None,
    ) -> dict[str, Tensor]:
        found = {}
        if self.embed is not None:
            hidden = self.embed(tokens)
        for layer in self.encoder.values():
            hidden = layer(hidden, self.position(places))
        if self.norm is not None:
            encoded = found["encoded"] = self.norm(hidden).float()
            score = encoded[..., :3].mean((1, 2))
            found["kind"] = F.binary_cross_entropy_with_logits(score, kinds, reduction="sum")
            found["right"] = ((score > 0) == (kinds > 0)).sum().float()
        if self.decoder_embed is not None:
            hidden = self.decoder_embed(targets)
        for layer in self.decoder.values():
            hidden = layer(hidden, self.position(target_places), encoded)
        if self.head is not None:
            return found | {"lm": self.head(hidden, labels)}
        return found | {"hidden": hidden}

    def init_std(self, name: str) -> float | None:
        return None if name.endswith("bias") or "norm" in name else 0.3


class Words:
    sums = Sum("lm", "tokens"), Sum("kind", "sequences", 0.5), Sum("right", "sequences", 0.0)

    def counts(self, microbatch: Mapping[str, Tensor]) -> dict[str, int]:
        return {"tokens": int((microbatch["labels"] != IGNORED).sum()), "sequences": len(microbatch["kinds"])}


@dataclass(frozen=True)
class TwoStacksFamily(BuiltIn):
    """Attributes:
    frozen: beginnings of the names of parameters that are not trained.
    """

    frozen: tuple[str, ...] = ()

    def build(self, model: config.Model) -> Model:
        whole = super().build(model)
        for name, parameter in whole.named_parameters():
            parameter.requires_grad_(not name.startswith(self.frozen))
        return whole

    def boundary(self, cfg: config.Config, sizes: Mapping[str, int], whole: Model, after: str) -> dict[str, Tensor]:
        dtype, b, d = getattr(torch, cfg.precision.params), cfg.batch.micro_batch_size, cfg.model.hidden_size
        if after == "embed" or after.startswith("encoder"):
            return {"hidden": torch.empty(b, S, d, dtype=dtype, device="meta")}
        encoded = {"encoded": torch.empty(b, S, d, device="meta")}
        return encoded if after == "norm" else encoded | {"hidden": torch.empty(b, T, d, dtype=dtype, device="meta")}


def plan(model: config.Model, sequence_parallel: bool) -> Plan:
    assert not sequence_parallel
    ends = {"embed": VocabEmbedding, "position": VocabEmbedding, "decoder_embed": VocabEmbedding, "head": VocabHead}
    layers = {"norm": Norm, "mlp": Enter, "mlp.up": Column, "mlp.down": Row}
    named = ends | {"norm": Norm} | {f"{s}.*.{n}": style for s in ("encoder", "decoder") for n, style in layers.items()}
    return {name: style(False) for name, style in named.items()}


FAMILY = TwoStacksFamily(TwoStacks, plan, completed=lambda *_: cast("Any", Words()))
