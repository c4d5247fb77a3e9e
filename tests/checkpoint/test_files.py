"""Claims about checkpoint/files.py: what a disk or a URL is asked for, in which order, and how it refuses."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem

from dtmega.checkpoint import manifest
from dtmega.checkpoint.files import Disk, Place, open_root
from dtmega.checkpoint.manifest import Damaged
from dtmega.checkpoint.remote import Remote
from dtmega.checkpoint.resume import finished, open_checkpoint
from dtmega.checkpoint.weights import Weights
from dtmega.cli.convert import to_checkpoint
from dtmega.config.families.bloom import BloomKeys
from tests.checkpoint.test_reader import store

NAME = "data-00000.bin"


@pytest.fixture(params=["disk", "url"])
def files(request, tmp_path) -> Place:
    return open_root(str(tmp_path / "checkpoints") if request.param == "disk" else f"memory://{uuid4().hex}")


def put(files: Place, folder: str, *names: str) -> None:
    """A new folder with such files, of one byte each."""
    files.make(folder)
    for name in names:
        with files.create(folder, name) as file:
            file.write(b"x")


def test_folders_are_listed_in_order_without_files_and_files_with_their_bytes_without_folders(files, tmp_path):
    assert files.folders() == []
    for folder in ("c", "a", "b"):
        put(files, folder, NAME)
    if isinstance(files, Disk):
        (files.root / "file").touch()
        (files.root / "a" / "inside").mkdir()
        (files.root / "a" / "link").symlink_to(files.root / "b" / NAME)
    else:
        with files._fs.open(f"{files.root}/file", "wb") as file:
            file.write(b"x")
        files._fs.makedirs(f"{files.root}/a/inside")
    assert files.folders() == ["a", "b", "c"]
    assert files.sizes("a") == {NAME: 1}


def test_what_is_not_there_is_damage_that_names_it(files):
    with pytest.raises(Damaged, match="step-00000001"):
        files.sizes("step-00000001")
    files.make("step-00000001")
    with pytest.raises(Damaged, match=NAME), files.open("step-00000001", NAME):
        pass


def test_a_link_that_takes_the_place_of_a_file_after_the_folder_was_listed_is_not_followed(tmp_path):
    disk = Disk(str(tmp_path / "checkpoints"))
    put(disk, "step-00000001", NAME)
    (disk.root / "step-00000001" / "link").symlink_to(disk.root / "step-00000001" / NAME)
    with pytest.raises(Damaged, match="link: Too many levels of symbolic links"), disk.open("step-00000001", "link"):
        pass


def test_a_folder_is_made_empty_whatever_was_left_there(files):
    put(files, "step-00000001", NAME, "data-00001.bin")
    files.make("step-00000001")
    assert files.sizes("step-00000001") == {}


def test_what_is_not_there_can_be_removed(files):
    files.remove("step-00000001")
    put(files, "step-00000001", NAME)
    files.remove("step-00000001")
    assert files.folders() == []


def test_a_folder_that_is_moved_is_whole_in_its_new_place(files):
    put(files, "step-00000001", NAME)
    put(files, "step-00000002", NAME)
    for folder in ("step-00000001", "step-00000002"):
        files.move(folder, "superseded-1")
    assert files.folders() == ["superseded-1"]
    assert open_root(files.path("superseded-1")).sizes("step-00000001") == {NAME: 1}


# On a disk.


@pytest.fixture
def events(monkeypatch) -> list[str]:
    """Each fsync, mkdir and rename from now on, by the names of files and folders."""
    seen: list[str] = []

    def note(name: str, describe: Callable[..., str]) -> None:
        honest = getattr(os, name)

        def noted(*args: Any, **keywords: Any) -> Any:
            seen.append(f"{name} {describe(*args)}")
            return honest(*args, **keywords)

        monkeypatch.setattr(os, name, noted)

    note("fsync", lambda fd: Path(os.readlink(f"/proc/self/fd/{fd}")).name)
    note("mkdir", lambda path, *_: Path(path).name)
    note("rename", lambda old, new: f"{Path(old).parent.name}/{Path(old).name} to {Path(new).parent.name}")
    return seen


def test_a_folder_that_is_moved_is_in_its_new_place_after_a_power_cut_too(tmp_path, events):
    disk = Disk(str(tmp_path / "checkpoints"))
    put(disk, "step-00000001", NAME)
    events.clear()
    disk.move("step-00000001", "superseded-1")
    moved = ["mkdir superseded-1", "fsync checkpoints", "rename checkpoints/step-00000001 to superseded-1"]
    assert events == [*moved, "fsync superseded-1", "fsync checkpoints"]


def test_the_folder_of_a_runs_first_checkpoint_is_on_the_disk_before_the_checkpoint(tmp_path, events):
    Disk(str(tmp_path / "runs" / "checkpoints")).make("step-00000001")
    parents = ["mkdir runs", f"fsync {tmp_path.name}", "mkdir checkpoints", "fsync runs"]
    assert events == [*parents, "mkdir step-00000001"]


def test_converted_weights_are_on_the_disk_before_their_name_and_that_before_the_command_ends(tmp_path, events):
    source = Weights(open_checkpoint(store(f"{tmp_path}/run", {"model/x": torch.ones(3)})))
    events.clear()
    to_checkpoint.write(f"{tmp_path}/out/w", source, BloomKeys())
    synced = ["fsync data-00000.bin", "fsync manifest.json", "fsync .tmp-w"]
    assert events == [
        *("mkdir out", f"fsync {tmp_path.name}", "mkdir .tmp-w"),
        *synced,
        *("rename out/.tmp-w to out", "fsync out"),
    ]
    assert torch.equal(open_checkpoint(f"{tmp_path}/out/w").read("model/x"), torch.ones(3))


@pytest.mark.parametrize("can_remove", [True, False])
def test_weights_that_cannot_be_converted_leave_what_was_there_and_say_why(files, monkeypatch, can_remove):
    path = store(files.path("w"), {"model/x": torch.ones(3)})
    source = Weights(open_checkpoint(path))
    with pytest.raises(ValueError, match=r"w exists already \(--to\)"):
        to_checkpoint.write(path, source, BloomKeys())
    open_checkpoint(path).verify()

    def stuck(*args: object) -> None:
        raise RuntimeError("429 Too Many Requests")

    def unreadable(*args: object) -> None:
        if not can_remove:
            monkeypatch.setattr(type(files), "remove", stuck)
        raise Damaged("not intact")

    monkeypatch.setattr(Weights, "read", unreadable)
    with pytest.raises(Damaged, match="not intact"):
        to_checkpoint.write(files.path("other"), source, BloomKeys())
    if can_remove:
        assert files.folders() == ["w"]


def test_a_file_is_made_once_and_others_may_read_it(tmp_path):
    disk = Disk(str(tmp_path))
    put(disk, "step-00000001", NAME)
    with pytest.raises(FileExistsError), disk.create("step-00000001", NAME):
        pass
    mask = os.umask(0)
    os.umask(mask)
    assert (tmp_path / "step-00000001" / NAME).stat().st_mode & 0o777 == 0o644 & ~mask


class Partial:
    """A raw file of which a write takes no more than three bytes, and then none."""

    def __init__(self, file: Any, room: int) -> None:
        self._file, self._room = file, room

    def write(self, data: memoryview) -> int:
        if not self._room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        n = self._file.write(data[: min(3, self._room)])
        self._room -= n
        return n


def written(monkeypatch, disk: Disk, data: bytes, room: int) -> None:
    fdopen = os.fdopen

    @contextlib.contextmanager
    def partial(*args: Any, **keywords: Any) -> Any:
        with fdopen(*args, **keywords) as file:
            yield Partial(file, room)

    disk.make("step-00000001")
    with monkeypatch.context() as patched:
        patched.setattr(os, "fdopen", partial)
        with disk.create("step-00000001", NAME) as file:
            file.write(data)


def test_all_is_written_where_the_kernel_takes_a_part_at_a_time(tmp_path, monkeypatch):
    written(monkeypatch, Disk(str(tmp_path)), b"0123456789", room=99)
    assert (tmp_path / "step-00000001" / NAME).read_bytes() == b"0123456789"


def test_a_file_for_which_there_is_no_room_is_named(tmp_path, monkeypatch):
    with pytest.raises(OSError, match=f"No space left on device: '.*step-00000001/{NAME}'"):
        written(monkeypatch, Disk(str(tmp_path)), b"0123456789", room=5)


def test_what_is_free_is_what_the_disk_says_where_there_is_one(tmp_path, monkeypatch):
    usage = shutil._ntuple_diskusage(100, 60, 40)  # pyright: ignore[reportAttributeAccessIssue]
    with monkeypatch.context() as patched:
        patched.setattr(shutil, "disk_usage", lambda path: usage)
        assert Disk(str(tmp_path)).free_bytes() == 40
    assert Disk(str(tmp_path / "nowhere")).free_bytes() is None


# Under a URL.


def test_s3_without_its_library_is_refused_with_what_to_install(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    words = r"^s3://bucket \(\[checkpoint\] dir\) needs obstore, which is not installed: pip install -e '\.\[s3\]'$"
    with pytest.raises(ValueError, match=words):
        open_root("s3://bucket")


def test_a_url_that_nobody_knows_or_that_cannot_be_reached_is_refused_with_the_key(monkeypatch):
    with pytest.raises(ValueError, match=r"cannot open nosuch://bucket: .*nosuch.* \(\[checkpoint\] dir\)"):
        open_root("nosuch://bucket")

    def unreachable(*args: object, **keywords: object) -> None:
        raise ConnectionError("no route to host")

    monkeypatch.setattr(MemoryFileSystem, "ls", unreachable)
    with pytest.raises(ValueError, match=r"cannot open memory://bucket: no route to host \(\[checkpoint\] dir\)"):
        open_root("memory://bucket")


def test_a_removal_that_is_cut_off_leaves_no_folder_that_counts(monkeypatch):
    files = open_root(f"memory://{uuid4().hex}")
    put(files, "step-00000001", NAME, manifest.NAME)
    assert finished(files) == ["step-00000001"]
    rm = MemoryFileSystem.rm

    def cut_off(self: MemoryFileSystem, path: str, recursive: bool = False, **keywords: Any) -> None:
        if recursive:
            raise ConnectionError("no route to host")
        rm(self, path)

    monkeypatch.setattr(MemoryFileSystem, "rm", cut_off)
    with pytest.raises(ConnectionError):
        files.remove("step-00000001")
    assert finished(files) == []
    assert files.sizes("step-00000001") == {NAME: 1}


def test_what_another_process_removes_meanwhile_is_removed(monkeypatch):
    files = open_root(f"memory://{uuid4().hex}")
    put(files, "step-00000001", NAME)
    rm = MemoryFileSystem.rm

    def twice(self: MemoryFileSystem, path: str, **keywords: Any) -> None:
        rm(self, path, **keywords)
        rm(self, path, **keywords)

    monkeypatch.setattr(MemoryFileSystem, "rm", twice)
    files.remove("step-00000001")
    assert files.folders() == []


@pytest.mark.parametrize("url", ["memory://run/checkpoints", "memory://run/checkpoints/"])
def test_a_path_has_no_empty_part(url):
    """An object store takes a//b for another name than a/b."""
    files = open_root(url)
    assert files.path("step-00000001") == "memory://run/checkpoints/step-00000001"
    asked: list[str] = []
    assert isinstance(files, Remote)
    files._fs = type(
        "Noted", (), {"invalidate_cache": int, "ls": lambda self, path, detail: asked.append(path) or []}
    )()
    files.folders()
    files.sizes("step-00000001")
    assert [path.partition("run")[2] for path in asked] == ["/checkpoints", "/checkpoints/step-00000001"]


@pytest.mark.parametrize("error", [OSError("no route"), KeyboardInterrupt()])
def test_half_a_file_under_a_url_is_not_there(error):
    files = open_root(f"memory://{uuid4().hex}")
    files.make("step-00000001")

    def half() -> None:
        with files.create("step-00000001", manifest.NAME) as file:
            file.write(b"half of it")
            raise error

    with pytest.raises(type(error)):
        half()
    assert finished(files) == []
