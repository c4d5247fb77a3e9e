"""Settings for CPU memory: freed buffers stay with the process, and large buffers are on huge pages.

By default, glibc requests each buffer above 32 MiB (and often smaller buffers) from the system, and returns the buffer
when it is freed. The system fills every new buffer with zeros, in pages of 4 KiB. For a chunk's logits and the gradient
of the head's weight, filling with zeros took a sixth as long as the matrix products, or a tenth of a whole step
(archive/2026-11.md).
"""

from __future__ import annotations

import ctypes
import sys

from torch import Tensor

LARGE_BYTES = 2**24  # minimum size of a buffer that is put on huge pages
HUGE_PAGE = 2**21  # size of a huge page in bytes
# Parameters of mallopt, from glibc's malloc.h.
M_TRIM_THRESHOLD = -1
M_TOP_PAD = -2
M_MMAP_MAX = -4
GROWTH_BYTES = 2**26  # number of bytes added whenever the heap grows
MADV_HUGEPAGE = 14  # from Linux's asm-generic/mman-common.h


def keep_freed_memory() -> None:
    """Make glibc keep freed memory in this process, because each step needs as much memory as the previous step.

    On a system without glibc, this function does nothing.
    """
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None
    if libc is not None and hasattr(libc, "gnu_get_libc_version"):
        libc.mallopt(M_MMAP_MAX, 0)  # allocate large buffers on the heap too
        libc.mallopt(M_TRIM_THRESHOLD, -1)  # never return the end of the heap to the system
        libc.mallopt(M_TOP_PAD, GROWTH_BYTES)


def on_huge_pages(x: Tensor) -> Tensor:
    """Ask Linux to map x in pages of 2 MiB. Return x. Call this function before anything is written to x.

    For a small x, or on a system other than Linux, nothing happens. If huge pages are switched off, Linux ignores the
    request.
    """
    if type(x) is Tensor and x.device.type == "cpu" and sys.platform == "linux":
        # The address comes from x, not from the storage of x: once Python has seen that storage, autograd no longer
        # accumulates gradients into x in place (torch 2.13).
        start, n_bytes = x.data_ptr(), x.nbytes
        first = -(-start // HUGE_PAGE) * HUGE_PAGE
        if n_bytes >= LARGE_BYTES:
            libc = ctypes.CDLL(None)
            libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(start + n_bytes - first), MADV_HUGEPAGE)
    return x
