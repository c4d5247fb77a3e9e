"""The passes of cross-entropy over logits, a few rows at a time: numbers of each row, and then its derivatives.

On a CPU these rows stay in its cache from one pass to the next, in one scratch of fp32. Such plain passes are faster
there than torch's softmax, and than Inductor's kernels (docs/decisions.md). On a GPU two kernels of Inductor's read the
logits of a whole chunk, and nothing in fp32 is as large as these.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

# Logits that are taken at once; in fp32 half of what a core has of second-level cache, if it is a new one.
SLICE_LOGITS = {"cpu": 2**18, "cuda": 2**26}
COMPILED_ON = {"cuda"}  # types of devices where the compiled passes are the faster ones


class Passes:
    """The passes over logits [N, V], by torch's own operations.

    Attributes:
        rows: the slices of rows that are taken one after the other.
    """

    def __init__(self, logits: Tensor) -> None:
        n_tokens, n_columns = logits.shape
        self.rows = slices(n_tokens, SLICE_LOGITS[logits.device.type] // n_columns)
        n_rows = min(n_tokens, self.rows[0].stop) if self.rows else 0
        self._scratch = logits.new_empty(n_rows, n_columns, dtype=wide(logits.dtype))

    def numbers(self, x: Tensor, peak: Tensor, total: Tensor) -> None:
        """Write the largest logit of each row of x [n, V] to `peak` [n, 1], and the sum of exp(x - peak) to `total`."""
        exponentials = self._scratch[: len(x)]
        in_fp32 = x if x.dtype == exponentials.dtype else exponentials.copy_(x)
        torch.amax(in_fp32, dim=1, keepdim=True, out=peak)
        torch.sub(in_fp32, peak, out=exponentials).exp_()
        torch.sum(exponentials, dim=1, keepdim=True, out=total)

    def derivatives(
        self, x: Tensor, dx: Tensor, peak: Tensor, slope: Tensor, smooth: Tensor | None, following: bool
    ) -> None:
        """Write slope exp(x - peak) - smooth to dx [n, V], which may be x. All but x and dx are [n, 1].

        following: `numbers` of the same x, with this peak, was what came before.
        """
        exponentials = self._scratch[: len(x)]
        if not following:
            in_fp32 = x if x.dtype == exponentials.dtype else exponentials.copy_(x)
            torch.sub(in_fp32, peak, out=exponentials).exp_()
        if smooth is not None:
            dx.copy_(exponentials.mul_(slope).sub_(smooth))
        elif dx.dtype == exponentials.dtype:
            torch.mul(exponentials, slope, out=dx)
        else:
            dx.copy_(exponentials.mul_(slope))


class CompiledPasses(Passes):
    """The same in two kernels of Inductor's, which are made once for all sizes."""

    def __init__(self, logits: Tensor) -> None:
        n_tokens, n_columns = logits.shape
        self.rows = slices(n_tokens, n_tokens if logits.is_cuda else SLICE_LOGITS["cpu"] // n_columns)

    def numbers(self, x: Tensor, peak: Tensor, total: Tensor) -> None:
        found = _fused(_peak_and_sum)(_of_any_length(x))
        peak.copy_(found[0])
        total.copy_(found[1])

    def derivatives(
        self, x: Tensor, dx: Tensor, peak: Tensor, slope: Tensor, smooth: Tensor | None, following: bool
    ) -> None:
        # In one place: where two arguments are parts of one tensor, torch writes to the first call's (2.13).
        if dx.data_ptr() != x.data_ptr():
            dx.copy_(x)
        smooth = None if smooth is None else _of_any_length(smooth)
        _fused(_slope_)(_of_any_length(dx), _of_any_length(peak), _of_any_length(slope), smooth)


def slices(n_tokens: int, n_rows: int) -> list[slice]:
    """Cut so many tokens into slices of `n_rows`, but of one at least; the last one may be smaller."""
    n_rows = max(1, n_rows)
    return [slice(start, min(start + n_rows, n_tokens)) for start in range(0, n_tokens, n_rows)]


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums: fp32, or fp64."""
    return torch.promote_types(dtype, torch.float32)


def _of_any_length(x: Tensor) -> Tensor:
    """x as a tensor of its own: kernels for all sizes would be made again for a view that is not all of its base."""
    return x.detach()


@functools.cache
def _fused(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, dynamic=True)


def _peak_and_sum(x: Tensor) -> tuple[Tensor, Tensor]:
    in_fp32 = x.to(wide(x.dtype))
    peak = in_fp32.amax(dim=1, keepdim=True)
    return peak, (in_fp32 - peak).exp().sum(dim=1, keepdim=True)


def _slope_(x: Tensor, peak: Tensor, slope: Tensor, smooth: Tensor | None) -> None:
    dx = (x.to(wide(x.dtype)) - peak).exp() * slope
    x.copy_(dx if smooth is None else dx - smooth)
