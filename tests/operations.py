"""A count of the operations that torch runs, by name: for tests of what is computed, and how often."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

# The products for CPUs with AMX call oneDNN directly, which multiplies bfloat16 only on CPUs with AVX-512 or AMX.
needs_onednn_bfloat16 = pytest.mark.skipif(
    not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="oneDNN has no bfloat16 products on this CPU"
)


class Operations(TorchDispatchMode):
    """Counts what is run inside, on plain tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))
