"""Claims about the end of a run: exit code, last lines, checkpoints; failed saves, stops, steps without a loss."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import ANY

import numpy as np
import pytest
import torch.distributed as dist

from dtmega import train
from dtmega.checkpoint import tensor_files
from dtmega.checkpoint.run import Checkpoints
from dtmega.data.indexed_files.writer import IndexedWriter
from dtmega.distributed import exit_codes
from dtmega.training import device_peaks, start
from tests.layouts import write_text
from tests.resumed import Record, Training, train_all
from tests.test_faults import alone, checkpoints, replaced
from tests.test_loop import SMALL

STEP_S = 25
ASYNC = {"checkpoint.mode": "async"}
AT_END = {"checkpoint.interval": 0}
EVERY_3 = {"checkpoint.interval": 3}
NOT_FINAL = {"checkpoint.final": False}


@pytest.fixture(scope="module")
def keys(tmp_path_factory) -> dict[str, Any]:
    """The keys of a run of four steps, with a checkpoint after each second one and no evaluation before the end."""
    short = {"train.steps": 4, "checkpoint.interval": 2, "checkpoint.keep": 9, "eval.interval": 0, "eval.steps": 1}
    return SMALL | write_text(tmp_path_factory.mktemp("text")) | short | {"eval.sample_tokens": 0}


@contextlib.contextmanager
def no_room(steps: set[int]) -> Iterator[None]:
    """The checkpoints of these steps cannot be written."""
    honest = tensor_files.save

    def save(files: Any, folder: str, tensors: Any, step: int, *others: Any) -> Any:
        if step in steps:
            raise tensor_files.Failed("no room")
        return honest(files, folder, tensors, step, *others)

    with replaced(tensor_files, "save", save):
        yield


@contextlib.contextmanager
def in_steps(happens: Callable[[int], None]) -> Iterator[None]:
    """Each training step takes STEP_S on the clock of the loop, and this happens in it."""
    honest, clock = train.train_step, [1000.0]

    def train_step(run: Any, batch: Any) -> Any:
        clock[0] += STEP_S
        happens(batch.first_sample // batch.samples + 1)
        return honest(run, batch)

    clocks = SimpleNamespace(perf_counter=time.perf_counter, monotonic=lambda: clock[0])
    with replaced(train, "train_step", train_step), replaced(train, "time", clocks):
        yield


class Saves(NamedTuple):
    """A run some of whose saves fail.

    Attributes:
        lost: steps whose checkpoints cannot be written.
        last: what it says at its end, {} being its folder.
        there: steps whose checkpoints it leaves.
    """

    lost: set[int]
    keys: dict[str, Any]
    code: int
    last: str
    there: list[int]


WRITTEN = "written: config.toml and metrics.jsonl in {}"
NEWEST = f"{WRITTEN}, {{}}/checkpoints/step-0000000"
NOT_SAVED = "NOT SAVED: step {}; the newest checkpoint: {}"
STEP_2 = "{}/checkpoints/step-00000002"
SAVES = {
    "the first fails": Saves({2}, {}, exit_codes.DONE, f"{NEWEST}4", [4]),
    "the first fails in a thread": Saves({2}, ASYNC, exit_codes.DONE, f"{NEWEST}4", [4]),
    "the last fails": Saves({4}, {}, exit_codes.STUCK, NOT_SAVED.format(4, STEP_2), [2]),
    "the last fails in a thread": Saves({4}, ASYNC, exit_codes.STUCK, NOT_SAVED.format(4, STEP_2), [2]),
    "the only one fails": Saves({4}, AT_END, exit_codes.STUCK, NOT_SAVED.format(4, "none"), []),
    "where it is stopped": Saves({2}, {"train.exit_interval": 2}, exit_codes.STUCK, NOT_SAVED.format(2, "none"), []),
    "none at the end": Saves(set(), EVERY_3 | NOT_FINAL, exit_codes.DONE, f"{NEWEST}3", [3]),
    "none at the end, from a thread": Saves(set(), EVERY_3 | NOT_FINAL | ASYNC, exit_codes.DONE, f"{NEWEST}3", [3]),
    "none at all": Saves(set(), AT_END | NOT_FINAL, exit_codes.DONE, WRITTEN, []),
}


@pytest.mark.parametrize("name", SAVES)
def test_a_run_names_its_newest_checkpoint_and_has_an_exit_code_of_its_own_if_the_last_save_failed(
    tmp_path, keys, capsys, name
):
    lost, more, code, last, there = SAVES[name]
    with no_room(lost):
        assert alone(keys | more, tmp_path) == code
    ending = [last.format(tmp_path, tmp_path)]
    if code == exit_codes.DONE:
        ending.append(f"to look at it: dtmega report {tmp_path}")
    assert capsys.readouterr().out.splitlines()[-len(ending) :] == ending
    assert checkpoints(tmp_path) == [f"step-{step:08}" for step in there]
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    failed = {line["checkpoint"] for line in lines if line.get("checkpoint_error", "").startswith("no room")}
    assert failed == lost
    newest = f"{tmp_path}/checkpoints/step-{there[-1]:08}" if there else None
    told = json.loads((tmp_path / "exit.json").read_text())
    assert (told["code"], told["checkpoint"]) == (code, newest)
    assert told["reason"].startswith("finished" if code == exit_codes.DONE else "not saved: no room")
    assert told["step"] == more.get("train.exit_interval", keys["train.steps"])


class Stops(NamedTuple):
    """A run that is to stop.

    Attributes:
        signalled: the step in which a signal comes, 0 for none.
        after: the step after which it ends.
        why: what it says; '' if it is done by then.
    """

    keys: dict[str, Any]
    signalled: int
    code: int
    after: int
    why: str


INTERVAL, MINUTES = "train.exit_interval", "train.exit_duration_min"
GOES_ON = "the same command goes on from there"
STOPS = {
    "interval": Stops({INTERVAL: 2}, 0, exit_codes.DONE, 2, f"[train] exit_interval; {GOES_ON}"),
    "interval, save in a thread": Stops(
        {INTERVAL: 2} | ASYNC, 0, exit_codes.DONE, 2, f"[train] exit_interval; {GOES_ON}"
    ),
    "interval of the end": Stops({INTERVAL: 4}, 0, exit_codes.DONE, 4, ""),
    "minutes": Stops({MINUTES: 2 * STEP_S / 60}, 0, exit_codes.DONE, 2, f"[train] exit_duration_min; {GOES_ON}"),
    "signal": Stops({}, 3, exit_codes.PREEMPTED, 3, f"a signal asked for it; {GOES_ON}"),
    "all at once": Stops({INTERVAL: 1, MINUTES: 0.1}, 1, exit_codes.PREEMPTED, 1, f"a signal asked for it; {GOES_ON}"),
    "of a run that starts anew each time": Stops(
        {INTERVAL: 3, "checkpoint.resume": "none"},
        0,
        exit_codes.DONE,
        3,
        f"[train] exit_interval; with --checkpoint.resume auto {GOES_ON}; as it is, it would start anew",
    ),
}


@pytest.mark.parametrize("name", STOPS)
def test_a_run_that_is_stopped_says_why_and_is_saved_there(tmp_path, keys, capsys, name):
    more, signalled, code, after, why = STOPS[name]

    def happens(step: int) -> None:
        assert not told.exists()  # what the start before has left
        if step == signalled:
            os.kill(os.getpid(), signal.SIGTERM)

    told = tmp_path / "exit.json"
    told.write_text('{"code": 75}')
    before = signal.getsignal(signal.SIGTERM)
    with in_steps(happens):
        assert alone(keys | AT_END | more, tmp_path) == code
    assert signal.getsignal(signal.SIGTERM) == before
    assert checkpoints(tmp_path) == [f"step-{after:08}"]
    reason = why.partition(";")[0] or "finished"
    newest = f"{tmp_path}/checkpoints/step-{after:08}"
    assert exit_codes.ExitRecord.read(tmp_path) == (code, reason, after, newest, ANY)
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("stopped")]
    assert said == ([f"stopped after step {after} of 4: {why}"] if why else [])


def test_a_start_that_fails_says_why_and_when_and_leaves_the_run_its_step_and_its_checkpoint(tmp_path, keys, capsys):
    assert alone(keys, tmp_path) == 0
    finished = exit_codes.ExitRecord.read(tmp_path)
    assert finished is not None
    path = tmp_path / "exit.json"
    for was_killed in (False, True):
        for wrong, why in (
            ({"train.steps": "many"}, "--train.steps: "),
            ({"data.path": "no/such"}, "no/such"),
            ({"run.seed": 4321}, "[run] seed was 1234, is 4321"),
        ):
            path.write_text(json.dumps({"code": 75, "step": finished.step, "checkpoint": finished.checkpoint}))
            if was_killed:
                path.unlink()
            before = datetime.now(timezone.utc).replace(microsecond=0)
            assert alone(keys | wrong, tmp_path) == exit_codes.REFUSED
            told = exit_codes.ExitRecord.read(tmp_path)
            assert told is not None
            assert (told.code, told.step, told.checkpoint) == (exit_codes.REFUSED, 4, finished.checkpoint)
            assert why in told.reason
            assert told.reason in capsys.readouterr().err
            assert before <= datetime.fromisoformat(told.time) <= datetime.now(timezone.utc)
    with replaced(start, "open_text", no_memory), pytest.raises(MemoryError):
        alone(keys, tmp_path)
    assert exit_codes.ExitRecord.read(tmp_path) == (
        exit_codes.FAILED,
        "MemoryError: 3 TiB",
        4,
        finished.checkpoint,
        ANY,
    )


def no_memory(*_: object) -> None:
    raise MemoryError("3 TiB")


@pytest.mark.parametrize("told_by", ["exit.json", "metrics.jsonl", "starts.jsonl"])
def test_a_run_whose_checkpoints_are_not_to_be_seen_is_refused_and_begins_anew_only_by_name(
    tmp_path, keys, capsys, told_by
):
    run_dir, root = tmp_path / "run", tmp_path / "disk" / "run"
    keys = keys | {"checkpoint.dir": str(root)}
    assert alone(keys | {"train.exit_interval": 2}, run_dir) == 0
    assert alone(keys | {"train.exit_interval": 3}, run_dir) == 0
    (tmp_path / "disk").rename(tmp_path / "moved")
    had = f"{root}/step-00000003"
    if told_by != "exit.json":
        (run_dir / "exit.json").unlink()
        had = f"a checkpoint of step {3 if told_by == 'metrics.jsonl' else 2} ({told_by})"
    if told_by == "starts.jsonl":
        (run_dir / "metrics.jsonl").write_text('{"step": 3, "checkpoint": 3, "checkpoint_error": "full"}\n')
    written_anew = ("exit.json", ".lock")
    before = {path: path.read_bytes() for path in run_dir.iterdir() if path.name not in written_anew}
    for _ in range(2):
        assert alone(keys, run_dir) == exit_codes.REFUSED
        said = capsys.readouterr().err
        assert f"{run_dir} is of a run that had {had}, and {root} has no checkpoint: " in said
        assert "[checkpoint] resume = 'none'" in said
    assert {path: path.read_bytes() for path in run_dir.iterdir() if path.name not in written_anew} == before
    assert not (tmp_path / "disk").exists()
    assert alone(keys | {"checkpoint.resume": "none"}, run_dir) == 0
    assert (run_dir / "metrics.1.jsonl").read_bytes() == before[run_dir / "metrics.jsonl"]
    assert (root / "step-00000004").is_dir()


def test_a_run_that_never_saved_begins_anew(tmp_path, keys):
    never = keys | {"checkpoint.interval": 0, "checkpoint.final": False}
    for _ in range(2):
        assert alone(never, tmp_path) == 0


def test_an_evaluation_leaves_the_run_its_step_and_its_checkpoint(tmp_path, keys):
    assert alone(keys, tmp_path) == 0
    older = f"{tmp_path}/checkpoints/step-00000002"
    assert alone(keys | {"eval.only": True, "checkpoint.resume": older}, tmp_path) == 0
    assert exit_codes.ExitRecord.read(tmp_path) == (0, "[eval] only", 4, f"{tmp_path}/checkpoints/step-00000004", ANY)


def test_a_checkpoint_that_a_killed_save_did_not_delete_is_deleted_at_the_next_start(tmp_path, keys):
    one = keys | {"checkpoint.keep": 1}
    with replaced(Checkpoints, "_purge", lambda *_: None):  # as a kill just before it
        assert alone(one, tmp_path) == 0
    assert checkpoints(tmp_path) == ["step-00000002", "step-00000004"]
    newest = str(tmp_path / "checkpoints" / "step-00000004")
    assert alone(one | {"checkpoint.resume": newest}, tmp_path) == 0  # one that goes back could go back further
    assert checkpoints(tmp_path) == ["step-00000002", "step-00000004"]
    assert alone(one, tmp_path) == 0
    assert checkpoints(tmp_path) == ["step-00000004"]


def test_a_start_with_nothing_left_to_train_deletes_nothing_that_the_run_was_to_keep(tmp_path, keys):
    assert alone(keys, tmp_path) == 0
    assert alone(keys | {"checkpoint.keep": 1}, tmp_path) == 0
    assert checkpoints(tmp_path) == ["step-00000002", "step-00000004"]


@contextlib.contextmanager
def late_on_rank_1() -> Iterator[None]:
    """Steps that take an hour on the clock of one rank, and machines of 1 TFLOP/s."""
    hours = itertools.count()
    now = time.monotonic if dist.get_rank() == 0 else lambda: 3600.0 * next(hours)
    clocks = SimpleNamespace(perf_counter=time.perf_counter, monotonic=now)
    with replaced(train, "time", clocks), replaced(device_peaks, "matmul_flops", lambda device, dtype: 1e12):
        yield


def test_where_the_time_is_up_on_one_rank_all_stop_and_one_writes_for_all(tmp_path, keys):
    two = keys | AT_END | {"train.exit_duration_min": 30, "mesh.dp_shard": 2, "log.num_zeros": True}
    train_all([Training(2, two, tmp_path, late_on_rank_1)])
    assert checkpoints(tmp_path) == ["step-00000001"]
    said, nothing = ((tmp_path / f"stdout-{rank}").read_text() for rank in range(2))
    assert "float32 on 2 x cpu" in said
    assert nothing == ""
    step, _saved = Record(tmp_path).lines
    S, D, V = two["data.seq_len"], two["model.hidden_size"], two["model.vocab_size"]
    flops_per_token = 6 * 12 * D * D + 6 * S * D + 6 * V * D
    assert step["tokens_per_s"] == pytest.approx(4 * S / step["step_time_s"])
    of_padding = two["model.pad_vocab_to_multiple"] - V
    assert of_padding * D <= step["num_zeros"] <= (of_padding + 1) * D  # a bias of the keys may have some
    assert step["mfu"] == pytest.approx(step["tokens_per_s"] * flops_per_token / 2e12)


def test_a_run_that_started_from_weights_goes_on_from_its_checkpoint_and_not_from_them_again(tmp_path, keys):
    assert alone(keys | {"train.steps": 2}, tmp_path / "weights") == 0
    started = keys | {"train.steps": 2, "model.init_from": str(tmp_path / "weights" / "checkpoints" / "step-00000002")}
    assert alone(started, tmp_path / "whole") == 0
    for _ in range(2):
        assert alone(started | {"train.exit_interval": 1}, tmp_path / "cut") == 0
    losses = [Record(tmp_path / name).series("loss") for name in ("weights", "whole", "cut")]
    assert losses[0][0] != losses[1][0]
    assert losses[1] == losses[2]


def test_a_batch_without_any_label_has_loss_zero_and_is_no_skipped_step(tmp_path, keys):
    with IndexedWriter(tmp_path / "ends", np.dtype(np.uint16)) as writer:
        for _ in range(40):
            writer.add([0] * 20)  # nothing but ends of documents, which [data] eod_mask_loss leaves out
    assert alone(keys | {"data.path": str(tmp_path / "ends"), "data.split": "1,0,0"}, tmp_path / "run") == 0
    steps = Record(tmp_path / "run").steps
    assert {step: (line["loss"], line["grad_norm"]) for step, line in steps.items()} == dict.fromkeys(
        range(1, 5), (0, 0)
    )
    assert not any("skipped" in line for line in steps.values())
