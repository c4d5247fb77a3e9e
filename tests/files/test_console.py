"""files/console.py: whatever becomes of stdout and stderr, a run goes on and its exit code stays."""

from __future__ import annotations

import contextlib
import errno
import io
import logging
import os
import pty
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist
from tqdm import tqdm

from dtmega import train
from dtmega.files import console
from tests.layouts import DEBUG, write_text
from tests.resumed import flags


@contextlib.contextmanager
def full_disk() -> Iterator[io.TextIOBase]:
    with contextlib.suppress(OSError), Path("/dev/full").open("w") as file:  # closing it fails once more
        yield file


@contextlib.contextmanager
def closed_pipe() -> Iterator[io.TextIOBase]:
    reader, writer = os.pipe()
    os.close(reader)
    with contextlib.suppress(OSError), os.fdopen(writer, "w") as file:
        yield file


@contextlib.contextmanager
def dead_terminal() -> Iterator[io.TextIOBase]:
    there, here = pty.openpty()
    os.close(there)
    with contextlib.suppress(OSError), os.fdopen(here, "w") as file:
        yield file


GONE = {"full disk": full_disk, "closed pipe": closed_pipe, "dead terminal": dead_terminal}


@pytest.mark.parametrize("gone", GONE)
def test_what_cannot_be_written_is_lost_and_raises_nothing(gone):
    with GONE[gone]() as stream:
        with pytest.raises(OSError, match=r"\[Errno \d+\]"):
            print("a line", file=stream, flush=True)
        with contextlib.redirect_stdout(stream), contextlib.redirect_stderr(stream), console.guarded():
            print("a line", flush=True)
            console.say("another one")


def test_a_stream_that_is_closed_or_was_never_there_is_written_to_in_vain(monkeypatch):
    closed = io.StringIO()
    closed.close()
    for stream in (None, closed):
        monkeypatch.setattr(sys, "stdout", stream)
        with console.guarded():
            print("a line", flush=True)
            assert not sys.stdout.isatty()
        assert sys.stdout is stream


def test_ranks_are_named_and_of_many_the_first_sixteen():
    assert console.name_ranks([2]) == "rank 2"
    assert console.name_ranks([0, 1]) == "ranks 0, 1"
    sixteen = "0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15"
    assert console.name_ranks([*range(16)]) == f"ranks {sixteen}"
    assert console.name_ranks([*range(17)]) == f"ranks {sixteen} and 1 more"
    assert console.name_ranks([*range(19)]) == f"ranks {sixteen} and 3 more"


@pytest.mark.parametrize(
    ("n", "noun", "text"),
    [
        (0, "step", "0 steps"),
        (1, "process", "1 process"),
        (2048, "process", "2,048 processes"),
        (2, "batch", "2 batches"),
    ],
)
def test_one_thing_is_counted_as_one(n, noun, text):
    assert console.counted(n, noun) == text


def test_what_is_said_is_one_write_in_which_nothing_steers_a_terminal():
    written: list[str] = []
    stream = io.StringIO()
    stream.write = lambda text: written.append(text) or len(text)
    with contextlib.redirect_stderr(stream):
        console.say("two\nlines \x1b[2J")
    assert written == ["two\nlines \\x1b[2J\n"]


def test_letters_that_a_terminal_does_not_have_are_escaped():
    raw = io.BytesIO()
    terminal = io.TextIOWrapper(raw, encoding="ascii")
    with contextlib.redirect_stdout(terminal), console.guarded():
        print("caf\u00e9", flush=True)
    assert raw.getvalue() == b"caf\\xe9\n"


class Terminal(io.StringIO):
    """A stream on which tqdm draws a bar."""

    def isatty(self) -> bool:
        return True


