"""Claims about a job under torchrun, with train.py as it is: signals, a hang, the death of the agent."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import sys
import time
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from subprocess import Popen
from typing import Any, NamedTuple
from unittest.mock import ANY

import pytest
import torch
import torch.distributed as dist

from dtmega import train
from dtmega.checkpoint import found
from dtmega.data.loader import TrainBatches
from dtmega.distributed import exit_codes, process
from tests.distributed.test_process import TORCHRUN, alive, started, wait_for
from tests.layouts import ROOT, write_text
from tests.ranks import forks
from tests.resumed import KEYS, LAYOUTS, Record, Training, flags, train_all, whole

LAYOUT = "dp 2"
PATIENCE_S = 300.0
# Before the batch of some sample, each rank says that it is there and what it does, and does it, once.
WORKER = """
import os, runpy, sys, time
from pathlib import Path
from dtmega.distributed.watchdog import Watch
from dtmega.data.loader import TrainBatches

RANK, here, watches = os.environ["RANK"], Path.cwd(), []
watch, batch = Watch.__init__, TrainBatches.__next__

def wait_for_a_signal(watch):
    while not watch.signals:
        time.sleep(0.02)

def hang_on_rank_1(watch):
    watch.timeout_s /= 20
    while RANK == "1":
        time.sleep(0.02)

def remembered(self, *arguments):
    watch(self, *arguments)
    watches.append(self)

def stopping(self):
    what = FAULTS.get(self._consumed)
    if what is not None and not (here / f"{what.__name__}-{RANK}").exists():
        (here / f"tmp-{RANK}").write_text(str(os.getpid()))
        (here / f"tmp-{RANK}").rename(here / f"{what.__name__}-{RANK}")
        what(watches[0])
    return batch(self)

