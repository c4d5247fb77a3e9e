"""The norm of gradients over all ranks, and gradient clipping, as in Megatron."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn


def total_norm(tensors: list[Tensor], device: torch.device, group: dist.ProcessGroup) -> float:
    """The L2 norm over all ranks' local tensors. If several ranks of `group` hold an element, only one may pass it."""
    return math.sqrt(_sum(squared_norm(tensors), device, group))


def squared_norm(tensors: list[Tensor]) -> Tensor:
    """The square of the L2 norm over this rank's tensors, as an fp64 scalar on the tensors' device."""
    on_cpu = not tensors or tensors[0].device.type == "cpu"
    norm = _norm(tensors) if on_cpu else nn.utils.get_total_norm(tensors)
    return norm.to(torch.float64).square()


def _norm(tensors: list[Tensor], row: int = 4096) -> Tensor:
    """The L2 norm over tensors on a CPU, as an fp64 scalar.

    On a CPU, torch sums a tensor's squares in fp32. With half a million squares, the sum has an error of 5e-5, which
    differs between layouts. This function therefore computes the norms of short rows first and then combines
    these norms in fp64.
    """
    norms = [torch.zeros(1)]
    for tensor in tensors:
        flat = tensor.flatten()
        in_rows = flat.numel() // row * row
        norms.append(torch.linalg.vector_norm(flat[:in_rows].view(-1, row), dim=1))
        norms.append(torch.linalg.vector_norm(flat[in_rows:]).view(1))
    return torch.linalg.vector_norm(torch.cat(norms), dtype=torch.float64)


def count_zeros(tensors: list[Tensor], device: torch.device, group: dist.ProcessGroup) -> int:
    """The number of zeros in all ranks' local tensors. If several ranks hold an element, only one may pass it."""
    zeros = torch.stack([(t == 0).sum() for t in tensors]).sum() if tensors else torch.zeros(())
    return int(_sum(zeros.to(torch.float64), device, group))


def _sum(value: Tensor, device: torch.device, group: dist.ProcessGroup) -> float:
    value = value.to(device)
    dist.all_reduce(value, group=group)
    return value.item()


def unscale(gradients: Sequence[Tensor], scale: float) -> None:
    """Divide local gradients by the loss scale, in place. If the scale is a power of 2, nothing is rounded."""
    _multiply(gradients, 1 / scale)


def clip_gradients(gradients: Sequence[Tensor], norm: float, largest: float) -> None:
    """Scale local gradients down in place, so that their norm over all ranks is at most `largest`.

    The factor is Megatron's (`optimizer/clip_grads.py`): largest / (norm + 1e-6), or 1 if this quotient is above 1.

    Args:
        gradients: this rank's parts of the gradients.
        norm: norm of the gradients over all ranks.
        largest: largest allowed norm; 0 for no limit.
    """
    factor = largest / (norm + 1e-6)
    if 0 < factor < 1:
        _multiply(gradients, factor)


def _multiply(tensors: Sequence[Tensor], factor: float) -> None:
    """Multiply tensors by `factor` in place. A GPU runs a few kernels for all tensors, not one kernel per tensor."""
    if tensors:
        torch._foreach_mul_(list(tensors), factor)  # pyright: ignore[reportPrivateImportUsage]
