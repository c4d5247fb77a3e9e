"""planning/counting/copies.py: the bytes of copies inside of an operator, against those that torch's allocator sees."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed.fsdp  # pyright: ignore[reportUnusedImport]  # defines the operator fsdp::chunk_cat
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from dtmega.planning.counting.copies import copied_bytes

N = 1000
NUMBER_BYTES = 16  # a number in an expression becomes a tensor inside of the operator, which is converted once
WIDE, NARROW = torch.ones(7, N), torch.ones(7, N, dtype=torch.bfloat16)
INTEGERS, MASK = torch.ones(7, N, dtype=torch.int64), torch.ones(7, N, dtype=torch.bool)


def in_chunks(tensors: list[Tensor], n_rows: int, dtype: torch.dtype) -> Tensor:
    """What FSDP does with unsharded gradients: cut each into 2 chunks, padded to `n_rows` rows in all."""
    out = torch.empty(2, n_rows // 2 * N, dtype=dtype)
    torch.ops.fsdp.chunk_cat(tensors, dim=0, num_chunks=2, out=out)
    return out


OPERATORS: dict[str, Callable[[], Tensor]] = {
    "fp32 += bf16": lambda: WIDE.add_(NARROW),
    "bf16 += fp32": lambda: NARROW.add_(WIDE),
    "fp32 * bf16": lambda: WIDE * NARROW,
    "bf16 * number": lambda: NARROW * 0.5,
    "fp32 > bf16": lambda: WIDE > NARROW,
    "bf16 * mask": lambda: NARROW * MASK,
    "integers / number": lambda: INTEGERS / 2,
    "addcmul": lambda: torch.addcmul(WIDE, NARROW, NARROW),
    "where": lambda: torch.where(MASK, WIDE, NARROW),
    "masked_fill": lambda: NARROW.masked_fill(MASK, 0.0),
    "copy": lambda: WIDE.copy_(NARROW),
    "sum": lambda: NARROW.sum(0),
    "sum in fp32": lambda: NARROW.sum(0, dtype=torch.float32),
    "sum of a mask": MASK.sum,
    "norm in fp64": lambda: torch.linalg.vector_norm(WIDE, dtype=torch.float64),
    "cat": lambda: torch.cat([WIDE, NARROW, NARROW]),
    "chunks, even": lambda: in_chunks([NARROW[:6]], 6, torch.bfloat16),
    "chunks in fp32, even": lambda: in_chunks([NARROW[:6], NARROW[:6]], 12, torch.float32),
    "chunks, padded": lambda: in_chunks([WIDE, WIDE], 16, torch.float32),
    "chunks in fp32, padded": lambda: in_chunks([NARROW, NARROW, NARROW[:6]], 22, torch.float32),
}


class Most(TorchDispatchMode):
    """The most bytes of copies in one of the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.n_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        self.n_bytes = max(self.n_bytes, copied_bytes(func, args, kwargs or {}, output))
        return output


def peak_above_result(function: Callable[[], Tensor]) -> int:
    """The most bytes that torch's allocator has given out while the function runs, without those of its result."""
    warnings.filterwarnings("ignore", "Warning: Profiler clears events")  # torch 2.11
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        result = function()
    found: list[tuple[int, int]] = []

    def walk(nodes: Any) -> None:
        for node in nodes:
            if node.name == "[memory]":
                found.append((node.start_time_ns, node.extra_fields.alloc_size))
            walk(node.children)

    walk(profiled.profiler.kineto_results.experimental_event_tree())  # pyright: ignore[reportOptionalMemberAccess]
    del result
    levels = [*itertools.accumulate(n_bytes for _, n_bytes in sorted(found, key=lambda event: event[0]))]
    return max(levels, default=0) - (levels[-1] if levels else 0)


@pytest.mark.parametrize("name", OPERATORS)
def test_copies_inside_of_an_operator_are_those_of_the_allocator(name: str):
    most = Most()
    with most:
        OPERATORS[name]()
    assert 0 <= peak_above_result(OPERATORS[name]) - most.n_bytes <= NUMBER_BYTES
