"""plans/mappings.py: each move and its gradient against the closed form, computed with the tensors of all ranks."""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from dtmega.plans import mappings
from tests import ranks

TP, S, D = 3, 6, 5
Tensors = list[Tensor]  # of each rank


def same(tensors: Tensors) -> Tensors:
    return [tensors[0]] * TP


def total(tensors: Tensors) -> Tensors:
    return [sum(tensors[1:], tensors[0])] * TP


def joined(tensors: Tensors, dim: int = 1) -> Tensors:
    return [torch.cat(tensors, dim)] * TP


def parts(tensors: Tensors, dim: int = 1) -> Tensors:
    """Each rank's own part of a tensor; the last one may be smaller."""
    return [whole.chunk(TP, dim)[rank] for rank, whole in enumerate(tensors)]


class Move(NamedTuple):
    """A move, and its closed form on the tensors of all ranks.

    Attributes:
        cut: dim of which each rank has a part before the move; None: all of it.
        same_before: all ranks have the same, before the move.
        same_after: they compute the same after it, and so have the same gradient.
    """

    run: Callable[..., Tensor]
    forward: Callable[[Tensors], Tensors]
    backward: Callable[[Tensors], Tensors]
    cut: int | None = None
    same_before: bool = False
    same_after: bool = False


# Along the last dim there are 5, of which the ranks have 2, 2 and 1.
split_last_dim, join_last_dim = partial(mappings.split, dim=2), partial(mappings.join, dim=2, size=D)
MOVES = {
    "copy": Move(mappings.copy, same, total, same_before=True),
    "add_up": Move(mappings.add_up, total, same, same_after=True),
    "gather": Move(mappings.gather, joined, lambda gradients: parts(total(gradients)), cut=1),
    "scatter": Move(mappings.scatter, lambda x: parts(total(x)), joined),
    "split": Move(mappings.split, parts, joined, same_before=True),
    "split the last dim": Move(split_last_dim, partial(parts, dim=2), partial(joined, dim=2), same_before=True),
    "join": Move(partial(mappings.join, dim=1, size=S), joined, parts, cut=1, same_after=True),
    "join the last dim": Move(join_last_dim, partial(joined, dim=2), partial(parts, dim=2), cut=2, same_after=True),
}


def values(move: Move, batch: int) -> tuple[Tensors, Tensors]:
    """The inputs, and the gradients of the outputs."""
    generator = torch.Generator().manual_seed(batch)

    def drawn(shape: torch.Size) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    x = [drawn(torch.Size((batch, S, D))) for _ in range(TP)]
    if move.same_before:
        x = same(x)
    if move.cut is not None:
        x = parts(x, move.cut)
    gradients = [drawn(y.shape) for y in move.forward(x)]
    return x, same(gradients) if move.same_after else gradients


def moved(compiled: bool) -> dict[tuple[str, int], dict[str, Any]]:
    """Results, gradients, and whether what went in is as it was, on this rank; `compiled`: by what is for that."""
    torch.compiler.is_compiling = lambda: compiled
    group, rank, found = dist.group.WORLD, dist.get_rank(), {}
    assert group is not None
    for name, move in MOVES.items():
        for batch in (1, 2):
            inputs, gradients = values(move, batch)
            x, gradient = inputs[rank].clone().requires_grad_(), gradients[rank].clone()
            y = move.run(x, group)
            (dx,) = torch.autograd.grad(y, x, gradient)
            left = torch.equal(x, inputs[rank]) and torch.equal(gradient, gradients[rank])
            found[name, batch] = {"y": y.detach() + 0, "dx": dx + 0, "inputs are as they were": left}
            found[name, batch]["is a view"] = y._is_view()
    return found


@functools.cache
def on_three(compiled: bool) -> list[dict[tuple[str, int], dict[str, Any]]]:
    return ranks.run(TP, moved, compiled)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", MOVES)
def test_a_move_and_its_gradient_are_those_of_the_closed_form(name: str, compiled: bool):
    move = MOVES[name]
    for batch in (1, 2):
        inputs, gradients = values(move, batch)
        for rank, (y, dx) in enumerate(zip(move.forward(inputs), move.backward(gradients), strict=True)):
            found = on_three(compiled)[rank][name, batch]
            torch.testing.assert_close(found["y"], y)
            torch.testing.assert_close(found["dx"], dx)
            assert found["inputs are as they were"]


@pytest.mark.parametrize("name", ["join", "join the last dim"])
def test_a_joined_tensor_is_no_view_which_fsdp2_would_warn_of_at_the_end_of_a_block(name: str):
    assert not any(on_three(False)[rank][name, batch]["is a view"] for rank in range(TP) for batch in (1, 2))
