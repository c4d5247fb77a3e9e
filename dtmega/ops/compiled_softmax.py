"""The passes of `softmax.py` as Inductor's kernels, which read the logits of a whole chunk on a GPU.

No fp32 copy of the logits is ever stored.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dtmega.ops import softmax
from dtmega.ops.shards import begin_at_same_place
from dtmega.ops.softmax import wide


class CompiledPasses(softmax.Passes):
    """The passes as two Inductor kernels, which are compiled once for all sizes."""

    def __init__(self, logits: Tensor) -> None:
        n_tokens, n_columns = logits.shape
        self.rows = softmax.slices(n_tokens, n_tokens if logits.is_cuda else softmax.SLICE_LOGITS["cpu"] // n_columns)

    def peak_and_total(self, x: Tensor, peak: Tensor, total: Tensor) -> None:
        row_peak, row_total = compiled_pass(_peak_and_total)(_without_base(x))
        peak.copy_(row_peak)
        total.copy_(row_total)

    def derivatives(
        self, x: Tensor, dx: Tensor, peak: Tensor, slope: Tensor, smooth: Tensor | None, reuse_scratch: bool
    ) -> None:
        # The kernel takes a single tensor and changes that tensor in place. If the kernel took x and dx as two views of
        # the same tensor, torch 2.13 would write to the tensor of the first call.
        if not begin_at_same_place(dx, x):
            dx.copy_(x)
        smooth = None if smooth is None else _without_base(smooth)
        compiled_pass(_derivatives_)(_without_base(dx), _without_base(peak), _without_base(slope), smooth)


def _without_base(x: Tensor) -> Tensor:
    """Detach x from its base tensor, because torch would otherwise compile new kernels for each size of a view."""
    return x.detach()


@functools.cache
def compiled_pass(function: Callable[..., Any]) -> Callable[..., Any]:
    # On a GPU, if x has few but long rows, Inductor reads each row twice and would print a warning.
    warnings.filterwarnings("ignore", r"\s*Online softmax is disabled on the fly")
    return torch.compile(function, dynamic=True)


def _peak_and_total(x: Tensor) -> tuple[Tensor, Tensor]:
    in_fp32 = x.to(wide(x.dtype))
    peak = in_fp32.amax(dim=1, keepdim=True)
    return peak, (in_fp32 - peak).exp().sum(dim=1, keepdim=True)


def _derivatives_(x: Tensor, peak: Tensor, slope: Tensor, smooth: Tensor | None) -> None:
    dx = (x.to(wide(x.dtype)) - peak).exp() * slope
    x.copy_(dx if smooth is None else dx - smooth)
