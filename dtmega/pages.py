"""Large buffers of a CPU on huge pages.

Memory of more than 32 MiB glibc takes from the system and gives back to it each time, and the system maps it in pages
of 4 KiB. For a chunk's logits and the gradient of the head's weight this took a sixth of the time of their products.
"""

from __future__ import annotations

import ctypes
import sys

from torch import Tensor

LARGE_BYTES = 2**24
HUGE_PAGE = 2**21  # bytes
MADV_HUGEPAGE = 14  # Linux, asm-generic/mman-common.h


def on_huge_pages(x: Tensor) -> Tensor:
    """Ask Linux to map x, which is not written to yet, in pages of 2 MiB. Elsewhere, and if it is small, do nothing.

    It is a wish: where huge pages are switched off, x is mapped as before.
    """
    if type(x) is Tensor and x.device.type == "cpu" and sys.platform == "linux":
        start, n_bytes = x.untyped_storage().data_ptr(), x.untyped_storage().nbytes()
        first = -(-start // HUGE_PAGE) * HUGE_PAGE
        if n_bytes >= LARGE_BYTES:
            libc = ctypes.CDLL(None)
            libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(start + n_bytes - first), MADV_HUGEPAGE)
    return x
