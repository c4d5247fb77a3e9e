"""planning/counting/recorder.py: what waits for a message, and which tensors take memory, on a fake GPU."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from dtmega.ops import host
from dtmega.ops.softmax import slices
from dtmega.planning.counting import compiled
from dtmega.planning.counting.fake_device import on_fake_device
from dtmega.planning.counting.recorder import Recorder
from dtmega.planning.work import Work

GPU = torch.device("cuda", 0)
N = 1024  # elements of fp32, so 4 KiB


@contextlib.contextmanager
def recording() -> Iterator[Recorder]:
    """A recorder in a phase of a step, on the first of two ranks."""
    recorder = Recorder(GPU)
    with (
        on_fake_device(GPU, 0, 2, recorder) as fake_device,
        compiled.counted(recorder),
        recorder.waits_for_messages(),
    ):
        recorder.streams = fake_device.streams
        recorder.name_groups({})
        fake_device.stepping = True
        recorder.enter("test")
        yield recorder


def waits_of_kernels(is_async: bool) -> list[bool]:
    """For a kernel right after a sum over ranks, and one after the wait for it: does the kernel wait for the sum?"""
    with recording() as recorder:
        x = torch.empty(N, device=GPU)
        recorder.begin()
        work = dist.all_reduce(x, async_op=is_async)
        x.mul(2)
        if work is not None:
            work.wait()
        x.mul(3)
        (message,) = (number for number, one in enumerate(recorder.works) if one.message)
        kernels = [one for one in recorder.works if one.operator == "aten.mul"]
        return [message in one.waits for one in kernels]


@pytest.mark.parametrize(("is_async", "waits"), [(True, [False, True]), (False, [True, False])])
def test_a_kernel_waits_for_a_message_that_the_program_has_waited_for(is_async: bool, waits: list[bool]):
    assert waits_of_kernels(is_async) == waits


def bytes_after_a_functional_sum() -> tuple[int, bool]:
    with recording() as recorder:
        everyone = dist.group.WORLD
        assert everyone is not None
        x = torch.empty(N, device=GPU)
        before = recorder.ledger.now_bytes
        on_its_way = torch.ops._c10d_functional.all_reduce(x, "sum", everyone.group_name)
        total = torch.ops._c10d_functional.wait_tensor(on_its_way)
        recorder.begin()
        total.mul(2)
        return recorder.ledger.now_bytes - before, total.device == GPU


def test_a_wait_hands_on_the_tensor_of_its_message_and_takes_no_memory():
    assert bytes_after_a_functional_sum() == (4 * N, True)


def sum_of_a_chain(x: Tensor) -> Tensor:
    return (x * 2 + 1).exp().sum()


def product_of_a_chain(x: Tensor) -> Tensor:
    return (x * 2 + 1).exp().view(2, -1) @ x.view(-1, 2)


def added_bytes(chain: Callable[[Tensor], Tensor]) -> tuple[int, int]:
    """The most memory that a compiled function adds, and the bytes that its kernels move."""
    with recording() as recorder:
        x = torch.empty(N, device=GPU)
        function = torch.compile(chain)
        function(x)
        recorder.begin()
        before = recorder.ledger.now_bytes
        function(x)
        recorder.enter("after")
        return recorder.ledger.spans[0].peak_bytes - before, sum(one.moved_bytes for one in recorder.works)


def test_a_chain_that_a_sum_reads_is_never_in_memory():
    # The chain's first operator reads x. The sum reads nothing from memory and writes one number.
    assert added_bytes(sum_of_a_chain) == (4, 4 * N + 4)


def test_of_a_chain_that_a_product_reads_only_the_last_result_is_in_memory():
    # x is read once by the chain and once by the product, which also reads the chain's result and writes 2 x 2 numbers.
    assert added_bytes(product_of_a_chain) == (4 * N + 16, 4 * 4 * N + 16)


def test_a_synchronous_message_waits_for_no_other_message():
    with recording() as recorder:
        x, y = torch.empty(N, device=GPU), torch.empty(N, device=GPU)
        recorder.begin()
        dist.all_reduce(x, async_op=True)
        dist.all_reduce(y)
        y.mul(2)
        first, second = (number for number, one in enumerate(recorder.works) if one.message)
        (kernel,) = (one for one in recorder.works if one.operator == "aten.mul")
        assert first not in kernel.waits
        assert second in kernel.waits


def rows_of_one_loop(asks_host: bool) -> tuple[list[Work], int]:
    """The kernels of a loop over rows, and the most memory that the loop adds."""
    with recording() as recorder:
        x = torch.empty(N, 8, device=GPU)
        recorder.begin()
        before = recorder.ledger.now_bytes
        parts = slices(N, N // 3)  # three long parts and a short one
        for rows in host.each(parts) if asks_host else parts:
            x[rows].exp().sum()
        recorder.enter("after")
        return recorder.works, recorder.ledger.spans[0].peak_bytes - before


def test_parts_that_a_plan_counts_without_work_are_those_that_a_loop_works_on():
    counted, run = rows_of_one_loop(True), rows_of_one_loop(False)
    assert counted == run
    assert len(run[0]) == 8


def test_buffers_and_moves_to_the_same_device_launch_no_kernel():
    with recording() as recorder:
        x = torch.empty(N, device=GPU)
        recorder.begin()
        torch.ops.prims.device_put(torch.empty_like(x), GPU)
        assert recorder.works == []


def moved_by_a_sum_of_parts() -> tuple[int, int]:
    """Bytes that `add_` moves on plain parts of N / 2 numbers, and on DTensors of N numbers cut over two ranks."""
    with recording() as recorder:
        ranks = init_device_mesh("cuda", (2,))
        parts = [torch.empty(N // 2, device=GPU) for _ in range(2)]
        whole = [DTensor.from_local(part, ranks, [Shard(0)], run_check=False) for part in parts]
        recorder.begin()
        parts[0].add_(parts[1])
        whole[0].add_(whole[1])
        plain, cut = (one.moved_bytes for one in recorder.works if one.operator == "aten.add_")
        return plain, cut


def test_an_operator_of_cut_tensors_moves_the_bytes_of_this_ranks_parts():
    assert moved_by_a_sum_of_parts() == (3 * 4 * N // 2, 3 * 4 * N // 2)
