"""Claims about faults in a run: full disks, gradients that are none, spikes, damage, other data, a rewind."""

from __future__ import annotations

import contextlib
import errno
import json
import re
import shutil
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tensorboardX.event_file_writer import EventsWriter

from dtmega import train
from dtmega.checkpoint.files import Disk
from dtmega.distributed import exit_codes
from dtmega.models.bloom import Block
from dtmega.ops.optim.spikes import Spikes
from dtmega.training import start
from dtmega.training.sharded_model import ShardedModel
from tests.layouts import write_text
from tests.resumed import KEYS, LAYOUTS, Record, Training, deviation, flags, rest, train_all, whole

DP2 = "dp 2"
NAN_STEP, NAN_SAMPLES = 3, range(8, 12)
ASYNC = {"checkpoint.mode": "async"}
SHORT = {
    "model.n_layers": 2,
    "train.steps": 8,
    "eval.interval": 4,
    "optim.warmup": 3,
    "batch.rampup": [4, 4, 24],
    "batch.micro_batch_size": 2,
    "checkpoint.interval": 2,
    "checkpoint.keep": 9,
}


@contextlib.contextmanager
def replaced(owner: Any, name: str, function: Any) -> Iterator[None]:
    honest = getattr(owner, name)
    setattr(owner, name, function)
    try:
        yield
    finally:
        setattr(owner, name, honest)


def full_disk() -> contextlib.AbstractContextManager[None]:
    """While rank 1 writes its part of the checkpoint of step 2."""
    honest = Disk.create

    class Full:
        def write(self, data: object) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

    @contextlib.contextmanager
    def create(self: Disk, folder: str, name: str) -> Iterator[Any]:
        with honest(self, folder, name) as file:
            yield Full() if folder.endswith("step-00000002") and dist.get_rank() == 1 else file

    return replaced(Disk, "create", create)


@contextlib.contextmanager
def no_room_for_metrics() -> Iterator[None]:
    """Neither in metrics.jsonl nor for TensorBoard, whose thread ends by that."""
    honest = start.Metrics

    def metrics(*args: Any, **keywords: Any) -> start.Metrics:
        made = honest(*args, **keywords)
        made._file._file.close()
        made._file._file = Path("/dev/full").open("a", buffering=1)  # noqa: SIM115  # the metrics close it
        return made

    write = EventsWriter.write_event

    def write_event(self: EventsWriter, event: Any) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise OSError(errno.ENOSPC, "No space left on device")
        write(self, event)

    with replaced(start, "Metrics", metrics), replaced(EventsWriter, "write_event", write_event):
        yield


