"""Mixtures of experts: Mixtral (arXiv:2401.04088), Qwen3-MoE (arXiv:2505.09388), DeepSeek-V3 (arXiv:2412.19437).

Attention is Llama's, or DeepSeek's latent attention (`latent_attention.py`). A layer has a router and E experts instead
of one feed-forward. Each token uses the k experts with the largest scores and adds up the results of these experts,
weighted by the router (`routing.py`, `experts.py`). Mixtral and Qwen3-MoE take the softmax of all experts' scores and
divide the k weights by their sum. DeepSeek-V3 takes sigmoids, adds a bias that affects only the choice of experts,
limits the choice to each token's best groups of experts, and multiplies the weights by a factor. DeepSeek-V3 also has
shared experts, which every token uses, and dense first layers.

The design:
- The weights of all experts are stacked in three parameters: gate and up [E, F, D], and down [E, D, F]. tp shards F, as
  in any feed-forward, so each tp rank has a shard of every expert, and all tp ranks have the same load. FSDP2 shards E.
- A token's experts do not depend on other tokens, unless experts have a capacity (`capacity.py`). The capacity applies
  to each document separately. So results do not depend on how documents are distributed over ranks and microbatches.
- The router computes in fp32 and breaks ties by expert number. Under tp every rank computes the same routing for all
  tokens. The router's gradients are partial sums, because each rank computes only its shard of F.
- A layer returns a `Report` (auxiliary losses, and the number of tokens per expert) along with the hidden state. The
  model adds up the reports outside the layers. A recomputed layer's report is discarded, so no token counts twice.
- After each step, the experts' loads are summed over the global batch, and each router's bias is adjusted once. Skipped
  steps and evaluations do not change the bias.

bloom.py explains how a model written for one device also runs sharded over tp, or split into pipeline stages.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dtmega.config.families.moe import MoEKeys
from dtmega.models.experts import Experts
from dtmega.models.latent_attention import LatentAttention
from dtmega.models.layers import finish
from dtmega.models.llama import MLP, Attention, Llama, Rotation, Rules
from dtmega.models.routing import Report, Router, Texts, report, texts_of
from dtmega.ops.key_value_cache import KeyValueCache


class Mixture(nn.Module):
    """A router with its experts, and optionally shared experts, which all tokens use."""

    def __init__(self, cfg: MoEKeys) -> None:
        super().__init__()
        self.has_losses = bool(cfg.balance_loss or cfg.router_z_loss)
        self.router = Router(cfg)
        self.experts = Experts(cfg.n_experts, cfg.hidden_size, cfg.expert_ffn)
        n_shared = cfg.shared_experts
        self.shared = MLP(cfg.hidden_size, n_shared * cfg.expert_ffn) if n_shared else None

    def forward(self, x: Tensor, texts: Texts | None) -> tuple[Tensor, Report | None]:
        """Apply each token's experts to the token.

        Args:
            x: activations, [B, S, D].
            texts: tokens that count for the balance loss and the experts' capacity, grouped by document; if None, the
                layer returns no report and has no capacity limit.
        """
        routing = self.router(x)
        found = None if texts is None else report(routing, texts, self.has_losses, self.router.steered)
        if found is not None and texts is not None and texts.capacity is not None:
            late = texts.capacity.late(routing.experts)
            routing, found = routing.without(late), found._replace(dropped=late.sum().float())
        out = self.experts(x, routing.experts, routing.weights)
        if self.shared is not None:
            out = out + self.shared(x)
        return out, found


class Block(nn.Module):
    """One layer: h + attn(norm h), then h + mlp(norm h). A mixture may replace the mlp.

    Args:
        cfg: sizes of the model.
        layer: number of the layer, from 0.
    """

    def __init__(self, cfg: MoEKeys, layer: int) -> None:
        super().__init__()
        is_dense = layer < cfg.dense_layers
        self.attn_norm = nn.RMSNorm(cfg.hidden_size, cfg.rms_norm_eps)
        self.attn = LatentAttention(cfg, layer) if cfg.kv_latent_size else Attention(cfg, layer)
        self.mlp_norm = nn.RMSNorm(cfg.hidden_size, cfg.rms_norm_eps)
        self.mlp = MLP(cfg.hidden_size, cfg.ffn) if is_dense else None
        self.mixture = None if is_dense else Mixture(cfg)

    def forward(self, h: Tensor, rules: Rules, rotation: Rotation, texts: Texts | None) -> tuple[Tensor, Report | None]:
        h = h + self.attn(self.attn_norm(h), rules, rotation)
        if self.mlp is not None:
            return h + self.mlp(self.mlp_norm(h)), None
        assert self.mixture is not None
        out, found = self.mixture(self.mlp_norm(h), texts)
        return h + out, found


class MoE(Llama):
    """The whole model, or one pipeline stage of the model.

    Attributes:
        loads: number of this rank's labelled tokens that chose each expert since the last `after_step`, [L, E] fp64; 0
            for dense layers and for layers of other stages.
    """

    cfg: MoEKeys  # pyright: ignore[reportIncompatibleVariableOverride]
    block = Block
    loads: Tensor

    def __init__(self, cfg: MoEKeys) -> None:
        super().__init__(cfg)
        self.experts_per_token = cfg.experts_per_token
        loads = torch.zeros(cfg.n_layers, cfg.n_experts, dtype=torch.float64)
        self.register_buffer("loads", loads, persistent=False)

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
            tokens, labels, sample_ids, position_ids, document_ids, prefix, label_weights, hidden, places, cache:
                arguments of `Llama.forward`.

        Returns:
            The result of `Llama.forward`. With labels, every stage also returns {"balance": ..., "router_z": ...,
            "dropped": ...}, fp32 [layers with experts]: each layer's losses and number of dropped (token, expert)
            pairs. A loss without a weight is left out, and so is "dropped" if experts have no capacity.
        """
        rules, rotation = self.rules_and_rotation(
            places, position_ids, document_ids=document_ids, prefix=prefix, cache=cache, fused=self.may_fuse(labels)
        )
        texts = None if labels is None else texts_of(labels, document_ids, self.context, self.cfg)
        if self.embed is not None:
            hidden = self.embed(tokens)
        assert hidden is not None
        state, reports = self.run_layers(self.blocks(), (hidden, ()), rules, rotation, texts)
        result = finish(state, self.norm, self.head, labels, label_weights)
        if labels is not None:
            self._count(reports)
            result |= self._sums(reports, tokens.device)
        return result

    def run_layers(self, layers: Sequence[nn.Module], hidden: Any, *shared: Any) -> Any:
        """Apply the layers to `hidden`, a pair (hidden state, reports), and append each layer's report to `reports`."""
        state, reports = hidden
        for layer in layers:
            state, found = layer(state, *shared)
            if found is not None:
                reports = (*reports, found)
        return state, reports

    def experts(self) -> list[nn.Module]:
        return [mixture.experts for mixture in self.mixtures().values()]

    def mixtures(self) -> dict[int, Mixture]:
        """The mixtures of this stage, keyed by layer number."""
        found = {int(layer): block.mixture for layer, block in self.layers.items()}
        return {layer: mixture for layer, mixture in found.items() if isinstance(mixture, Mixture)}

    def _count(self, reports: Sequence[Report]) -> None:
        """In training, add the experts' loads in a microbatch to `loads`."""
        if not (self.training and torch.is_grad_enabled()):
            return
        for layer, found in zip(self.mixtures(), reports, strict=True):
            self.loads[layer] += found.load.detach()

    def _sums(self, reports: Sequence[Report], device: torch.device) -> dict[str, Tensor]:
        """Collect the numbers that the stage returns, keyed by name: losses with a nonzero weight, and dropped pairs.

        Each tensor has one number for each layer with experts on this stage.
        """
        none = torch.zeros(0, device=device)
        sums = {}
        if self.cfg.balance_loss:
            sums["balance"] = torch.stack([found.balance for found in reports]) if reports else none
        if self.cfg.router_z_loss:
            sums["router_z"] = torch.stack([found.z for found in reports]) if reports else none
        if self.cfg.capacity_factor:
            sums["dropped"] = torch.stack([found.dropped for found in reports]) if reports else none
        return sums

    def counts_of_step(self) -> Tensor:
        return self.loads

    def after_step(self, counts: Tensor, skipped: bool) -> None:
        self.loads.zero_()
        if skipped:
            return
        for layer, mixture in self.mixtures().items():
            router = mixture.router
            # A frozen router also keeps its bias, because adapters need an unchanged base model.
            if router.bias is None or not router.weight.requires_grad:
                continue
            load = counts[layer]
            # Compare each load with the mean load without dividing, because a division would round.
            lacks = torch.sign(load.sum() - len(load) * load)
            router.bias += self.cfg.router_bias_rate * lacks.float()

    def attention_flops(self, piece: str) -> int:
        # Values may be narrower than queries and keys.
        return 3 * self.cfg.n_heads * (self.cfg.head_dim + self.cfg.v_dim) if piece.startswith("layers.") else 0

    def init_std(self, name: str) -> float | None:
        # Like `mlp.down`, these weights write to the residual stream.
        if name.endswith(("experts.down", "shared.down.weight")):
            return self.cfg.init_std / math.sqrt(2 * self.cfg.n_layers)
        return super().init_std(name)

    def init_buffers(self, seed: int) -> None:
        super().init_buffers(seed)
        self.loads.zero_()
        for mixture in self.mixtures().values():
            if mixture.router.bias is not None:
                mixture.router.bias.zero_()
