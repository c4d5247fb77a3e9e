"""A copy that is not equal any more is found and named."""

import pytest
import torch
import torch.distributed as dist

from dtmega import drift
from tests import ranks


def copies(rank: int, spoiled: int | None) -> dict[str, torch.Tensor]:
    tensors = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(5, dtype=torch.bfloat16), "empty": torch.empty(0)}
    if rank == spoiled:
        bits = tensors["b"].view(torch.int16)
        bits[3] ^= 1  # one bit
    return tensors


def check(spoiled: int | None) -> str:
    group = dist.group.WORLD
    assert group is not None
    try:
        drift.check_equal(copies(dist.get_rank(), spoiled), group, "copies")
    except RuntimeError as error:
        return str(error)
    return "equal"


def test_equal_copies_pass():
    assert ranks.run(3, check, None) == ["equal"] * 3


def test_one_flipped_bit_is_named_with_its_tensor_and_rank_on_every_rank():
    for message in ranks.run(3, check, 1):
        assert "'b'" in message
        assert "rank 1 is not like the others" in message


def test_swapped_elements_change_the_checksum():
    a, b = torch.tensor([1.0, 2.0]), torch.tensor([2.0, 1.0])
    assert not torch.equal(drift.checksums({"x": a}), drift.checksums({"x": b}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_a_checksum_covers_every_byte(dtype):
    x = torch.arange(4, dtype=dtype)
    before = drift.checksums({"x": x})
    for byte in range(x.numel() * x.itemsize):
        changed = x.clone()
        changed.view(torch.uint8)[byte] ^= 0x80
        assert not torch.equal(drift.checksums({"x": changed}), before), byte
