"""Checkpoints under a URL: in an object store (`objects.py`), or wherever fsspec can write (`Remote`).

Under a URL, no folder can be renamed atomically. The manifest is therefore written last, and a folder without a
manifest is no checkpoint.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import fsspec
from fsspec.core import url_to_fs

from dtmega.checkpoint.manifest import NAME, Damaged
from dtmega.checkpoint.objects import Objects
from dtmega.files.object_requests import check_usable
from dtmega.files.outages import at_start
from dtmega.files.urls import is_object_store


def open_url(url: str) -> Remote | Objects:
    """Open the storage for checkpoints under a URL; see `files.open_root`."""
    check_usable(url, "[checkpoint] dir")
    try:
        return Objects(url) if is_object_store(url) else Remote(url)
    except (ImportError, ValueError, OSError) as error:
        raise at_start(error, f"cannot open {url}: {error} ([checkpoint] dir)") from None


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
        """Delete the probes of killed starts, which are all that has a temporary name here; [] as on a disk."""
        for folder in self.folders():
            if folder.startswith(".tmp-step-"):
                with contextlib.suppress(Exception):
                    self.remove(folder)
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
