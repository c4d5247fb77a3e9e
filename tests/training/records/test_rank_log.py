"""training/records/rank_log.py: what a rank does and prints is in its file, even if process or disk fail."""

from __future__ import annotations

import contextlib
import io
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path

import pytest
import torch

from dtmega import mesh
from dtmega.training.records.rank_log import RankLog
from tests import ranks
from tests.layouts import ROOT

ONE = dict.fromkeys(mesh.AXES, 1)
CPU = torch.device("cpu")


def log_of(folder: Path) -> RankLog:
    return RankLog(folder, 0, ONE, CPU)


def entries(folder: Path, rank: int = 0) -> list[tuple[float, str]]:
    """The lines of a log: time and text. Each line has both; empty lines, which stand between starts, are left out."""
    found = []
    for line in Path(folder, f"rank-{rank:05d}.txt").read_text(encoding="utf-8").splitlines():
        if line:
            match = re.fullmatch(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3})Z (.+)", line)
            assert match, line
            at = datetime.strptime(match[1], "%Y-%m-%dT%H:%M:%S.%f").replace(tzinfo=timezone.utc)
            found.append((at.timestamp(), match[2]))
    return found


def texts(folder: Path) -> list[str]:
    """The texts of a log with one start, without the line about the start."""
    first, *others = [text for _, text in entries(folder)]
    assert first.startswith("start: ")
    return others


@contextlib.contextmanager
def streams() -> Iterator[tuple[io.StringIO, io.StringIO]]:
    """New streams in place of stdout and stderr."""
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        yield out, err


def run_script(folder: Path, text: str) -> subprocess.CompletedProcess[str]:
    """Run a script that has `log`, a log in this folder."""
    begin = f"""
import logging, os, resource, signal, threading, warnings
from pathlib import Path
import torch
from dtmega import mesh
from dtmega.files import console
from dtmega.training.records.rank_log import RankLog
log = RankLog(Path({str(folder)!r}), 0, dict.fromkeys(mesh.AXES, 1), torch.device("cpu"))
"""
    more = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "", "TZ": "EAST-9"}
    command = [sys.executable, "-c", begin + text]
    return subprocess.run(command, check=False, capture_output=True, text=True, env=os.environ | more, timeout=120)


def begin_on_a_mesh(folder: str, axes: dict[str, int]) -> list[str]:
    """Begin this rank's log. Returns its place on each longer axis, as the device mesh has it, and its process."""
    sizes = ONE | axes
    world = mesh.start(CPU, sizes)
    with RankLog(Path(folder), world.rank, sizes, CPU):
        pass
    return [f"{axis} {world.coordinate(axis)} of {axes[axis]}" for axis in axes] + [f"process {os.getpid()}"]


def test_a_log_begins_with_the_rank_its_place_on_the_device_mesh_its_device_process_and_host(tmp_path):
    described = ranks.run(6, begin_on_a_mesh, str(tmp_path), {"pp": 2, "dp_shard": 3})
    for rank, (*places, process) in enumerate(described):
        ((_, text),) = entries(tmp_path, rank)
        assert text == ", ".join(
            [f"start: rank {rank} of 6", *places, "on cpu", f"{process} on {socket.gethostname()}"]
        )


def test_what_python_and_torch_print_by_themselves_is_logged(tmp_path):
    text = """
with log:
    console.say("said")
    warnings.warn("warned")
    logging.getLogger("torch.distributed").warning("from a logger of torch")
    thread = threading.Thread(target=divmod, args=(1, 0))
    thread.start()
    thread.join()
"""
    ended = run_script(tmp_path, text)
    for part in ("said\n", "UserWarning: warned\n", "from a logger of torch\n", "\nZeroDivisionError: "):
        assert part in ended.stderr
    assert texts(tmp_path) == [line for line in ended.stderr.splitlines() if line]


def test_an_error_that_ends_the_run_is_logged_and_left_for_others_to_print(tmp_path):
    with streams() as (out, err), pytest.raises(RuntimeError), log_of(tmp_path):
        raise RuntimeError("no step learns")
    first, *_, last = texts(tmp_path)
    assert (first, last) == ("Traceback (most recent call last):", "RuntimeError: no step learns")
    assert out.getvalue() + err.getvalue() == ""


