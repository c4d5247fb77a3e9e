"""Claims about distributed/watchdog.py: signals and hangs, with real launchers, in small workers."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import FileStore, HashStore  # pyright: ignore[reportPrivateImportUsage]

from dtmega import config, train
from dtmega.distributed import exit_codes, process
from dtmega.distributed.watchdog import CodePlace, Watch, place_of
from dtmega.models.bloom import Block
from dtmega.ops import optim
from dtmega.training.records import trackers
from tests.distributed.test_process import PATIENCE_S, ROOT, TORCHRUN, script, started
from tests.layouts import DEBUG, write_text
from tests.ranks import forks
from tests.resumed import flags

RUNNING = ROOT / "docs" / "running.md"


@pytest.fixture
def watches() -> Iterator[list[Watch]]:
    """The watches of four ranks, in this process."""
    with ExitStack() as stack:
        made = []
        for rank in range(4):
            made.append(Watch(grace_s=60, timeout_s=0, rank=rank))
            stack.callback(made[-1].close)
        yield made


def test_the_ranks_that_did_not_come_as_far_as_the_others_are_named_with_step_and_phase(watches):
    store = HashStore()
    for watch in watches[:3]:
        watch.share(store, 4)
        watch.beat(6, "checkpoint")
        watch.beat(7, "data")
    for watch in watches[:2]:
        watch.beat(7, "step")
    behind = watches[0].who_is_behind()
    assert behind == watches[2].who_is_behind()
    assert re.sub(r", for \d+ s", "", behind).splitlines() == [
        "rank 3 behind: nothing heard since the start",
        "rank 2 behind: step 7 in data",
        "ranks 0, 1 in front: step 7 in step",
    ]


def test_a_phase_that_comes_twice_in_a_step_is_further_the_second_time(watches):
    store = HashStore()
    for watch, beats in zip(watches, (1, 2, 2, 2), strict=True):
        watch.share(store, 4)
        for _ in range(beats):
            watch.beat(1, "evaluation")
    assert watches[0].who_is_behind().startswith("rank 0 behind: step 1 in evaluation")
    watches[0].beat(1, "evaluation")
    assert watches[0].who_is_behind().startswith("ranks 0, 1, 2, 3 together: step 1 in evaluation")


def test_of_very_many_ranks_sixteen_are_named(watches):
    watches[0].share(HashStore(), 1000)
    assert watches[0].who_is_behind().startswith("ranks 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16 and 983")


def test_without_others_it_says_where_this_rank_is(watches):
    watches[0].beat(3, "data")
    assert watches[0].who_is_behind() == "rank 0: step 3 in data, for 0 s"


def test_a_store_that_is_gone_ends_no_run_and_is_said_once(watches, capsys):
    class Gone(HashStore):
        def set(self, key: str, value: str) -> None:
            raise RuntimeError("Broken pipe")

        def check(self, keys: list[str]) -> bool:
            raise RuntimeError("Broken pipe")

    watches[0].share(Gone(), 4)
    watches[0].beat(1, "step")
    assert capsys.readouterr().err == "rank 0: beats are no longer shared: Broken pipe\n"
    assert watches[0].who_is_behind() == "the store does not say who is behind: Broken pipe"


def test_the_ending_of_a_job_is_that_of_the_rank_that_leaves_first():
    store = HashStore()
    statuses = [exit_codes.ExitStatus() for _ in range(3)]
    for rank, why in (
        (2, "OutOfMemoryError: 3 GiB"),
        (0, "RuntimeError: peer closed"),
        (1, "RuntimeError: peer closed"),
    ):
        watch = Watch(grace_s=60, timeout_s=0, rank=rank, exit_status=statuses[rank])
        watch.record_exit(exit_codes.STUCK, "before others are known")
        watch.share(store, 3)
        watch.record_exit(exit_codes.FAILED if rank == 2 else exit_codes.STUCK, why)
        watch.close()
    first = (exit_codes.FAILED, "OutOfMemoryError: 3 GiB")
    others = (exit_codes.FAILED, f"rank 2: {first[1]}")
    assert [(status.code, status.reason) for status in statuses] == [others, others, first]


@pytest.mark.parametrize("error", [RuntimeError("Connection closed by peer"), KeyError("its own")])
def test_a_rank_whose_collective_breaks_because_another_one_hung_leaves_in_one_line(monkeypatch, capsys, error):
    store = HashStore()
    status = exit_codes.ExitStatus()
    watches = [Watch(grace_s=60, timeout_s=0, rank=rank, exit_status=status) for rank in (0, 1)]
    for watch in watches:
        watch.share(store, 2)
    watches[1].record_exit(exit_codes.HUNG, "nothing for 6 s")
    run: Any = SimpleNamespace(
        watch=watches[0],
        world=SimpleNamespace(device=torch.device("meta")),
        cfg=SimpleNamespace(eval=SimpleNamespace(only=False)),
    )

    def fails(*_: object) -> int:
        raise error

    monkeypatch.setattr(train, "begin", lambda *_: (run, None))
    monkeypatch.setattr(train, "train", fails)
    if isinstance(error, RuntimeError):
        assert train.main([]) == exit_codes.HUNG
        (line,) = capsys.readouterr().err.splitlines()
        assert line == (
            "rank 0: leaving after rank 1 (RuntimeError: Connection closed by peer), at step 0 in start (exit code 77)"
        )
    else:
        with pytest.raises(KeyError):
            train.main([])
    for watch in reversed(watches):
        watch.close()


def test_signals_are_collected_and_afterwards_do_what_they_did():
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
    before = [signal.getsignal(number) for number in numbers]
    watch = Watch(grace_s=60, timeout_s=0, rank=0)
    for number in numbers:
        os.kill(os.getpid(), number)
    assert watch.signals == [*numbers]
    watch.close()
    assert [signal.getsignal(number) for number in numbers] == before
    assert signal.set_wakeup_fd(-1) == -1


def stuck(folder: str) -> None:
    """Rank 0 waits in a collective when a signal comes to both, rank 1 saves; stderr goes to a file."""
    rank = dist.get_rank()
    with Path(folder, f"stderr-{rank}").open("w") as file, contextlib.redirect_stderr(file):
        watch = Watch(grace_s=1, timeout_s=0, rank=rank)
        watch.share(FileStore(f"{folder}/beats", 2), 2)
        watch.beat(3, "step" if rank == 0 else "checkpoint")
        (pids := [0, 0])[rank] = os.getpid()
        everyones = torch.tensor(pids)
        dist.all_reduce(everyones)
        if rank == 0:
            dist.recv(torch.zeros(1), src=1)  # nobody sends
        for pid in everyones.tolist():
            os.kill(pid, signal.SIGTERM)
        while not watch.signals:
            time.sleep(0.05)
        time.sleep(3)
        Path(folder, "saved").touch()
        watch.beat(3, "leaving")
        watch.close()
        process.leave(exit_codes.PREEMPTED)


def test_a_signal_ends_a_process_that_sits_in_a_collective_and_leaves_one_that_saves_in_peace(tmp_path):
    assert [rank.code for rank in forks().run(2, stuck, str(tmp_path))] == [exit_codes.STUCK, exit_codes.PREEMPTED]
    waiting, saving = ((tmp_path / f"stderr-{rank}").read_text() for rank in (0, 1))
    assert "rank 0: a signal came, and no step boundary in 1 s: leaving without a save, at step 3 in step" in waiting
    assert (tmp_path / "saved").exists()
    assert saving == ""


def never_comes() -> None:
    while True:
        time.sleep(1)


def hang(folder: str) -> None:
    """Rank 1 sleeps in step 7, while a collective of rank 0 runs into its timeout; stderr goes to a file."""
    rank = dist.get_rank()
    impatient = dist.new_group(timeout=timedelta(seconds=2))
    with Path(folder, f"stderr-{rank}").open("w") as file, contextlib.redirect_stderr(file):
        watch = Watch(grace_s=20, timeout_s=5, rank=rank)
        watch.share(FileStore(f"{folder}/beats", 2), 2)
        dist.barrier()
        watch.beat(7, "data")
        if rank == 1:
            never_comes()
        watch.beat(7, "step")
        try:
            dist.all_reduce(torch.ones(1), group=impatient)
        except RuntimeError as error:
            print(f"caught {error}: " + watch.who_is_behind().replace("\n", "; "), file=sys.stderr)
        never_comes()


def test_a_hang_ends_the_job_and_names_rank_step_and_phase_with_stacks_and_so_does_a_timeout(tmp_path):
    assert [rank.code for rank in forks().run(2, hang, str(tmp_path))] == [exit_codes.HUNG, exit_codes.HUNG]
    waiting, hanging = ((tmp_path / f"stderr-{rank}").read_text() for rank in (0, 1))
    assert re.search(r"caught .*imed out.*: rank 1 behind: step 7 in data, for \d+ s; rank 0 in front", waiting)
    assert re.search(r"rank 0: nothing for \d+ s, at step 7 in step \(exit code 77\)", waiting)
    assert re.search(r"rank 1: nothing for \d+ s, at step 7 in data \(exit code 77\)", hanging)
    assert "in never_comes" in hanging
    place = r"in never_comes \(test_watchdog\.py:\d+\)"
    report = rf"^rank 1 behind: step 7 in data, for \d+ s, {place}$"
    assert len(re.findall(report, waiting + hanging, re.MULTILINE)) == 1


def test_a_process_that_was_stopped_did_not_hang(tmp_path):
    worker = """
