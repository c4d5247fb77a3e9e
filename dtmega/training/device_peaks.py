"""Peak values: the FLOP/s that count as 100 % MFU, and the peak memory of this process."""

from __future__ import annotations

import resource
import sys
import time
from pathlib import Path

import torch

from dtmega.ops import cost


class PeakMemory:
    """The peak memory of this process: memory allocated for tensors on a GPU, or resident memory on a CPU.

    Args:
        device: device on which this process computes.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._before_restarts_bytes = 0

    def since_start_bytes(self) -> int:
        """The peak memory since the process started."""
        return max(self._before_restarts_bytes, self._system_bytes())

    def since_restart_bytes(self) -> int | None:
        """The peak memory since the last call to this method; on the first call, since the process started.

        The result is None if the system cannot restart the measurement. Only Linux can reset the peak of a process.
        """
        peak_bytes = self._system_bytes()
        self._before_restarts_bytes = max(self._before_restarts_bytes, peak_bytes)
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
            return peak_bytes
        try:
            # Writing 5 resets the peak of the resident memory to its current size (proc(5)).
            Path("/proc/self/clear_refs").write_text("5")
        except OSError:
            return None
        return peak_bytes

    def _system_bytes(self) -> int:
        """The peak memory since the process started, or since the peak was last reset."""
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device)
        unit_bytes = 1 if sys.platform == "darwin" else 1024  # getrusage(2): KiB, but bytes on macOS
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit_bytes


def reference_flops(device: torch.device, dtype: str) -> float:
    """The FLOP/s that count as 100 % MFU: the datasheet's value if `cost` lists the GPU, otherwise `matmul_flops`.

    With `matmul_flops`, MFU is relative to the measured speed of this machine, so it must not be compared between
    machines.
    """
    known = cost.peak_flops(torch.cuda.get_device_name(device), dtype) if device.type == "cuda" else None
    return known or matmul_flops(device, getattr(torch, dtype))


def matmul_flops(device: torch.device, dtype: torch.dtype) -> float:
    """Measure the FLOP/s of the fastest square matrix product. The matrix size doubles until one product takes 10 ms.

    On a CPU, the whole measurement takes about 0.1 s.
    """
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
