"""Checkpoints in an object store (s3://, gs://, az://), through the library `obstore`.

An object store cannot rename objects, but it can create an object on the condition that the name is free. Such a
conditional request creates the manifest and thereby publishes the checkpoint. If two processes save the same step, only
one request succeeds, and the second process gets an error. The name of a data file ends with an id of the attempt that
wrote the file, so two processes cannot overwrite or delete each other's files.

Files that no manifest names are leftovers of killed saves, or files of a save that another process is still writing.
Such files are deleted once they are older than LEFTOVER_AGE.

Credentials and endpoints come from the environment (`AWS_ACCESS_KEY_ID`, `AWS_ENDPOINT_URL`, ...) and never appear in
messages.
"""

from __future__ import annotations

import contextlib
import io
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta, timezone
from typing import Any
from uuid import uuid4

from dtmega.checkpoint import manifest
from dtmega.checkpoint.manifest import DATA_FILE, NAME, Damaged
from dtmega.files.object_requests import PARALLEL, PART_BYTES, open_store, put_new, reported

MAX_COPY_BYTES = 5 * 2**30  # size of the largest object that S3 itself can copy
LEFTOVER_AGE = timedelta(hours=24)
PROBE = ".tmp-step-probe-"  # prefix of the folders that `found.py` makes when a run starts
LEFTOVER_FOLDER = re.compile(rf"(superseded-\d+/)?step-\d{{8}}|{re.escape(PROBE)}\w+")


