"""The file operations a checkpoint is made of: on a disk (`Disk`), or under an fsspec URL (`Remote`).

Every event goes through one method here, so a test can kill the process at each of them. On a disk a folder is written
aside and renamed, which is one event; under a URL nothing renames in one, so a folder counts from its manifest on.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import fsspec
from fsspec.core import url_to_fs

from dtmega import durable, extras
from dtmega.checkpoint.manifest import NAME, Damaged


def open_root(root: str) -> Disk | Remote:
    """Open the place that holds the checkpoints of a run: a folder, or a URL such as s3://bucket/run.

    Raises:
        ValueError: no library for that URL, or it cannot be reached.
    """
    if "://" not in root:
        return Disk(root)
    if root.startswith("s3://"):
        extras.check("s3fs", "s3", f"{root} ([checkpoint] dir)")
    try:
        return Remote(root)
    except (ImportError, ValueError, OSError) as error:
        raise ValueError(f"cannot open {root}: {error} ([checkpoint] dir)") from None


class Disk:
    """Folders of one local (or shared) file system, by name under `root`."""

    def __init__(self, root: str) -> None:
        self.root = Path(root)

    def path(self, folder: str) -> str:
        return str(self.root / folder)

    def folders(self) -> list[str]:
        return sorted(entry.name for entry in os.scandir(self.root) if entry.is_dir()) if self.root.is_dir() else []

    def sizes(self, folder: str) -> dict[str, int]:
        """The bytes of each regular file; links are not followed."""
        try:
            found = [(e.name, e.stat(follow_symlinks=False)) for e in os.scandir(self.root / folder)]
        except OSError as error:
            raise Damaged(f"{self.path(folder)}: {error.strerror}") from None
        return {name: s.st_size for name, s in found if stat.S_ISREG(s.st_mode)}

    def make(self, folder: str) -> None:
        """An empty folder, whatever a killed save left there."""
        durable.empty_folder(self.root / folder)

    def create(self, folder: str, name: str) -> AbstractContextManager[Any]:
        """A new file to write to; on the disk, and not in a cache only, when the block ends."""
        return durable.created(self.root / folder / name)

    @contextlib.contextmanager
    def open(self, folder: str, name: str) -> Iterator[Any]:
        try:
            fd = os.open(self.root / folder / name, os.O_RDONLY | os.O_NOFOLLOW)
        except OSError as error:
            raise Damaged(f"{name}: {error.strerror}") from None
        with os.fdopen(fd, "rb", buffering=0) as file:
            yield file

    def sync(self, folder: str) -> None:
        """Put the names in a folder on the disk."""
        durable.sync_folder(self.root / folder)

    def rename(self, folder: str, to: str) -> None:
        os.rename(self.root / folder, self.root / to)

    def move(self, folder: str, into: str) -> None:
        durable.make_folder(self.root / into)
        os.rename(self.root / folder, self.root / into / folder)
        durable.sync_folder(self.root / into)
        durable.sync_folder(self.root)

    def remove(self, folder: str) -> None:
        durable.remove_folder(self.root / folder)

    def free_bytes(self) -> int | None:
        with contextlib.suppress(OSError):
            return shutil.disk_usage(self.root).free
        return None


class Remote:
    """The same under a URL, but for `sync` and `rename`: a file is durable when it is closed, a folder counts from its
    manifest on.
    """

    def __init__(self, url: str) -> None:
        fs, root = url_to_fs(url)
        assert isinstance(fs, fsspec.AbstractFileSystem)
        self._fs, self.root, self._url = fs, root, url.rstrip("/")
        self.folders()  # reachable? Not made: to look for a checkpoint leaves nothing behind

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
            # Closed on the way here: half a manifest is there as if it were whole.
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

    def move(self, folder: str, into: str) -> None:
        self._fs.makedirs(self._at(into), exist_ok=True)
        self._fs.mv(self._at(folder), self._at(into, folder), recursive=True)

    def remove(self, folder: str) -> None:
        self._fs.invalidate_cache()
        if self._fs.exists(self._at(folder)):
            # The manifest first: half a folder must not look like a whole one.
            with contextlib.suppress(FileNotFoundError):
                self._fs.rm(self._at(folder, NAME))
            with contextlib.suppress(FileNotFoundError):
                self._fs.rm(self._at(folder), recursive=True)

    def free_bytes(self) -> int | None:
        return None

    def _ls(self, folder: str) -> list[dict[str, Any]]:
        self._fs.invalidate_cache()  # of listings, which do not have what other ranks wrote since
        return self._fs.ls(self._at(folder), detail=True)

    def _at(self, *names: str) -> str:
        return "/".join([self.root, *filter(None, names)])  # an object store takes a//b for another name than a/b


def _base(path: str) -> str:
    return path.rstrip("/").rpartition("/")[2]
