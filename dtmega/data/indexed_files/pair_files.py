"""The three files of a new data set. The files have temporary names until all three are complete."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from dtmega.files.atomic import sync_folder


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
        prefix: path of the files without their suffixes. Missing folders are made.
    """

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        self.folder = Path(prefix).parent
        self.folder.mkdir(parents=True, exist_ok=True)
        tag = f"{os.getpid()}-{secrets.token_hex(4)}"
        self._temps = {suffix: Path(f"{prefix}.{suffix}.{tag}.tmp") for suffix in ("bin", "idx", "meta.json")}

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
        for temp in self._temps.values():
            temp.unlink(missing_ok=True)
