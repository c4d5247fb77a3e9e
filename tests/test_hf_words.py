"""Files plans/hf/{styles,packed,vocab}.py: each word, cut over four ranks, gives the numbers of one whole module."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from dtmega.plans.apply import apply_plan
from dtmega.plans.hf import styles
from dtmega.plans.hf.packed import ConvColumn, ConvPacked, ConvRow, PackedColumn
from dtmega.plans.hf.styles import HeadColumns, SharedColumn, Stack, Whole
from dtmega.plans.hf.vocab import VocabEmbedding, VocabHead
from tests import ranks

TP, B, S, D, F, V = 4, 2, 8, 8, 24, 11
KV_HEADS = 2  # each of which two ranks need
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


class Use(NamedTuple):
    """A word on a module.

    Attributes:
        word: of the stack that it stands in.
        given, got: what a rank has of the input and of the output.
        summed: the gradient of the input on each rank is a term of the whole one.
        cut: the hidden state of the stack is cut along S.
    """

    word: Callable[[Stack], Any]
    module: Callable[[], nn.Module]
    given: Part
    got: Part
    summed: bool = False
    cut: bool = False


def linear(out: int = F, bias: bool = True) -> Callable[[], nn.Module]:
    return lambda: nn.Linear(D, out, bias)


def conv(out: int = F) -> Callable[[], nn.Module]:
    def made() -> nn.Module:
        from transformers.pytorch_utils import Conv1D

        return Conv1D(out, D)

    return made


def entering(word: type[Any]) -> Callable[[Stack], Any]:
    return lambda stack: word(stack, enters=True)


def padded() -> nn.Module:
    return nn.Embedding(V, D, padding_idx=7)


USES = {
    "column": Use(styles.Column, linear(), all_of, features, summed=True),
    "column without bias": Use(styles.Column, linear(bias=False), all_of, features, summed=True),
    "entering column": Use(entering(styles.Column), linear(), all_of, features),
    "entering column, cut": Use(entering(styles.Column), linear(), tokens, features, cut=True),
    "row": Use(styles.Row, linear(), features, all_of),
    "row without bias": Use(styles.Row, linear(bias=False), features, all_of),
    "row, cut": Use(styles.Row, linear(), features, tokens, cut=True),
    "gathered column": Use(styles.GatheredColumn, linear(), all_of, all_of),
    "gathered column, uneven": Use(styles.GatheredColumn, linear(V), all_of, all_of),
    "split row": Use(styles.SplitRow, linear(), all_of, all_of),
    "shared column": Use(lambda s: SharedColumn(KV_HEADS, s), linear(), all_of, head_of_keys, summed=True),
    "entering shared column": Use(
        lambda s: SharedColumn(KV_HEADS, s, enters=True), linear(bias=False), all_of, head_of_keys
    ),
    "packed column": Use(PackedColumn, linear(), all_of, of_each_part(2)),
    "packed column, cut": Use(PackedColumn, linear(), tokens, of_each_part(2), cut=True),
    "packed column without bias": Use(PackedColumn, linear(bias=False), all_of, of_each_part(2)),
    "conv column": Use(ConvColumn, conv(), all_of, features, summed=True),
    "entering conv column, cut": Use(entering(ConvColumn), conv(), tokens, features, cut=True),
    "conv row": Use(ConvRow, conv(), features, all_of),
    "conv row, cut": Use(ConvRow, conv(), features, tokens, cut=True),
    "packed conv": Use(ConvPacked, conv(), all_of, of_each_part(3), summed=True),
    "norm": Use(Whole, lambda: nn.LayerNorm(D), all_of, all_of),
    "norm, cut": Use(Whole, lambda: nn.LayerNorm(D), tokens, tokens, cut=True),
    # Of heads: [B, S, H, K] after a view, here of one number for each; the last dim stays whole.
    "norm of heads": Use(lambda s: Whole(s, of_heads=True), lambda: nn.LayerNorm(D), tokens, tokens),
    "columns of heads": Use(HeadColumns, lambda: nn.Embedding(V, D), all_of, features),
    "vocabulary": Use(lambda s: VocabEmbedding(), lambda: nn.Embedding(V, D), all_of, all_of),
    "vocabulary with padding": Use(lambda s: VocabEmbedding(), padded, all_of, all_of),
    "head": Use(lambda s: VocabHead(fused=False), linear(V), all_of, all_of),
    "fused head without labels": Use(lambda s: VocabHead(fused=True), linear(V, bias=False), all_of, all_of),
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
    whole, x = fresh(use)
    leaf = x.requires_grad_() if x.is_floating_point() else x
    out = whole(leaf)
    towards = torch.randn(out.shape)
    # What all ranks have counts once, what one of them has counts there.
    parts = [0] if use.got is all_of else range(TP)
    sum((use.got(out, r) * use.got(towards, r)).sum() for r in parts).backward()

    module, x = fresh(use)
    stack = Stack(sequence_parallel=use.cut)
    stack.cut = use.cut
    holder = nn.Sequential(module)
    apply_plan(holder, mesh, {"0": use.word(stack)})
    given = use.given(x, rank).clone()
    if given.is_floating_point():
        given.requires_grad_()
    ours = holder(given)
    (ours * use.got(towards, rank)).sum().backward()

    found = {"output": error(ours, use.got(out, rank))}
    if given.is_floating_point():
        gradient = given.grad
        if use.summed:
            dist.all_reduce(gradient)
        found["gradient of the input"] = error(gradient, use.given(leaf.grad, rank))
    for (name, p), q in zip(module.named_parameters(), whole.parameters(), strict=True):
        assert isinstance(p, DTensor), name
        found[f"gradient of {name}"] = error(p.grad.full_tensor(), q.grad)
        # Gradients of a parameter that is whole on every rank are, on every rank, those of one process.
        if p.to_local().shape == p.shape:
            found[f"gradient of {name} here"] = error(p.grad.to_local(), q.grad)
    return found


def on_four() -> dict[str, dict[str, float]]:
    mesh = init_device_mesh("cpu", (TP,), mesh_dim_names=("tp",))
    return {name: deviations(use, mesh) for name, use in USES.items()}


@cache
def measured() -> list[dict[str, dict[str, float]]]:
    return ranks.run(TP, on_four)


@pytest.mark.parametrize("name", USES)
def test_a_word_gives_output_and_gradients_of_one_whole_module(name: str):
    for found in measured():
        assert {what: e for what, e in found[name].items() if not e < 1e-5} == {}
