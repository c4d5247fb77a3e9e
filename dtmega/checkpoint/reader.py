"""A finished checkpoint, to read: nothing is believed before its digest matches."""

from __future__ import annotations

import math
import resource
import weakref
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from dtmega.checkpoint import manifest
from dtmega.checkpoint.files import Disk, Remote
from dtmega.checkpoint.manifest import Damaged, StoredChunk

SPARE_FILES = 256  # of the files that a process may open: room for all that are no data files


class Checkpoint:
    """A finished folder, as a `Source`; nothing is read before its digest can be checked.

    Attributes:
        bytes_read: from data files, by this object.
    """

    def __init__(self, files: Disk | Remote, folder: str) -> None:
        """Read the manifest of a folder.

        Raises:
            Damaged: no readable manifest, or it does not fit the files.
        """
        self.files, self.folder, self.path, self.bytes_read = files, folder, files.path(folder), 0
        sizes = files.sizes(folder)
        if manifest.NAME not in sizes:
            raise Damaged(f"{manifest.NAME} is missing")
        if sizes[manifest.NAME] > manifest.MAX_BYTES:
            raise Damaged(f"{manifest.NAME} has {sizes[manifest.NAME]} bytes, more than any manifest")
        with files.open(folder, manifest.NAME) as file:
            self.manifest = manifest.parse(file.read(), sizes)
        self._held: dict[str, Any] = {}

    def hold(self) -> Checkpoint:
        """Open every data file now: a run that goes on may delete the checkpoint while it is read.

        Under a URL nothing can be held, nor on a disk more files than a process may open.

        Raises:
            Damaged: a file is not there.
        """
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        wanted = len(self.manifest.files) + SPARE_FILES
        if not isinstance(self.files, Disk) or (hard != resource.RLIM_INFINITY and wanted > hard):
            return self
        if soft != resource.RLIM_INFINITY and wanted > soft:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        with ExitStack() as opened:
            self._held = {
                name: opened.enter_context(self.files.open(self.folder, name)) for name in self.manifest.files
            }
            weakref.finalize(self, opened.pop_all().close)
        return self

    @property
    def tensors(self) -> Mapping[str, tuple[torch.dtype, tuple[int, ...]]]:
        return {name: (entry.dtype, entry.shape) for name, entry in self.manifest.tensors.items()}

    def read(self, name: str, index: tuple[slice, ...] | None = None) -> Tensor:
        """Read a part (None: all) of a tensor, verified.

        Raises:
            Damaged: names file and entry.
        """
        entry = self.manifest.tensors[name]
        bounds = [s.indices(n) for s, n in zip(index or [slice(None)] * len(entry.shape), entry.shape, strict=True)]
        result = torch.empty([stop - start for start, stop, _ in bounds], dtype=entry.dtype)
        for chunk in entry.chunks:
            # The box that both have, seen from the chunk and from the result.
            low = [max(start, o) for (start, _, _), o in zip(bounds, chunk.offsets, strict=True)]
            high = [min(stop, o + n) for (_, stop, _), o, n in zip(bounds, chunk.offsets, chunk.sizes, strict=True)]
            if all(a < b for a, b in zip(low, high, strict=True)):
                there = tuple(slice(a - o, b - o) for a, b, o in zip(low, high, chunk.offsets, strict=True))
                here = tuple(slice(a - start, b - start) for a, b, (start, _, _) in zip(low, high, bounds, strict=True))
                result[here] = self.read_chunk(name, chunk, there)
        return result

    def read_chunk(self, name: str, chunk: StoredChunk, box: tuple[slice, ...]) -> Tensor:
        """Read a box of a chunk, and verify the blocks that hold its rows."""
        dtype = self.manifest.tensors[name].dtype
        rows = box[0] if box else slice(0, 1)
        row_bytes = math.prod(chunk.sizes[1:]) * dtype.itemsize
        total = math.prod(chunk.sizes) * dtype.itemsize
        first, last = rows.start * row_bytes // manifest.BLOCK_BYTES, -(-rows.stop * row_bytes // manifest.BLOCK_BYTES)
        start, stop = first * manifest.BLOCK_BYTES, min(last * manifest.BLOCK_BYTES, total)
        raw = torch.empty(stop - start, dtype=torch.uint8)
        view = memoryview(raw.numpy())  # pyright: ignore[reportArgumentType]
        with self._open(chunk.file) as file:
            file.seek(chunk.start + start)
            filled = 0
            while filled < len(view) and (n := file.readinto(view[filled:])):
                filled += n
        self.bytes_read += filled
        if filled < len(view) or manifest.block_digests(view) != chunk.digests[first:last]:
            raise Damaged(
                f"{chunk.file}: the bytes of '{name}' from {chunk.start + start} to {chunk.start + stop} do not match "
                f"their digest"
            )
        skip = rows.start * row_bytes - start
        wanted = raw[skip : skip + (rows.stop - rows.start) * row_bytes].view(dtype)
        if not box:
            return wanted[0]
        return wanted.view(rows.stop - rows.start, *chunk.sizes[1:])[(slice(None), *box[1:])]

    @contextmanager
    def _open(self, name: str) -> Iterator[Any]:
        """Open a data file, or use it where it is held open.

        Raises:
            Damaged: it is not there.
        """
        with ExitStack() as closing:
            try:
                file = self._held.get(name) or closing.enter_context(self.files.open(self.folder, name))
            except Damaged:
                if self.folder in self.files.folders():
                    raise
                raise Damaged("it was deleted while it was read, as the run that writes there has gone on") from None
            yield file

    def verify(self) -> None:
        """Read every byte. Raises `Damaged`."""
        for name in self.manifest.tensors:
            for chunk in self.manifest.tensors[name].chunks:
                self.read_chunk(name, chunk, tuple(slice(0, n) for n in chunk.sizes))
