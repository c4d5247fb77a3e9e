"""Copies that kernels of a CPU make inside of an operator, and that a plan would not see: conversions and padding.

A kernel of a GPU converts each element as it reads it. A CPU's kernel first converts whole arguments to one dtype
(`TensorIteratorBase::compute_types` in aten/src/ATen/TensorIterator.cpp), for example in `fp32 += bf16`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dtmega.planning.counting.launches import described, tensors_in
from dtmega.planning.counting.ledger import local_part

REDUCTIONS = ("sum", "mean", "linalg_vector_norm")
WITHOUT_COPIES = ("copy_", "masked_fill", "masked_fill_")  # elementwise operators that read each argument in its dtype


def copied_bytes(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> int:
    """The most bytes of copies that an operator's kernel holds on a CPU at any time. The kernel frees all of them."""
    known = described(operator)
    if known.name in ("cat", "chunk_cat"):
        named = dict(zip(known.parameters, args, strict=False)) | kwargs
        (result,) = tensors_in(named.get("out", output))
        return _of_cat(named["tensors"], result.dtype, named.get("dim", 0), named.get("num_chunks", 1))
    tensors = [local_part(tensor) for tensor in tensors_in(args)]
    results = [local_part(tensor) for tensor in tensors_in(output)]
    if known.name in REDUCTIONS:
        return tensors[0].numel() * _itemsize_if_changed(tensors[0], results[0].dtype)
    if torch.Tag.pointwise not in operator.tags or known.name in WITHOUT_COPIES or not results:
        return 0
    if known.name == "where":
        del tensors[0]  # the condition
    # A tensor without dims takes the dtype of the others.
    sized = [tensor for tensor in tensors if tensor.dim()]
    if not sized:
        return 0
    common = functools.reduce(torch.promote_types, [tensor.dtype for tensor in sized])
    if results[0].is_floating_point() and not common.is_floating_point:
        common = results[0].dtype
    written = [sized[0]] if known.returns_argument else []
    return sum(tensor.numel() * _itemsize_if_changed(tensor, common) for tensor in [*sized, *written])


def _itemsize_if_changed(tensor: Tensor, dtype: torch.dtype) -> int:
    """The bytes of an element that is converted to `dtype`; 0 if the tensor has this dtype already."""
    return 0 if tensor.dtype == dtype else dtype.itemsize


def _of_cat(tensors: Sequence[Tensor], dtype: torch.dtype, dim: int, n_chunks: int) -> int:
    """The bytes of copies in `cat`, and in FSDP's `chunk_cat`, which first pads tensors that the chunks do not divide.

    To convert dtypes, the kernel also copies one tensor after the other.
    """
    padded = converted = 0
    for tensor in map(local_part, tensors):
        size = tensor.shape[dim]
        n_bytes = tensor.nbytes // max(1, size) * math.ceil(size / n_chunks) * n_chunks
        if size % n_chunks:
            padded += n_bytes
        if tensor.dtype != dtype:
            converted = max(converted, n_bytes)
    return padded + converted
