"""The gradient of the head's weight, which chunks of tokens add up: dW [V, D] = sum of dlogits^T h.

In bfloat16 a CPU with AMX multiplies at half its rate where the first factor is transposed (oneDNN, torch 2.13), as
dlogits^T is. There, of many tokens h^T dlogits is added up instead, [D, V], and turned over once at the end.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dtmega import processor
from dtmega.pages import on_huge_pages
from dtmega.softmax import slices, wide

PRODUCT_COLUMNS = 4096  # of the vocabulary, of which a product waits in bf16 to be added up in fp32
TURNED_FROM = 768  # tokens; of fewer, turning the sum over costs more than the slower product
TURNED_COLUMNS = 256  # of the vocabulary that are turned over at once: they stay in the second-level cache


class WeightGradient:
    """The sum over chunks, in fp32 if there are more than two: two products are rounded no more often without it.

    Args:
        n_tokens: of all chunks together.
        chunk: tokens of each but the last.
    """

    def __init__(self, n_tokens: int, chunk: int) -> None:
        self.few = n_tokens <= 2 * chunk
        self.many_tokens = n_tokens >= TURNED_FROM
        self.turned = False
        self.total: Tensor | None = None

    def add(self, dlogits: Tensor, h: Tensor) -> None:
        """Add a chunk's product, of dlogits [n, V] and h [n, D]."""
        if h.is_cuda and h.dtype != wide(h.dtype) and not self.few:
            product = torch.mm(dlogits.t(), h, out_dtype=wide(h.dtype))
            self.total = product if self.total is None else self.total.add_(product)
            return
        on_tiles = h.dtype == torch.bfloat16 and h.device.type == "cpu" and processor.HAS_TILES
        self.turned = on_tiles and self.many_tokens
        if self.turned:
            self._add_up(h.t().contiguous(), dlogits)
        else:
            self._add_up(dlogits.t(), h)

    def whole(self, dtype: torch.dtype) -> Tensor:
        """The sum, [V, D] in this dtype."""
        assert self.total is not None
        if not self.turned:
            return self.total.to(dtype)
        n_columns = self.total.shape[1]
        found = on_huge_pages(self.total.new_empty(n_columns, self.total.shape[0], dtype=dtype))
        for columns in slices(n_columns, TURNED_COLUMNS):
            # Copied first: torch turns over a whole tensor in blocks, and a part of one number by number.
            found[columns] = self.total[:, columns].to(dtype, memory_format=torch.contiguous_format, copy=True).t()
        return found

    def _add_up(self, first: Tensor, second: Tensor) -> None:
        """Add first @ second to the total."""
        is_first = self.total is None
        if self.total is None:
            dtype = first.dtype if self.few else wide(first.dtype)
            self.total = on_huge_pages(first.new_empty(first.shape[0], second.shape[1], dtype=dtype))
        if self.total.dtype == first.dtype:
            torch.addmm(self.total, first, second, beta=0 if is_first else 1, out=self.total)
            return
        # A part of the vocabulary at a time: its product is still cached when it is added.
        across = 1 if self.turned else 0
        for columns in slices(self.total.shape[across], PRODUCT_COLUMNS):
            if self.turned:
                part, product = self.total[:, columns], torch.mm(first, second[:, columns])
            else:
                part, product = self.total[columns], torch.mm(first[columns], second)
            if is_first:
                part.copy_(product)
            else:
                part.add_(product)
