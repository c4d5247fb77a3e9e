"""The gradient of the head's weight, summed over chunks of tokens: dW [V, D] = sum of dlogits^T h.

On a CPU with AMX, bfloat16 products run at half the rate if the first factor is transposed, as dlogits^T is (oneDNN,
torch 2.13). On such a CPU, if there are many tokens, `WeightGradient` therefore sums the transposed products
h^T dlogits, [D, V], and transposes the sum once at the end.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dtmega.ops.cpu import features
from dtmega.ops.cpu.huge_pages import on_huge_pages
from dtmega.ops.softmax import slices, wide

PRODUCT_COLUMNS = 4096  # number of vocabulary columns in one bf16 product, which is then added to the fp32 sum
TRANSPOSE_FROM_TOKENS = 768  # with fewer tokens, transposing the sum costs more time than the faster products save
TRANSPOSED_COLUMNS = 256  # number of columns to transpose at a time, few enough to stay in the level-2 cache


class WeightGradient:
    """The gradient of the head's weight: a sum over chunks, in fp32 if there are more than two chunks.

    A sum of one or two products has the dtype of the products, because fp32 would not reduce the number of roundings.

    Args:
        n_tokens: number of tokens in all chunks together.
        chunk: number of tokens in each chunk except the last chunk, which may be smaller.
    """

    def __init__(self, n_tokens: int, chunk: int) -> None:
        self._at_most_two_chunks = n_tokens <= 2 * chunk
        self._many_tokens = n_tokens >= TRANSPOSE_FROM_TOKENS
        self._is_transposed = False
        self._total: Tensor | None = None  # [V, D], or [D, V] if it is transposed

    def add(self, dlogits: Tensor, h: Tensor) -> None:
        """Add one chunk's product, computed from dlogits [n, V] and h [n, D]."""
        # A GPU can write the product of bf16 factors in fp32. On a CPU, `_add_product` adds bf16 products to the sum.
        if h.is_cuda and h.dtype != wide(h.dtype) and not self._at_most_two_chunks:
            product = torch.mm(dlogits.t(), h, out_dtype=wide(h.dtype))
            self._total = product if self._total is None else self._total.add_(product)
            return
        on_tiles = h.dtype == torch.bfloat16 and h.device.type == "cpu" and features.HAS_TILES
        self._is_transposed = on_tiles and self._many_tokens
        if self._is_transposed:
            self._add_product(h.t().contiguous(), dlogits)
        else:
            self._add_product(dlogits.t(), h)

    def finish(self, dtype: torch.dtype) -> Tensor:
        """The sum over all chunks, [V, D] in `dtype`."""
        assert self._total is not None
        if not self._is_transposed:
            return self._total.to(dtype)
        n_columns = self._total.shape[1]
        gradient = on_huge_pages(self._total.new_empty(n_columns, self._total.shape[0], dtype=dtype))
        for columns in slices(n_columns, TRANSPOSED_COLUMNS):
            # Copy the slice first: torch transposes a whole tensor in blocks, but a slice element by element.
            block = self._total[:, columns].to(dtype, memory_format=torch.contiguous_format, copy=True)
            gradient[columns] = block.t()
        return gradient

    def _add_product(self, first: Tensor, second: Tensor) -> None:
        """Add first @ second to the total."""
        is_first = self._total is None
        if self._total is None:
            dtype = first.dtype if self._at_most_two_chunks else wide(first.dtype)
            self._total = on_huge_pages(first.new_empty(first.shape[0], second.shape[1], dtype=dtype))
        if self._total.dtype == first.dtype:
            torch.addmm(self._total, first, second, beta=0 if is_first else 1, out=self._total)
            return
        # On a CPU the product of bf16 factors is bf16 and must be added to the fp32 sum. Process the vocabulary
        # in parts, so that each part of the product is still in the cache when it is added.
        vocabulary_dim = 1 if self._is_transposed else 0
        for columns in slices(self._total.shape[vocabulary_dim], PRODUCT_COLUMNS):
            if self._is_transposed:
                part = self._total[:, columns]
                product = torch.mm(first, second[:, columns])
            else:
                part = self._total[columns]
                product = torch.mm(first[columns], second)
            if is_first:
                part.copy_(product)
            else:
                part.add_(product)
