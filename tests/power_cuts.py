"""Every disk that a power cut could leave of what a writer does: one recorder, for all writers.

    with Disk(folder) as disk:
        write(folder)
    for left in disk.left(elsewhere):   # each in turn is written there
        assert read(left) in (old, new)
    assert disk.uncertain() == []       # the writer returned when all was certain to be there

The kernel says what became of names (inotify); `os.fsync` and `os.mkdir` of this process are noted. The rules are
those of POSIX: until a folder is synced, each change of its names since the last time is on the disk or not, in any
combination; until a file is synced, its content is that of the last time (nothing, if never) or the newest. A rename
within a folder is one change. Processes that are forked later are not recorded.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import shutil
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

MODIFY = 0x2  # these of inotify(7)
MOVED_FROM = 0x40
MOVED_TO = 0x80
CREATE = 0x100
DELETE = 0x200
EVENT = struct.Struct("iIII")
FEW = 6  # changes of names of which all combinations are tried; of more: each prefix, each alone, all but each

Tree = dict[str, "bytes | None"]  # path -> content; None: a folder


class File:
    """A file by its content, whatever its name. `synced`: the content that is certain."""

    def __init__(self, synced: bytes = b"") -> None:
        self.synced = synced
        self.newest = synced


class Folder:
    """A folder by its names.

    Attributes:
        names: as processes see them.
        synced: as they are certain to be on the disk.
        changes: what has been done to them since, each a name or two and what it stands for (None: nothing).
    """

    def __init__(self) -> None:
        self.names: dict[str, File | Folder] = {}
        self.synced: dict[str, File | Folder] = {}
        self.changes: list[dict[str, File | Folder | None]] = []

    def change(self, change: dict[str, File | Folder | None]) -> None:
        self.changes.append(change)
        self.names = after(self.names, change)

    def sync(self) -> None:
        self.synced = dict(self.names)
        self.changes = []

    def possible(self) -> Iterator[dict[str, File | Folder]]:
        """The names that can be on the disk now."""
        n = len(self.changes)
        everything = range(n)
        if n <= FEW:
            chosen = itertools.chain.from_iterable(itertools.combinations(everything, size) for size in range(n + 1))
        else:
            prefixes = [tuple(range(size)) for size in range(n + 1)]
            alone = [(i,) for i in everything]
            all_but_one = [tuple(k for k in everything if k != i) for i in everything]
            chosen = iter([*prefixes, *alone, *all_but_one])
        for numbers in chosen:
            names = self.synced
            for number in numbers:
                names = after(names, self.changes[number])
            yield names


def after(names: dict[str, File | Folder], change: dict[str, File | Folder | None]) -> dict[str, File | Folder]:
    changed = names | change
    return {name: node for name, node in changed.items() if node is not None}


class Disk:
    """Records what is done below `root` in the block.

    Attributes:
        events: "create a", "write a", "rename a to b", "unlink a", "fsync a" in their order; paths from `root`, which
            is "." itself. For a person who looks for the reason, and for claims about what comes before what.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.events: list[str] = []
        self._lock = threading.Lock()
        self._left: dict[tuple[tuple[str, bytes | None], ...], Tree] = {}
        self._folders: dict[int, Path] = {}  # by the number of the watch
        self._libc = ctypes.CDLL(None)

    def __enter__(self) -> Disk:
        self._inotify = self._libc.inotify_init1(os.O_NONBLOCK)
        self._moved: dict[int, tuple[Path, File | Folder]] = {}  # by cookie: the first half of a rename
        self._top = Folder()
        self._watch(self.root, self._top)
        self._all_is_synced(self._top, self.root)
        self._fsync = os.fsync
        self._mkdir = os.mkdir
        os.fsync = self._recorded_fsync
        os.mkdir = self._watched_mkdir
        return self

    def __exit__(self, *exception: object) -> None:
        os.fsync = self._fsync
        os.mkdir = self._mkdir
        with self._lock:
            self._look()
            self._note_what_could_be_left()
        os.close(self._inotify)

    def left(self, at: Path) -> Iterator[Path]:
        """Each disk that a power cut could have left at any moment, the end included; one after the other at `at`."""
        for tree in self._left.values():
            shutil.rmtree(at, ignore_errors=True)
            at.mkdir(parents=True)
            for name, content in tree.items():
                if content is None:
                    (at / name).mkdir()
                else:
                    (at / name).write_bytes(content)
            yield at

    def uncertain(self) -> list[str]:
        """The paths that a power cut after the block could undo: names or contents that are not synced."""
        return [*_uncertain(self._top, "")]

    def _recorded_fsync(self, fd: int) -> None:
        with self._lock:
            self._look()
            self._note_what_could_be_left()
            path = Path(os.readlink(f"/proc/self/fd/{fd}"))
            node = self._find(path)
            if isinstance(node, Folder):
                node.sync()
            elif node is not None:
                node.synced = node.newest
            if node is not None:
                self.events.append(f"fsync {path.relative_to(self.root)}")
        self._fsync(fd)

    def _watched_mkdir(self, *args: Any, **keywords: Any) -> None:
        self._mkdir(*args, **keywords)
        with self._lock:
            self._look()  # before anything happens in the new folder

    def _find(self, path: Path) -> File | Folder | None:
        if path != self.root and self.root not in path.parents:
            return None
        node: File | Folder | None = self._top
        for name in path.relative_to(self.root).parts:
            node = node.names.get(name) if isinstance(node, Folder) else None
        return node

    def _watch(self, path: Path, folder: Folder) -> None:
        """Watch a folder from now on; what is in a new one already has just been made."""
        kinds = CREATE | MODIFY | MOVED_FROM | MOVED_TO | DELETE
        self._folders[self._libc.inotify_add_watch(self._inotify, os.fsencode(path), ctypes.c_uint32(kinds))] = path
        for child in sorted(path.iterdir()):
            if child.name not in folder.names:
                self._appears(child, folder)

    def _appears(self, path: Path, folder: Folder) -> None:
        node = Folder() if path.is_dir() else File()
        folder.change({path.name: node})
        if isinstance(node, Folder):
            self._watch(path, node)

    def _all_is_synced(self, folder: Folder, path: Path) -> None:
        folder.sync()
        for name, node in folder.names.items():
            if isinstance(node, Folder):
                self._all_is_synced(node, path / name)
            else:
                node.newest = node.synced = (path / name).read_bytes()

    def _look(self) -> None:
        """Take in what the kernel has seen since the last call."""
        while True:
            try:
                seen = os.read(self._inotify, 2**16)
            except BlockingIOError:
                break
            at = 0
            while at < len(seen):
                watch, kind, cookie, length = EVENT.unpack_from(seen, at)
                name = seen[at + EVENT.size : at + EVENT.size + length].rstrip(b"\0").decode()
                at += EVENT.size + length
                if name and watch in self._folders:
                    self._happened(kind, cookie, self._folders[watch] / name)
        self._read(self._top, self.root)

    def _happened(self, kind: int, cookie: int, path: Path) -> None:
        folder = self._find(path.parent)
        if not isinstance(folder, Folder):
            return  # in a folder that is gone
        name = path.relative_to(self.root)
        if kind & CREATE and path.name not in folder.names:
            self.events.append(f"create {name}")
            self._appears(path, folder)
        elif kind & MODIFY and self.events[-1:] != [f"write {name}"]:
            self.events.append(f"write {name}")
        elif kind & DELETE:
            self.events.append(f"unlink {name}")
            folder.change({path.name: None})
        elif kind & MOVED_FROM:
            self._moved[cookie] = path, folder.names[path.name]
        elif kind & MOVED_TO and cookie in self._moved:
            before, node = self._moved.pop(cookie)
            self.events.append(f"rename {before.relative_to(self.root)} to {name}")
            old = self._find(before.parent)
            assert isinstance(old, Folder)
            if old is folder:
                folder.change({before.name: None, path.name: node})
            else:
                old.change({before.name: None})
                folder.change({path.name: node})
            for number, watched in self._folders.items():
                if watched == before or before in watched.parents:
                    self._folders[number] = path / watched.relative_to(before)

    def _read(self, folder: Folder, path: Path) -> None:
        for name, node in folder.names.items():
            if isinstance(node, Folder):
                self._read(node, path / name)
            elif (path / name).is_file():
                node.newest = (path / name).read_bytes()

    def _note_what_could_be_left(self) -> None:
        for content in ("synced", "newest"):
            for tree in _trees(self._top, "", content):
                self._left.setdefault(tuple(sorted(tree.items())), tree)


def _trees(folder: Folder, path: str, content: str) -> Iterator[Tree]:
    """The states that can be on the disk below a folder, each file with its `content`."""
    for names in folder.possible():
        here: Tree = {
            path + name: None if isinstance(node, Folder) else getattr(node, content) for name, node in names.items()
        }
        folders = [(name, node) for name, node in names.items() if isinstance(node, Folder)]
        below = [list(_trees(node, f"{path}{name}/", content)) for name, node in folders]
        for together in itertools.product(*below):
            tree = dict(here)
            for part in together:
                tree |= part
            yield tree


def _uncertain(folder: Folder, path: str) -> Iterator[str]:
    for name in sorted({name for change in folder.changes for name in change}):
        yield path + name
    for name, node in folder.names.items():
        if isinstance(node, Folder):
            yield from _uncertain(node, f"{path}{name}/")
        elif node.synced != node.newest:
            yield f"{path}{name}: content"