Watch.__init__, TrainBatches.__next__ = remembered, stopping
"""
AND_TRAIN = f"""
runpy.run_path({str(ROOT / "train.py")!r}, run_name="__main__")
"""
WAITING = "FAULTS = {24: wait_for_a_signal}"  # in the seventh step
HANGING_AND_WAITING = "FAULTS = {24: hang_on_rank_1, 28: wait_for_a_signal}"  # and in the eighth


class Base(NamedTuple):
    """Attributes:
    keys: of every run here.
    truth: what a run that nothing happens to gives.
    """

    keys: dict[str, Any]
    truth: Record


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Base:
    folder = tmp_path_factory.mktemp("torchrun")
    short = {"model.n_layers": 2, "train.steps": 9, "checkpoint.interval": 4, "eval.interval": 0}
    keys = KEYS | write_text(folder) | LAYOUTS[LAYOUT][1] | short | {"run.timeout_s": 60, "log.tensorboard": True}
    train_all([whole(LAYOUT, folder / "truth", keys)])
    return Base(keys, Record(folder / "truth"))


def torchrun(folder: Path, faults: str, keys: dict[str, Any], *options: object) -> AbstractContextManager[Popen[str]]:
    """Two workers that train in folder/run and stop where the fault says."""
    (folder / "worker.py").write_text(WORKER + faults + AND_TRAIN)
    argv = [*TORCHRUN, "--standalone", "--nproc-per-node", 2, *options, folder / "worker.py"]
    return started(*argv, *flags(keys, folder / "run"), cwd=folder)


def workers(folder: Path, agent: Popen[str]) -> list[int]:
    """Their pids, as soon as both wait for a signal."""
    wait_for(lambda: len([*folder.glob("wait_for_a_signal-?")]) == 2, agent)
    return [int(path.read_text()) for path in folder.glob("wait_for_a_signal-?")]


def go_on(folder: Path, base: Base) -> Record:
    """The same command again, to the end."""
    train_all([Training(2, base.keys, folder / "run")])
    return Record(folder / "run")


def same_bits(run: Record, truth: Record) -> bool:
    weights = all(run.final[name].equal(weight) for name, weight in truth.final.items())
    return weights and all(run.series(key) == truth.series(key) for key in ("loss", "grad_norm"))


class Ended(NamedTuple):
    """A job that was asked to end.

    Attributes:
        folder: where it trained, in `run`.
        output: of torchrun and both workers.
        left: workers that were still there when torchrun had ended.
    """

    folder: Path
    output: str
    left: list[int]


def asked_to_end(folder: Path, base: Base, faults: str, *options: object) -> Ended:
    """A job under torchrun, whose agent gets SIGTERM when both workers wait for a signal."""
    with torchrun(folder, faults, base.keys, *options) as agent:
        pids = workers(folder, agent)
        agent.terminate()
        output, _ = agent.communicate(timeout=PATIENCE_S)
        left = [pid for pid in pids if alive(pid)]
    return Ended(folder, output, left)


def check_end(ended: Ended, base: Base, step: int) -> None:
    """Check that the job saved at the boundary of a step, left nobody, and goes on to the bit."""
    assert ended.left == []
    assert f"stopped after step {step} of 9: a signal asked for it" in ended.output, ended.output
    assert "Unable to shutdown" not in ended.output  # what torchrun says before it sends SIGKILL
    newest = ended.folder / "run" / "checkpoints" / f"step-{step:08}"
    assert newest.exists()
    # Torchrun itself does not tell.
    assert exit_codes.ExitRecord.read(ended.folder / "run") == (75, "a signal asked for it", step, str(newest), ANY)
    assert same_bits(go_on(ended.folder, base), base.truth)


def test_sigterm_saves_at_the_step_boundary_and_all_are_gone_and_the_next_start_goes_on_to_the_bit(tmp_path, base):
    check_end(asked_to_end(tmp_path, base, WAITING), base, step=7)


# test_watchdog.py says it of ranks without torchrun, and test_process.py that torchrun starts small workers again.
@pytest.mark.full
def test_a_hang_names_rank_step_and_phase_and_torchrun_starts_again(tmp_path, base):
    ended = asked_to_end(tmp_path, base, HANGING_AND_WAITING, "--max-restarts", 3)
    hanging = r"^rank 1 behind: step 7 in data, for \d+ s, in hang_on_rank_1 \(worker\.py:\d+\)$"
    assert re.search(hanging, ended.output, re.MULTILINE)
    waiting = r"^rank 0 in front: step 7 in counts, for \d+ s, in all_reduce \("
    assert re.search(waiting, ended.output, re.MULTILINE)
    assert "resumed at step 4" in ended.output
    check_end(ended, base, step=8)


def stop_for_ever(argv: list[str], folder: str, leaves: bool) -> None:
    """train.py; before its seventh step rank 1 sends both a signal and goes to sleep, or leaves as if its time were up.

    stderr goes to a file.
    """
    rank, honest = dist.get_rank(), TrainBatches.__next__
    everyones = torch.zeros(2, dtype=torch.int64)
    everyones[rank] = os.getpid()
    dist.all_reduce(everyones)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2"}

    def stopping(self: TrainBatches) -> Any:
        if self._consumed == 24 and rank == 1:
            for pid in everyones.tolist():
                os.kill(pid, signal.SIGTERM)
            if leaves:
                process.leave(exit_codes.STUCK)
            while True:
                time.sleep(1)
        return honest(self)

    TrainBatches.__next__ = stopping
    with Path(folder, f"stderr-{rank}").open("w") as file, contextlib.redirect_stderr(file):
        process.leave(train.main(argv))


def test_a_signal_while_a_rank_waits_in_a_collective_ends_both_within_their_grace_time(tmp_path, base):
    argv = flags(base.keys | {"run.grace_s": 2}, tmp_path / "run")
    ranks = forks().run(2, stop_for_ever, argv, str(tmp_path), False)
    assert [rank.code for rank in ranks] == [exit_codes.STUCK, exit_codes.STUCK]
    waiting, stopped = ((tmp_path / f"stderr-{rank}").read_text() for rank in (0, 1))
    # Whose time is up first ends the collective that the other one waits in.
    assert re.search(r"rank 0: a signal came, and no step boundary (in 2 s|before this).* at step 7 in counts", waiting)
    assert re.search(r"rank 1: a signal came, and no step boundary in 2 s.* at step 7 in data", stopped)
    told = json.loads((tmp_path / "run" / "exit.json").read_text())
    newest = f"{tmp_path}/run/checkpoints/step-00000004"
    assert (told["code"], told["step"], told["checkpoint"]) == (exit_codes.STUCK, 6, newest)
    assert re.match(r"(rank 1: )?a signal came, and no step boundary in 2 s: leaving without a save", told["reason"])
    assert same_bits(go_on(tmp_path, base), base.truth)


def test_after_a_signal_a_collective_that_fails_because_another_rank_left_is_no_error_of_its_own(tmp_path, base):
    argv = flags(base.keys | {"run.grace_s": 60}, tmp_path / "run")
    ranks = forks().run(2, stop_for_ever, argv, str(tmp_path), True)
    assert [rank.code for rank in ranks] == [exit_codes.STUCK, exit_codes.STUCK]
    said = (tmp_path / "stderr-0").read_text()
    assert re.search(r"rank 0: a signal came, and no step boundary before this: .+ at step 7 in counts", said)


def test_a_second_writer_is_refused(tmp_path, base, capsys, monkeypatch):
    monkeypatch.setattr(found, "Claim", partial(process.Claim, patience_s=0))
    first = process.Claim(tmp_path / "run")
    (tmp_path / "run" / "exit.json").write_text("of the first")
    alone = base.keys | {"mesh.dp_shard": 1}
    assert train.main(flags(alone, tmp_path / "run")) == exit_codes.REFUSED
    assert re.search(r"is being written by process \d+ on .* since", capsys.readouterr().err)
    assert train.main(flags(alone | {"train.steps": "many"}, tmp_path / "run")) == exit_codes.REFUSED
    assert (tmp_path / "run" / "exit.json").read_text() == "of the first"
    first.close()


@pytest.mark.full  # distributed/test_process.py says it of small workers
def test_a_second_writer_is_refused_and_a_killed_agent_leaves_no_orphan_and_a_run_that_goes_on(
    tmp_path, base, capsys, monkeypatch
):
    with torchrun(tmp_path, WAITING, base.keys) as agent:
        pids = workers(tmp_path, agent)
        monkeypatch.setattr(found, "Claim", partial(process.Claim, patience_s=0))
        alone = base.keys | {"mesh.dp_shard": 1}
        assert train.main(flags(alone, tmp_path / "run")) == exit_codes.REFUSED
        assert re.search(r"is being written by process \d+ on .* since", capsys.readouterr().err)
        assert all(map(alive, pids))
        os.kill(agent.pid, signal.SIGKILL)
        wait_for(lambda: not any(map(alive, pids)))
    assert same_bits(go_on(tmp_path, base), base.truth)


# What the worker reads at its start keeps it until its trainer is dead, as its imports might.
TRAINER = """
import os, time
from pathlib import Path
from dtmega import config
from dtmega.data.loader import TrainBatches

class Rows:
    def __reduce__(self):
        return wait, ()

def wait():
    trainer = os.getppid()
    Path("tmp").write_text(str(os.getpid()))
    Path("tmp").rename("pid-worker")
    while os.getppid() == trainer:
        time.sleep(0.01)

if __name__ == "__main__":
    next(TrainBatches(Rows(), config.Data(num_workers=1), config.Batch(), 0, 1))
"""


def test_a_data_worker_that_starts_while_its_trainer_is_killed_does_not_stay(tmp_path):
    (tmp_path / "trainer.py").write_text(TRAINER)
    with started(sys.executable, tmp_path / "trainer.py", cwd=tmp_path) as trainer:
        wait_for((tmp_path / "pid-worker").exists, trainer)
        worker = int((tmp_path / "pid-worker").read_text())
        assert alive(worker)
        trainer.kill()
        wait_for(lambda: not alive(worker))