def test_lines_are_copied_when_they_are_complete_and_printed_as_ever():
    taken: list[str] = []
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        before = sys.stdout, sys.stderr
        with console.copied(taken.append):
            print("one", 1, end="")
            assert taken == []
            print(file=sys.stderr)
            print("!")
            console.say("two\nand three")
            tqdm.write("four")
            print("five", end="")
            assert taken == ["", "one 1!", "two\nand three", "four"]
        assert (sys.stdout, sys.stderr) == before
    assert taken[4:] == ["five"]
    assert out.getvalue() == "one 1!\nfour\nfive"
    assert err.getvalue() == "\ntwo\nand three\n"


def test_a_log_handler_that_looks_up_stderr_for_each_line_is_left_alone_and_its_lines_are_copied():
    taken: list[str] = []
    logger = logging.getLogger("of a library")
    assert logging.lastResort is not None
    logger.addHandler(logging.lastResort)
    try:
        with contextlib.redirect_stderr(sys.__stderr__), console.copied(taken.append):
            logger.error("a line")
    finally:
        logger.removeHandler(logging.lastResort)
    assert taken == ["a line"]


def test_progress_bars_are_not_copied_and_lines_that_are_printed_meanwhile_are():
    # Without times and rates: tqdm pads a bar to the width of the one before, so their digits would show.
    without_times = "{l_bar}{bar}| {n_fmt}/{total_fmt}"

    def show() -> None:
        with tqdm(total=3, mininterval=0, miniters=1, bar_format=without_times) as bar:
            for i in range(3):
                for _ in tqdm(range(2), desc="validation", mininterval=0, leave=False, bar_format=without_times):
                    pass
                print(f"a warning {i}", file=sys.stderr)
                tqdm.write(f"step {i}")
                bar.update()
        print("50 %", end="\r")
        print("done\r\nand gone")

    taken: list[str] = []
    printed = []
    for context in (contextlib.nullcontext(), console.copied(taken.append)):
        with contextlib.redirect_stdout(Terminal()) as out, contextlib.redirect_stderr(Terminal()) as err, context:
            show()
        printed.append((out.getvalue(), err.getvalue()))
    lines = [line for text in taken for line in text.split("\n") if line]
    assert lines == [*(f"{kind} {i}" for i in range(3) for kind in ("a warning", "step")), "done", "and gone"]
    assert printed[0] == printed[1]
    assert "validation" in printed[0][1]


def test_threads_that_print_at_once_do_not_mix_their_lines():
    barrier = threading.Barrier(8)

    def show(thread: int) -> None:
        barrier.wait()
        for i in range(100):
            print(thread, "line", i)

    taken: list[str] = []
    interval = sys.getswitchinterval()
    with contextlib.redirect_stdout(io.StringIO()), console.copied(taken.append):
        threads = [threading.Thread(target=show, args=(i,)) for i in range(8)]
        sys.setswitchinterval(1e-6)
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        finally:
            sys.setswitchinterval(interval)
    for thread in range(8):
        assert [line for line in taken if line.startswith(f"{thread} ")] == [f"{thread} line {i}" for i in range(100)]


class BrokenTerminal(Terminal):
    """A terminal that is gone."""

    def write(self, text: str) -> int:
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")


@pytest.mark.parametrize("gone", GONE)
def test_a_run_whose_output_goes_nowhere_trains_to_its_end_and_exits_with_0(tmp_path, gone):
    keys = DEBUG | write_text(tmp_path) | {"train.steps": 2, "eval.interval": 1}
    with (
        GONE[gone]() as stdout,
        contextlib.redirect_stdout(stdout),
        contextlib.redirect_stderr(BrokenTerminal()),
    ):
        try:
            assert train.main(flags(keys, tmp_path / "run")) == 0
        finally:
            dist.destroy_process_group()
    assert [path.name for path in (tmp_path / "run" / "checkpoints").glob("step-*")] == ["step-00000002"]


def test_a_refusal_that_nobody_can_read_has_its_exit_code(tmp_path):
    with contextlib.redirect_stderr(BrokenTerminal()):
        assert train.main(flags({"data.path": "no/such"}, tmp_path)) == 2
