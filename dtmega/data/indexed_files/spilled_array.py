"""A growing array whose older entries are on disk, so that its memory use is bounded."""

from __future__ import annotations

import tempfile
from array import array
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

IN_MEMORY = 1 << 20  # number of entries kept in memory; a shorter array needs no file


class SpilledArray:
    """A growing array of integers. The newest entries, at most IN_MEMORY, are in memory, the others in an unnamed file.

        lengths = SpilledArray("i", folder)
        lengths.extend([3, 5])
        for piece in lengths.pieces(): ...

    Args:
        typecode: "i" for entries of 4 bytes, "q" for entries of 8 bytes, as in Python's `array`.
        folder: folder for the unnamed file, on a disk with enough room. The disk space is freed even if this process is
            killed.
    """

    def __init__(self, typecode: str, folder: Path) -> None:
        self._new = array(typecode)
        self._folder = folder
        self._file: IO[bytes] | None = None
        self._n_in_file = 0

    def __len__(self) -> int:
        return self._n_in_file + len(self._new)

    def extend(self, values: Iterable[int]) -> None:
        """Append entries.

        Raises:
            OSError: the disk is full, or the folder is not writable.
        """
        self._new.extend(values)
        if len(self._new) < IN_MEMORY:
            return
        if self._file is None:
            self._file = tempfile.TemporaryFile(dir=self._folder)  # noqa: SIM115  # `close` closes it
        self._file.seek(self._n_in_file * self._new.itemsize)
        self._file.write(self._new.tobytes())
        self._n_in_file += len(self._new)
        del self._new[:]

    def pieces(self) -> Iterator[NDArray[Any]]:
        """Yield all entries in order, in arrays of at most IN_MEMORY entries."""
        dtype = np.dtype(self._new.typecode)
        if self._file is not None:
            self._file.seek(0)
            while raw := self._file.read(IN_MEMORY * dtype.itemsize):
                yield np.frombuffer(raw, dtype)
        yield np.array(self._new, dtype)

    def close(self) -> None:
        """Close the file, which frees its disk space."""
        if self._file is not None:
            self._file.close()
