"""A finished checkpoint, opened for reading: no bytes are used before their digest has been verified."""

from __future__ import annotations

import resource
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from dtmega.checkpoint import manifest
from dtmega.checkpoint.data_files import Extent, extent
from dtmega.checkpoint.files import Place
from dtmega.checkpoint.manifest import Damaged, StoredChunk

SPARE_FILES = 256  # number of file descriptors that `hold` leaves free for the rest of the process


class Checkpoint:
    """A finished checkpoint, as a `Source` of its tensors.

    Args:
        files: disk or object store that holds the checkpoint's folder.
        folder: name of the checkpoint's folder.

    Attributes:
        path: path or URL of the folder.
        manifest: description of the checkpoint's content, from its `manifest.json`.
        bytes_read: number of bytes that this object has read from data files.

    Raises:
        Damaged: the manifest is missing, is damaged or does not fit the data files.
    """

    def __init__(self, files: Place, folder: str) -> None:
        self.files, self.folder, self.path, self.bytes_read = files, folder, files.path(folder), 0
        sizes = files.sizes(folder)
        if manifest.NAME not in sizes:
            raise Damaged(f"{manifest.NAME} is missing")
        if sizes[manifest.NAME] > manifest.MAX_BYTES:
            raise Damaged(f"{manifest.NAME} has {sizes[manifest.NAME]} bytes, more than any manifest")
        with files.open(folder, manifest.NAME) as file:
            self.manifest = manifest.parse(file.read(), sizes)
        self._held: dict[str, Any] = {}
        self._counting = threading.Lock()

    def hold(self) -> Checkpoint:
        """Open every data file now, so that the files stay readable even if a run in progress deletes the checkpoint.

        No file is opened if there are more data files than a process may open. No file is opened under a URL either,
        because an open file under a URL becomes unreadable when the file is deleted.

        Returns:
            This checkpoint.

        Raises:
            Damaged: a data file is missing.
        """
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        wanted = len(self.manifest.files) + SPARE_FILES
        if not self.files.stays_readable or (hard != resource.RLIM_INFINITY and wanted > hard):
            return self
        if soft != resource.RLIM_INFINITY and wanted > soft:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        with ExitStack() as closing:
            held = {name: closing.enter_context(self.files.open(self.folder, name)) for name in self.manifest.files}
            # All files are open and stay open as long as this object exists.
            self._held = held
            weakref.finalize(self, closing.pop_all().close)
        return self

    @property
    def tensors(self) -> Mapping[str, tuple[torch.dtype, tuple[int, ...]]]:
        """Name of each tensor -> (dtype, shape)."""
        return {name: (entry.dtype, entry.shape) for name, entry in self.manifest.tensors.items()}

    def read(self, name: str, index: tuple[slice, ...] | None = None) -> Tensor:
        """Read a tensor or a slice of it; verify every block that is read.

        Args:
            name: name of the tensor in the checkpoint.
            index: slices of step 1, one per dim; None for the whole tensor.

        Raises:
            Damaged: a block does not match its digest; the message names the file and the tensor.
        """
        entry = self.manifest.tensors[name]
        slices = index or [slice(None)] * len(entry.shape)
        bounds = [s.indices(n) for s, n in zip(slices, entry.shape, strict=True)]
        starts = [start for start, _, _ in bounds]
        stops = [stop for _, stop, _ in bounds]
        result = torch.empty([stop - start for start, stop in zip(starts, stops, strict=True)], dtype=entry.dtype)
        for chunk in entry.chunks:
            # The chunk and the requested slice overlap from `low` to `high`, as indices into the whole tensor.
            low = [max(start, o) for start, o in zip(starts, chunk.offsets, strict=True)]
            high = [min(stop, o + n) for stop, o, n in zip(stops, chunk.offsets, chunk.sizes, strict=True)]
            if all(a < b for a, b in zip(low, high, strict=True)):
                in_chunk = tuple(slice(a - o, b - o) for a, b, o in zip(low, high, chunk.offsets, strict=True))
                in_result = tuple(slice(a - start, b - start) for a, b, start in zip(low, high, starts, strict=True))
                result[in_result] = self.read_chunk(name, chunk, in_chunk)
        return result

    def read_chunk(self, name: str, chunk: StoredChunk, box: tuple[slice, ...]) -> Tensor:
        """Read a box (a slice along each dim) of a chunk; verify the blocks that hold the box's rows.

        Args:
            name: name of the tensor that the chunk belongs to.
            chunk: entry of the chunk in the manifest.
            box: slices within the chunk, one per dim.

        Raises:
            Damaged: a block does not match its digest; the message names the file and the tensor.
        """
        return self.read_extents([extent(self.manifest, name, chunk, box)])[0]

    def read_extents(self, extents: Sequence[Extent]) -> list[Tensor]:
        """Read boxes whose bytes are adjacent in one data file; verify the blocks that hold the boxes.

        Args:
            extents: one group of extents from `data_files.side_by_side`.

        Returns:
            The content of each box.

        Raises:
            Damaged: a block does not match its digest; the message names the file and the tensor.
        """
        start = extents[0].start
        raw = torch.empty(max(each.stop for each in extents) - start, dtype=torch.uint8)
        view = memoryview(raw.numpy())  # pyright: ignore[reportArgumentType]
        with self._open(extents[0].chunk.file) as file:
            file.seek(start)
            # The file is unbuffered: `readinto` may read fewer bytes than requested and returns 0 at the end.
            filled = 0
            while filled < len(view) and (n := file.readinto(view[filled:])):
                filled += n
        with self._counting:
            self.bytes_read += filled
        read = raw[:filled]
        return [each.tensor(read[each.start - start : each.stop - start]) for each in extents]

    @contextmanager
    def _open(self, name: str) -> Iterator[Any]:
        """Open a data file for a `with` block or reuse the file that `hold` has opened.

        Raises:
            Damaged: the file is missing, perhaps because the run has deleted the whole checkpoint.
        """
        with ExitStack() as closing:
            try:
                yield self._held.get(name) or closing.enter_context(self.files.open(self.folder, name))
            except Damaged:
                if self.folder in self.files.folders():
                    raise
                raise Damaged("it was deleted while it was read, as the run that writes there has gone on") from None

    def verify(self) -> None:
        """Verify every digest by reading every tensor.

        Raises:
            Damaged: a block does not match its digest.
        """
        for name in self.manifest.tensors:
            for chunk in self.manifest.tensors[name].chunks:
                self.read_chunk(name, chunk, tuple(slice(0, n) for n in chunk.sizes))
