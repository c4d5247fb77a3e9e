"""models/capacity.py against loops over documents: which pairs an expert drops, and what a mixture is without them."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from dtmega.config.families.moe import MoEKeys
from dtmega.models import routing
from dtmega.models.moe import Mixture
from dtmega.ops.context_parallel import ContextParallel
from tests import ranks
from tests.models.test_llama import V, batch
from tests.models.test_moe import OURS, gradients, small

E, K, S = 4, 2, 24
MODEL: dict[str, Any] = {**OURS, "n_experts": E, "expert_ffn_hidden_size": 24}
# By row: the length of each document, and the places without a label. The first row has a prompt and an end of a
# document without a label, the second is one document, and the third has a conversation and padding.
DOCUMENTS = ([5, 9, 10], [24], [13, 11])
WITHOUT_LABEL = (*((0, place) for place in (0, 1, 2, 13)), *((2, place) for place in (0, 1, *range(13, 24))))


def sizes(factor: float, **keys: Any) -> MoEKeys:
    return MoEKeys(**{"n_experts": E, "experts_per_token": K, "capacity_factor": factor} | keys)


def rows() -> tuple[Tensor, Tensor]:
    """Labels and document ids, [3, S]."""
    labels = torch.zeros(len(DOCUMENTS), S, dtype=torch.int64)
    for place in WITHOUT_LABEL:
        labels[place] = -100
    numbers = [[n for n, length in enumerate(lengths) for _ in range(length)] for lengths in DOCUMENTS]
    return labels, torch.tensor(numbers)


def choices() -> Tensor:
    """Two experts of each token, [3, S, K]; most tokens use expert 1."""
    weights = torch.tensor([1.0, 9.0, 2.0, 1.0]).expand(len(DOCUMENTS) * S, E)
    chosen = torch.multinomial(weights, K, generator=torch.Generator().manual_seed(0))
    return chosen.view(len(DOCUMENTS), S, K)


def dropped_by_loop(chosen: Tensor, labels: Tensor, documents: Tensor, factor: str) -> Tensor:
    """The dropped pairs, [B, S, K] bool, document by document and token by token."""
    dropped = torch.zeros(chosen.shape, dtype=torch.bool)
    for b, numbers in enumerate(documents.tolist()):
        for number in sorted(set(numbers)):
            places = [s for s in range(S) if numbers[s] == number and labels[b, s] != -100]
            capacity = math.ceil(Fraction(factor) * len(places) * K / E)
            taken = [0] * E
            for s in places:
                for j, expert in enumerate(chosen[b, s].tolist()):
                    dropped[b, s, j] = taken[expert] >= capacity
                    taken[expert] += 1
    return dropped


def late(chosen: Tensor, labels: Tensor, documents: Tensor | None, factor: float) -> Tensor:
    texts = routing.texts_of(labels, documents, None, sizes(factor))
    assert texts.capacity is not None
    return texts.capacity.late(chosen.flatten(0, 1)).view(chosen.shape)


@pytest.mark.parametrize("factor", ["0.25", "0.5", "1.0", "1.5", "100.0"])
def test_an_expert_takes_the_earliest_pairs_of_each_document_and_counts_only_tokens_with_a_label(factor: str):
    labels, documents = rows()
    chosen = choices()
    found = late(chosen, labels, documents, float(factor))
    assert torch.equal(found, dropped_by_loop(chosen, labels, documents, factor))
    assert not found[labels == -100].any()
    assert found.any() == (factor != "100.0")


def test_a_row_without_document_ids_is_one_document():
    labels, documents = rows()
    chosen = choices()
    expected = dropped_by_loop(chosen, labels, torch.zeros_like(documents), "1.0")
    assert torch.equal(late(chosen, labels, None, 1.0), expected)


@pytest.mark.parametrize(("factor", "kept"), [(1.1, 55), (1.100001, 56), (1e-6, 1), (2.0, 100)])
def test_a_capacity_is_the_product_of_the_number_that_is_written_rounded_up(factor: float, kept: int):
    """1.1 times the even share of 100 tokens, 50, is 55; the product of floats is above it."""
    chosen = torch.tensor([0, 1]).expand(1, 100, K)
    found = late(chosen, torch.zeros(1, 100, dtype=torch.int64), None, factor)
    assert found[0, :, 0].tolist() == [False] * kept + [True] * (100 - kept)


class OfRank(NamedTuple):
    """Attributes:
    places: places of the rank's tokens in a row.
    late: late pairs of these tokens.
    sums: sums of a model over them.
    """

    places: Tensor
    late: Tensor
    sums: dict[str, float]


def of_a_rank() -> OfRank:
    assert dist.group.WORLD is not None
    context = ContextParallel(dist.group.WORLD)
    labels, documents = (context.slice(row, balanced=True) for row in rows())
    chosen = context.slice(choices(), balanced=True)
    texts = routing.texts_of(labels, documents, context, sizes(1.0))
    assert texts.capacity is not None
    places = context.slice(torch.arange(S).expand(len(DOCUMENTS), S), balanced=True)
    late = texts.capacity.late(chosen.flatten(0, 1)).view(chosen.shape)
    return OfRank(places[0], late, sums_of_a_model(context))


def sums_of_a_model(context: ContextParallel | None) -> dict[str, float]:
    model = small(MoEKeys(**MODEL, capacity_factor=1.0))
    labels, documents = rows()
    tokens = torch.arange(labels.numel()).view(labels.shape)
    every = {"tokens": tokens, "labels": labels, "document_ids": documents}
    model.context = context
    with torch.no_grad():
        sums = model(**every if context is None else model.part_of(every, context))
    return {name: total.sum().item() for name, total in sums.items()}


@pytest.mark.parametrize("cp", [2, 3])
def test_ranks_that_share_sequences_drop_the_pairs_that_one_rank_drops(cp: int):
    truth = dropped_by_loop(choices(), *rows(), "1.0")
    found = torch.zeros_like(truth)
    of_ranks = ranks.run(cp, of_a_rank)
    for of_rank in of_ranks:
        found[:, of_rank.places] = of_rank.late
    assert torch.equal(found, truth)
    for name, expected in sums_of_a_model(None).items():
        assert sum(of_rank.sums[name] for of_rank in of_ranks) == pytest.approx(expected, rel=1e-6)


def mixture_by_loop(module: Mixture, x: Tensor, labels: Tensor, documents: Tensor, factor: str) -> Tensor:
    """A mixture's result, token by token, where a dropped pair is left out and the other weights stay as they are."""
    scores = (x @ module.router.weight.t()).softmax(-1)
    best = scores.topk(K)
    weights = best.values / best.values.sum(-1, keepdim=True)
    dropped = dropped_by_loop(best.indices, labels, documents, factor)
    result = torch.zeros_like(x)
    experts = module.experts
    for b, s, j in (~dropped).nonzero().tolist():
        e, token = best.indices[b, s, j], x[b, s]
        inner = F.silu(experts.gate[e] @ token) * (experts.up[e] @ token)
        part = torch.zeros_like(x)
        part[b, s] = 1.0
        result = result + part * (weights[b, s, j] * (experts.down[e] @ inner))
    return result


