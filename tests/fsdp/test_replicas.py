"""Sums over data ranks: of gradients where they are, and FSDP2's two collectives as messages."""

from __future__ import annotations

import functools
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from dtmega import config
from dtmega.fsdp import sends
from dtmega.fsdp.masters import Masters
from dtmega.fsdp.replicas import Replicas
from dtmega.training.choices import wraps
from tests import ranks

N = 5  # so that the messages have a fourth and a last sender


class Blocks(nn.Module):
    """Two blocks, a weight before them that is used behind them, too, one that is frozen, and one that rank 1 skips."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 4)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(2)])
        self.seldom = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.frozen(self.embed(x))
        for layer in self.layers:
            h = layer(h).tanh()
        return self.embed(h if dist.get_rank() == 1 else self.seldom(h)).square().sum()


def summed(cast: bool) -> tuple[dict[str, Tensor], dict[str, Tensor], list[str]]:
    """The gradients of two microbatches by Replicas, the sums of all ranks' own, and what happened in which order.

    Args:
        cast: other tensors compute, as in mixed precision.
    """
    torch.manual_seed(1)
    model = Blocks()
    torch.manual_seed(2 + dist.get_rank())
    microbatches = torch.randn(2, 5, 4)
    for x in microbatches:
        model(x).backward()
    expected = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            expected[name] = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()
            dist.all_reduce(expected[name])
    model.zero_grad()
    assert dist.group.WORLD is not None
    masters = Masters(model, torch.float32) if cast else None
    replicas = Replicas(model, [*model.layers], dist.group.WORLD)
    happened = []
    honest = dist.all_reduce

    def all_reduce(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        happened.append(f"sum {x.numel()}")
        return honest(x, *args, **kwargs)

    for i, layer in enumerate(model.layers):
        layer.register_full_backward_pre_hook(lambda *_, i=i: happened.append(f"backward {i}"))
    with patch.object(dist, "all_reduce", all_reduce):
        for x, last in zip(microbatches, (False, True), strict=True):
            if last:
                happened.append("last")
                replicas.expect()
            if masters is not None:
                masters.last = last
            model(x).backward()
        happened.append("done")
        if masters is not None:
            masters.release()
        for parameter in model.seldom.parameters():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        replicas.finish()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return found, expected, happened


def exchanged() -> list[tuple[Tensor, Tensor]]:
    """What the messages brought, and what gloo's own collectives bring or the sum in the order of ranks is."""
    group, rank = dist.group.WORLD, dist.get_rank()
    assert group is not None
    everyone = [torch.randn(N * 5, generator=torch.Generator().manual_seed(i)) for i in range(N)]
    mine = everyone[rank]
    pairs = []
    for async_op in (False, True):
        whole = torch.empty(N * len(mine))
        work = sends.Gathers()(whole, mine, group, async_op)
        if work is not None:
            work.wait()
        pairs.append((whole, torch.cat(everyone)))
    inside = torch.zeros(N, len(mine))
    inside[rank] = mine
    sends.Gathers()(inside.view(-1), inside[rank], group)
    pairs.append((inside.view(-1), torch.cat(everyone)))
    part = torch.empty(5)
    sends.ReducesAndScatters()(part, mine, group, dist.ReduceOp.SUM)
    pairs.append((part, functools.reduce(torch.add, [x.view(N, 5)[rank] for x in everyone])))
    pairs.append((mine, torch.randn(N * 5, generator=torch.Generator().manual_seed(rank))))
    return pairs


def all_three() -> tuple[Any, Any, Any]:
    return summed(cast=False), summed(cast=True), exchanged()


@functools.cache
def found() -> list[tuple[Any, Any, Any]]:
    return ranks.run(N, all_three)


@pytest.mark.parametrize("cast", [False, True])
def test_each_copy_has_the_sum_of_all_gradients(cast: bool):
    for each in found():
        sums, expected, _ = each[cast]
        assert sums.keys() == expected.keys() == {n for n, _ in Blocks().named_parameters() if "frozen" not in n}
        for name, total in sums.items():
            torch.testing.assert_close(total, expected[name], msg=name)


@pytest.mark.parametrize("cast", [False, True])
def test_sums_begin_in_the_last_backward_block_by_block_and_in_one_order_on_all_ranks(cast: bool):
    block = ["sum 16", "sum 4"]
    during = ["backward 1", "backward 0", "last", "backward 1", *block, "backward 0", *block]
    rest = ["sum 16", "sum 16", "sum 8"]
    for rank, each in enumerate(found()):
        happened = each[cast][2]
        assert happened == [*during, *(["done", *rest] if rank == 1 else [*rest, "done"])]  # one is missing on rank 1


def test_messages_bring_what_the_collectives_would_and_add_up_in_the_order_of_ranks():
    for _, _, pairs in found():
        for got, expected in pairs:
            assert torch.equal(got, expected)


def test_fsdp2_is_left_out_where_nothing_is_cut_cast_or_offloaded():
    def asked(replicas: int = 1, splits_backward: bool = False, **cut_or_section: Any) -> bool:
        sizes = {axis: cut_or_section.pop(axis, 1) for axis in ("dp_shard", "cp", "tp")}
        cfg = config.validate({"train": {"steps": 1}, **cut_or_section}, "test")
        return wraps(cfg, {"dp_replicate": replicas, **sizes}, splits_backward)

    assert not asked()
    assert not asked(replicas=2)
    assert asked(dp_shard=2)
    assert asked(cp=2)
    assert asked(tp=2, precision={"params": "bfloat16"})
    assert asked(splits_backward=True)
    # What is whole on each rank is cast by it.
    assert not asked(precision={"params": "bfloat16"})
    assert not asked(replicas=2, precision={"params": "bfloat16"})
    assert asked(replicas=2, dp_shard=2, precision={"params": "bfloat16"})
    assert asked(cp=2, precision={"params": "bfloat16"})
    assert asked(precision={"params": "bfloat16", "reduce": "bfloat16"})
    assert asked(replicas=2, precision={"reduce": "bfloat16"})
    assert not asked(precision={"reduce": "bfloat16"})
    assert asked(fsdp={"cpu_offload": True})
