"""Claims about how ranks start together: one job or none, and why not is said once; by ranks started by hand.

Each rank is a process with RANK, WORLD_SIZE and MASTER_* in its environment, forked from a warm server: so what is
claimed holds without a launcher that ends the others.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch.distributed as dist

import train
from dtmega import job
from tests import ranks
from tests.layouts import write_text
from tests.resumed import KEYS, flags
from tests.test_job import free_port

SMALL = KEYS | {
    "model.hidden_size": 16,
    "model.n_layers": 1,
    "model.n_heads": 2,
    "batch.global_batch_size": 2,
    "batch.rampup": [],
    "train.steps": 2,
    "checkpoint.interval": 1,
    "eval.interval": 0,
}


class Start(NamedTuple):
    """What came of the start of one rank.

    Attributes:
        code: that main returned, or what it raised.
    """

    code: int | str
    stdout: str
    stderr: str
    seconds: float


def start(folder: Path, *keys: Mapping[str, Any], plant: Callable[[], object] = tuple) -> list[Start]:
    """train.py on as many ranks as there are keys, each with its own, in `folder`/run."""
    argvs = [flags(SMALL | own, folder / "run") for own in keys]
    return ranks.run(len(keys), _one_rank, argvs, free_port(), plant)


def _one_rank(argvs: Sequence[list[str]], port: int, plant: Callable[[], object]) -> Start:
    rank = dist.get_rank()
    dist.barrier()
    dist.destroy_process_group()
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= place | {"RANK": str(rank), "WORLD_SIZE": str(len(argvs))}
    plant()
    began = time.monotonic()
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                code: int | str = train.main(argvs[rank])
            except RuntimeError as error:
                code = str(error)
        texts = [file.seek(0) or file.read() for file in (out, err)]
        return Start(code, *texts, time.monotonic() - began)


def said(started: list[Start]) -> list[str]:
    """Every line on stderr, of all ranks."""
    return [line for one in started for line in one.stderr.splitlines()]


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> dict[str, str]:
    return write_text(tmp_path_factory.mktemp("text"))


def test_ranks_of_one_job_start(tmp_path, text):
    started = start(tmp_path, text, text)
    assert ([one.code for one in started], said(started)) == ([0, 0], [])
    assert (tmp_path / "run" / "checkpoints" / "step-00000002").is_dir()


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"optim.lr": 0.02}, "[optim] lr is 0.01 on rank 0, 0.02 on rank 1"),
        ({"mesh.tp": 2}, "[mesh] tp is 1 on rank 0, 2 on rank 1"),
        ({"run.seed": 1, "log.interval": 3}, "[log] interval is 10 on rank 0, 3 on rank 1; [run] seed is 1234 on rank"),
    ],
)
def test_ranks_with_other_keys_are_refused_in_seconds_with_one_line_that_names_keys_and_ranks(
    tmp_path, text, other, message
):
    started = start(tmp_path, text, text | other)
    assert [one.code for one in started] == [job.REFUSED, job.REFUSED]
    (line,) = said(started)
    assert line.startswith("dtmega: the ranks do not have the same configuration: " + message)
    assert max(one.seconds for one in started) < 30
    assert not (tmp_path / "run").exists()


def nothing(path: Path) -> None:
    """A link to where nothing can be made."""
    path.symlink_to("/proc/nowhere/file")


@pytest.mark.parametrize(
    ("name", "plant", "message"),
    [
        (".lock", Path.mkdir, "cannot write to .*run: Is a directory"),
        ("config.toml", Path.mkdir, "files of the run: .* Is a directory: .*config.toml"),
        ("metrics.jsonl", nothing, "files of the run: .* No such file or directory: .*metrics.jsonl"),
        ("tensorboard", Path.touch, "files of the run: .* File exists: .*tensorboard"),
        ("checkpoints", Path.touch, r"cannot write to .*checkpoints: .* \(\[checkpoint\] dir\)"),
    ],
)
def test_what_cannot_be_written_is_one_line_and_exit_code_2(tmp_path, text, name, plant, message):
    (tmp_path / "run").mkdir()
    plant(tmp_path / "run" / name)
    (one,) = start(tmp_path, text | {"log.tensorboard": True})
    assert one.code == job.REFUSED
    (line,) = said([one])
    assert re.match(f"dtmega: {message}", line), line


def test_a_checkpoint_folder_that_cannot_be_made_names_its_key(tmp_path, text):
    (tmp_path / "file").touch()
    (one,) = start(tmp_path, text | {"checkpoint.dir": str(tmp_path / "file" / "checkpoints")})
    assert one.code == job.REFUSED
    (line,) = said([one])
    assert re.match(r"dtmega: cannot write to .*checkpoints: Not a directory \(\[checkpoint\] dir\)$", line)


def test_what_only_rank_0_cannot_write_is_said_once_and_ends_all_ranks(tmp_path, text):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "tensorboard").touch()
    keys = text | {"log.tensorboard": True}
    started = start(tmp_path, keys, keys)
    assert [one.code for one in started] == [job.REFUSED, job.REFUSED]
    (line,) = said(started)
    assert "tensorboard" in line


def full_disk() -> None:
    """When the process says in the lock that it is its own."""

    def ftruncate(fd: int, size: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    job.os.ftruncate = ftruncate


def test_a_disk_that_is_full_at_the_start_is_one_line(tmp_path, text):
    (one,) = start(tmp_path, text, plant=full_disk)
    assert one.code == job.REFUSED
    (line,) = said([one])
    assert re.match(r"dtmega: cannot write to .*run: No space left on device \(\[run\] dir\)$", line)
