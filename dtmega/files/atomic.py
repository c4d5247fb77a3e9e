"""Write files and folders that a power cut cannot leave half-written: write under a temporary name, sync, then rename.

make_folder(Path("runs/bloom"))
with replaced(Path("runs/bloom/config.toml")) as file:
    file.write(text)

empty_folder(Path(".tmp-out"))
with created(Path(".tmp-out/model.safetensors")) as file:
    file.write(content)
sync_folder(Path(".tmp-out"))
os.rename(".tmp-out", "out")
sync_folder(Path("."))
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

CANNOT_SYNC = (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS)  # errors of file systems that cannot sync a folder


@contextlib.contextmanager
def replaced(path: Path) -> Iterator[TextIO]:
    """A UTF-8 file to write to. When the `with` block ends, the file is synced to disk and then replaces `path`.

    Raises:
        OSError: the file cannot be written; `path` is then unchanged. The error names the file.
    """
    temporary = path.with_name(f".tmp-{path.name}")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        # A write to a full disk names no file, and a user does not know the temporary one.
        if isinstance(error, OSError) and error.errno and str(error.filename) in ("None", str(temporary)):
            raise OSError(error.errno, error.strerror, str(path)) from None
        raise
    sync_folder(path.parent)


@contextlib.contextmanager
def created(path: Path) -> Iterator[Any]:
    """A new binary file to write to. After the `with` block, the file's bytes are on disk, not just in a cache.

    Raises:
        OSError: the file already exists, or cannot be written; the error names the file.
    """
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    with os.fdopen(fd, "wb", buffering=0) as file:
        yield _WholeWrites(file, path)
        os.fsync(fd)


class _WholeWrites:
    """An unbuffered file whose `write` writes all bytes, even if the kernel writes fewer bytes per call.

    Errors name the file.
    """

    def __init__(self, file: Any, path: Path) -> None:
        self._file = file
        self._path = path

    def flush(self) -> None:
        """Do nothing, because nothing is buffered. torch.save calls this method."""

    def write(self, data: Any) -> None:
        unwritten = memoryview(data)
        try:
            while unwritten:
                unwritten = unwritten[self._file.write(unwritten) :]
        except OSError as error:
            error.filename = str(self._path)
            raise


def empty_folder(path: Path) -> None:
    """Make an empty folder; delete any earlier content. The name of the folder is not synced to disk."""
    remove_folder(path)
    make_folder(path.parent)
    os.mkdir(path)


def remove_folder(path: Path) -> None:
    """Remove a folder with everything in it, if it exists."""
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(path)


def make_folder(path: Path) -> None:
    """Make a folder and its missing parents, so that all these folders survive a power cut."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    for folder in reversed(missing):
        folder.mkdir(exist_ok=True)
        sync_folder(folder.parent)


def sync_folder(path: Path) -> None:
    """Make the names of a folder's entries survive a power cut, if the file system can sync folders."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in CANNOT_SYNC:
            raise
    finally:
        os.close(fd)
