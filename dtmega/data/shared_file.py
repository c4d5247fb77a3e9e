"""A file of arrays in the cache directory: one process of a node makes it, all of them map it.

    made = SharedFile(path, made_from=index_state(dataset), pieces=lambda: iter([array]), about="ordering 9 documents")
    made.read_or_make()
    np.memmap(path, ...)

The content is followed by a digest of it and of what it was made from: a file that is damaged, or of data that have
changed, is made again. Anything in the cache directory may be deleted at any time.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import xxhash
from numpy.typing import NDArray

from dtmega.data.indexed import CHUNK, IndexedDataset
from dtmega.lock import Lock

DIGEST_BYTES = 16


def index_state(dataset: IndexedDataset) -> str:
    """Path, size and time of the index: where one of them differs, it may be another data set."""
    index = index_path(dataset)
    stat = os.stat(index)
    return f"{index} {stat.st_size} {stat.st_mtime_ns}"


def index_path(dataset: IndexedDataset) -> str:
    return os.path.realpath(f"{dataset.prefix}.idx")


class SharedFile:
    """One file that the processes of a node share.

    Args:
        made_from: all that the content is a function of.
        pieces: makes the content, one array after the other.
        about: a line for people, said by the process that makes it.
    """

    def __init__(self, path: Path, made_from: str, pieces: Callable[[], Iterator[NDArray[Any]]], about: str) -> None:
        self.path, self._pieces, self._about = path, pieces, about
        self._made_from = made_from.encode()

    def read_or_make(self) -> bool:
        """Make the file unless it is there, whole; True if this process has made it.

        Raises:
            OSError: no room, or a directory that cannot be written.
        """
        if self._is_whole():
            return False
        with self._lock():
            if self._is_whole():  # another process may have made it while this one waited
                return False
            self._make()
            return True

    @contextlib.contextmanager
    def _lock(self) -> Iterator[None]:
        """Spare the node the same work twice, no more: a file appears whole, by a rename."""
        with contextlib.ExitStack() as held:
            with contextlib.suppress(OSError):  # the lock's file may be another user's
                held.enter_context(Lock(Path(f"{self.path}.lock")))
            yield

    def _is_whole(self) -> bool:
        # Read, not mapped: pages that a process has mapped and looked at count as its memory.
        with contextlib.suppress(OSError), open(self.path, "rb") as file:
            n_bytes = os.fstat(file.fileno()).st_size - DIGEST_BYTES
            digest = xxhash.xxh3_128(self._made_from)
            while n_bytes > 0:
                piece = file.read(min(n_bytes, 8 * CHUNK))
                digest.update(piece)
                n_bytes -= len(piece)
                if not piece:
                    return False
            return file.read() == digest.digest()
        return False

    def _make(self) -> None:
        print(f"dtmega: {self._about} in {self.path}", file=sys.stderr, flush=True)
        digest = xxhash.xxh3_128(self._made_from)
        temp = Path(f"{self.path}.{secrets.token_hex(4)}.tmp")
        try:
            with open(temp, "wb") as file:
                for piece in self._pieces():
                    digest.update(piece.data)
                    file.write(piece.data)
                file.write(digest.digest())
                file.flush()
                os.fsync(file.fileno())
            os.replace(temp, self.path)
        finally:
            temp.unlink(missing_ok=True)
