"""files/atomic.py: what is on the disk, and in which order; power cuts themselves are not made here."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from dtmega.files import atomic


@pytest.fixture
def events(monkeypatch) -> list[str]:
    """Each fsync, rename and new folder from now on, by the name of the file or folder."""
    seen: list[str] = []
    fsync, replace, mkdir = os.fsync, os.replace, os.mkdir

    def noted_fsync(fd: int) -> None:
        seen.append(f"fsync {Path(os.readlink(f'/proc/self/fd/{fd}')).name}")
        fsync(fd)

    def noted_replace(old: Path, new: Path) -> None:
        seen.append(f"rename {old.name} to {new.name}")
        replace(old, new)

    def noted_mkdir(path: Path, mode: int) -> None:
        seen.append(f"mkdir {Path(path).name}")
        mkdir(path, mode)

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(os, "replace", noted_replace)
    monkeypatch.setattr(os, "mkdir", noted_mkdir)
    return seen


def test_a_file_is_on_the_disk_before_its_name_and_its_name_before_anything_else(tmp_path, events):
    with atomic.replaced(tmp_path / "config.toml") as file:
        file.write("[run]\n")
    assert events == ["fsync .tmp-config.toml", "rename .tmp-config.toml to config.toml", f"fsync {tmp_path.name}"]
    assert (tmp_path / "config.toml").read_text() == "[run]\n"


def test_a_file_whose_successor_cannot_be_written_stays_as_it_is(tmp_path, monkeypatch):
    (tmp_path / "config.toml").write_text("old")

    def full(fd: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left") as lost, atomic.replaced(tmp_path / "config.toml") as file:
        file.write("new")
    assert lost.value.filename == str(tmp_path / "config.toml")
    monkeypatch.undo()
    for path in (tmp_path, tmp_path / "absent" / "config.toml"):
        with pytest.raises(OSError) as refused, atomic.replaced(path):
            pass
        assert str(refused.value).endswith(f": '{path}'")
    with pytest.raises(KeyboardInterrupt), atomic.replaced(tmp_path / "config.toml"):
        raise KeyboardInterrupt
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("config.toml", "old")]


def test_each_folder_that_is_made_is_on_the_disk_and_one_that_was_there_is_not_touched(tmp_path, events):
    atomic.make_folder(tmp_path / "runs" / "a" / "b")
    assert events == [
        *("mkdir runs", f"fsync {tmp_path.name}"),
        *("mkdir a", "fsync runs"),
        *("mkdir b", "fsync a"),
    ]
    atomic.make_folder(tmp_path / "runs" / "a")
    assert len(events) == 6


def test_a_folder_that_another_process_makes_at_the_same_time_is_as_good(tmp_path, monkeypatch):
    mkdir = os.mkdir

    def overtaken(path: Path, mode: int) -> None:
        mkdir(path, mode)
        mkdir(path, mode)

    monkeypatch.setattr(os, "mkdir", overtaken)
    atomic.make_folder(tmp_path / "runs" / "a")
    assert (tmp_path / "runs" / "a").is_dir()


@pytest.mark.parametrize(
    ("number", "raises"), [(errno.EINVAL, False), (errno.ENOTSUP, False), (errno.ENOSYS, False), (errno.EIO, True)]
)
def test_a_file_system_that_cannot_sync_a_folder_is_used_and_one_that_fails_is_not(
    tmp_path, monkeypatch, number, raises
):
    def fsync(fd: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", fsync)
    if raises:
        with pytest.raises(OSError, match="Input/output error"):
            atomic.sync_folder(tmp_path)
    else:
        atomic.sync_folder(tmp_path)