class Objects:
    """The folders under the URL of an object store, with the methods of `Disk`. A folder is a prefix of object names.

    Raises:
        Unreachable: the store does not list its objects.
    """

    parallel_reads = PARALLEL
    stays_readable = False
    second_writer = "of two runs that save the same step there, the second one to finish is told, and saves nothing"

    def __init__(self, url: str) -> None:
        self.root = self._url = url.rstrip("/")
        self._store = open_store(self._url)
        # Attempts whose manifest may have been published although the store has not responded.
        self._in_doubt: set[str] = set()
        # Fail now if the URL is unreachable. Create nothing: a mere search for checkpoints must leave no trace.
        self.folders()

    def path(self, folder: str) -> str:
        return f"{self._url}/{folder}"

    def folders(self) -> list[str]:
        with reported():
            return sorted(self._store.list_with_delimiter()["common_prefixes"])

    def sizes(self, folder: str) -> dict[str, int]:
        with reported():
            found = self._store.list_with_delimiter(folder)
        # An object store has no empty folders.
        if not found["objects"] and not found["common_prefixes"]:
            raise Damaged(f"{self.path(folder)}: No such file or directory")
        return {entry["path"].rpartition("/")[2]: entry["size"] for entry in found["objects"]}

    def is_complete(self, folder: str) -> bool:
        """Return True if a folder has a manifest."""
        return self._exists(f"{folder}/{NAME}")

    def new_attempt(self) -> str:
        """The suffix that one save appends to the names of its data files, before `.bin`."""
        return f"-{uuid4().hex}"

    def unpublished(self, folder: str) -> str:
        return folder

    def make(self, folder: str) -> None:
        """Check that no process has published this folder. Files that earlier attempts have left there are kept."""
        if self.is_complete(folder):
            raise FileExistsError(f"{self.path(folder)} is a finished checkpoint")

    @contextlib.contextmanager
    def create(self, folder: str, name: str) -> Iterator[Any]:
        """Open a binary file for writing. The file appears after the `with` block or not at all.

        Raises:
            FileExistsError: a file with this name exists and is not a data file.
        """
        key = f"{folder}/{name}"
        with reported():
            if not DATA_FILE.fullmatch(name):
                buffer = io.BytesIO()
                yield buffer
                put_new(self._store, key, buffer.getvalue())
                return
            import obstore
            from obstore.exceptions import BaseError

            # After an exception, the upload remains incomplete, and the store shows no object with this name.
            writer = obstore.open_writer(self._store, key, buffer_size=PART_BYTES, max_concurrency=4)
            yield writer
            try:
                writer.close()
            # The response to the last request may have been lost. A retry then fails, because no upload is left to
            # complete. Only this attempt writes under this name, so the file is complete if it exists.
            except (BaseError, OSError):
                if not self._exists(key):
                    raise

    @contextlib.contextmanager
    def open(self, folder: str, name: str) -> Iterator[Any]:
        yield Reading(self._store, f"{folder}/{name}", name)

    def publish(self, folder: str, raw: bytes, attempt: str) -> str:
        """Create the manifest on the condition that it does not exist yet. The manifest makes the folder a checkpoint.

        Returns:
            An empty string, because a published checkpoint is durable.

        Raises:
            FileExistsError: a different process has published this folder.
            Unreachable: the store has not responded.
        """
        self._in_doubt.add(attempt)
        try:
            put_new(self._store, f"{folder}/{NAME}", raw)
        except FileExistsError:
            self._in_doubt.discard(attempt)
            raise FileExistsError(f"another process has saved {self.path(folder)}, and this save came second") from None
        self._in_doubt.discard(attempt)
        return ""

    def discard(self, folder: str, attempt: str) -> None:
        """Delete the data files of a failed attempt.

        Keep the files if the store has not responded to the request that creates the attempt's manifest, because the
        store may still publish this manifest.
        """
        if attempt not in self._in_doubt:
            with reported():
                found = self._store.list_with_delimiter(folder)["objects"]
            self._delete(entry["path"] for entry in found if entry["path"].endswith(f"{attempt}.bin"))

    def retire(self, folder: str) -> None:
        """Delete a checkpoint, but keep files that its manifest does not name: another attempt may be writing them."""
        self._delete_in_order(f"{folder}/{name}" for name in self._belonging(folder))

    def move(self, folder: str, into: str) -> None:
        """Move a checkpoint into the folder `into`.

        The manifest is the last file to be copied; then the old manifest is the first file to be deleted.
        """
        sizes = self._belonging(folder)
        manifest_bytes = sizes.pop(NAME)
        with ThreadPoolExecutor(PARALLEL) as threads:
            copies = [threads.submit(self._copy, f"{folder}/{name}", into, size) for name, size in sizes.items()]
        for copy in copies:
            copy.result()
        self._copy(f"{folder}/{NAME}", into, manifest_bytes)
        self._delete_in_order(f"{folder}/{name}" for name in [NAME, *sizes])

    def remove(self, folder: str) -> None:
        """Delete everything in a folder."""
        self._delete_in_order(entry["path"] for entry in self._all(folder))

    def clear_leftovers(self) -> list[str]:
        """Delete the leftovers that are older than LEFTOVER_AGE.

        Returns:
            A line for each folder with leftovers, including leftovers that are too recent to be deleted.
        """
        files: dict[str, dict[str, Any]] = defaultdict(dict)
        for entry in self._all(""):
            folder, _, name = entry["path"].rpartition("/")
            if LEFTOVER_FOLDER.fullmatch(folder):
                files[folder][name] = entry
        now = datetime.now(timezone.utc)
        lines = []
        for folder, entries in sorted(files.items()):
            named: Iterable[str] = ()
            if NAME in entries:
                try:
                    named = [*self._named(folder), NAME]
                # The names in a damaged manifest cannot be trusted.
                except ValueError:
                    continue
            left = [entry for name, entry in entries.items() if name not in named]
            old = [entry["path"] for entry in left if now - entry["last_modified"] > LEFTOVER_AGE]
            self._delete(old)
            # A recent probe belongs to a run that is starting, perhaps to this run.
            if left and (old or not folder.startswith(PROBE)):
                lines.append(self._line(folder, left, len(old)))
        return lines

    def free_bytes(self) -> int | None:
        return None

    def _line(self, folder: str, left: list[dict[str, Any]], n_deleted: int) -> str:
        """A line about the leftovers in a folder, with the number of deleted leftovers."""
        n_bytes = sum(entry["size"] for entry in left)
        hours = LEFTOVER_AGE.total_seconds() / 3600
        return (
            f"{self.path(folder)}: {len(left)} files ({n_bytes:,} bytes) that no manifest names, of a save that was "
            f"killed or still goes on; deleted, as older than {hours:g} hours: {n_deleted}"
        )

    def _named(self, folder: str) -> list[str]:
        """The names of a checkpoint's data files, read from the manifest."""
        with self.open(folder, NAME) as file:
            return list(manifest.parse(file.read(), self.sizes(folder)).files)

    def _belonging(self, folder: str) -> dict[str, int]:
        """The sizes of a checkpoint's files, keyed by name. Data files that other attempts left behind are excluded."""
        sizes = self.sizes(folder)
        try:
            named = self._named(folder)
        # A damaged manifest does not list the checkpoint's files reliably.
        except ValueError:
            return sizes
        return {name: size for name, size in sizes.items() if name in named or not DATA_FILE.fullmatch(name)}

    def _all(self, folder: str) -> list[dict[str, Any]]:
        with reported():
            return [entry for batch in self._store.list(folder or None) for entry in batch]

    def _exists(self, key: str) -> bool:
        try:
            with reported():
                self._store.head(key)
        except FileNotFoundError:
            return False
        return True

    def _delete_in_order(self, keys: Iterable[str]) -> None:
        """Delete objects, manifests first, so that a partly deleted folder does not count as a checkpoint."""
        first, rest = [], []
        for key in keys:
            (first if key.endswith(f"/{NAME}") else rest).append(key)
        self._delete(first)
        self._delete(rest)

    def _delete(self, keys: Iterable[str]) -> None:
        keys = list(keys)
        if keys:
            # S3 ignores names that do not exist; other stores raise FileNotFoundError.
            with reported(), contextlib.suppress(FileNotFoundError):
                self._store.delete(keys)

    def _copy(self, key: str, into: str, n_bytes: int) -> None:
        to = f"{into}/{key}"
        if n_bytes <= MAX_COPY_BYTES:
            with reported():
                self._store.copy(key, to)
            return
        folder, _, name = to.rpartition("/")
        source = Reading(self._store, key, name)
        part = memoryview(bytearray(PART_BYTES))
        with self.create(folder, name) as file:
            for start in range(0, n_bytes, PART_BYTES):
                piece = part[: min(PART_BYTES, n_bytes - start)]
                source.readinto(piece)
                file.write(piece)


class Reading:
    """A file in an object store. Each read sends one request, which asks for exactly the bytes to read."""

    def __init__(self, store: Any, key: str, name: str) -> None:
        self._store, self._key, self._name, self._at = store, key, name, 0

    def seek(self, at: int) -> None:
        self._at = at

    def read(self) -> bytes:
        """Read the whole file."""
        with self._reported():
            return bytes(self._store.get(self._key).bytes())

    def readinto(self, view: memoryview) -> int:
        """Read at most PART_BYTES, because a larger read could exceed REQUEST_S. Return the number of bytes read."""
        wanted = min(len(view), PART_BYTES)
        with self._reported():
            data = self._store.get_range(self._key, start=self._at, length=wanted)
        view[: len(data)] = data
        self._at += len(data)
        return len(data)

    @contextlib.contextmanager
    def _reported(self) -> Iterator[None]:
        try:
            with reported():
                yield
        except FileNotFoundError:
            raise Damaged(f"{self._name}: No such file or directory") from None
