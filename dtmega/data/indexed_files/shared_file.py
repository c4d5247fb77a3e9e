"""A file of arrays in the cache directory. One process per node makes the file, and all processes map the file.

    made = SharedFile(path, made_from=dataset.index_state, pieces=lambda: iter([array]), about="ordering 9 documents")
    made.read_or_make()
    np.memmap(path, ...)

The file ends with a digest of its content and its inputs. The file is replaced if it is damaged or if its inputs have
changed. Users may delete anything in the cache directory at any time.
"""

from __future__ import annotations

import contextlib
import glob
import os
import secrets
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import xxhash
from numpy.typing import NDArray

from dtmega.files.lock import Lock, is_held

DIGEST_BYTES = 16
PIECE_BYTES = 8 << 20  # number of bytes read at a time


class SharedFile:
    """A file that the processes of a node share.

    Args:
        path: path of the file.
        made_from: text that identifies everything that the content is computed from; if it changes, the file is remade.
        pieces: function that yields the arrays of the content, one after another.
        about: a line for the user, printed by the process that makes the file.
    """

    def __init__(self, path: Path, made_from: str, pieces: Callable[[], Iterator[NDArray[Any]]], about: str) -> None:
        self.path, self._pieces, self._about = path, pieces, about
        self._made_from = made_from.encode()

    def read_or_make(self) -> bool:
        """Make the file unless an intact file exists. Returns True if this process made the file.

        Raises:
            OSError: the disk is full, or the directory is not writable.
        """
        if self._is_intact():
            return False
        with self._lock():
            if self._is_intact():  # another process may have made the file while this process waited
                return False
            self._make()
            return True

    @contextlib.contextmanager
    def _lock(self) -> Iterator[None]:
        """Hold a lock, if possible, so that only one process per node makes the shared file.

        A missing lock does no harm, because each process writes to a temporary file of its own and then renames it.
        """
        lock = Path(f"{self.path}.lock")
        with contextlib.ExitStack() as held:
            with contextlib.suppress(OSError):  # the lock file may belong to another user
                held.enter_context(Lock(lock))
                if is_held(lock):  # None without locks. With them, all temporary files are of killed processes.
                    for temp in self.path.parent.glob(f"{glob.escape(self.path.name)}.*.tmp"):
                        temp.unlink()
            yield

    def _is_intact(self) -> bool:
        """True if the file is complete, is undamaged and was made from the inputs in `made_from`."""
        # The file is read, not mapped, because mapped pages that a process touches count towards its memory use.
        with contextlib.suppress(OSError), open(self.path, "rb") as file:
            n_bytes = os.fstat(file.fileno()).st_size - DIGEST_BYTES
            digest = xxhash.xxh3_128(self._made_from)
            while n_bytes > 0:
                piece = file.read(min(n_bytes, PIECE_BYTES))
                digest.update(piece)
                n_bytes -= len(piece)
                if not piece:
                    return False
            return file.read() == digest.digest()
        return False

    def _make(self) -> None:
        """Write the file under a temporary name, then rename it."""
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