def test_a_mixture_without_dropped_pairs_is_a_loop_that_leaves_them_out():
    cfg = sizes(0.5, hidden_size=16, n_heads=2, expert_ffn_hidden_size=12)
    module = Mixture(cfg)
    generator = torch.Generator().manual_seed(0)
    for p in module.parameters():
        nn.init.normal_(p, std=0.3, generator=generator)
    labels, documents = rows()
    x = torch.randn(*labels.shape, 16, generator=generator)
    of_ours, of_loop = x.clone().requires_grad_(), x.clone().requires_grad_()
    out, report = module(of_ours, routing.texts_of(labels, documents, None, cfg))
    truth = mixture_by_loop(module, of_loop, labels, documents, "0.5")
    torch.testing.assert_close(out, truth, rtol=1e-5, atol=1e-5)
    found = torch.autograd.grad(out.square().sum(), [of_ours, *module.parameters()])
    expected = torch.autograd.grad(truth.square().sum(), [of_loop, *module.parameters()])
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    n_labels = int((labels != -100).sum())
    assert report.load.sum().item() == K * n_labels  # as they were chosen
    assert 0 < report.dropped.item() < K * n_labels


def test_without_labels_nothing_is_dropped_and_an_evaluation_drops_what_training_does():
    limited, unlimited = small(MoEKeys(**MODEL, capacity_factor=0.25)), small(MoEKeys(**MODEL))
    tokens, labels = batch()
    assert torch.equal(limited(tokens), unlimited(tokens))
    trained = limited(tokens, labels)
    assert not torch.equal(trained["lm"], unlimited(tokens, labels)["lm"])
    evaluated = limited.eval()(tokens, labels)
    assert torch.equal(evaluated["lm"], trained["lm"])
    assert torch.equal(evaluated["dropped"], trained["dropped"])


def test_packed_conversations_drop_what_each_drops_alone():
    model = small(MoEKeys(**MODEL, capacity_factor=0.75, balance_loss=0.01))
    lengths, prompts = (20, 35, 14), (5, 0, 9)
    padding = 8
    generator = torch.Generator().manual_seed(1)
    alone = []
    for length, prompt in zip(lengths, prompts, strict=True):
        tokens = torch.randint(V, (1, length), generator=generator)
        labels = tokens.roll(-1, 1)
        labels[:, :prompt] = -100
        alone.append((tokens, labels))
    sums = [model(tokens, labels) for tokens, labels in alone]
    expected = torch.stack([one["lm"] + one["balance"].sum() for one in sums]).sum()
    expected.backward()
    expected_gradients = gradients(model)
    model.zero_grad()
    packed = [torch.cat(parts, 1) for parts in zip(*alone, strict=True)]
    tokens, labels = F.pad(packed[0], (0, padding)), F.pad(packed[1], (0, padding), value=-100)
    every = [*lengths, padding]
    documents = torch.cat([torch.full((1, length), n) for n, length in enumerate(every)], 1)
    positions = torch.cat([torch.arange(length)[None] for length in every], 1)
    found = model(tokens, labels, document_ids=documents, position_ids=positions)
    n_dropped = torch.stack([one["dropped"] for one in sums]).sum(0)  # of each layer
    assert torch.equal(found["dropped"], n_dropped)
    assert n_dropped.all()
    total = found["lm"] + found["balance"].sum()
    total.backward()
    torch.testing.assert_close(total, expected, rtol=1e-6, atol=0)
    torch.testing.assert_close(gradients(model), expected_gradients, rtol=1e-4, atol=1e-5)
