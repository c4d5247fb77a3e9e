"""Memory of a CPU: buffers that are freed stay with the process, and large ones are on huge pages.

Memory of more than 32 MiB, and often less, glibc takes from the system and gives back to it each time, and the system
fills it with zeros in pages of 4 KiB. For a chunk's logits and the gradient of the head's weight this took a sixth of
the time of their products, and of a step a tenth (docs/decisions.md).
"""

from __future__ import annotations

import ctypes
import sys

from torch import Tensor

LARGE_BYTES = 2**24
HUGE_PAGE = 2**21  # bytes
# Of glibc's malloc.h.
M_TRIM_THRESHOLD = -1
M_TOP_PAD = -2
M_MMAP_MAX = -4
GROWTH_BYTES = 2**26  # by which the heap grows
MADV_HUGEPAGE = 14  # Linux, asm-generic/mman-common.h


def keep_freed() -> None:
    """Let glibc keep for this process what is freed: a step needs the memory of the one before. Elsewhere nothing."""
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None
    if libc is not None and hasattr(libc, "gnu_get_libc_version"):
        libc.mallopt(M_MMAP_MAX, 0)  # large ones from the heap too
        libc.mallopt(M_TRIM_THRESHOLD, -1)  # whose end is not given back
        libc.mallopt(M_TOP_PAD, GROWTH_BYTES)


def on_huge_pages(x: Tensor) -> Tensor:
    """Ask Linux to map x, which is not written to yet, in pages of 2 MiB. Elsewhere, and if it is small, do nothing.

    It is a wish: where huge pages are switched off, x is mapped as before.
    """
    if type(x) is Tensor and x.device.type == "cpu" and sys.platform == "linux":
        # Not by its storage: once Python has seen that, autograd adds nothing to x in place (torch 2.13).
        start, n_bytes = x.data_ptr(), x.nbytes
        first = -(-start // HUGE_PAGE) * HUGE_PAGE
        if n_bytes >= LARGE_BYTES:
            libc = ctypes.CDLL(None)
            libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(start + n_bytes - first), MADV_HUGEPAGE)
    return x