import sys
from dtmega.distributed.watchdog import Watch
watch = Watch(grace_s=20, timeout_s=4, rank=0)
print("ready", flush=True)
sys.stdin.readline()
watch.close()
"""
    with started(sys.executable, script(tmp_path, worker), cwd=tmp_path) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGSTOP)
        time.sleep(5)
        process.send_signal(signal.SIGCONT)
        time.sleep(0.5)  # in which a watch that looked at the clock alone would report
        output, _ = process.communicate("\n", timeout=PATIENCE_S)
    assert (process.returncode, output) == (0, "")


WARNED = """
import time
from dtmega.distributed import exit_codes, process
from dtmega.distributed.watchdog import Watch
process.die_with_parent()
watch = Watch(grace_s=60, timeout_s=0, rank=0)
print("trains", flush=True)
while not watch.signals:
    time.sleep(0.02)
time.sleep(1)  # in which the agent's own comes
print("saved", flush=True)
process.leave(exit_codes.PREEMPTED)
"""


def test_slurms_warning_to_each_process_of_a_step_is_heard_by_a_worker_of_torchrun(tmp_path):
    (signals,) = re.findall(r"--signals-to-handle (\S+)", RUNNING.read_text())
    command = [*TORCHRUN, "--standalone", "--signals-to-handle", signals, script(tmp_path, WARNED)]
    with started(*command, cwd=tmp_path) as agent:
        assert agent.stdout is not None
        said = next(line for line in agent.stdout if not line.startswith("W"))
        assert said == "trains\n"
        for pid in children(agent.pid):
            os.kill(pid, signal.SIGUSR1)
        agent.send_signal(signal.SIGUSR1)
        output, _ = agent.communicate(timeout=PATIENCE_S)
    assert "saved\n" in output


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


class OnDisk:
    """A tracker that writes into the run directory what it is told."""

    def __init__(self, cfg: config.Config, known: str) -> None:
        self.id = "run"
        self._path = Path(cfg.run.dir, "tracked")

    def send(self, rows: list[trackers.Row]) -> None:
        self._write(*(f"step {row.step}" for row in rows))

    def close(self, finished: bool) -> None:
        self._write(f"closed, finished {finished}")

    def _write(self, *lines: str) -> None:
        with self._path.open("a") as file:
            file.writelines(f"{line}\n" for line in lines)


def hang_in_training(argv: list[str], folder: str, where: str) -> None:
    """train.py, whose rank 1 goes to sleep in a part of the third step; stderr goes to a file."""
    rank, calls = dist.get_rank(), []
    trackers.TRACKERS = {"wandb": OnDisk}
    trackers.check = lambda names: None
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(dist.get_world_size())}
    beat = Watch.beat

    def impatient(self: Watch, step: int, phase: str) -> None:
        if step == 3:
            self.timeout_s = 6
        beat(self, step, phase)

    Watch.beat = impatient
    parts = {
        "forward+backward": (Block, "forward"),
        "reduce": (optim, "squared_norm"),
        "optimizer": (optim.AdamW, "step"),
    }
    owner, name = parts[where]
    honest = getattr(owner, name)

    def hanging(*args: Any, **keywords: Any) -> Any:
        calls.append(None)
        if rank == 1 and len(calls) == 3:
            never_comes()
        return honest(*args, **keywords)

    setattr(owner, name, hanging)
    with Path(folder, f"stderr-{rank}").open("w") as file, contextlib.redirect_stderr(file):
        train.main(argv)


@pytest.mark.parametrize("where", ["forward+backward", "reduce", "optimizer"])
def test_a_rank_that_hangs_inside_a_step_is_named_with_the_part_of_the_step_and_the_line(tmp_path, where):
    keys = DEBUG | write_text(tmp_path) | {"mesh.tp": 2, "model.n_layers": 1, "batch.micro_batch_size": 8}
    keys |= {"eval.interval": 0, "train.drift_interval": 0, "log.params_norm": False, "log.num_zeros": False}
    keys |= {"log.trackers": ["wandb"]}
    ended = forks().run(2, hang_in_training, flags(keys, tmp_path / "run"), str(tmp_path), where)
    assert exit_codes.HUNG in [rank.code for rank in ended]
    report = "".join((tmp_path / f"stderr-{rank}").read_text() for rank in (0, 1))
    sleeps = r"in never_comes \(test_watchdog\.py:\d+\)"
    assert (
        len(
            re.findall(rf"^rank 1 (?:behind|hanging): step 3 in {re.escape(where)}, for \d+ s, {sleeps}$", report, re.M)
        )
        == 1
    )
    told = json.loads((tmp_path / "run" / "exit.json").read_text())
    done = 3 if where == "optimizer" else 2  # on rank 0, whose own update of the third step ends
    assert (told["code"], told["step"], told["checkpoint"]) == (exit_codes.HUNG, done, None)
    assert re.match(
        rf"(rank 1: )?nothing for \d+ s; rank 1 (behind|hanging): step 3 in {re.escape(where)}", told["reason"]
    )
    tracked = [*(f"step {step}" for step in range(1, done + 1)), "closed, finished False"]
    assert (tmp_path / "run" / "tracked").read_text().splitlines() == tracked
    waits = r"in \w+ \(distributed_c10d\.py:\d+\), called by \w+ \(\w+\.py:\d+\)"
    assert len(re.findall(rf"^rank 0 (?:in front|waiting): step 3 in [a-z+]+, for \d+ s, {waits}$", report, re.M)) == 1


def test_a_thread_waits_if_it_came_to_its_innermost_frame_through_torch_distributed(monkeypatch):
    def place(*files: str) -> CodePlace:
        frame: Any = None
        for file in files:
            frame = SimpleNamespace(f_code=SimpleNamespace(co_filename=file, co_name="f"), f_lineno=7, f_back=frame)
        return place_of(frame)

    torch_root, library = torch.__path__[0], "/usr/lib/python3/site-packages/transformers/modeling.py"
    collective = f"{torch_root}/distributed/distributed_c10d.py"
    ours, schedule = "/home/me/train.py", f"{torch_root}/distributed/pipelining/schedules.py"
    assert place(ours) == (False, "f (train.py:7)")
    assert place(ours, collective) == (True, "f (distributed_c10d.py:7), called by f (train.py:7)")
    assert place(ours, collective, threading.__file__) == (True, "f (threading.py:7), called by f (train.py:7)")
    assert place(ours, schedule, f"{torch_root}/nn/modules/module.py", library).waits is False
    assert place(ours, schedule, ours) == (False, "f (train.py:7)")
    assert place(ours, f"{torch_root}/autograd/graph.py").waits is False
    assert place(ours, "<frozen os>") == (False, "f (<frozen os>:7), called by f (train.py:7)")
    assert place_of(None) == (False, "")
    installed = "/usr/lib/python3/site-packages/dtmega"
    monkeypatch.setattr("dtmega.distributed.watchdog.OUR_CODE", installed)
    assert place(ours, f"{installed}/data/loader.py") == (False, "f (loader.py:7)")


def test_ranks_that_wait_in_different_places_are_told_apart(watches, monkeypatch):
    store = HashStore()
    for watch in watches:
        watch.share(store, 4)
        watch.beat(7, "forward")
    places = [CodePlace(True, "a"), CodePlace(True, "b"), CodePlace(True, "b"), CodePlace(False, "c")]
    for watch, place in zip(watches, places, strict=True):
        monkeypatch.setattr("dtmega.distributed.watchdog.place_of", lambda frame, place=place: place)
        watch._publish_place()
    assert re.sub(r", for \d+ s", "", watches[0].who_is_behind()).splitlines() == [
        "rank 3 hanging: step 7 in forward, in c",
        "rank 0 waiting: step 7 in forward, in a",
        "ranks 1, 2 waiting: step 7 in forward, in b",
    ]
    watches[3].beat(7, "reduce")  # where it was then is of an earlier beat
    assert "rank 3 in front: step 7 in reduce, for 0 s\n" in watches[0].who_is_behind() + "\n"


def test_a_closed_terminal_is_a_signal_unless_the_run_was_told_to_ignore_it():
    before = signal.getsignal(signal.SIGHUP)
    try:
        for told, heard in ((signal.SIG_DFL, [signal.SIGHUP]), (signal.SIG_IGN, [])):
            signal.signal(signal.SIGHUP, told)
            watch = Watch(grace_s=60, timeout_s=0, rank=0)
            os.kill(os.getpid(), signal.SIGHUP)
            assert watch.signals == heard
            watch.close()
            assert signal.getsignal(signal.SIGHUP) == told
    finally:
        signal.signal(signal.SIGHUP, before)
