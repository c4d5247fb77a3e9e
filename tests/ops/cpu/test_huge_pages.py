"""Claims about ops/cpu/huge_pages.py; the truth is what Linux says of the process's memory."""

from __future__ import annotations

import mmap
import re
import resource
import statistics
from pathlib import Path

import pytest
import torch
from torch import Tensor

from dtmega.ops.cpu.huge_pages import LARGE_BYTES, keep_freed_memory, on_huge_pages
from dtmega.ops.cross_entropy import with_gradient
from tests import ranks

SMAPS = Path("/proc/self/smaps")
OF_THE_KERNEL = Path("/sys/kernel/mm/transparent_hugepage")
needs_linux = pytest.mark.skipif(not (SMAPS.exists() and OF_THE_KERNEL.exists()), reason="Linux tells of huge pages")


def asked_for(x: Tensor) -> bool:
    """Whether the mapping that holds the middle of x has the flag of `madvise(..., MADV_HUGEPAGE)`."""
    middle = x.data_ptr() + x.nbytes // 2
    for mapping in re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", SMAPS.read_text(), flags=re.M)[1:]:
        start, end = (int(address, 16) for address in mapping.split()[0].split("-"))
        if start <= middle < end:
            return " hg" in mapping.rpartition("VmFlags:")[2]
    raise AssertionError("the tensor is in no mapping")


def fresh(n_bytes: int) -> Tensor:
    """Bytes in a mapping of their own: a heap may give back a place that an earlier test has asked huge pages for."""
    mapping = mmap.mmap(-1, n_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(mapping, dtype=torch.uint8)


@needs_linux
def test_a_large_tensor_is_mapped_as_was_asked_and_a_small_one_is_left_alone():
    large = on_huge_pages(fresh(4 * LARGE_BYTES))
    assert asked_for(large)
    assert (large.fill_(3) == 3).all()
    small = on_huge_pages(fresh(LARGE_BYTES - 1))
    assert not asked_for(small)


def test_a_tensor_without_memory_comes_back_as_it_is():
    x = torch.empty(LARGE_BYTES, device="meta")
    assert on_huge_pages(x) is x


def test_a_second_gradient_is_added_where_one_in_huge_pages_is():
    weight = torch.ones(LARGE_BYTES // 4, requires_grad=True)
    gradient = on_huge_pages(torch.empty(LARGE_BYTES // 4)).fill_(2)
    place = gradient.data_ptr()
    first = weight.sum()  # whose gradient comes last
    total = with_gradient(torch.zeros(()), weight, gradient) + first
    del gradient
    total.backward()
    assert weight.grad is not None
    assert weight.grad.data_ptr() == place
    assert (weight.grad == 3).all()


def faults() -> int:
    """Pages that the system has to find while some large tensors are filled, which are freed at the end."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    filled = [torch.empty(n * LARGE_BYTES, dtype=torch.uint8).fill_(3) for n in (1, 3, 4)]
    del filled
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def before_and_after() -> tuple[float, float]:
    """Of ten rounds, after ten that bring up the memory."""
    found = []
    for begins in (lambda: None, keep_freed_memory):
        begins()
        found.append(statistics.median([faults() for _ in range(20)][10:]))
    return found[0], found[1]


@needs_linux
def test_a_step_finds_the_memory_that_the_one_before_has_freed():
    ((before, after),) = ranks.run(1, before_and_after)
    assert before >= 4 * LARGE_BYTES // 2**21  # of huge pages, if not more and smaller ones
    # A forked process copies a page when it first writes there, so Python's own objects may take one or two.
    assert after <= 2
