"""Files and folders that a power cut leaves whole: written aside, synced, renamed, and their folder synced.

make_folder(Path("runs/bloom"))
with replaced(Path("runs/bloom/config.toml")) as file:
    file.write(text)
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

UNKNOWN = (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS)  # said by file systems that cannot sync a folder


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
        if error.errno not in UNKNOWN:
            raise
    finally:
        os.close(fd)
