"""Sums that have no order: numbers rounded to multiples of a power of two, and added as integers or exactly in fp64.

A floating-point sum depends on the order of its terms, and each layout adds in another order. A sum of int64 has the
same bits in every order, as long as it does not wrap. So each term is rounded once, to a grid, and then all
sums (over microbatches, stages and ranks) are exact.

    grid = Grid.of(largest, n_terms)       # equal on all ranks: the largest term expected, the number of terms
    grid.add(total, term)                  # int64, in any order, on any rank
    grid.write(total, gradient)            # fp32
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, NamedTuple

import torch
import torch.distributed as dist
from pydantic import Field
from torch import Tensor

from dtmega.ops import host

BITS = 62  # magnitude of a whole sum: int64 holds 63, and the last bit is spare for the rounding of the terms
HEADROOM = 10  # a term may exceed the largest term expected by the factor 2^10
SCALAR = 2.0**20  # sums of losses: multiples of 2^-20, exact in fp64 up to 2^33
LARGEST_SCALAR = 2.0**33
PIECE = 2**18  # elements to convert to fp64 at a time


class Grid(NamedTuple):
    """Multiples of 2^exponent.

    Attributes:
        exponent: binary exponent of the distance between two neighbours.
        limit: largest magnitude of a term; a sum of all terms of this size still fits.
    """

    exponent: int
    limit: float

    @classmethod
    def of(cls, largest: float, n_terms: int) -> Grid:
        """Choose the finest grid on which `n_terms` terms of magnitude up to 2^HEADROOM x largest can be added.

        Args:
            largest: positive magnitude, rounded up to a power of two here.
            n_terms: number of terms of the whole sum, over all microbatches and ranks.
        """
        bits = BITS - _log2_ceil(n_terms)
        exponent = _exponent(largest) + HEADROOM - bits
        return cls(exponent, math.ldexp(1.0, exponent + bits))

    def add(
        self, total: Tensor, term: Tensor, scale: float = 1.0, seen: Callable[[int, Tensor], object] | None = None
    ) -> None:
        """Round term / scale to the grid, and add it to `total`, a contiguous int64 tensor of the same shape.

        The caller compares the term with `limit`, before or after the addition: int64 wraps silently.

        Args:
            total: the sum.
            term: the term, times the scale.
            scale: number that the term is divided by.
            seen: function that gets the number of each piece and its integers; None: nobody.
        """
        # The product with a factor is rounded to fp64, and only if the scale is not a power of two.
        factor = math.ldexp(1.0, -self.exponent) / scale
        for number, (sums, piece) in enumerate(zip(_pieces(total), _pieces(term), strict=True)):
            integers = piece.double().mul_(factor).round_().to(torch.int64)
            sums += integers
            if seen is not None:
                seen(number, integers)

    def write(self, total: Tensor, out: Tensor) -> None:
        """Write sums, a contiguous int64 tensor, into a contiguous fp32 tensor of the same shape."""
        unit = math.ldexp(1.0, self.exponent)
        for floats, piece in zip(_pieces(out), _pieces(total), strict=True):
            floats.copy_(piece.double().mul_(unit))


class ExactState(NamedTuple):
    """The part of a checkpoint that a run with [run] exact needs.

    Attributes:
        maxima: largest gradient of a microbatch in the last step that was not skipped, by tensor.
        fixed: values that the first step recorded and no later start may change, by name (`training/exact`).
    """

    maxima: dict[str, Annotated[float, Field(gt=0)]]
    fixed: dict[str, Any]


def scalar(term: Tensor) -> Tensor:
    """Round a scalar to a multiple of 2^-20, in fp64. Infinities and NaN stay.

    A sum of such numbers is exact in fp64, and so has no order, while it is below `LARGEST_SCALAR`.
    """
    return (term.double() * SCALAR).round() / SCALAR


def exact_or_infinite(totals: Tensor) -> Tensor:
    """Replace each total of `scalar` from `LARGEST_SCALAR` on by infinity, because its order may have changed a bit.

    Losses are not negative, so all orders of their terms agree whether the total is that large.
    """
    return totals.where(~(totals >= LARGEST_SCALAR), math.inf)


def largest_of(tensor: Tensor) -> Tensor:
    """The largest magnitude in a tensor, an fp64 scalar: infinity if an element is not finite, 0 if there is none."""
    if tensor.numel() == 0:
        return torch.zeros((), dtype=torch.float64, device=tensor.device)
    least, most = tensor.aminmax()
    return torch.maximum(-least, most).double().nan_to_num(nan=math.inf, posinf=math.inf)


def squared_norm(parts: Mapping[str, Tensor], sizes: Mapping[str, int], group: dist.ProcessGroup) -> float:
    """The square of the L2 norm over tensors that the ranks of a group share; no layout changes a bit of it.

    Each square is split into a multiple of a coarse unit and one of a fine unit. Both are added as int64 over all
    elements of a tensor, so 64 bits below the largest square count, and more for small tensors.

    Args:
        parts: this rank's part of each tensor, by name; each element is on exactly one rank of the group.
        sizes: number of elements of every whole tensor, by name, in an order that is the same on all ranks.
        group: the ranks.
    """
    device = next((part.device for part in parts.values()), torch.device("cpu"))
    largest = torch.zeros(len(sizes), dtype=torch.float64, device=device)
    for i, name in enumerate(sizes):
        if name in parts:
            largest[i] = largest_of(parts[name])
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    bounds = host.read(largest).tolist()
    if not all(map(math.isfinite, bounds)):
        return math.inf
    sums = torch.zeros(len(sizes), 2, dtype=torch.int64, device=device)
    units: list[tuple[int, int]] = []
    for i, (name, size) in enumerate(sizes.items()):
        room = BITS - _log2_ceil(size)
        coarse = 2 * _exponent(bounds[i]) - room
        units.append((coarse, coarse - room))
        if name in parts and bounds[i] > 0:
            sums[i] = _sums_of_squares(parts[name], coarse, room)
    dist.all_reduce(sums, group=group)
    terms: list[float] = []
    for of_tensor, exponents in zip(host.read(sums).tolist(), units, strict=True):
        terms += [math.ldexp(float(n), exponent) for n, exponent in zip(of_tensor, exponents, strict=True)]
    return math.fsum(terms)


def _sums_of_squares(tensor: Tensor, exponent: int, room: int) -> Tensor:
    """The two sums of a tensor's squares, int64 [2]: in units of 2^exponent, and of the rest in 2^(exponent - room)."""
    total = torch.zeros(2, dtype=torch.int64, device=tensor.device)
    for piece in _pieces(tensor):
        # The square of an fp32 number is exact in fp64, and so is what the first rounding leaves over.
        squares = piece.double().square_() * math.ldexp(1.0, -exponent)
        coarse = squares.round()
        fine = ((squares - coarse) * math.ldexp(1.0, room)).round_()
        total[0] += coarse.to(torch.int64).sum()
        total[1] += fine.to(torch.int64).sum()
    return total


def _pieces(tensor: Tensor) -> Sequence[Tensor]:
    return tensor.flatten().split(PIECE)


def _exponent(value: float) -> int:
    """The smallest e with value <= 2^e; 0 for 0."""
    mantissa, exponent = math.frexp(value)
    return exponent - 1 if mantissa == 0.5 else exponent


def _log2_ceil(n: int) -> int:
    """The smallest e with n <= 2^e."""
    return (n - 1).bit_length()
