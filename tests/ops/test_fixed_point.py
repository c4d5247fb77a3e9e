"""Sums without an order, against exact fractions."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch

from dtmega.data.objectives.sums import Sum, Tally
from dtmega.ops import fixed_point
from dtmega.ops.fixed_point import Grid, exact_or_infinite, largest_of, scalar, squared_norm
from tests import ranks


def terms(n: int, size: int) -> list[torch.Tensor]:
    """Gradients whose elements are of very different sizes."""
    generator = torch.Generator().manual_seed(0)
    sizes = 10.0 ** -torch.randint(0, 6, (size,), generator=generator)
    return [torch.randn(size, generator=generator) * sizes for _ in range(n)]


def summed(parts: list[torch.Tensor], grid: Grid, scale: float = 1.0) -> torch.Tensor:
    total = torch.zeros(parts[0].shape, dtype=torch.int64)
    for part in parts:
        grid.add(total, part, scale)
    out = torch.empty(parts[0].shape)
    grid.write(total, out)
    return out


def test_a_sum_has_the_same_bits_in_every_order_and_is_closer_to_the_fraction_than_a_sum_in_fp32():
    parts = terms(64, 1000)
    grid = Grid.of(max(float(part.abs().max()) for part in parts), len(parts))
    found = summed(parts, grid)
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        order = torch.randperm(len(parts), generator=generator).tolist()
        assert torch.equal(summed([parts[i] for i in order], grid), found)
    plain = torch.zeros(1000)
    for part in parts:
        plain += part
    truth = [sum(Fraction(float(part[i])) for part in parts) for i in range(1000)]
    errors = [[abs(Fraction(float(values[i])) - truth[i]) for i in range(1000)] for values in (found, plain)]
    assert max(errors[0]) <= max(errors[1])
    assert sum(errors[0]) < sum(errors[1])
    # The sum is rounded to fp32 once, and each of its terms to the grid.
    of_terms = len(parts) * Fraction(2) ** (grid.exponent - 1)
    for error, exact in zip(errors[0], truth, strict=True):
        assert error <= (abs(exact) + of_terms) * Fraction(2) ** -24 + of_terms


def test_a_grid_holds_the_sum_of_all_terms_at_its_limit():
    for n_terms in (1, 3, 4096):
        grid = Grid.of(0.3, n_terms)
        assert grid.limit == 0.5 * 2**10
        total = torch.zeros(1, dtype=torch.int64)
        for _ in range(min(n_terms, 3)):
            grid.add(total, torch.tensor([grid.limit]))
        out = torch.empty(1)
        grid.write(total, out)
        assert out.item() == grid.limit * min(n_terms, 3)
        assert int(total) // min(n_terms, 3) * n_terms <= 2**62


def test_the_loss_scale_is_divided_out_before_the_rounding():
    part = torch.tensor([1.0, -3.0, 2.0**-30])
    grid = Grid.of(1.0, 2)
    assert torch.equal(summed([part * 1024, part * 1024], grid, scale=1024.0), summed([part, part], grid))


def test_scalars_add_up_exactly_and_not_finite_ones_stay():
    values = [float(value) for value in torch.rand(1000, generator=torch.Generator().manual_seed(0)) * 1000]
    rounded = [float(scalar(torch.tensor(value))) for value in values]
    assert math.fsum(rounded) == sum(rounded) == sum(reversed(rounded))
    assert max(abs(a - b) for a, b in zip(rounded, values, strict=True)) <= 2.0**-23 + 1e-4
    assert scalar(torch.tensor(math.inf)).isinf()
    assert scalar(torch.tensor(math.nan)).isnan()


def test_totals_beyond_what_is_exact_are_infinite():
    totals = torch.tensor([1.0, math.inf, 2.0**33 - 2.0**-20, 2.0**33, math.nan], dtype=torch.float64)
    assert exact_or_infinite(totals).tolist() == pytest.approx(
        [1.0, math.inf, 2.0**33 - 2.0**-20, math.inf, math.nan], rel=0, abs=0, nan_ok=True
    )


def test_the_largest_of_a_tensor_is_infinite_if_an_element_is_not_finite():
    assert largest_of(torch.tensor([1.0, -3.0])).item() == 3.0
    assert largest_of(torch.empty(0)).item() == 0.0
    assert largest_of(torch.tensor([1.0, math.nan])).item() == math.inf
    assert largest_of(torch.tensor([-math.inf, 1.0])).item() == math.inf


TENSORS = {"a": terms(1, 5000)[0], "b": terms(2, 77)[1] * 1e-4, "zero": torch.zeros(9)}


def norms_of(cuts: list[list[float]]) -> list[float]:
    """The squared norm of the same tensors, cut at these places."""
    import torch.distributed as dist

    group = dist.group.WORLD
    assert group is not None
    sizes = {name: tensor.numel() for name, tensor in TENSORS.items()}
    found = []
    for places in cuts:
        parts = {}
        for name, tensor in TENSORS.items():
            at = [0, *(int(place * len(tensor)) for place in places), len(tensor)]
            parts[name] = tensor[at[group.rank()] : at[group.rank() + 1]]
        found.append(squared_norm(parts, sizes, group))
    return found


def test_a_norm_has_the_same_bits_wherever_tensors_are_cut_and_is_that_of_the_fractions():
    exact = sum(Fraction(float(x)) ** 2 for tensor in TENSORS.values() for x in tensor)
    (whole,) = ranks.run(1, norms_of, [[]])[0]
    for of_rank in ranks.run(2, norms_of, [[0.5], [0.1], [0.99]]):
        assert of_rank == [whole] * 3
    assert abs(Fraction(whole) - exact) <= exact * Fraction(2) ** -52


def infinite() -> float:
    import torch.distributed as dist

    group = dist.group.WORLD
    assert group is not None
    bad = torch.tensor([1.0, math.inf]) if group.rank() else torch.ones(2)
    return squared_norm({"a": bad}, {"a": 4}, group)


def test_a_norm_is_infinite_on_all_ranks_if_an_element_of_one_is():
    assert ranks.run(2, infinite) == [math.inf] * 2


def test_pieces_do_not_change_a_sum(monkeypatch: pytest.MonkeyPatch):
    parts = terms(3, 100)
    grid = Grid.of(10.0, 3)
    whole = summed(parts, grid)
    monkeypatch.setattr(fixed_point, "PIECE", 7)
    assert torch.equal(summed(parts, grid), whole)


def test_a_tally_adds_terms_without_an_order():
    values = torch.rand(1000, generator=torch.Generator().manual_seed(0)) * torch.logspace(-6, 3, 1000)
    found = []
    for order in (range(1000), reversed(range(1000))):
        tally = Tally((Sum("lm", "tokens"),), torch.device("cpu"), rounded=scalar)
        for i in order:
            tally.add_all({"lm": values[i]})
        found.append(tally.totals.item())
    assert found[0] == found[1] == pytest.approx(values.double().sum().item(), abs=1000 * 2.0**-23)
