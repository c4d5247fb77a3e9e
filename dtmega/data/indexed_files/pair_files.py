"""The three files of a new data set. The files have temporary names until all three are complete.

PREFIX.bin.4711-0a1b2c3d.tmp       so also .idx and .meta.json, as far as they are written
PREFIX.lock.4711-0a1b2c3d.tmp      locked while the writer lives
"""

from __future__ import annotations

import glob
import os
import secrets
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from dtmega.files.atomic import sync_folder
from dtmega.files.lock import Lock, is_held

SUFFIXES = ("bin", "idx", "meta.json")


class PairFiles:
    """New files PREFIX.bin, PREFIX.idx and PREFIX.meta.json.

    PREFIX.idx appears last, when PREFIX.bin and PREFIX.meta.json are complete.

        files = PairFiles("data/mine")
        try:
            write(files.temporary("bin"))
            files.write("idx", pieces)
            files.publish()
        finally:
            files.discard()

    Args:
        prefix: path of the files without their suffixes. Missing folders are made, and what a killed writer of the
            same files has left is removed.
    """

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        self.folder = Path(prefix).parent
        self.folder.mkdir(parents=True, exist_ok=True)
        remove_abandoned(prefix)
        tag = f"{os.getpid()}-{secrets.token_hex(4)}"
        self._temps = _temporaries(prefix, tag)
        self._lock_path = Path(f"{prefix}.lock.{tag}.tmp")
        # The lock file gets its name when it is locked. Otherwise another writer could take it for a killed writer's.
        unnamed = Path(f"{prefix}.{tag}.tmp")
        self._lock = Lock(unnamed)
        self._lock.take()
        unnamed.rename(self._lock_path)

    def temporary(self, suffix: str) -> Path:
        """The temporary path of one file; `suffix` is "bin", "idx" or "meta.json"."""
        return self._temps[suffix]

    def write(self, suffix: str, pieces: Iterable[bytes | NDArray[Any]]) -> None:
        """Write `pieces` one after another to a temporary file and sync it to disk; `suffix` is as in `temporary`."""
        with open(self._temps[suffix], "xb") as file:
            for piece in pieces:
                file.write(piece if isinstance(piece, bytes) else piece.data)
            file.flush()
            os.fsync(file.fileno())

    def publish(self) -> None:
        """Rename the finished files into place. Without a new PREFIX.meta.json, delete the old PREFIX.meta.json."""
        idx = Path(f"{self.prefix}.idx")
        about = Path(f"{self.prefix}.meta.json")
        # Even if a crash interrupts these steps, an .idx must never be next to a .bin or .meta.json from another write.
        # So the old index is deleted first, the new index is renamed last, and the folder is synced between the steps.
        idx.unlink(missing_ok=True)
        sync_folder(self.folder)
        os.replace(self._temps["bin"], f"{self.prefix}.bin")
        if self._temps["meta.json"].exists():
            os.replace(self._temps["meta.json"], about)
        else:
            about.unlink(missing_ok=True)
        sync_folder(self.folder)
        os.replace(self._temps["idx"], idx)
        sync_folder(self.folder)

    def discard(self) -> None:
        """Delete the temporary files that remain."""
        _remove(self._temps, self._lock_path)
        sync_folder(self.folder)
        self._lock.close()


def remove_abandoned(prefix: str) -> None:
    """Remove what killed writers have left: their temporary files, and a PREFIX.bin that was published without its idx.

    Where the file system has no locks, nothing is removed.
    """
    folder, name = os.path.split(prefix)
    start = f"{name}.lock."
    for lock in Path(folder).glob(f"{glob.escape(start)}*.tmp"):
        if is_held(lock) is not False:
            continue
        temps = _temporaries(prefix, lock.name[len(start) : -len(".tmp")])
        # `publish` has renamed the new .bin, which is useless, but not yet the index.
        if temps["idx"].exists() and not temps["bin"].exists() and not os.path.lexists(f"{prefix}.idx"):
            Path(f"{prefix}.bin").unlink(missing_ok=True)
        _remove(temps, lock)


def _temporaries(prefix: str, tag: str) -> dict[str, Path]:
    """Suffix -> temporary path of the file, for the writer with this tag."""
    return {suffix: Path(f"{prefix}.{suffix}.{tag}.tmp") for suffix in SUFFIXES}


def _remove(temps: dict[str, Path], lock: Path) -> None:
    # The .bin goes after the .idx: an .idx alone means that the .bin was published. The lock file goes last, because
    # without it the others would be nobody's.
    for temp in (temps["meta.json"], temps["idx"], temps["bin"], lock):
        temp.unlink(missing_ok=True)
