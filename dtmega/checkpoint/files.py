"""Storage for checkpoints: a disk (`Disk`), an object store (`Objects`), or any other fsspec URL (`Remote`).

Each change to the file system is one method call here, so that a test can kill the process at each change. On a disk,
a checkpoint is written under a temporary name and published by a rename, which is atomic. Object stores and URLs cannot
rename a folder atomically, so there the manifest is written last, and a folder without a manifest is no checkpoint.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, TypeAlias

import fsspec
from fsspec.core import url_to_fs

from dtmega.checkpoint.manifest import NAME, Damaged
from dtmega.checkpoint.objects import Objects
from dtmega.files import atomic
from dtmega.files.object_requests import check_usable
from dtmega.files.outages import at_start
from dtmega.files.regular import open_regular
from dtmega.files.urls import is_object_store


def open_root(root: str) -> Place:
    """Open the storage for a run's checkpoints: a folder, or a URL such as s3://bucket/run.

    Raises:
        ValueError: the library for this URL is not installed, or the URL cannot be reached.
        Unreachable: the object store does not answer.
    """
    if "://" not in root:
        return Disk(root)
    check_usable(root, "[checkpoint] dir")
    try:
        return Objects(root) if is_object_store(root) else Remote(root)
    except (ImportError, ValueError, OSError) as error:
        raise at_start(error, f"cannot open {root}: {error} ([checkpoint] dir)") from None


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
        _remove_temporary(self)
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


class Remote:
    """The folders under a URL that fsspec can open, with the methods of `Disk` except `sync` and `rename`.

    `sync` and `rename` are not needed: a file is durable once it is closed, and a folder is a checkpoint once it has a
    manifest.
    """

    parallel_reads = 1
    stays_readable = False
    second_writer = "a second run that writes there would not be noticed"

    def __init__(self, url: str) -> None:
        fs, root = url_to_fs(url)
        assert isinstance(fs, fsspec.AbstractFileSystem)
        self._fs, self.root, self._url = fs, root, url.rstrip("/")
        # Fail now if the URL is unreachable. Create nothing: a mere search for checkpoints must leave no trace.
        self.folders()

    def path(self, folder: str) -> str:
        return f"{self._url}/{folder}"

    def folders(self) -> list[str]:
        try:
            return sorted(_base(e["name"]) for e in self._ls("") if e["type"] == "directory")
        except FileNotFoundError:
            return []

    def sizes(self, folder: str) -> dict[str, int]:
        try:
            return {_base(e["name"]): e["size"] for e in self._ls(folder) if e["type"] == "file"}
        except OSError as error:
            raise Damaged(f"{self.path(folder)}: {error}") from None

    def is_complete(self, folder: str) -> bool:
        return NAME in self.sizes(folder)

    def new_attempt(self) -> str:
        return ""

    def unpublished(self, folder: str) -> str:
        return folder

    def make(self, folder: str) -> None:
        self._fs.invalidate_cache()
        if self._fs.exists(self._at(folder, NAME)):
            raise FileExistsError(f"{self.path(folder)} is a finished checkpoint")
        self.remove(folder)
        self._fs.makedirs(self._at(folder), exist_ok=True)

    @contextlib.contextmanager
    def create(self, folder: str, name: str) -> Iterator[Any]:
        path = self._at(folder, name)
        try:
            with self._fs.open(path, "wb") as file:
                yield file
        except BaseException:
            # The `with` statement has closed the file, so a partial file, such as half a manifest, now exists.
            with contextlib.suppress(Exception):
                self._fs.rm(path)
            raise

    @contextlib.contextmanager
    def open(self, folder: str, name: str) -> Iterator[Any]:
        try:
            file = self._fs.open(self._at(folder, name), "rb")
        except OSError as error:
            raise Damaged(f"{name}: {error}") from None
        with file:
            yield file

    def publish(self, folder: str, raw: bytes, attempt: str) -> str:
        with self.create(folder, NAME) as file:
            file.write(raw)
        return ""

    def discard(self, folder: str, attempt: str) -> None:
        # A save writes directly into the final folder, which may hold an older, complete checkpoint.
        if folder in self.folders() and not self.is_complete(folder):
            self.remove(folder)

    def retire(self, folder: str) -> None:
        self.remove(folder)

    def clear_leftovers(self) -> list[str]:
        _remove_temporary(self)
        return []

    def move(self, folder: str, into: str) -> None:
        self._fs.makedirs(self._at(into), exist_ok=True)
        self._fs.mv(self._at(folder), self._at(into, folder), recursive=True)

    def remove(self, folder: str) -> None:
        self._fs.invalidate_cache()
        if self._fs.exists(self._at(folder)):
            # Delete the manifest first: if the removal is interrupted, the folder no longer counts as a checkpoint.
            with contextlib.suppress(FileNotFoundError):
                self._fs.rm(self._at(folder, NAME))
            with contextlib.suppress(FileNotFoundError):
                self._fs.rm(self._at(folder), recursive=True)

    def free_bytes(self) -> int | None:
        return None

    def _ls(self, folder: str) -> list[dict[str, Any]]:
        # Drop fsspec's cached listing, which lacks files that other ranks wrote later.
        self._fs.invalidate_cache()
        return self._fs.ls(self._at(folder), detail=True)

    def _at(self, *names: str) -> str:
        # Empty names are left out: for an object store, a//b and a/b are different names.
        return "/".join([self.root, *filter(None, names)])


def _base(path: str) -> str:
    return path.rstrip("/").rpartition("/")[2]


def _remove_temporary(files: Disk | Remote) -> None:
    """Delete the folders with temporary names. A folder that cannot be deleted only takes up space."""
    for folder in files.folders():
        if folder.startswith((".tmp-step-", ".old-step-")):
            with contextlib.suppress(Exception):
                files.remove(folder)


Place: TypeAlias = Disk | Remote | Objects
