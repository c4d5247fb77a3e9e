"""The layout of a checkpoint's data files: `DataFile` writes slices of tensors, and an `Extent` finds them again.

A chunk, a slice of a tensor in one data file, is stored row by row, so consecutive rows of the chunk form one range of
bytes. Each digest covers a whole block of bytes, so the range is widened to block boundaries.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dtmega.checkpoint.manifest import Damaged, Manifest, StoredChunk, block_digests

Slices = tuple[slice, ...]
WRITE_BYTES = 4 * 2**20  # number of bytes per write; a multiple of every block size
READ_BYTES = 8 * 2**20  # number of bytes per read, unless one box has more; what an object store sends in one answer


class DataFile:
    """A writer for one data file: appends slices of tensors and computes a digest of every block.

    Args:
        name: name of the file.
        file: data file, opened for writing.
        block_bytes: size of a block in bytes; a power of two.

    Attributes:
        n_bytes: number of bytes written so far.
    """

    def __init__(self, name: str, file: Any, block_bytes: int) -> None:
        self.name = name
        self.n_bytes = 0
        self._file = file
        self._block_bytes = block_bytes

    def add(self, tensor: Tensor, offsets: Iterable[int]) -> StoredChunk:
        """Append a slice of a tensor as a chunk.

        Args:
            tensor: content of the slice.
            offsets: index of the slice's first element in the whole tensor, one number per dim.

        Returns:
            The chunk's entry for the manifest.
        """
        data = _bytes(tensor.detach().cpu().contiguous())
        digests: list[str] = []
        # Hash WRITE_BYTES at a time right before writing them, while they are in the processor's cache.
        for i in range(0, len(data), WRITE_BYTES):
            part = data[i : i + WRITE_BYTES]
            digests.extend(block_digests(part, self._block_bytes))
            self._file.write(part)
        chunk = StoredChunk(tuple(offsets), tuple(tensor.shape), self.name, self.n_bytes, tuple(digests))
        self.n_bytes += len(data)
        return chunk


class Extent(NamedTuple):
    """A box (a slice along each dim) of a stored chunk, and the bytes of the blocks that hold the box's rows.

    Attributes:
        name: name of the tensor that the chunk belongs to.
        dtype: dtype of the tensor.
        chunk: entry of the chunk in the manifest.
        box: slices within the chunk, one per dim.
        block_bytes: size of a block in bytes.
        start: start of the first block in the data file, in bytes.
        stop: end of the last block in the data file, in bytes.
    """

    name: str
    dtype: torch.dtype
    chunk: StoredChunk
    box: Slices
    block_bytes: int
    start: int
    stop: int

    def tensor(self, blocks: Tensor) -> Tensor:
        """Verify the blocks and return the content of the box.

        Args:
            blocks: bytes of the blocks, uint8; fewer than `stop - start` if the file is too short.

        Raises:
            Damaged: a block does not match its digest; the message names the file and the tensor.
        """
        first = (self.start - self.chunk.start) // self.block_bytes
        n_blocks = -(-(self.stop - self.start) // self.block_bytes)
        digests = block_digests(_bytes(blocks), self.block_bytes)
        if len(blocks) < self.stop - self.start or digests != self.chunk.digests[first : first + n_blocks]:
            raise Damaged(
                f"{self.chunk.file}: the bytes of '{self.name}' from {self.start} to {self.stop} do not match their "
                f"digest"
            )
        rows, row_bytes = _rows(self.chunk, self.box, self.dtype)
        skip = self.chunk.start + rows.start * row_bytes - self.start
        wanted = blocks[skip : skip + (rows.stop - rows.start) * row_bytes].view(self.dtype)
        # A tensor without dims is stored as one row of one element.
        if not self.box:
            return wanted[0]
        return wanted.view(rows.stop - rows.start, *self.chunk.sizes[1:])[(slice(None), *self.box[1:])]


def extent(manifest: Manifest, name: str, chunk: StoredChunk, box: Slices) -> Extent:
    """Find the blocks that hold the rows of a box.

    Args:
        manifest: manifest of the checkpoint.
        name: name of the tensor that the chunk belongs to.
        chunk: entry of the chunk in the manifest.
        box: slices within the chunk, one per dim.
    """
    dtype, block_bytes = manifest.tensors[name].dtype, manifest.block_bytes
    rows, row_bytes = _rows(chunk, box, dtype)
    total = math.prod(chunk.sizes) * dtype.itemsize
    first = rows.start * row_bytes // block_bytes
    last = -(-rows.stop * row_bytes // block_bytes)
    start = chunk.start + first * block_bytes
    stop = chunk.start + min(last * block_bytes, total)
    return Extent(name, dtype, chunk, box, block_bytes, start, stop)


def side_by_side(extents: Sequence[Extent], most_bytes: int) -> list[list[int]]:
    """Group adjacent extents, so that one read of at most `most_bytes` can fetch a whole group.

    An extent that is longer than `most_bytes` forms its own group.

    Returns:
        The groups, each a list of indices into `extents`, in the order in which the file stores the extents.
    """
    groups: list[list[int]] = []
    file, start, stop = "", 0, 0
    for number in sorted(range(len(extents)), key=lambda i: (extents[i].chunk.file, extents[i].start)):
        here = extents[number]
        joins = here.chunk.file == file and here.start <= stop and max(stop, here.stop) - start <= most_bytes
        if not joins:
            groups.append([])
            file, start, stop = here.chunk.file, here.start, here.stop
        groups[-1].append(number)
        stop = max(stop, here.stop)
    return groups


def _rows(chunk: StoredChunk, box: Slices, dtype: torch.dtype) -> tuple[slice, int]:
    """The range of a chunk's rows (indices along dim 0) that a box covers, and the size of one such row in bytes."""
    return (box[0] if box else slice(0, 1)), math.prod(chunk.sizes[1:]) * dtype.itemsize


def _bytes(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, without a copy."""
    return memoryview(tensor.reshape(-1).view(torch.uint8).numpy())  # pyright: ignore[reportArgumentType]