def test_what_is_printed_is_logged_between_the_lines_of_the_log_and_neither_after_its_end(tmp_path):
    with streams() as (out, err):
        with log_of(tmp_path) as log:
            print("one", 1)
            log.line("two\n\nand three")
            print("four", file=sys.stderr)
            print("five", end="")
        print("six")
        log.line("seven")
    assert texts(tmp_path) == ["one 1", "two", "and three", "four", "five"]
    assert (out.getvalue(), err.getvalue()) == ("one 1\nfivesix\n", "four\n")


def test_what_would_steer_a_terminal_is_escaped_and_other_scripts_are_not(tmp_path):
    with streams(), log_of(tmp_path) as log:
        print("\x1b[2Jred \x07 \u202e caf\u00e9 \u4f60 \udcff")
        log.line("a\tb\x85c")
    assert texts(tmp_path) == [r"\x1b[2Jred \x07 \u202e caf" + "\u00e9 \u4f60" + r" \udcff", r"a\tb\x85c"]


def test_a_second_start_is_appended_on_a_line_of_its_own(tmp_path):
    for text in ("first", "second"):
        with streams(), log_of(tmp_path):
            print(text)
        with (tmp_path / "rank-00000.txt").open("a") as file:
            file.write("2026-01-01T00:00:00.000Z torn")  # by a power cut
    logged = [text for _, text in entries(tmp_path)]
    assert [text.partition(":")[0] for text in logged] == ["start", "first", "torn", "start", "second", "torn"]


@pytest.mark.parametrize(
    ("end", "code"), [("os._exit(7)", 7), ("os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL)]
)
def test_a_process_that_ends_at_once_loses_the_buffer_of_its_stdout_and_no_line_of_its_log(tmp_path, end, code):
    before = time.time()
    ended = run_script(tmp_path, f"log.__enter__(); print('printed'); log.line('logged'); {end}")
    assert (ended.returncode, ended.stdout) == (code, "")
    assert texts(tmp_path) == ["printed", "logged"]
    # Whatever the time zone; the log has whole milliseconds.
    assert all(before - 0.001 <= at <= time.time() for at, _ in entries(tmp_path))


def test_a_full_disk_is_one_warning_and_changes_nothing_else(tmp_path):
    (tmp_path / "rank-00000.txt").symlink_to("/dev/full")
    with streams() as (out, err), log_of(tmp_path) as log:
        print("a line")
        log.line("a line")
        log.write_stacks()
        print("another one", file=sys.stderr)
    assert out.getvalue() == "a line\n"
    path = tmp_path / "rank-00000.txt"
    assert err.getvalue() == f"WARNING: lines are missing in {path}: No space left on device\nanother one\n"


def test_when_a_disk_has_space_again_the_log_goes_on_and_says_that_lines_are_missing(tmp_path):
    # The kernel writes the part of the line that is below the limit.
    text = """
with log:
    size = os.stat(log._path).st_size
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 40, resource.RLIM_INFINITY))
    print("line 1, which is not short")
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    print("line 2")
    print("line 3")
"""
    ended = run_script(tmp_path, text)
    assert (ended.returncode, ended.stdout) == (0, "line 1, which is not short\nline 2\nline 3\n")
    assert re.fullmatch(r"WARNING: lines are missing in .*: File too large\n", ended.stderr)
    torn, *others = texts(tmp_path)
    assert "line 1, which is not short".startswith(torn)
    assert others == ["lines are missing here: File too large", "line 2", "line 3"]


def test_the_places_of_all_threads_can_be_logged(tmp_path):
    begun, over = threading.Event(), threading.Event()

    def hang() -> None:
        begun.set()
        over.wait()

    thread = threading.Thread(target=hang)
    thread.start()
    begun.wait()
    with streams() as (out, err), log_of(tmp_path) as log:
        log.write_stacks()
    over.set()
    thread.join()
    functions = re.findall(r'File ".*test_rank_log\.py", line \d+ in (\w+)', (tmp_path / "rank-00000.txt").read_text())
    assert functions == ["hang", "test_the_places_of_all_threads_can_be_logged"]
    assert out.getvalue() + err.getvalue() == ""


@pytest.mark.parametrize("name", ["", "rank-00000.txt"])
def test_a_log_that_cannot_be_opened_is_refused_and_the_streams_stay(tmp_path, name):
    folder = tmp_path / "logs"
    if name:
        (folder / name).mkdir(parents=True)
    else:
        folder.touch()
    before = sys.stdout, sys.stderr
    with pytest.raises(ValueError, match=r"cannot write to .*rank-00000\.txt: .* directory \(\[log\] ranks\)"):
        log_of(folder).__enter__()
    assert (sys.stdout, sys.stderr) == before
