"""64-bit digests of tensors. The digests of a tensor's parts, or of tensors on several ranks, can be added up.

Each element has a hash, computed from the tensor's name, the element's index and the element's bits. A digest is the
sum of all elements' hashes modulo 2^64, so it does not depend on how a tensor is sharded or how ranks are ordered. The
hash applies SplitMix64's finalizer (`ops/keyed.py`) twice: to the index, and then to the result combined with the name
and the bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from dtmega.ops import keyed
from dtmega.ops.fixed_point import PIECE
from dtmega.ops.shards import boxes


class StepDigests(NamedTuple):
    """The digests of a step, equal on all ranks and all data layouts.

    Attributes:
        update: digest of all weights after the step.
        microbatches: digests of each microbatch's rounded gradients, in the order of the global batch.
    """

    update: int
    microbatches: tuple[int, ...]


class Digest:
    """A running digest of tensors that are always divided into the same pieces.

    Args:
        keys: result of `first_keys`.

    Attributes:
        total: digest of all pieces added so far, an int64 scalar.
    """

    def __init__(self, keys: Tensor) -> None:
        self._keys = keys
        self.total = torch.zeros_like(keys[0])

    def add(self, name: str, number: int, values: Tensor) -> None:
        """Add a piece of a tensor.

        Args:
            name: name of the tensor.
            number: index of the piece in the tensor.
            values: elements of the piece, int64, at most PIECE elements.
        """
        self.total += _hashed(self._keys[: values.numel()], values, f"{name}/{number}")


def first_keys(device: torch.device) -> Tensor:
    """The hashes of the indices 0 to PIECE - 1, int64 [PIECE]."""
    return _mix(torch.arange(PIECE, device=device))


@torch.no_grad()
def of_weights(weights: Mapping[str, Tensor], device: torch.device) -> Tensor:
    """Compute the digest of this rank's shards of the weights, an int64 scalar.

    The sum of all ranks' digests does not depend on how the weights are sharded.

    Args:
        weights: fp32 weights, keyed by name in the whole model; a sharded one is a DTensor. No weight may be a scalar.
        device: device of the digest.
    """
    total = torch.zeros((), dtype=torch.int64, device=device)
    for name, weight in weights.items():
        for box in boxes(weight.detach()):
            start = box.offsets[0]
            for rows in box.part.split(max(1, PIECE // box.part[0].numel())):
                numbers = _numbers(weight.shape, (start, *box.offsets[1:]), rows)
                start += rows.shape[0]
                bits = rows.contiguous().view(torch.int32).to(torch.int64)
                total += _hashed(_mix(numbers), bits, name)
    return total


def _numbers(shape: torch.Size, offsets: tuple[int, ...], part: Tensor) -> Tensor:
    """The index that each element of a part has in the flattened whole tensor, int64 in the shape of the part.

    Args:
        shape: shape of the whole tensor.
        offsets: position of the part's first element in the whole tensor.
        part: part of the tensor.
    """
    numbers = torch.zeros((), dtype=torch.int64, device=part.device)
    for whole_size, offset, size in zip(shape, offsets, part.shape, strict=True):
        along = torch.arange(offset, offset + size, device=part.device)
        numbers = (numbers * whole_size).unsqueeze(-1) + along
    return numbers


def _hashed(keys: Tensor, bits: Tensor, name: str) -> Tensor:
    """The sum of the elements' hashes, an int64 scalar.

    Args:
        keys: hashes of the elements' indices, int64.
        bits: bits of the elements, int64 in the shape of `keys`.
        name: name that all elements share.
    """
    x = keys ^ bits
    x += _signed(keyed.key64(name))
    return _mix(x).sum()


def _signed(bits: int) -> int:
    """Reinterpret the bits of an unsigned 64-bit number as an int64."""
    return bits - 2**64 if bits >= 2**63 else bits


GOLDEN, FIRST, SECOND = map(_signed, (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def _mix(x: Tensor) -> Tensor:
    """Apply SplitMix64 to each element of an int64 tensor in place, and return the tensor."""
    x += GOLDEN
    shifted = torch.empty_like(x)
    # int64 has no logical shift, so a mask removes the copies of the sign bit.
    for shift, factor in ((30, FIRST), (27, SECOND), (31, 1)):
        torch.bitwise_right_shift(x, shift, out=shifted)
        shifted &= 2 ** (64 - shift) - 1
        x ^= shifted
        if factor != 1:
            x *= factor
    return x
