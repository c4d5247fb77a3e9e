"""The router of a mixture of experts: which experts a token uses, with which weights, and how evenly experts are used.

A token's choice depends on the token alone, and ties are broken by the expert's number. So it is a function of the
data and the weights, and of nothing else. How even the routing is, is counted for each document, over the tokens that
have a label; padding has none.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed._functional_collectives as functional
import torch.nn.functional as F
from torch import Tensor, nn

from dtmega import config
from dtmega.data.objectives.rows import IGNORED
from dtmega.models.capacity import Capacity, capacity_of
from dtmega.ops.context_parallel import ContextParallel


class Routing(NamedTuple):
    """The routing of N tokens.

    Attributes:
        experts: experts of each token, [N, k] int64.
        weights: weights of these experts, [N, k] fp32.
        probabilities: scores of all experts, divided by their sum, [N, E] fp32; for the balance loss only.
        log_z: logarithm of the sum of all exponentiated logits, [N] fp32; for the z-loss only.
    """

    experts: Tensor
    weights: Tensor
    probabilities: Tensor
    log_z: Tensor

    def without(self, dropped: Tensor) -> Routing:
        """The routing without dropped pairs: they get the number E, which no expert has, and the weight 0.

        The weights of a token's other experts stay as they are.

        Args:
            dropped: whether each pair is dropped, [N, k] bool.
        """
        n_experts = self.probabilities.shape[1]
        experts = self.experts.masked_fill(dropped, n_experts)
        return self._replace(experts=experts, weights=self.weights.masked_fill(dropped, 0.0))


class Texts(NamedTuple):
    """The tokens of a microbatch that count for balance and capacity, and the documents in which they are counted.

    Attributes:
        counts: 1 for a token that counts, otherwise 0, [N] fp32.
        document: number of each token's document within the microbatch, [N] int64.
        n_documents: number that is larger than all numbers of documents.
        length: number of tokens that count in each document, [n_documents] fp32.
        context: ranks that share the sequences; None: this rank has whole sequences.
        capacity: number of pairs that an expert takes of each document; None: all.
    """

    counts: Tensor
    document: Tensor
    n_documents: int
    length: Tensor
    context: ContextParallel | None
    capacity: Capacity | None = None

    def add_up(self, values: Tensor) -> Tensor:
        """Sum the tokens' values, [N, ...], over each document: [n_documents, ...], equal on all ranks that share it.

        The values must be integers below 2^24, so that no order of the additions changes the sum.
        """
        sums = values.new_zeros(self.n_documents, *values.shape[1:]).index_add(0, self.document, values)
        if self.context is None:
            return sums
        return functional.wait_tensor(functional.all_reduce(sums, "sum", self.context.group))


def texts_of(labels: Tensor, document_ids: Tensor | None, context: ContextParallel | None, cfg: config.MoE) -> Texts:
    """The tokens that count for the balance and the capacity.

    Args:
        labels: token to predict at each place, [B, S]; a token without one does not count.
        document_ids: index of each token's document in its row, [B, S]; None: each row is one document.
        context: ranks that share the sequences; the tensors are this rank's part of them.
        cfg: the model's sizes.
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
    """How evenly a layer has routed a microbatch.

    Attributes:
        balance: sum over the tokens of the balance loss, fp32 scalar (arXiv:2412.19437, equations 17 to 20). It counts
            the experts with the largest scores, which need not be those that tokens use.
        z: sum over the tokens of the squared log_z (arXiv:2202.08906, equation 5), fp32 scalar.
        load: number of pairs of each expert before any is dropped, [E] fp32 without a gradient. Under cp: of this
            rank's tokens.
        dropped: number of pairs that are dropped, fp32 scalar without a gradient. Under cp: of this rank's tokens.
    """

    balance: Tensor
    z: Tensor
    load: Tensor
    dropped: Tensor


def report(routing: Routing, texts: Texts, losses: bool, steered: bool) -> Report:
    """Report how evenly N tokens were routed.

    Args:
        routing: routing of the tokens.
        texts: tokens that count, by document.
        losses: whether to compute the losses; if not, they are 0.
        steered: whether a bias or groups took part in the choice of experts.

    The balance loss of a document of T tokens is T times the sum over the experts of f P. f is E / k times the share of
    the document's tokens that have the expert among their k largest scores, without bias and groups, and P is the mean
    of the expert's probabilities. If all experts are alike, f and E P are 1, and so is each token's part of the loss.
    """
    n_experts, k = routing.probabilities.shape[1], routing.experts.shape[1]
    used = _counted(routing.experts, n_experts, texts)
    load = used.sum(0)
    zero = load.new_zeros(())
    if not losses:
        return Report(zero, zero, load, zero)
    # Probabilities are in the order of scores. If nothing steers the choice, these are the experts that tokens use.
    best = _counted(_largest(routing.probabilities.detach(), k), n_experts, texts) if steered else used
    loads = texts.add_up(best)
    share = loads * (n_experts / k) / texts.length.clamp(min=1).unsqueeze(1)
    of_token = (share[texts.document] * routing.probabilities).sum(1)
    balance = (of_token * texts.counts).sum()
    z = (routing.log_z.square() * texts.counts).sum()
    return Report(balance, z, load, zero)


def _counted(experts: Tensor, n_experts: int, texts: Texts) -> Tensor:
    """Whether each token counts and has each expert, [N, k] -> [N, E]: 1 or 0, fp32."""
    counts = texts.counts.unsqueeze(1)
    return counts.new_zeros(len(experts), n_experts).scatter(1, experts, 1.0) * counts


class Router(nn.Module):
    """The layer that chooses each token's experts. It computes in fp32, whatever the dtype of the weights is.

    Attributes:
        weight: the expert's direction of each expert, [E, D].
        bias: number that is added to each expert's score for the choice, but not for the weights, [E] fp32. Training
            moves it towards an even load, without a gradient (arXiv:2408.15664). None: there is none.
        steered: whether a bias or groups take part in the choice, so that it need not be the largest scores.
    """

    bias: Tensor | None

    def __init__(self, cfg: config.MoE) -> None:
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
        """The k experts with the largest scores, [N, E] -> [N, k]; of equal scores, those with smaller numbers.

        With groups of experts, only the experts of the best groups count. A group is as good as its two best experts
        together.
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
    """The indices of the k largest scores of each row, the largest first; of equal ones, the first first."""
    return scores.sort(dim=1, descending=True, stable=True).indices[:, :k]


class Loads:
    """The loads of a run's experts: numbers for the record, and a warning about experts that no token uses.

    Attributes:
        last: number of pairs of each expert in the last step's global batch, [L, E]; None before the first step.
    """

    def __init__(self) -> None:
        self.last: Tensor | None = None
        self._total: Tensor | None = None  # since the last call of `unused`, [L, E]
        self._said: set[tuple[int, int]] = set()

    def add(self, loads: Tensor) -> None:
        """Add the number of pairs of each expert in a step's global batch, [L, E]; dense layers have zeros."""
        self.last = loads.clone()
        self._total = loads.clone() if self._total is None else self._total + loads

    def numbers(self) -> dict[str, float]:
        """The last step's extreme loads of an expert, as multiples of its layer's mean; {} if nothing was counted."""
        if self.last is None:
            return {}
        loads = self.last.cpu()
        loads = loads[loads.any(1)]
        if not len(loads):
            return {}
        multiples = loads / loads.mean(1, keepdim=True)
        return {"expert_load_max": multiples.max().item(), "expert_load_min": multiples.min().item()}

    def unused(self) -> str:
        """A warning about experts that no token has used since the last call. Each expert is named once; '' if none."""
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
