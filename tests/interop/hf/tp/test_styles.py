"""The words of plans/ and hf/tp/: each, cut over four ranks, gives the numbers of one whole module."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from dtmega.interop.hf.tp.generic import GlobalLinear
from dtmega.interop.hf.tp.packed import ConvColumn, ConvPacked, ConvRow, MultiQueryColumn, PackedColumn, PackedRow
from dtmega.interop.hf.tp.regions import EnterHeads
from dtmega.interop.hf.tp.styles import GatheredColumn, SplitRow, Stack
from dtmega.interop.hf.tp.vocab import LogitsHead
from dtmega.ops.shards import full_tensor
from dtmega.plans.apply import apply_plan
from dtmega.plans.styles import Column, Enter, KVColumn, Norm, Row
from dtmega.plans.vocabulary import HeadColumns, VocabEmbedding
from tests import ranks

TP, B, S, D, F, V = 4, 2, 8, 8, 24, 11
KV_HEADS = 2  # each of which two ranks need
HEADS = 8
Part = Callable[[Tensor, int], Tensor]


def all_of(x: Tensor, rank: int) -> Tensor:
    return x


def tokens(x: Tensor, rank: int) -> Tensor:
    return x.chunk(TP, 1)[rank]


def features(x: Tensor, rank: int) -> Tensor:
    return x.chunk(TP, -1)[rank]


def of_each_part(n: int) -> Part:
    return lambda x, rank: torch.cat([part.chunk(TP, -1)[rank] for part in x.chunk(n, -1)], -1)


def head_of_keys(x: Tensor, rank: int) -> Tensor:
    return x.chunk(KV_HEADS, -1)[rank * KV_HEADS // TP]


def queries_and_keys(x: Tensor, rank: int) -> Tensor:
    queries, keys_and_values = x.split([HEADS, x.shape[-1] - HEADS], -1)
    return torch.cat([queries.chunk(TP, -1)[rank], keys_and_values], -1)


class Use(NamedTuple):
    """A word on a module.

    Attributes:
        word: of the stack that it stands in.
        given, got: what a rank has of the input and of the output.
        inside: of an Enter around it.
        cut: the hidden state of the stack is cut along S.
    """

    word: Callable[[Stack], Any]
    module: Callable[[], nn.Module]
    given: Part
    got: Part
    inside: bool = False
    cut: bool = False


def linear(out: int = F, bias: bool = True) -> Callable[[], nn.Module]:
    return lambda: nn.Linear(D, out, bias)


def conv(out: int = F) -> Callable[[], nn.Module]:
    def made() -> nn.Module:
        from transformers.pytorch_utils import Conv1D

        return Conv1D(out, D)

    return made


def entering(word: type[Any]) -> Callable[[Stack], Any]:
    return lambda stack: word(stack).entering()


def padded(row: int) -> Callable[[], nn.Module]:
    return lambda: nn.Embedding(V, D, padding_idx=row)


USES = {
    "column": Use(Column, linear(), all_of, features, inside=True),
    "column without bias": Use(Column, linear(bias=False), all_of, features, inside=True),
    "entering column": Use(entering(Column), linear(), all_of, features),
    "entering column, cut": Use(entering(Column), linear(), tokens, features, cut=True),
    "row": Use(Row, linear(), features, all_of),
    "row without bias": Use(Row, linear(bias=False), features, all_of),
    "row, cut": Use(Row, linear(), features, tokens, cut=True),
    "gathered column": Use(lambda s: GatheredColumn(), linear(), all_of, all_of),
    "gathered column, uneven": Use(lambda s: GatheredColumn(), linear(V), all_of, all_of),
    "split row": Use(lambda s: SplitRow(), linear(), all_of, all_of),
    "shared column": Use(lambda s: KVColumn(KV_HEADS, s), linear(), all_of, head_of_keys, inside=True),
    "entering shared column": Use(lambda s: KVColumn(KV_HEADS, s).entering(), linear(bias=False), all_of, head_of_keys),
    "packed column": Use(entering(PackedColumn), linear(), all_of, of_each_part(2)),
    "packed column, cut": Use(entering(PackedColumn), linear(), tokens, of_each_part(2), cut=True),
    "packed column without bias": Use(entering(PackedColumn), linear(bias=False), all_of, of_each_part(2)),
    "conv column": Use(ConvColumn, conv(), all_of, features, inside=True),
    "entering conv column, cut": Use(entering(ConvColumn), conv(), tokens, features, cut=True),
    "conv row": Use(ConvRow, conv(), features, all_of),
    "conv row, cut": Use(ConvRow, conv(), features, tokens, cut=True),
    "packed conv": Use(ConvPacked, conv(), all_of, of_each_part(3), inside=True),
    "packed row": Use(lambda s: PackedRow(s, 2), linear(), of_each_part(2), all_of),
    "packed row, cut": Use(lambda s: PackedRow(s, 2), linear(bias=False), of_each_part(2), tokens, cut=True),
    "queries and one head": Use(
        lambda s: MultiQueryColumn(s, HEADS), linear(HEADS + 2), all_of, queries_and_keys, True
    ),
    "norm": Use(Norm, lambda: nn.LayerNorm(D), all_of, all_of),
    "norm, cut": Use(Norm, lambda: nn.LayerNorm(D), tokens, tokens, cut=True),
    # Of heads: [B, S, H, K] after a view, here of one number for each; the last dim stays whole.
    "norm of heads": Use(lambda s: Norm(s, of_heads=True), lambda: nn.LayerNorm(D), tokens, tokens),
    "columns of heads": Use(HeadColumns, lambda: nn.Embedding(V, D), all_of, features),
    "vocabulary": Use(lambda s: VocabEmbedding(Stack()), lambda: nn.Embedding(V, D), all_of, all_of),
    # A rank has three rows.
    "vocabulary with padding in a first row": Use(lambda s: VocabEmbedding(Stack()), padded(6), all_of, all_of),
    "vocabulary with padding in a last row": Use(lambda s: VocabEmbedding(Stack()), padded(8), all_of, all_of),
    "head": Use(lambda s: LogitsHead(fused=False), linear(V), all_of, all_of),
    "fused head without labels": Use(lambda s: LogitsHead(fused=True), linear(V, bias=False), all_of, all_of),
}


def error(ours: Tensor, truth: Tensor) -> float:
    if ours.shape != truth.shape:
        return float("inf")
    return ((ours - truth).norm() / truth.norm()).item()


def fresh(use: Use) -> tuple[nn.Module, Tensor]:
    """The module and its input, alike in all processes and at each call: ids of all rows, or hidden states."""
    torch.manual_seed(0)
    module = use.module()
    for p in module.parameters():
        nn.init.normal_(p)
    if isinstance(module, nn.Embedding):
        return module, torch.arange(B * S).view(B, S) % V
    return module, torch.randn(B, S, D)


def deviations(use: Use, mesh: DeviceMesh) -> dict[str, float]:
    """Relative to one process: this rank's part of the output, of the gradient of the input, and each parameter's."""
    rank = mesh.get_local_rank()
    alone, x = fresh(use)
    leaf = x.requires_grad_() if x.is_floating_point() else x
    out = alone(leaf)
    towards = torch.randn(out.shape)
    # What all ranks have counts once, what one of them has counts there.
    parts = [0] if use.got is all_of else range(TP)
    sum((use.got(out, r) * use.got(towards, r)).sum() for r in parts).backward()

    module, x = fresh(use)
    stack = Stack(sequence_parallel=use.cut)
    stack.cut = use.cut
    holder = nn.Sequential(module)
    apply_plan(holder, mesh, {"0": use.word(stack)} | ({"": Enter(stack)} if use.inside else {}))
    given = use.given(x, rank).clone()
    if given.is_floating_point():
        given.requires_grad_()
    ours = holder(given)
    (ours * use.got(towards, rank)).sum().backward()

    found = {"output": error(ours, use.got(out, rank))}
    if given.is_floating_point():
        found["gradient of the input"] = error(given.grad, use.given(leaf.grad, rank))
    for (name, p), q in zip(module.named_parameters(), alone.parameters(), strict=True):
        assert isinstance(p, DTensor), name
        found[f"gradient of {name}"] = error(full_tensor(p.grad), q.grad)
        # Gradients of a parameter that is whole on every rank are, on every rank, those of one process.
        if p.to_local().shape == p.shape:
            found[f"gradient of {name} here"] = error(p.grad.to_local(), q.grad)
    return found


def losses(mesh: DeviceMesh) -> dict[str, float]:
    """The loss and each gradient of logits that no rank has whole, with some tokens that take no part."""
    labels = torch.arange(B * S) % V
    labels[::3] = -100
    found: dict[str, float] = {}
    for bias in (True, False):
        for options in ({}, {"reduction": "sum", "label_smoothing": 0.1}):
            results = []
            for cut in (False, True):
                torch.manual_seed(0)
                head, x = nn.Linear(D, V, bias), torch.randn(B, S, D, requires_grad=True)
                if cut:
                    word = LogitsHead(fused=True)
                    apply_plan(nn.Sequential(head), mesh, {"0": word})
                    word.labelled = True
                loss = nn.functional.cross_entropy(head(x).view(-1, V), labels, **options)
                loss.backward()
                grads = [full_tensor(p.grad) if cut else p.grad for p in head.parameters()]
                results.append([loss.detach(), x.grad, *grads])
            found[f"{bias} {options}"] = max(error(ours, truth) for truth, ours in zip(*results, strict=True))
    return found


def tokens_outside(mesh: DeviceMesh) -> list[str]:
    """The errors for ids below and above the vocabulary."""
    module = nn.Embedding(V, D)
    apply_plan(nn.Sequential(module), mesh, {"0": VocabEmbedding(Stack())})
    found: list[str] = []
    for token in (-1, V):
        with pytest.raises(IndexError) as raised:
            module(torch.tensor([[0, token]]))
        found.append(type(raised.value).__name__)
    return found


def on_four() -> tuple[dict[str, dict[str, float]], dict[str, float], list[str]]:
    mesh = init_device_mesh("cpu", (TP,), mesh_dim_names=("tp",))
    return {name: deviations(use, mesh) for name, use in USES.items()}, losses(mesh), tokens_outside(mesh)


@pytest.fixture(scope="module")  # unlike a cache it keeps a failure too
def measured() -> list[tuple[dict[str, dict[str, float]], dict[str, float], list[str]]]:
    return ranks.run(TP, on_four)


@pytest.mark.parametrize("name", USES)
def test_a_word_gives_output_and_gradients_of_one_whole_module(measured, name: str):
    for found, _, _ in measured:
        assert {what: e for what, e in found[name].items() if not e < 1e-5} == {}


def test_a_loss_of_logits_that_no_rank_has_whole_is_torchs(measured):
    for _, found, _ in measured:
        assert len(found) == 4
        assert {what: e for what, e in found.items() if not e < 1e-5} == {}


def test_a_token_outside_of_the_vocabulary_fails_on_every_rank_as_in_one_process(measured):
    for _, _, raised in measured:
        assert raised == ["IndexError", "IndexError"]


class OwnLinear(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * 2


class OwnEmbedding(nn.Embedding):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * 2


def enter() -> tuple[Any, nn.Module]:
    module = nn.Module()
    module.num_heads = 6  # pyright: ignore[reportArgumentType]
    return EnterHeads(Stack(), divide=("num_heads",)), module


REFUSED: dict[str, tuple[Any, nn.Module, int, str]] = {
    "a column of another forward": (Column(), OwnLinear(D, F), 4, "would replace the forward of OwnLinear"),
    "a row of another forward": (Row(), OwnLinear(D, F), 4, "would replace the forward of OwnLinear"),
    "a column that is uneven": (Column(), nn.Linear(D, 6), 4, "tp=4 does not divide 6: dim 0 of 'weight'"),
    "a row that is uneven": (Row(), nn.Linear(6, D), 4, "tp=4 does not divide 6: dim 1 of 'weight'"),
    "a gathered column without rows": (GatheredColumn(), nn.Linear(D, 9), 4, "leaves a rank without any of 9"),
    "a packed column that is uneven": (PackedColumn(), nn.Linear(D, 12), 4, "'weight' of Linear in 2 parts"),
    "a packed conv that is uneven": (ConvPacked(), conv(36)(), 8, "'weight' of Conv1D in 3 parts"),
    "a conv that is none": (ConvColumn(), nn.Linear(D, F), 4, "would replace the forward of Linear"),
    "heads of another module": (HeadColumns(), nn.Linear(D, F), 4, "would replace the forward of Linear"),
    "rows of one rank": (VocabEmbedding(Stack()), nn.Embedding(9, D), 4, "leave a rank without any of 9"),
    "a norm of rows": (
        VocabEmbedding(Stack()),
        nn.Embedding(V, D, max_norm=1.0),
        4,
        "is for nn.Embedding without max_norm",
    ),
    "scaled gradients": (
        VocabEmbedding(Stack()),
        nn.Embedding(V, D, scale_grad_by_freq=True),
        4,
        "is for nn.Embedding without",
    ),
    "a norm over tokens": (Norm(), nn.LayerNorm([S, D]), 4, "does not know LayerNorm with {'weight': [8, 8]"),
    "a norm over batches": (Norm(), nn.BatchNorm1d(D), 4, "does not know BatchNorm1d"),
    "heads of keys": (KVColumn(3), nn.Linear(D, F), 2, "tp=2 and n_kv_heads=3: neither divides the other"),
    "no embedding": (VocabEmbedding(Stack()), nn.Linear(D, F), 4, "VocabEmbedding is for nn.Embedding"),
    "another head": (LogitsHead(True), OwnLinear(D, V), 4, "would replace the forward of OwnLinear"),
    "a head of one rank": (LogitsHead(True), nn.Linear(D, 9), 4, "leave a rank without any of 9"),
    "heads that are uneven": (*enter(), 4, "tp=4 does not divide num_heads=6 of Module"),
    "a linear of DTensors": (
        GlobalLinear(True),
        OwnLinear(D, F),
        4,
        "GlobalLinear is for nn.Linear, not for OwnLinear",
    ),
}
TAKEN: list[tuple[Any, nn.Module, int]] = [
    (Column(), nn.Linear(D, 8), 4),
    (GatheredColumn(), nn.Linear(D, 10), 4),
    (PackedColumn(), nn.Linear(D, 16), 4),
    (ConvPacked(), conv(24)(), 8),
    (VocabEmbedding(Stack()), OwnEmbedding(10, D, padding_idx=1), 4),
    (LogitsHead(True), nn.Linear(D, 10), 4),
    (*enter(), 3),
    (Norm(), nn.LayerNorm(D, elementwise_affine=False), 4),
    (KVColumn(2), nn.Linear(D, 8), 4),
    (KVColumn(4), nn.Linear(D, 8), 2),
    (GlobalLinear(True), nn.Linear(D, 9), 4),
]


@pytest.mark.parametrize("what", REFUSED)
def test_a_module_that_a_word_is_not_for_or_ranks_cannot_share_is_refused(what: str):
    word, module, tp, text = REFUSED[what]
    with pytest.raises(ValueError, match=re.escape(text)):
        word.check(module, tp)


@pytest.mark.parametrize("number", range(len(TAKEN)))
def test_a_module_that_just_fits_is_taken(number: int):
    word, module, tp = TAKEN[number]
    word.check(module, tp)