class NotANumber(torch.autograd.Function):
    """The identity, and a gradient that is not a number."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return gradient * float("nan")


def nan_gradient(rank: int) -> contextlib.AbstractContextManager[None]:
    """Plant a fault in the backward pass of the third step, on one rank."""
    honest = Block.forward

    def forward(self: Block, h: torch.Tensor, rule: Any, head_ids: Any, sample_ids: torch.Tensor, places: Any) -> Any:
        planted = torch.is_grad_enabled() and dist.get_rank() == rank and sample_ids[0].item() in NAN_SAMPLES
        return honest(self, NotANumber.apply(h) if planted else h, rule, head_ids, sample_ids, places)

    return replaced(Block, "forward", forward)


@contextlib.contextmanager
def damaged_newest(source: Path, folder: Path) -> Iterator[None]:
    """`folder` is what `source` was after step 6, but for one bit that only rank 1 reads."""
    if dist.get_rank() == 0:
        shutil.copytree(source, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("step-00000008", ".lock"))
        flip(folder / "checkpoints" / "step-00000006" / "data-00001.bin")
    dist.barrier()
    yield


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


@pytest.fixture(scope="module")
def ran(tmp_path_factory) -> dict[str, Path]:
    """The folders of all trainings that need more than one process, done by one group."""
    folder = tmp_path_factory.mktemp("faults")
    keys, two = KEYS | write_text(folder) | SHORT, LAYOUTS[DP2][1]
    short = keys | {"train.steps": 5, "checkpoint.interval": 0}
    whole_run = whole(DP2, folder / "whole", keys)
    trainings = {
        "whole": whole_run,
        "async": whole(DP2, folder / "async", keys | ASYNC),
        "async -> pp 2": rest("pp 2, 1F1B", folder / "async", folder / "async-pp", keys | ASYNC),
        "full disk": Training(2, keys | two, folder / "full", full_disk),
        "full disk, async": Training(2, keys | two | ASYNC, folder / "full-async", full_disk),
        # So many events that a queue of ten would be full.
        "no metrics": Training(
            1,
            short | {"log.tensorboard": True, "log.interval": 1, "run.timeout_s": 60},
            folder / "no metrics",
            no_room_for_metrics,
        ),
        "damaged": Training(
            2, keys | two, folder / "damaged", partial(damaged_newest, whole_run.folder, folder / "damaged")
        ),
        "nan, 1": Training(1, short, folder / "nan 1", partial(nan_gradient, 0)),
        "nan, dp 2": Training(2, short | two, folder / "nan dp", partial(nan_gradient, 1)),
        "nan, tp 2": Training(2, short | LAYOUTS["tp 2"][1], folder / "nan tp", partial(nan_gradient, 1)),
        "nan, pp 2": Training(2, short | LAYOUTS["pp 2, 1F1B"][1], folder / "nan pp", partial(nan_gradient, 0)),
    }
    train_all([*trainings.values()])
    return {name: training.folder for name, training in trainings.items()}


def checkpoints(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").glob("[!.]*"))


def same_bits(run: Record, truth: Record) -> bool:
    return deviation(run, truth, first=1).same_bits


def test_asynchronous_checkpoints_change_no_number_and_say_how_long_training_stood_still(ran):
    run = Record(ran["async"])
    assert same_bits(run, Record(ran["whole"]))
    assert checkpoints(ran["async"]) == [f"step-000000{n:02}" for n in (2, 4, 6, 8)]
    saved = [line for line in run.lines if "checkpoint" in line]
    assert [line["checkpoint"] for line in saved] == [2, 4, 6, 8]
    assert all(line["checkpoint_stall_s"] > 0 and "checkpoint_error" not in line for line in saved)


def test_an_asynchronous_checkpoint_is_resumed_on_another_layout(ran):
    found = deviation(Record(ran["async -> pp 2"]), Record(ran["whole"]))
    assert found.within_bounds(), found


def test_a_pipeline_says_how_to_get_a_sample(ran):
    command = f"python -m dtmega generate --run {ran['async -> pp 2']} --prompt 'def '"
    assert f"for a sample: {command}\n" in (ran["async -> pp 2"] / "stdout-0").read_text()


@pytest.mark.parametrize("name", ["full disk", "full disk, async"])
def test_a_full_disk_costs_a_warning_and_one_checkpoint(ran, name):
    run = Record(ran[name])
    assert same_bits(run, Record(ran["whole"]))
    (failed,) = [line for line in run.lines if "checkpoint_error" in line]
    assert failed["checkpoint"] == 2
    assert re.search(r"No space left on device.* \([\d,]+ bytes free\)$", failed["checkpoint_error"])
    assert "WARNING: no checkpoint of step 2, the ones before stay: " in (ran[name] / "stdout-0").read_text()
    assert checkpoints(ran[name]) == [f"step-000000{n:02}" for n in (4, 6, 8)]


def test_a_disk_without_room_for_metrics_ends_no_run(ran):
    assert "WARNING: metrics.jsonl cannot be written: [Errno 28]" in (ran["no metrics"] / "stdout-0").read_text()
    assert checkpoints(ran["no metrics"]) == ["step-00000005"]


def test_where_the_newest_checkpoint_is_damaged_the_one_before_is_used_and_the_file_is_named(ran):
    output = (ran["damaged"] / "stdout-0").read_text()
    assert "resumed at step 4" in output
    assert re.search(r"damaged: .*step-00000006: data-00001\.bin: the bytes of '.*' from .* do not match", output)
    assert same_bits(Record(ran["damaged"]), Record(ran["whole"]))


@pytest.mark.parametrize("layout", ["dp 2", "tp 2", "pp 2"])
def test_a_gradient_that_is_none_on_one_rank_makes_all_skip_the_step_and_agree_afterwards(ran, layout):
    run, truth = Record(ran[f"nan, {layout}"]), Record(ran["nan, 1"])
    for record in (run, truth):
        assert [(n, line["reason"]) for n, line in record.steps.items() if line.get("skipped")] == [
            (NAN_STEP, "grad_norm is nan")
        ]
    found = deviation(run, truth, first=NAN_STEP + 1)
    assert found.within_bounds(), found


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> dict[str, Any]:
    """Keys of a run of one process that takes a second."""
    size = {"model.hidden_size": 16, "model.n_layers": 1, "model.n_heads": 2, "batch.global_batch_size": 2}
    length = {"batch.rampup": [], "train.steps": 12, "checkpoint.interval": 4, "checkpoint.keep": 9}
    return KEYS | write_text(tmp_path_factory.mktemp("small")) | size | length


def alone(keys: dict[str, Any], folder: Path) -> int:
    """train.py in this process; returns the exit code."""
    try:
        return train.main(flags(keys, folder))
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


@pytest.fixture
def spike(monkeypatch) -> int:
    """The step whose gradient is 1000 times too large; what is usual is known after half of a short window."""
    monkeypatch.setattr(Spikes, "WINDOW", 16)
    honest = ShardedModel.forward_backward

    def forward_backward(
        self: ShardedModel, microbatches: Any, counts: dict[str, float], scale: float | None
    ) -> torch.Tensor:
        spike = 20 in microbatches[0]["sample_ids"]
        fewer = {name: n / 1000 if spike else n for name, n in counts.items()}
        return honest(self, microbatches, fewer, scale)

    monkeypatch.setattr(ShardedModel, "forward_backward", forward_backward)
    return 11


def test_a_spike_is_skipped_where_that_is_wanted_and_a_resumed_run_knows_what_was_usual(tmp_path, small, spike):
    long = small | {"train.steps": 12, "checkpoint.interval": 0, "train.drift_interval": 0}
    skipping = long | {"train.skip_spikes": 6.0}
    assert alone(long, tmp_path / "not") == 0
    assert alone(skipping, tmp_path / "whole") == 0
    assert alone(skipping | {"train.exit_interval": 10}, tmp_path / "cut") == 0
    assert alone(skipping, tmp_path / "cut") == 0
    whole_run, cut = Record(tmp_path / "whole"), Record(tmp_path / "cut")
    assert not any(line.get("skipped") for line in Record(tmp_path / "not").lines)
    assert [step for step, line in whole_run.steps.items() if line.get("skipped")] == [spike]
    assert [step for step, line in cut.steps.items() if line.get("skipped")] == [spike]
    assert same_bits(cut, whole_run)


def test_a_run_does_not_go_on_with_other_data_unless_it_may(tmp_path, small, capsys):
    assert alone(small | {"train.exit_interval": 4}, tmp_path / "run") == 0
    for suffix in (".bin", ".idx"):
        shutil.copy(f"{small['data.path']}{suffix}", tmp_path / f"text{suffix}")
    moved = small | {"data.path": str(tmp_path / "text")}
    assert alone(moved | {"train.exit_interval": 6}, tmp_path / "run") == 0  # where the data is does not matter
    capsys.readouterr()
    changed = moved
    for change, said in (
        ({"run.seed": 4321}, "[run] seed was 1234, is 4321"),
        ({"data.split": "7,2,1"}, "[data] split was"),
        ({}, "[data] path was"),
    ):
        if not change:  # but for one token
            content = bytearray((tmp_path / "text.bin").read_bytes())
            content[1000] = 9 if content[1000] != 9 else 10
            (tmp_path / "text.bin").write_bytes(content)
        changed = moved | change
        assert alone(changed, tmp_path / "run") == exit_codes.REFUSED
        message = capsys.readouterr().err
        assert "step-00000006 is of a run on other data: " in message
        assert said in message
    assert alone(changed | {"checkpoint.allow_changed_data": True}, tmp_path / "run") == 0
    assert "resumed at step 6" in capsys.readouterr().out


@pytest.mark.parametrize("what", ["manifest.json", "data-00000.bin"])
def test_where_every_checkpoint_is_damaged_the_run_does_not_start_from_scratch(tmp_path, small, capsys, what):
    assert alone(small, tmp_path) == 0
    for folder in (tmp_path / "checkpoints").glob("step-*"):
        flip(folder / what)
    before, metrics = checkpoints(tmp_path), (tmp_path / "metrics.jsonl").read_bytes()
    capsys.readouterr()
    assert alone(small, tmp_path) == exit_codes.DAMAGED
    message = capsys.readouterr().err
    for step in (4, 8, 12):
        assert re.search(rf"damaged: .*step-000000{step:02}: {what}: ", message)
    told = json.loads((tmp_path / "exit.json").read_text())
    assert (told["code"], f"dtmega: {told['reason']}\n") == (exit_codes.DAMAGED, message)
    assert checkpoints(tmp_path) == before
    assert (tmp_path / "metrics.jsonl").read_bytes() == metrics


@pytest.mark.parametrize("damage", ["short", "header"])
def test_damaged_data_is_named_before_anything_starts(tmp_path, small, capsys, damage):
    for suffix in (".bin", ".idx"):
        shutil.copy(f"{small['data.path']}{suffix}", tmp_path / f"text{suffix}")
    if damage == "short":
        (tmp_path / "text.bin").write_bytes((tmp_path / "text.bin").read_bytes()[:-100])
    else:
        (tmp_path / "text.idx").write_bytes(b"NOTINDEX" + (tmp_path / "text.idx").read_bytes()[8:])
    assert alone(small | {"data.path": str(tmp_path / "text")}, tmp_path / "run") == exit_codes.REFUSED
    assert f"text{'.bin' if damage == 'short' else '.idx'}" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_run_that_was_taken_back_keeps_where_it_goes_on_and_its_new_branch(tmp_path, small):
    assert alone(small, tmp_path) == 0
    before = Record(tmp_path)
    named = str(tmp_path / "checkpoints" / "step-00000004")
    back = small | {"checkpoint.resume": named, "checkpoint.keep": 1}
    assert alone(back | {"train.exit_interval": 6}, tmp_path) == 0
    # Of the new branch one checkpoint stays, whatever the numbers of the old one are; the named one is not purged.
    assert checkpoints(tmp_path) == ["step-00000004", "step-00000006", "superseded-1"]
    assert alone(small | {"checkpoint.keep": 1}, tmp_path) == 0
    assert checkpoints(tmp_path) == ["step-00000012", "superseded-1"]
    assert sorted(path.name for path in (tmp_path / "checkpoints" / "superseded-1").iterdir()) == [
        "step-00000008",
        "step-00000012",
    ]
    assert same_bits(Record(tmp_path), before)
