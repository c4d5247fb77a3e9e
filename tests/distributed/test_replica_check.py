"""A copy that is not equal any more is found and named."""

import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from dtmega.distributed import replica_check
from tests import ranks


def copies(rank: int, spoiled: int | None) -> dict[str, torch.Tensor]:
    tensors = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(5, dtype=torch.bfloat16), "empty": torch.empty(0)}
    if rank == spoiled:
        bits = tensors["b"].view(torch.int16)
        bits[3] ^= 1  # one bit
    return tensors


def check(spoiled: int | None, members: list[int] | None = None) -> str:
    """The message on this rank, if it is one of the members (None: all)."""
    group: Any = dist.group.WORLD if members is None else dist.new_group(members)
    if members is not None and dist.get_rank() not in members:
        return "elsewhere"
    try:
        replica_check.check_equal(copies(dist.get_rank(), spoiled), group, "copies")
    except RuntimeError as error:
        return str(error)
    return "equal"


def test_equal_copies_pass():
    assert ranks.run(3, check, None) == ["equal"] * 3


def test_one_flipped_bit_is_named_with_its_tensor_and_rank_on_every_rank():
    said = "copies: 1 of 3 tensors differ between ranks [0, 1, 2], first 'b' (rank 1 is not like the others)"
    assert ranks.run(3, check, 1) == [said] * 3


def test_of_two_copies_that_differ_none_is_blamed():
    said = "copies: 1 of 3 tensors differ between ranks [1, 2], first 'b' (which of them is right cannot be told)"
    assert ranks.run(3, check, 1, [1, 2]) == ["elsewhere", said, said]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("there", [1, 8191, replica_check.CHUNK, 2 * replica_check.CHUNK, 2**20])
def test_swapped_elements_change_the_checksum(dtype, there):
    x = torch.zeros(2**20 + 1, dtype=dtype)
    x[0], x[there] = 1, -1  # as floats their bits differ in the sign alone
    swapped = x.clone()
    swapped[0], swapped[there] = -1, 1
    assert not torch.equal(replica_check.checksums({"x": x}), replica_check.checksums({"x": swapped}))


def test_the_checksum_is_the_sum_of_words_by_place_whatever_the_pieces():
    words = torch.randint(-(2**31), 2**31, (2 * replica_check.CHUNK + 7,), generator=torch.Generator().manual_seed(1))
    expected = sum(place * word for place, word in enumerate(words.tolist(), start=1))
    assert replica_check.checksums({"x": words.to(torch.int32).view(torch.float32)}).item() == expected


class Allocated(TorchDispatchMode):
    """The most bytes of tensors at a time that operations have made, and not yet freed, while this is on."""

    def __init__(self) -> None:
        super().__init__()
        self.now_bytes = self.peak_bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        given = {t.untyped_storage().data_ptr() for t in args if isinstance(t, torch.Tensor)}
        if isinstance(result, torch.Tensor) and result.untyped_storage().data_ptr() not in given:
            n_bytes = result.untyped_storage().nbytes()
            self.now_bytes += n_bytes
            self.peak_bytes = max(self.peak_bytes, self.now_bytes)
            weakref.finalize(result, self._freed, n_bytes)
        return result

    def _freed(self, n_bytes: int) -> None:
        self.now_bytes -= n_bytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_memory_of_a_checksum_does_not_grow_with_the_tensor(dtype):
    """96 bytes per parameter were 25 GB for the embedding of bloom-560m."""
    peaks = []
    for numel in (2**20, 2**22):
        x = torch.zeros(numel, dtype=dtype)
        with Allocated() as allocated:
            replica_check.checksums({"x": x})
        peaks.append(allocated.peak_bytes)
    assert 0 < peaks[0] < 8 * 2**20
    assert peaks[1] == peaks[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_a_checksum_covers_every_byte(dtype):
    x = torch.arange(4, dtype=dtype)
    before = replica_check.checksums({"x": x})
    for byte in range(x.numel() * x.itemsize):
        changed = x.clone()
        changed.view(torch.uint8)[byte] ^= 0x80
        assert not torch.equal(replica_check.checksums({"x": changed}), before), byte
