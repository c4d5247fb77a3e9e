"""Routing in a mixture of experts: choose each token's experts, and report how even the routing is.

The choice of a token's experts depends only on the token itself and on the router's weights and bias. Ties are broken
by expert number. The evenness of the routing is measured separately for each document, over the tokens with a label.
Padding has no label.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed._functional_collectives as functional
import torch.nn.functional as F
from torch import Tensor, nn

from dtmega.config.families.moe import MoEKeys
from dtmega.data.objectives.rows import IGNORED
from dtmega.models.capacity import Capacity, capacity_of

if TYPE_CHECKING:
    from dtmega.ops.context_parallel import ContextParallel


class Routing(NamedTuple):
    """The routing of N tokens.

    Attributes:
        experts: experts of each token, [N, k] int64.
        weights: weight of each of the token's experts, [N, k] fp32.
        probabilities: scores of all experts, divided by their sum, [N, E] fp32; for the balance loss only.
        log_z: logarithm of the sum of all exponentiated logits, [N] fp32; for the z-loss only.
    """

    experts: Tensor
    weights: Tensor
    probabilities: Tensor
    log_z: Tensor

    def without(self, dropped: Tensor) -> Routing:
        """Return this routing without some (token, expert) pairs, which get weight 0 and E, the number for no expert.

        The weights of a token's remaining experts do not change.

        Args:
            dropped: mask of the dropped pairs, [N, k] bool.
        """
        n_experts = self.probabilities.shape[1]
        experts = self.experts.masked_fill(dropped, n_experts)
        return self._replace(experts=experts, weights=self.weights.masked_fill(dropped, 0.0))


class Texts(NamedTuple):
    """The tokens of a microbatch that count for the balance loss and the experts' capacity, grouped by document.

    Attributes:
        counts: flag of each token, [N] fp32; 1 if the token counts, otherwise 0.
        document: index of each token's document in the microbatch, [N] int64.
        n_documents: exclusive upper bound of the document indices.
        length: number of tokens that count in each document, [n_documents] fp32.
        context: cp ranks over which the sequences are split; None if this rank has whole sequences.
        capacity: maximum number of tokens that an expert processes per document; None for no maximum.
    """

    counts: Tensor
    document: Tensor
    n_documents: int
    length: Tensor
    context: ContextParallel | None
    capacity: Capacity | None = None

    def add_up(self, values: Tensor) -> Tensor:
        """Sum the tokens' values, [N, ...], over each document: [n_documents, ...].

        All cp ranks get the sum over the whole document. The values must be integers, and the sums must be below 2^24,
        so that the order of the additions does not change a sum.
        """
        sums = values.new_zeros(self.n_documents, *values.shape[1:]).index_add(0, self.document, values)
        if self.context is None:
            return sums
        return functional.wait_tensor(functional.all_reduce(sums, "sum", self.context.group))


def texts_of(labels: Tensor, document_ids: Tensor | None, context: ContextParallel | None, cfg: MoEKeys) -> Texts:
    """Find the tokens that count for the balance loss and the experts' capacity.

    Args:
        labels: token to predict at each position, [B, S]; a token without a label does not count.
        document_ids: index of each token's document in its row, [B, S]; None if each row is one document.
        context: cp ranks over which the sequences are split; if given, the tensors are this rank's part of them.
        cfg: sizes and capacity factor of the model.
    """
    counts = (labels != IGNORED).flatten().float()
    n_rows, length = labels.shape
    rows = torch.arange(n_rows, device=labels.device).unsqueeze(1)
    if document_ids is None:
        per_row, document = 1, rows.expand(labels.shape)
    else:
        # A document has at least one token, so a row has no more documents than tokens.
        per_row = length if context is None else length * context.group.size()
        document = rows * per_row + document_ids
    texts = Texts(counts, document.flatten(), n_rows * per_row, counts, context)
    texts = texts._replace(length=texts.add_up(counts))
    if not cfg.capacity_factor:
        return texts
    return texts._replace(capacity=capacity_of(cfg, labels != IGNORED, document, texts.length, context))


class Report(NamedTuple):
    """A layer's losses and counts for one microbatch, which show how evenly the layer has routed the tokens.

    Attributes:
        balance: balance loss, summed over the tokens, fp32 scalar (arXiv:2412.19437, equations 17 to 20). The loss
            counts the experts with the largest scores, even if a bias or groups make tokens use different experts.
        z: squared log_z, summed over the tokens, fp32 scalar (arXiv:2202.08906, equation 5).
        load: number of tokens that chose each expert, including dropped ones, [E] fp32 without a gradient. Under cp,
            only this rank's tokens are counted.
        dropped: number of dropped (token, expert) pairs, fp32 scalar without a gradient. Counted like `load`.
    """

    balance: Tensor
    z: Tensor
    load: Tensor
    dropped: Tensor


def report(routing: Routing, texts: Texts, losses: bool, steered: bool) -> Report:
    """Report how evenly N tokens were routed.

    The balance loss of a document with T tokens is T times the sum of f P over the experts. P is the expert's mean
    probability. f is E / k times the fraction of the document's tokens for which the expert's score is among the k
    largest scores, without bias and groups. If the routing is perfectly even, f, E P and each token's part of the loss
    are 1.

    Args:
        routing: routing of the tokens.
        texts: tokens that count, grouped by document.
        losses: whether to compute the losses; if False, the losses are 0.
        steered: whether a bias or groups affected the choice of experts.
    """
    n_experts, k = routing.probabilities.shape[1], routing.experts.shape[1]
    used = _counted(routing.experts, n_experts, texts)
    load = used.sum(0)
    zero = load.new_zeros(())
    if not losses:
        return Report(zero, zero, load, zero)
    # The largest probabilities belong to the largest scores. If nothing steers the choice, tokens use the experts with
    # the largest scores.
    best = _counted(_largest(routing.probabilities.detach(), k), n_experts, texts) if steered else used
    loads = texts.add_up(best)
    share = loads * (n_experts / k) / texts.length.clamp(min=1).unsqueeze(1)
    of_token = (share[texts.document] * routing.probabilities).sum(1)
    balance = (of_token * texts.counts).sum()
    z = (routing.log_z.square() * texts.counts).sum()
    return Report(balance, z, load, zero)


def _counted(experts: Tensor, n_experts: int, texts: Texts) -> Tensor:
    """Mark each counted token's experts, [N, k] -> [N, E] fp32: 1 for the token's experts, 0 for all others."""
    counts = texts.counts.unsqueeze(1)
    return counts.new_zeros(len(experts), n_experts).scatter(1, experts, 1.0) * counts


class Router(nn.Module):
    """The layer that chooses each token's experts. The layer computes in fp32, even if its weights have another dtype.

    Attributes:
        weight: matrix that computes the experts' logits from the hidden state, [E, D].
        bias: number added to each expert's score to choose experts but not to compute weights, [E] fp32; None if the
            router has no bias. To even out the load, training adjusts the bias without a gradient (arXiv:2408.15664).
        steered: whether a bias or groups affect the choice, so that tokens may not use the experts with the largest
            scores.
    """

    bias: Tensor | None

    def __init__(self, cfg: MoEKeys) -> None:
        super().__init__()
        self.k, self.scores = cfg.experts_per_token, cfg.router_scores
        self.groups, self.groups_per_token = cfg.expert_groups, cfg.groups_per_token
        self.steered = cfg.router_bias or cfg.expert_groups > 1
        self.normalizes, self.scale = cfg.normalize_weights, cfg.routed_scale
        self.weight = nn.Parameter(torch.empty(cfg.n_experts, cfg.hidden_size))
        self.register_buffer("bias", torch.zeros(cfg.n_experts) if cfg.router_bias else None)

    def forward(self, x: Tensor) -> Routing:
        """Route the tokens x, [B, S, D]."""
        return self.route(x, self.weight)

    def route(self, x: Tensor, weight: Tensor) -> Routing:
        """Compute `forward` with the given weight."""
        logits = F.linear(x.flatten(0, 1).float(), weight.float())  # [N, E]
        if self.scores == "softmax":
            scores = probabilities = logits.softmax(-1)
        else:
            scores = logits.sigmoid()
            probabilities = scores / (scores.sum(-1, keepdim=True) + 1e-20)
        experts = self.choose(scores.detach())
        weights = scores.gather(1, experts)
        if self.normalizes:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return Routing(experts, weights * self.scale, probabilities, logits.logsumexp(-1))

    def choose(self, scores: Tensor) -> Tensor:
        """Choose the k experts with the largest scores, [N, E] -> [N, k]. Ties go to the smaller expert number.

        With groups of experts, a token can use only experts in its best groups. A group's score is the sum of the two
        largest scores in the group.
        """
        if self.bias is not None:
            scores = scores + self.bias
        if self.groups > 1:
            by_group = scores.unflatten(1, (self.groups, -1))
            best_two = by_group.topk(min(2, by_group.shape[2]), dim=-1).values.sum(-1)
            chosen = _largest(best_two, self.groups_per_token)
            out = torch.ones_like(best_two, dtype=torch.bool).scatter(1, chosen, False)
            scores = by_group.masked_fill(out.unsqueeze(-1), float("-inf")).flatten(1)
        return _largest(scores, self.k)


def _largest(scores: Tensor, k: int) -> Tensor:
    """The indices of the k largest scores in each row, in descending order of scores; ties are in index order."""
    return scores.sort(dim=1, descending=True, stable=True).indices[:, :k]


class Loads:
    """The loads of a run's experts, with statistics for the run's metrics and a warning about unused experts.

    Attributes:
        last: number of tokens that chose each expert in the last global batch, [L, E]; None before the first step.
    """

    def __init__(self) -> None:
        self.last: Tensor | None = None
        self._total: Tensor | None = None  # sum of the loads since the last call of `unused`, [L, E]
        self._said: set[tuple[int, int]] = set()

    def add(self, loads: Tensor) -> None:
        """Add a step's loads: the number of tokens that chose each expert, [L, E]; 0 for dense layers."""
        self.last = loads.clone()
        if self._total is None:
            self._total = torch.zeros_like(loads)
        self._total += loads

    def numbers(self) -> dict[str, float]:
        """The last step's largest and smallest expert load, relative to the layer's mean; {} if nothing was counted."""
        if self.last is None:
            return {}
        loads = self.last.cpu()
        loads = loads[loads.any(1)]
        if not len(loads):
            return {}
        multiples = loads / loads.mean(1, keepdim=True)
        return {"expert_load_max": multiples.max().item(), "expert_load_min": multiples.min().item()}

    def unused(self) -> str:
        """Return a warning about experts that no token has used since the last call; '' if there are none.

        Each expert is named only once in a run.
        """
        if self._total is None:
            return ""
        total, self._total = self._total, None
        of_layers = []
        for layer, loads in enumerate(total.tolist()):
            unused = {(layer, expert) for expert, load in enumerate(loads) if not load} if any(loads) else set()
            if new := sorted(unused - self._said):
                of_layers.append(f"layer {layer}: {', '.join(str(expert) for _, expert in new)}")
            self._said |= unused
        if not of_layers:
            return ""
        return f"WARNING: no token has used these experts lately (each is named once): {'; '.join(of_layers)}"
