"""files/console.py: whatever becomes of stdout and stderr, a run goes on and its exit code stays."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import pty
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

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


class BrokenTerminal(io.StringIO):
    """A terminal, on which tqdm draws a bar, and which is gone."""

    def isatty(self) -> bool:
        return True

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
