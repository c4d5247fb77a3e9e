"""Order-independent sums: terms are rounded to multiples of a power of two, and the rounded terms are added exactly.

The bits of a floating-point sum depend on the order of its terms, and each layout adds the terms in a different order.
An int64 sum has the same bits in every order, unless it wraps. Each term is therefore rounded once, to a multiple of
2^exponent (a `Grid`), and all sums (over microbatches, stages and ranks) are then exact.

    grid = Grid.of(largest, n_terms)       # equal on all ranks: the expected largest term, the number of terms
    grid.add(total, term)                  # int64, in any order, on any rank
    grid.write(total, gradient)            # fp32
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from dtmega.ops import host

BITS = 62  # bits for the magnitude of a whole sum: int64 has 63, and one bit is reserved for the rounding of the terms
HEADROOM = 10  # a term may exceed the expected largest term by a factor of 2^10
SCALAR = 2.0**20  # sums of losses are multiples of 1 / SCALAR, which are exact in fp64 up to 2^33
LARGEST_SCALAR = 2.0**33
PIECE = 2**18  # number of elements to convert to fp64 at a time


class Grid(NamedTuple):
    """The multiples of 2^exponent, to which terms are rounded.

    Attributes:
        exponent: binary exponent of the distance between neighbouring multiples.
        limit: largest allowed magnitude of a term. If all terms have this magnitude, the sum still fits into int64.
    """

    exponent: int
    limit: float

    @classmethod
    def of(cls, largest: float, n_terms: int) -> Grid:
        """Choose the smallest exponent with which int64 can hold `n_terms` terms of up to 2^HEADROOM x largest.

        Args:
            largest: expected largest magnitude, positive; the function rounds it up to a power of two.
            n_terms: number of terms in the whole sum, over all microbatches and ranks.
        """
        bits = BITS - _log2_ceil(n_terms)
        exponent = _exponent(largest) + HEADROOM - bits
        return cls(exponent, math.ldexp(1.0, exponent + bits))

    def add(
        self, total: Tensor, term: Tensor, scale: float = 1.0, seen: Callable[[int, Tensor], object] | None = None
    ) -> None:
        """Round term / scale to a multiple of 2^exponent, and add the multiple to `total`.

        The caller must compare the term with `limit`, before or after the addition, because int64 wraps silently.

        Args:
            total: sum so far, in units of 2^exponent; a contiguous int64 tensor in the shape of `term`.
            term: term to add, already multiplied by `scale`.
            scale: number by which the term is divided.
            seen: function to call with the index and the integers of each block of PIECE elements; None for no call.
        """
        # If the scale is a power of two, multiplying by this factor is exact in fp64.
        factor = math.ldexp(1.0, -self.exponent) / scale
        for number, (sums, piece) in enumerate(zip(_pieces(total), _pieces(term), strict=True)):
            integers = piece.double().mul_(factor).round_().to(torch.int64)
            sums += integers
            if seen is not None:
                seen(number, integers)

    def write(self, total: Tensor, out: Tensor) -> None:
        """Convert the int64 sums in `total` to fp32 in `out`. Both tensors are contiguous and have the same shape."""
        unit = math.ldexp(1.0, self.exponent)
        for floats, piece in zip(_pieces(out), _pieces(total), strict=True):
            floats.copy_(piece.double().mul_(unit))


def scalar(term: Tensor) -> Tensor:
    """Round a scalar to a multiple of 2^-20, in fp64. Infinities and NaN do not change.

    If a sum of such multiples is below `LARGEST_SCALAR`, the sum is exact in fp64 and does not depend on the order of
    its terms.
    """
    return (term.double() * SCALAR).round() / SCALAR


def exact_or_infinite(totals: Tensor) -> Tensor:
    """Replace each total of at least `LARGEST_SCALAR` with infinity, because its bits may depend on the terms' order.

    Losses are not negative, so a total reaches the limit either in every order of its terms or in none.
    """
    return totals.masked_fill(totals >= LARGEST_SCALAR, math.inf)


def largest_of(tensor: Tensor) -> Tensor:
    """The largest magnitude in a tensor, as an fp64 scalar.

    The result is infinity if an element is not finite, and 0 if the tensor has no elements.
    """
    if tensor.numel() == 0:
        return torch.zeros((), dtype=torch.float64, device=tensor.device)
    least, most = tensor.aminmax()
    return torch.maximum(-least, most).double().nan_to_num(nan=math.inf, posinf=math.inf)


def squared_norm(parts: Mapping[str, Tensor], sizes: Mapping[str, int], group: dist.ProcessGroup) -> float:
    """The squared L2 norm of tensors that are sharded over a group of ranks. All layouts get identical bits.

    Each square is split into a multiple of a coarse unit and a multiple of a fine unit. The coarse and the fine
    multiples are each added as int64 over all elements of a tensor. The sum therefore keeps at least 64 bits below the
    largest square, and more bits for small tensors.

    Args:
        parts: name of each tensor -> this rank's part. Each element is on exactly one rank of the group.
        sizes: name of each tensor -> number of elements in the whole tensor, in the same order on all ranks.
        group: process group of the ranks.
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
    """Two sums that together represent the sum of a tensor's squares, int64 [2].

    The first number is the sum of the coarse parts, in units of 2^exponent. The second number is the sum of the
    remainders, in units of 2^(exponent - room).
    """
    total = torch.zeros(2, dtype=torch.int64, device=tensor.device)
    for piece in _pieces(tensor):
        # The square of an fp32 number is exact in fp64, and so is the remainder after the first rounding.
        squares = piece.double().square_() * math.ldexp(1.0, -exponent)
        coarse = squares.round()
        fine = ((squares - coarse) * math.ldexp(1.0, room)).round_()
        total[0] += coarse.to(torch.int64).sum()
        total[1] += fine.to(torch.int64).sum()
    return total


def _pieces(tensor: Tensor) -> Sequence[Tensor]:
    return tensor.flatten().split(PIECE)


def _exponent(value: float) -> int:
    """The smallest e with value <= 2^e; 0 if the value is 0."""
    mantissa, exponent = math.frexp(value)
    return exponent - 1 if mantissa == 0.5 else exponent


def _log2_ceil(n: int) -> int:
    """The smallest e with n <= 2^e."""
    return (n - 1).bit_length()
