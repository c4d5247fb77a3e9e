"""The two passes of cross-entropy over the logits: first the peak and the sum of each row, then the derivatives.

On a CPU, both passes process a few rows at a time. These rows and an fp32 scratch buffer stay in the core's cache from
one pass to the next, so two passes of plain torch operations are faster than torch's softmax and Inductor's kernels
(archive/2026-11.md). On a GPU, compiled passes are faster (`compiled_softmax.py`).
"""

from __future__ import annotations

import torch
from torch import Tensor

# Number of logits to process at a time. On a CPU these logits take 1 MiB in fp32, half of a core's level-2 cache.
SLICE_LOGITS = {"cpu": 2**18, "cuda": 2**26}
COMPILED_ON = {"cuda"}  # types of devices on which the compiled passes are faster


class Passes:
    """The passes over logits [N, V], computed with torch's own operations.

    Attributes:
        rows: slices of the rows, to be processed one after another.
    """

    def __init__(self, logits: Tensor) -> None:
        n_tokens, n_columns = logits.shape
        self.rows = slices(n_tokens, SLICE_LOGITS[logits.device.type] // n_columns)
        n_rows = min(n_tokens, self.rows[0].stop) if self.rows else 0
        self._scratch = logits.new_empty(n_rows, n_columns, dtype=wide(logits.dtype))

    def peak_and_total(self, x: Tensor, peak: Tensor, total: Tensor) -> None:
        """Write each row's largest logit in x [n, V] to `peak` [n, 1], and the sum of `exp(x - peak)` to `total`."""
        exponentials = self._scratch[: len(x)]
        in_fp32 = x if x.dtype == exponentials.dtype else exponentials.copy_(x)
        # Subtract the peak before exp, because exp(89) overflows fp32; the softmax does not change. The sum is then at
        # least 1, so neither a division by the sum nor its logarithm can fail.
        torch.amax(in_fp32, dim=1, keepdim=True, out=peak)
        torch.sub(in_fp32, peak, out=exponentials).exp_()
        torch.sum(exponentials, dim=1, keepdim=True, out=total)

    def derivatives(
        self, x: Tensor, dx: Tensor, peak: Tensor, slope: Tensor, smooth: Tensor | None, reuse_scratch: bool
    ) -> None:
        """Write `slope * exp(x - peak) - smooth` to dx [n, V], which may be x itself.

        Args:
            x: logits, [n, V].
            dx: memory for the derivatives, [n, V].
            peak, slope, smooth: terms of the formula, [n, 1]; None for `smooth` means 0.
            reuse_scratch: whether the last call was `peak_and_total` with this x and this peak, so that the
                scratch buffer still holds the exponentials.
        """
        exponentials = self._scratch[: len(x)]
        if not reuse_scratch:
            in_fp32 = x if x.dtype == exponentials.dtype else exponentials.copy_(x)
            torch.sub(in_fp32, peak, out=exponentials).exp_()
        if smooth is not None:
            dx.copy_(exponentials.mul_(slope).sub_(smooth))
        elif dx.dtype == exponentials.dtype:
            torch.mul(exponentials, slope, out=dx)
        else:
            dx.copy_(exponentials.mul_(slope))


def slices(n_tokens: int, n_rows: int) -> list[slice]:
    """Slices that split `n_tokens` rows into blocks of `n_rows` (1 if `n_rows` is 0). The last one may be smaller."""
    n_rows = max(1, n_rows)
    return [slice(start, min(start + n_rows, n_tokens)) for start in range(0, n_tokens, n_rows)]


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype for sums of numbers in `dtype`: fp64 if `dtype` is fp64, otherwise fp32."""
    return torch.promote_types(dtype, torch.float32)
