"""The peaks of a machine: the FLOP/s that MFU is a fraction of, and the most memory that this process has held."""

from __future__ import annotations

import resource
import sys
import time

import torch

from dtmega.ops import cost


def memory_bytes(device: torch.device) -> int:
    """The most this process has held since it started: the allocator's tensors on a GPU, else resident memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit_bytes = 1 if sys.platform == "darwin" else 1024  # getrusage(2): KiB, but bytes on macOS
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit_bytes


def reference_flops(device: torch.device, dtype: str) -> float:
    """The FLOP/s that MFU is a fraction of: a datasheet's for a GPU known to `cost`, else `matmul_flops`, measured.

    The second makes MFU a ratio to what this machine can do, so such figures do not compare across machines.
    """
    known = cost.peak_flops(torch.cuda.get_device_name(device), dtype) if device.type == "cuda" else None
    return known or matmul_flops(device, getattr(torch, dtype))


def matmul_flops(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of the fastest square matrix product. The size doubles until one takes 10 ms: 0.1 s in all on a CPU."""
    best = 0.0
    for n in (256, 512, 1024, 2048, 4096):
        a = torch.linspace(-1, 1, n * n, device=device).view(n, n).to(dtype)
        seconds = min(_seconds(a) for _ in range(3))
        best = max(best, 2 * n**3 / seconds)
        if seconds > 0.01:
            break
    return best


def _seconds(a: torch.Tensor) -> float:
    start = time.perf_counter()
    product = a @ a
    if product.is_cuda:
        torch.cuda.synchronize(product.device)
    return time.perf_counter() - start
