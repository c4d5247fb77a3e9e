"""Write a new data set to an object store: write files to this machine's temp folder, then upload them, the .idx last.

An object store cannot lock or rename objects. So a writer creates an object PREFIX.writing before the upload and
deletes it after the upload; if PREFIX.writing already exists, the writer gives up. During the upload, the writer keeps
renewing PREFIX.writing. If PREFIX.writing has not been renewed for STALE, its writer was killed, and another writer
takes over. Objects without an .idx are not a data set, so a killed writer leaves no incomplete data set.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path
from socket import gethostname
from uuid import uuid4

from dtmega.data.indexed_files.pair_files import PairFiles, remove_abandoned
from dtmega.files.lock import is_held
from dtmega.files.object_file import ObjectFile
from dtmega.files.object_requests import PART_BYTES, open_store, put_new, reported
from dtmega.files.outages import Unreachable
from dtmega.files.urls import is_object_store

KEY = "--output"
MAX_PARTS = 9000  # maximum number of parts in an upload; S3 allows 10,000
RENEW_S = 60.0
STALE = timedelta(minutes=10)


def pair_files(prefix: str) -> PairFiles:
    """Make a `PairFiles` for a new data set on a disk, or a `StoredPairFiles` for an object store."""
    return StoredPairFiles(prefix) if is_object_store(prefix) else PairFiles(prefix)


def local_folder(prefix: str) -> Path:
    """The folder on this machine for the temporary files of a new data set."""
    return Path(tempfile.gettempdir()) if is_object_store(prefix) else Path(prefix).parent


def is_there(path: str) -> bool:
    """True if a file, a link (even if broken) or an object with this name exists.

    Raises:
        ValueError: the URL holds credentials.
        Unreachable: the store does not answer.
    """
    return ObjectFile.open(path, KEY) is not None if is_object_store(path) else os.path.lexists(path)


def check_free(prefix: str, overwrite: bool) -> None:
    """Check that no token files would be replaced, unless `overwrite` is True. What a killed writer left is removed.

    Raises:
        ValueError: PREFIX.bin or PREFIX.idx exists, and `overwrite` is False.
        Unreachable: the object store does not answer.
    """
    # A killed upload leaves a .bin without an .idx, which may be replaced.
    suffixes = (".idx",)
    if not is_object_store(prefix):
        remove_abandoned(prefix)
        suffixes = (".bin", ".idx")
    for path in (f"{prefix}{suffix}" for suffix in suffixes):
        if is_there(path) and not overwrite:
            raise ValueError(f"{path} is there: expected another --output, or --overwrite to replace it")


class StoredPairFiles(PairFiles):
    """New objects PREFIX.bin, PREFIX.idx and PREFIX.meta.json, with the methods of `PairFiles`.

    Args:
        prefix: URL of the objects without their suffixes.

    Raises:
        ValueError: the URL holds credentials.
        Unreachable: the store does not answer.
    """

    def __init__(self, prefix: str) -> None:
        self._url = prefix
        self._before = self._etag()
        url, _, self._name = prefix.rpartition("/")
        self._store = open_store(url)
        self._mine = f"process {os.getpid()} on {gethostname()}, attempt {uuid4().hex}".encode()
        self._renewed_s = 0.0
        for lock in Path(tempfile.gettempdir()).glob("dtmega-*/*.lock.*.tmp"):
            if is_held(lock) is False:  # of a writer that was killed
                shutil.rmtree(lock.parent, ignore_errors=True)
        self._local = tempfile.mkdtemp(prefix="dtmega-")
        super().__init__(str(Path(self._local, self._name)))

    def publish(self) -> None:
        """Upload the finished files, the .idx last.

        Raises:
            FileExistsError: another process is writing this data set or has written it since this writer began.
            Unreachable: the store does not answer.
        """
        try:
            with reported():
                self._claim()
                try:
                    self._upload_all()
                finally:
                    # An error in this cleanup would hide the error that ended the upload.
                    with contextlib.suppress(OSError), reported():
                        if self._found() == self._mine:
                            self._delete("writing")
        except Unreachable as error:
            raise type(error)(f"{self._url}: {error} ({KEY})") from None

    def discard(self) -> None:
        """Delete the files in the temp folder."""
        super().discard()
        shutil.rmtree(self._local, ignore_errors=True)

    def _key(self, suffix: str) -> str:
        return f"{self._name}.{suffix}"

    def _etag(self) -> str | None:
        """The version of the .idx; None if there is no .idx."""
        idx = ObjectFile.open(f"{self._url}.idx", KEY)
        return None if idx is None else idx.version

    def _upload_all(self) -> None:
        """Upload the new files and delete the old objects that no new file replaces.

        PREFIX.writing is checked before each change, because a writer that was silent for STALE may have lost it.
        """
        if self._etag() != self._before:
            raise FileExistsError(f"another process has written {self._url}.idx since this one began: kept that")
        self._renew()
        self._delete("idx")
        for suffix in ("bin", "meta.json", "idx"):
            if self.temporary(suffix).exists():
                self._upload(suffix)
            else:
                self._renew()
                self._delete(suffix)

    def _claim(self) -> None:
        """Create PREFIX.writing, which keeps other writers away.

        Raises:
            FileExistsError: another process is writing this data set.
        """
        key = self._key("writing")
        for _ in range(2):
            with contextlib.suppress(FileExistsError):
                put_new(self._store, key, self._mine)
                self._renewed_s = time.monotonic()
                return
            with contextlib.suppress(FileNotFoundError):
                meta = self._store.head(key)
                if datetime.now(timezone.utc) - meta["last_modified"] < STALE:
                    break
                self._delete("writing")
        who = (self._found() or b"").decode(errors="replace")
        raise FileExistsError(
            f"another process writes {self._url}, as {self._url}.writing says ({who}): wait for its end; if it was "
            f"killed, try again {STALE.total_seconds() / 60:g} minutes later"
        )

    def _found(self) -> bytes | None:
        """The content of PREFIX.writing; None if this object does not exist."""
        with contextlib.suppress(FileNotFoundError):
            return bytes(self._store.get(self._key("writing")).bytes())
        return None

    def _renew(self) -> None:
        """Check that PREFIX.writing still belongs to this writer; update its modification time.

        Raises:
            FileExistsError: another process has taken over PREFIX.writing.
        """
        if self._found() != self._mine:
            raise FileExistsError(f"another process has begun to write {self._url}, because this one was silent")
        self._store.put(self._key("writing"), self._mine, use_multipart=False)
        self._renewed_s = time.monotonic()

    def _delete(self, suffix: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._store.delete(self._key(suffix))

    def _upload(self, suffix: str) -> None:
        """Upload a file in parts. The object appears when the upload is closed."""
        import obstore

        path = self.temporary(suffix)
        part_bytes = max(PART_BYTES, -(-path.stat().st_size // MAX_PARTS))
        # If an exception occurs, the upload is never closed, so the object does not appear.
        writer = obstore.open_writer(self._store, self._key(suffix), buffer_size=part_bytes, max_concurrency=4)
        for piece in self._pieces(path):
            writer.write(piece)
        self._renew()
        writer.close()

    def _pieces(self, path: Path) -> Iterator[bytes]:
        """Yield a file's content and renew PREFIX.writing about every RENEW_S seconds."""
        with path.open("rb") as file:
            while piece := file.read(PART_BYTES):
                if time.monotonic() - self._renewed_s > RENEW_S:
                    self._renew()
                yield piece
