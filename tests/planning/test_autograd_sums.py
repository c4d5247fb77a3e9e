"""planning/counting/autograd_sums.py against what autograd's engine does on real tensors, by torch's profiler."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from dtmega.planning.counting.fake_device import on_fake_device

CPU = torch.device("cpu")
GRAPHS: dict[str, Callable[[Tensor], Tensor]] = {
    "two products": lambda y: (y * 2 + y * 3).sum(),
    "three products": lambda y: (y * 2 + y * 3 + y.exp()).sum(),
    "a gradient that goes two ways": lambda y: (y * 2 + (y + y.exp() * 1)).mul(2).sum(),
    "a gradient that is expanded": lambda y: y.sum() + y.mul(3).sum(),
    "a view's gradient": lambda y: y.view(3, 2).mul(3).sum() + y.mul(3).sum(),
    "a transposed gradient": lambda y: y.t().mul(3).sum() + y.mul(3).sum(),
    "a backward in Python": lambda y: Doubled.apply(y).sum() + y.mul(3).sum(),
}


class Doubled(torch.autograd.Function):
    """2 y, whose backward adds in Python."""

    @staticmethod
    def forward(ctx: Any, y: Tensor) -> Tensor:
        return y * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return gradient + gradient


class Sums:
    """An observer that takes note of sums."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def launched(self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        name = operator.name().partition(".")[0]
        if name in ("aten::add", "aten::add_"):
            self.names.append(name)

    def resized(self, storage: torch.UntypedStorage) -> None:
        pass

    def repeated(self, times: int) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


@pytest.mark.parametrize("name", GRAPHS)
def test_the_engine_adds_in_place_in_a_plan_where_it_does_on_real_tensors(name: str):
    x = torch.ones(2, 3, requires_grad=True)
    loss = GRAPHS[name](x * 1)
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as profiled:
        loss.backward()
    real = [event.name for event in profiled.events() or () if event.name in ("aten::add", "aten::add_")]

    sums = Sums()
    with on_fake_device(CPU, 0, 1, sums) as fake_device, fake_device.holding_everything():
        x = torch.ones(2, 3, requires_grad=True)
        loss = GRAPHS[name](x * 1)
        sums.names.clear()
        loss.backward()
    assert sums.names == real
