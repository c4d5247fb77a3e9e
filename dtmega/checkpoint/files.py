"""Storage for checkpoints: a disk (`Disk`), or a URL (`remote.py`, which a run on disks does not open).

Each change to the file system is one method call here, so that a test can kill the process at each change. A checkpoint
is written under a temporary name and published by a rename, which is atomic.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from dtmega import rooms
from dtmega.checkpoint.manifest import NAME, Damaged
from dtmega.files import atomic
from dtmega.files.regular import open_regular

if TYPE_CHECKING:
    from dtmega.checkpoint.objects import Objects
    from dtmega.checkpoint.remote import Remote

Place: TypeAlias = "Disk | Remote | Objects"


def open_root(root: str) -> Place:
    """Open the storage for a run's checkpoints: a folder, or a URL such as s3://bucket/run.

    Raises:
        ValueError: the library for this URL is not installed, or the URL cannot be reached.
        Unreachable: the object store does not answer.
    """
    return rooms.remote().open_url(root) if "://" in root else Disk(root)


class Disk:
    """The folders in `root`, on a local or shared file system. The methods take folder names.

    Attributes:
        parallel_reads: number of concurrent reads that gives the best speed.
        stays_readable: whether an open file remains readable after its deletion.
        second_writer: consequence of a second run that writes here without a lock, as text for a warning.
    """

    parallel_reads = 1
    stays_readable = True
    second_writer = "a second run that writes there would not be noticed"

    def __init__(self, root: str) -> None:
        self.root = Path(root)

    def path(self, folder: str) -> str:
        return str(self.root / folder)

    def folders(self) -> list[str]:
        return sorted(entry.name for entry in os.scandir(self.root) if entry.is_dir()) if self.root.is_dir() else []

    def sizes(self, folder: str) -> dict[str, int]:
        """Return the size in bytes of each regular file in a folder, keyed by file name. Symbolic links are left out.

        Raises:
            Damaged: the folder cannot be listed.
        """
        try:
            stats = {e.name: e.stat(follow_symlinks=False) for e in os.scandir(self.root / folder)}
        except OSError as error:
            raise Damaged(f"{self.path(folder)}: {error.strerror}") from None
        return {name: s.st_size for name, s in stats.items() if stat.S_ISREG(s.st_mode)}

    def is_complete(self, folder: str) -> bool:
        """Return True: on a disk, a folder gets its final name only when the checkpoint is complete."""
        return True

    def new_attempt(self) -> str:
        """The suffix that one save appends to the names of its data files, before `.bin`."""
        return ""

    def unpublished(self, folder: str) -> str:
        """The name of a checkpoint's folder while the checkpoint is being written."""
        return f".tmp-{folder}"

    def make(self, folder: str) -> None:
        """Make an empty folder. If a killed save has left a folder with this name, delete that folder first."""
        atomic.empty_folder(self.root / folder)

    def create(self, folder: str, name: str) -> AbstractContextManager[Any]:
        """Open a binary file for writing. After the `with` block, the file's bytes are on disk, not just in a cache."""
        return atomic.created(self.root / folder / name)

    @contextlib.contextmanager
    def open(self, folder: str, name: str) -> Iterator[Any]:
        """Open a file for unbuffered reading.

        Raises:
            Damaged: the file is missing, unreadable or a symbolic link.
        """
        try:
            file = open_regular(self.root / folder / name, follow=False, buffering=0)
        except OSError as error:
            raise Damaged(f"{name}: {error.strerror}") from None
        with file:
            yield file

    def publish(self, folder: str, raw: bytes, attempt: str) -> str:
        """Write the manifest into the folder `unpublished(folder)` and give that folder its final name.

        Args:
            folder: final name of the folder.
            raw: content of the manifest.
            attempt: result of `new_attempt` at the start of this save.

        Returns:
            The reason why the new name might not survive a power cut; usually ''.
        """
        unpublished = self.unpublished(folder)
        with self.create(unpublished, NAME) as file:
            file.write(raw)
        # The names of all files must be on disk before the folder counts as a checkpoint.
        self.sync(unpublished)
        self.rename(unpublished, folder)
        # The checkpoint is now published, but its new name may not have reached the disk yet.
        try:
            self.sync("")
        except OSError as error:
            return str(error)
        return ""

    def discard(self, folder: str, attempt: str) -> None:
        """Delete the files that a failed save has written for `folder`. The arguments are the same as for `publish`."""
        self.remove(self.unpublished(folder))

    def retire(self, folder: str) -> None:
        """Rename a checkpoint and then delete it, so that a kill cannot leave half of it under a valid name."""
        retired = f".old-{folder}"
        self.rename(folder, retired)
        self.remove(retired)

    def clear_leftovers(self) -> list[str]:
        """Delete the leftovers of killed saves. The caller must hold the folder's lock.

        Returns:
            Lines for the user about leftovers; [] on a disk, where all leftovers are deleted.
        """
        for folder in self.folders():
            if folder.startswith((".tmp-step-", ".old-step-")):
                # A folder that cannot be deleted only takes up space.
                with contextlib.suppress(Exception):
                    self.remove(folder)
        return []

    def sync(self, folder: str) -> None:
        """Flush a folder to disk, so that the names of its entries survive a power cut; "" means `root`."""
        atomic.sync_folder(self.root / folder)

    def rename(self, folder: str, to: str) -> None:
        """Rename a folder atomically. `sync("")` makes the new name survive a power cut."""
        os.rename(self.root / folder, self.root / to)

    def move(self, folder: str, into: str) -> None:
        """Move a folder into the folder `into` and return once the move is durable."""
        atomic.make_folder(self.root / into)
        os.rename(self.root / folder, self.root / into / folder)
        atomic.sync_folder(self.root / into)
        atomic.sync_folder(self.root)

    def remove(self, folder: str) -> None:
        atomic.remove_folder(self.root / folder)

    def free_bytes(self) -> int | None:
        """The free space on the file system in bytes; None if unknown."""
        with contextlib.suppress(OSError):
            return shutil.disk_usage(self.root).free
        return None
