"""Files and folders that a power cut leaves whole: written aside, synced, renamed, and their folder synced.

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

CANNOT_SYNC = (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS)  # said by file systems that cannot sync a folder


@contextlib.contextmanager
def replaced(path: Path) -> Iterator[TextIO]:
    """A text file that takes the place of `path` when the block ends: whole and on the disk, or not at all.

    Raises:
        OSError: `path` is as it was.
    """
    aside = path.with_name(f".tmp-{path.name}")
    try:
        with aside.open("w", encoding="utf-8") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
    except BaseException:
        with contextlib.suppress(OSError):
            aside.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


@contextlib.contextmanager
def created(path: Path) -> Iterator[Any]:
    """A new file of bytes; on the disk, and not in a cache only, when the block ends.

    Raises:
        OSError: it is there already, or cannot be written; names it.
    """
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    with os.fdopen(fd, "wb", buffering=0) as file:
        yield _Whole(file, path)
        os.fsync(fd)


class _Whole:
    """A raw file whose `write` takes all of it, as the kernel may not, and names the file when it cannot."""

    def __init__(self, file: Any, path: Path) -> None:
        self._file = file
        self._path = path

    def flush(self) -> None:
        """Do nothing, as nothing is held back; torch.save asks for it."""

    def write(self, data: Any) -> None:
        rest = memoryview(data)
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError as error:
            error.filename = str(self._path)
            raise


def empty_folder(path: Path) -> None:
    """Make a folder with nothing in it, whatever was left there; its own name need not be on the disk yet."""
    remove_folder(path)
    make_folder(path.parent)
    os.mkdir(path)


def remove_folder(path: Path) -> None:
    """Remove a folder and all that is in it, if it is there."""
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(path)


def make_folder(path: Path) -> None:
    """Make a folder, and those above it, that will be there after a power cut."""
    absent = [folder for folder in (path, *path.parents) if not folder.exists()]
    for folder in reversed(absent):
        folder.mkdir(exist_ok=True)
        sync_folder(folder.parent)


def sync_folder(path: Path) -> None:
    """Put the names in a folder on the disk; a file system that knows no such thing is left as it is."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in CANNOT_SYNC:
            raise
    finally:
        os.close(fd)
