"""Concatenate files or stored objects into one file, using several threads."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from dtmega.files.object_file import ObjectFile

N_THREADS = 4  # number of copying threads; several disks or servers can answer at once
SLICE_BYTES = 1 << 26  # size of the slice that a thread copies
BUFFER_BYTES = 1 << 22  # size of a thread's buffer


class _Slice(NamedTuple):
    """A range of one file, and the range's offset in the joined file, all in bytes."""

    source: str | ObjectFile
    start: int
    n_bytes: int
    place: int


def join_files(sources: Sequence[str | ObjectFile], target: Path) -> None:
    """Concatenate the sources in the given order into a new file. The file is synced to disk.

    Raises:
        OSError: a file cannot be read or written, a file has become shorter during the copy, or an object cannot be
            read or has changed.
    """
    # Each slice has its own offsets in the source and in the target, so threads may finish in any order.
    # `copy_file_range` would avoid the copy through memory, but some file systems do not support it, and their errors
    # differ.
    with open(target, "xb") as joined, ThreadPoolExecutor(N_THREADS) as threads:
        for _ in threads.map(lambda piece: _copy(piece, joined.fileno()), list(_slices(sources))):
            pass
        os.fsync(joined.fileno())


def _slices(sources: Sequence[str | ObjectFile]) -> Iterator[_Slice]:
    """Yield slices that cover all files."""
    place = 0
    for source in sources:
        size_bytes = source.size if isinstance(source, ObjectFile) else os.path.getsize(source)
        for start in range(0, size_bytes, SLICE_BYTES):
            yield _Slice(source, start, min(SLICE_BYTES, size_bytes - start), place + start)
        place += size_bytes


def _copy(piece: _Slice, target: int) -> None:
    """Copy a slice into an open file."""
    done = 0
    if isinstance(piece.source, ObjectFile):
        (content,) = piece.source.read([(piece.start, piece.start + piece.n_bytes)])
        while done < piece.n_bytes:
            done += os.pwrite(target, content[done:], piece.place + done)
        return
    with open(piece.source, "rb", buffering=0) as source:
        while done < piece.n_bytes:
            content = os.pread(source.fileno(), min(BUFFER_BYTES, piece.n_bytes - done), piece.start + done)
            if not content:
                raise OSError(f"{piece.source} ends at byte {piece.start + done}, which it did not at first")
            done += os.pwrite(target, content, piece.place + done)
