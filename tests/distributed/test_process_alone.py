"""process.py, as far as one process can test it: the claim of a folder, the death of a parent, leaving."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import resource
import signal
import socket
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest

from dtmega import __main__, train
from dtmega.cli import entry
from dtmega.distributed import exit_codes, process
from dtmega.files import lock
from tests.ranks import forks


def test_a_lock_says_whose_it_is_and_nothing_of_the_one_before(tmp_path: Path):
    (tmp_path / ".lock").write_text("x" * 1000)
    claim = process.Claim(tmp_path)
    said = json.loads((tmp_path / ".lock").read_text())
    assert (said["pid"], said["host"]) == (os.getpid(), socket.gethostname())
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d[+-]\d\d:\d\d", said["since"])
    claim.close()


def test_a_folder_is_made_if_need_be_and_its_lock_may_be_taken_by_whoever_may_write_there(tmp_path: Path):
    before = os.umask(0)
    try:
        process.Claim(tmp_path / "a" / "b").close()
    finally:
        os.umask(before)
    assert (tmp_path / "a" / "b" / ".lock").stat().st_mode & 0o777 == 0o666


def test_the_name_in_a_lock_is_on_disk_before_the_claim_is_made(tmp_path: Path, monkeypatch):
    on_disk: list[Any] = []
    monkeypatch.setattr(os, "fsync", lambda fd: on_disk.append((tmp_path / ".lock").read_text()))
    process.Claim(tmp_path).close()
    assert json.loads(on_disk[-1])["pid"] == os.getpid()


def test_an_orphan_has_five_seconds_to_die(tmp_path: Path, monkeypatch):
    claim = process.Claim(tmp_path)
    naps_s: list[float] = []
    monkeypatch.setattr(lock, "time", SimpleNamespace(monotonic=lambda: sum(naps_s), sleep=naps_s.append))
    with pytest.raises(ValueError, match="is being written by process"):
        process.Claim(tmp_path)
    assert 5.0 < sum(naps_s) < 5.3
    claim.close()


def n_files() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("content", ["", "not JSON"])
def test_a_holder_that_has_not_said_who_it_is_is_another_process_and_nothing_stays_open(tmp_path: Path, content: str):
    claim = process.Claim(tmp_path)
    (tmp_path / ".lock").write_text(content)
    before = n_files()
    words = f"{tmp_path} is being written by another process ([checkpoint] dir)"
    with pytest.raises(ValueError, match=f"^{re.escape(words)}$"):
        process.Claim(tmp_path, patience_s=0, key="[checkpoint] dir")
    assert n_files() == before
    claim.close()


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK, errno.EIO])
def test_only_a_file_system_that_has_no_locks_is_used_without(tmp_path: Path, monkeypatch, capsys, number: int):
    def flock(*_: object) -> None:
        raise OSError(number, "some reason")

    monkeypatch.setattr(fcntl, "flock", flock)
    before = n_files()
    if number == errno.EIO:
        with pytest.raises(ValueError, match=r"^cannot write to .*: some reason \(\[run\] dir\)$"):
            process.Claim(tmp_path)
    else:
        process.Claim(tmp_path).close()
        said = f"{tmp_path}/.lock cannot be locked (some reason): a second writer would not be noticed\n"
        assert capsys.readouterr().err == said
    assert n_files() == before


def test_only_a_worker_of_torchrun_dies_with_its_parent_and_by_sigkill(monkeypatch):
    asked: list[Any] = []
    libc = type("Libc", (), {"prctl": staticmethod(lambda option, number: asked.append((option, number.value)))})
    monkeypatch.setattr(process.ctypes, "CDLL", lambda name: libc)
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    process.die_with_parent()  # of a shell, which may end while the run goes on
    assert asked == []
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "test")
    process.die_with_parent()
    assert asked == [(1, signal.SIGKILL)]  # PR_SET_PDEATHSIG of linux/prctl.h


class Left(BaseException):
    """A stand-in for the end of this process."""


def deeds_of_leaving(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The deeds, from now on, in place of the end of this process."""
    done: list[Any] = []

    def end(code: int) -> NoReturn:
        done.append(code)
        raise Left

    monkeypatch.setattr(os, "_exit", end)
    monkeypatch.setattr(process.signal, "signal", lambda number, what: done.append((number, what)))
    for name in ("stdout", "stderr"):
        stream = type("Stream", (), {"flush": lambda self, name=name: done.append(name), "write": len})()
        monkeypatch.setattr(sys, name, stream)
    return done


def test_who_leaves_hears_no_signal_any_more_then_flushes_then_ends(monkeypatch):
    left = deeds_of_leaving(monkeypatch)
    with pytest.raises(Left):
        process.leave(7)
    heard = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
    assert left == [*((number, signal.SIG_IGN) for number in heard), "stdout", "stderr", 7]


def test_another_thread_which_may_not_touch_signals_can_end_the_process_too(monkeypatch):
    left = deeds_of_leaving(monkeypatch)

    def leave() -> None:
        with pytest.raises(Left):
            process.leave(7)

    thread = threading.Thread(target=leave)
    thread.start()
    thread.join()
    assert left == ["stdout", "stderr", 7]


def leave_and_be_asked_to(code: int) -> None:
    class Slow:
        def flush(self) -> None:
            os.kill(os.getpid(), signal.SIGTERM)

    sys.stdout = Slow()
    process.leave(code)


def test_a_signal_while_a_process_leaves_does_not_change_its_code():
    (ended,) = forks().run(1, leave_and_be_asked_to, exit_codes.PREEMPTED)
    assert ended.code == exit_codes.PREEMPTED


class Faulty:
    """A module that ends who imports from it, as glibc ends a process whose heap is damaged."""

    def __getattr__(self, name: str) -> NoReturn:
        os.abort()


def end_by_a_fault(program: str, path: Path) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # its memory is not to lie in the folder of the tests
    sys.modules |= {"dtmega.train": Faulty(), "dtmega.inference.trained": Faulty()}  # pyright: ignore[reportArgumentType]
    is_there = threading.Event()
    threading.Thread(target=wait_for_ever, args=(is_there,), daemon=True).start()
    is_there.wait()
    if program == "rank":
        os.abort()
    sys.stderr = path.open("w")
    if program == "train":
        entry.train([])
    sys.argv = ["dtmega", "generate", "runs/bloom", "--prompt", "x"]
    __main__.run()


def wait_for_ever(is_there: threading.Event) -> None:
    is_there.set()
    threading.Event().wait()


@pytest.mark.parametrize("program", ["train", "generate", "rank"])
def test_a_process_that_a_fault_ends_says_where_its_threads_were(tmp_path: Path, program: str):
    path = tmp_path / "stderr"
    (ended,) = forks().run(1, end_by_a_fault, program, path)
    assert ended.code == -signal.SIGABRT
    said = ended.error if program == "rank" else path.read_text()
    assert "in end_by_a_fault\n" in said
    assert "in wait_for_ever\n" in said


def train_without_stderr() -> None:
    train.run_and_leave = lambda argv: os._exit(exit_codes.DONE)  # pyright: ignore[reportAttributeAccessIssue]
    sys.stderr = None  # as Python has it where file 2 is closed
    entry.train([])


def test_a_process_without_stderr_trains():
    (ended,) = forks().run(1, train_without_stderr)
    assert ended.code == exit_codes.DONE, ended.error
