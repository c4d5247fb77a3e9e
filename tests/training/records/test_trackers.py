"""trackers.py: what reaches a tracker, and that a tracker which fails or hangs is one line."""

from __future__ import annotations

import faulthandler
import importlib.metadata
import json
import sqlite3
import struct
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

from dtmega import config
from dtmega.distributed import exit_codes, process
from dtmega.distributed.watchdog import Watch
from dtmega.ops import cost
from dtmega.training import device_peaks
from dtmega.training.metrics import Metrics
from dtmega.training.records import trackers

STEPS, BATCH = 6, 4


class Recorder:
    """A tracker that keeps what it is sent."""

    runs: list[Recorder]

    def __init__(self, cfg: config.Config, known: str) -> None:
        self.id = known or f"run-{len(self.runs)}"
        self.rows: list[trackers.Row] = []
        self.finished: bool | None = None
        self.runs.append(self)

    def send(self, rows: list[trackers.Row]) -> None:
        self.rows += rows

    def close(self, finished: bool) -> None:
        self.finished = finished


class Broken(Recorder):
    def send(self, rows: list[trackers.Row]) -> None:
        raise ConnectionResetError("the service is gone\nTraceback ...")


class Hanging(Recorder):
    released = threading.Event()

    def send(self, rows: list[trackers.Row]) -> None:
        self.released.wait()


@pytest.fixture(autouse=True)
def fakes(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(device_peaks, "matmul_flops", lambda device, dtype: 1e12)
    monkeypatch.setattr(trackers, "PAUSE_S", 0.01)
    for kind in (Recorder, Broken, Hanging):
        monkeypatch.setattr(kind, "runs", [], raising=False)
    Hanging.released.clear()
    yield
    Hanging.released.set()


def settings(folder: Path, *names: str, steps: int = STEPS) -> config.Config:
    return config.Config(
        run=config.Run(dir=str(folder)),
        data=config.Data(seq_len=16),
        train=config.Train(steps=steps),
        log=config.Log(interval=0, tensorboard=False, trackers=list(names), project="tests"),
    )


def run(folder: Path, *names: str, after: int = 0, until: int = STEPS, steps: int = STEPS) -> None:
    """Steps `after` + 1 to `until` of a run, and a validation after the last of them."""
    cfg = settings(folder, *names, steps=steps)
    pieces = [cost.Piece("embed", 7, 0, 0)]
    record = Metrics(cfg, pieces, torch.device("cpu"), 1, cfg.end(0, 0), start_step=after)
    for step in range(after + 1, until + 1):
        samples = range((step - 1) * BATCH, step * BATCH)
        loss = float("nan") if step == 2 else 1 / step
        record.step(step, loss, 0.5, 1e-3, samples=samples, step_time_s=0.5)
    record.validation(until, 2.5)
    record.close()


def abandoned(folder: Path, *names: str, wait_for: Callable[[], bool] = lambda: True) -> None:
    """A run that the watch ends after its first step; `job.leave` has to be replaced."""
    cfg = settings(folder, *names)
    record = Metrics(cfg, [cost.Piece("embed", 7, 0, 0)], torch.device("cpu"), 1, cfg.end(0, 0))
    record.step(1, 2.5, 0.5, 1e-3, samples=range(BATCH), step_time_s=0.5)
    while not wait_for():
        time.sleep(0.01)
    watch = Watch(grace_s=60, timeout_s=0, rank=0)
    watch.before_exit(record.abandon)
    watch._end(exit_codes.STUCK, "a signal came")
    watch.close()
    faulthandler.cancel_dump_traceback_later()
    record._file.close()


def test_a_tracker_gets_every_finite_number_of_metrics_jsonl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(trackers.TRACKERS, "wandb", Recorder)
    run(tmp_path, "wandb")
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    numbers = [{k: v for k, v in line.items() if type(v) in (int, float) and k != "step"} for line in lines]
    (tracked,) = Recorder.runs
    assert [(row.step, row.values) for row in tracked.rows] == [
        (line["step"], values) for line, values in zip(lines, numbers, strict=True)
    ]
    assert "loss" not in numbers[1]
    assert tracked.finished is True


def test_a_validation_is_sent_although_its_step_was_sent_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(trackers.TRACKERS, "wandb", Recorder)
    tracked = trackers.Trackers(settings(tmp_path, "wandb"), new=True)
    tracked.record(1, {"loss": 1.0})
    while not Recorder.runs or not Recorder.runs[0].rows:
        time.sleep(0.01)
    tracked.record(1, {"val_loss": 2.0})
    tracked.close(finished=True, within_s=5)
    assert [row.values for row in Recorder.runs[0].rows] == [{"loss": 1.0}, {"val_loss": 2.0}]


def test_a_run_that_goes_on_has_the_same_id_and_sends_repeated_steps_once(tmp_path: Path, monkeypatch):
    monkeypatch.setitem(trackers.TRACKERS, "wandb", Recorder)
    run(tmp_path, "wandb", until=4)
    run(tmp_path, "wandb", after=2)
    first, second = Recorder.runs
    assert (first.id, first.finished) == (second.id, False)
    assert [row.step for row in first.rows] == [1, 2, 3, 4, 4]
    assert [row.step for row in second.rows] == [5, 6, 6]


def test_a_new_run_in_the_same_directory_is_a_new_run_at_the_tracker(tmp_path: Path, monkeypatch):
    monkeypatch.setitem(trackers.TRACKERS, "wandb", Recorder)
    run(tmp_path, "wandb")
    run(tmp_path, "wandb")
    first, second = Recorder.runs
    assert first.id != second.id
    assert [row.step for row in second.rows] == [1, 2, 3, 4, 5, 6, 6]


@pytest.mark.parametrize(
    "kept", ["{", "[]", '{"wandb": 3}', '{"wandb": {"id": 5, "newest": 2}}', '{"wandb": {"id": ""}}']
)
def test_a_damaged_file_of_ids_begins_a_new_run(tmp_path: Path, monkeypatch, kept: str):
    monkeypatch.setitem(trackers.TRACKERS, "wandb", Recorder)
    (tmp_path / trackers.FILE).write_text(kept)
    run(tmp_path, "wandb", after=2)
    (tracked,) = Recorder.runs
    assert [row.step for row in tracked.rows] == [3, 4, 5, 6, 6]


def test_a_tracker_that_fails_is_one_line_and_the_others_and_the_record_are_whole(tmp_path: Path, monkeypatch, capfd):
    monkeypatch.setitem(trackers.TRACKERS, "wandb", Broken)
    monkeypatch.setitem(trackers.TRACKERS, "mlflow", Recorder)
    run(tmp_path, "wandb", "mlflow")
    assert capfd.readouterr().err == "wandb tracks no longer: the service is gone\n"
    assert len(Recorder.runs[-1].rows) == STEPS + 1
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == STEPS + 1


def test_a_tracker_that_hangs_stops_neither_a_step_nor_the_end(tmp_path: Path, monkeypatch, capfd):
    monkeypatch.setitem(trackers.TRACKERS, "wandb", Hanging)
    monkeypatch.setattr(trackers, "WAITING", 3)
    cfg = settings(tmp_path, "wandb")
    record = trackers.Trackers(cfg, new=True)
    record.record(1, {"loss": 1.0})
    while not Hanging.runs or not record._sinks[0]._rows.empty():
        time.sleep(0.01)
    for step in range(2, 7):
        record.record(step, {"loss": 1.0})
    waited_s: list[float] = []
    monkeypatch.setattr(record._sinks[0]._thread, "join", waited_s.append)
    record.close(finished=True, within_s=0.2)
    assert 0 < waited_s[0] <= 0.2
    assert capfd.readouterr().err.splitlines() == [
        "wandb is 3 lines behind: it gets no more until it has caught up",
        "wandb did not close in 0.2 s: it may lack the last steps",
    ]


def test_a_run_that_is_ended_from_outside_its_main_thread_is_closed_and_waits_for_no_dead_tracker(
    tmp_path: Path, monkeypatch, capfd
):
    monkeypatch.setitem(trackers.TRACKERS, "wandb", Hanging)
    monkeypatch.setitem(trackers.TRACKERS, "mlflow", Recorder)
    monkeypatch.setattr(trackers, "ABANDON_S", 0.2)
    codes: list[int] = []
    monkeypatch.setattr(process, "leave", codes.append)
    abandoned(tmp_path, "wandb", "mlflow", wait_for=lambda: bool(Hanging.runs))
    assert codes == [exit_codes.STUCK]
    (tracked,) = Recorder.runs
    assert ([row.step for row in tracked.rows], tracked.finished) == ([1], False)
    assert capfd.readouterr().err.splitlines() == [
        "rank 0: a signal came, at step 0 in start (exit code 76)",
        "wandb did not close in 0.2 s: it may lack the last steps",
    ]


@pytest.mark.parametrize("name", trackers.TRACKERS)
def test_no_tracker_is_sent_the_credentials_in_a_url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str):
    monkeypatch.setenv("WANDB_MODE", "offline")
    library = MagicMock()
    monkeypatch.setattr(trackers, "import_module", lambda name: library)
    url = "s3://USER:hunter2@bucket/run?X-Amz-Signature=hunter3"
    cfg = settings(tmp_path, name)
    # A run refuses such a URL; an older checkpoint's configuration may hold one.
    cfg = cfg.model_copy(update={"checkpoint": cfg.checkpoint.model_copy(update={"dir": url})})
    trackers.TRACKERS[name](cfg, "")
    sent = str(library.mock_calls)
    assert "s3://***@bucket/run?***" in sent
    assert "hunter" not in sent


def test_values_of_keys_that_are_named_like_secrets_are_masked_and_no_key_of_ours_is():
    names = ("password", "api_key", "WANDB_API_KEY", "secret-key", "access_token", "credentials")
    plain = {"tokenizer": "bytes", "tokens": 3, "list": [{"keys": 1, "token": "x"}], "url": "see https://a.b/c"}
    sent = trackers.masked({"section": {**dict.fromkeys(names, "x"), **plain}})
    assert sent == {"section": {**dict.fromkeys(names, "***"), **plain, "list": [{"keys": 1, "token": "***"}]}}
    ours = config.load(["--config", "bloom.toml"]).model_dump()
    assert trackers.masked(ours) == ours


def test_a_tracker_that_is_not_installed_is_refused_with_what_to_install(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "trackio", None)
    with pytest.raises(ValueError, match=r"^\[log\] trackers needs trackio, .*: pip install -e '\.\[trackio\]'$"):
        trackers.check(["trackio"])


def test_no_tracker_is_imported_by_a_run_without_trackers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    asked: list[str] = []
    monkeypatch.setattr(trackers, "import_module", asked.append)
    run(tmp_path)
    assert asked == []
    assert not (tmp_path / trackers.FILE).exists()


# ------------------------------------------------------------------- the libraries themselves, where they are installed


def real(name: str, major: str) -> None:
    """Skip where the library is not; a version that pip took by backtracking is noticed."""
    pytest.importorskip(name)
    installed = {"mlflow": "mlflow-skinny"}.get(name, name)
    assert importlib.metadata.version(installed).startswith(major)


def expected(step: int) -> float:
    return 1 / step


def records(raw: bytes) -> list[bytes]:
    """The records of a .wandb file: after 7 bytes LevelDB's log, in blocks of 32 KiB."""
    found, place = [b""], 7
    while place + 7 <= len(raw):
        left_in_block = 32768 - place % 32768
        if left_in_block < 7:
            place += left_in_block
            continue
        _, length, kind = struct.unpack_from("<IHB", raw, place)
        found[-1] += raw[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or the last part of one
            found.append(b"")
    return found[:-1]


def losses_of_wandb(path: Path) -> list[tuple[int, float]]:
    """Steps and losses in a .wandb file."""
    from wandb.proto import wandb_internal_pb2

    losses = []
    for data in records(path.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        items = {item.key or item.nested_key[0]: item.value_json for item in record.history.item}
        if "loss" in items:
            losses.append((int(items["_step"]), float(items["loss"])))
    return losses


@pytest.mark.filterwarnings("default")
def test_a_run_that_the_watch_ends_is_whole_at_wandb_and_at_mlflow(tmp_path: Path, monkeypatch):
    real("wandb", "0.")
    real("mlflow", "3.")
    from mlflow import MlflowClient

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setattr(trackers, "ABANDON_S", 60.0)  # both are imported first
    monkeypatch.setattr(process, "leave", lambda code: None)
    abandoned(tmp_path, "wandb", "mlflow")
    (file,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    assert losses_of_wandb(file) == [(1, 2.5)]
    client: Any = MlflowClient(tracking_uri=(tmp_path / "mlruns").as_uri())
    (found,) = client.search_runs([client.get_experiment_by_name("tests").experiment_id])
    assert (found.info.status, found.data.metrics["loss"]) == ("KILLED", 2.5)


@pytest.mark.filterwarnings("default")
def test_wandb_offline_has_the_same_id_in_both_folders_and_each_step_once(tmp_path: Path, monkeypatch):
    real("wandb", "0.")
    monkeypatch.setenv("WANDB_MODE", "offline")
    run(tmp_path, "wandb", until=4)
    run(tmp_path, "wandb", after=2)
    files = sorted(tmp_path.glob("wandb/offline-run-*/run-*.wandb"))
    assert len(files) == 2
    assert len({path.name for path in files}) == 1
    losses = [loss for path in files for loss in losses_of_wandb(path)]
    assert losses == [(step, expected(step)) for step in range(1, STEPS + 1) if step != 2]


@pytest.mark.filterwarnings("default")
def test_mlflow_has_one_run_with_each_step_once(tmp_path: Path, monkeypatch):
    real("mlflow", "3.")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    run(tmp_path, "mlflow", until=4)
    run(tmp_path, "mlflow", after=2)
    from mlflow import MlflowClient

    client: Any = MlflowClient(tracking_uri=(tmp_path / "mlruns").as_uri())
    (found,) = client.search_runs([client.get_experiment_by_name("tests").experiment_id])
    history = client.get_metric_history(found.info.run_id, "loss")
    assert [(each.step, each.value) for each in history] == [(s, expected(s)) for s in range(1, STEPS + 1) if s != 2]
    assert found.info.status == "FINISHED"
    assert found.data.params["optim.lr"] == str(settings(tmp_path).optim.lr)


@pytest.mark.filterwarnings("default")
def test_trackio_has_one_run_with_each_step_once_and_prints_nothing(tmp_path: Path, monkeypatch, capfd):
    pytest.importorskip("trackio")
    from trackio import sqlite_storage, utils

    for module in (utils, sqlite_storage):  # TRACKIO_DIR is read when it is imported
        monkeypatch.setattr(module, "TRACKIO_DIR", tmp_path / "trackio", raising=False)
    run(tmp_path, "trackio", until=4)
    run(tmp_path, "trackio", after=2)
    assert [line for line in capfd.readouterr().out.splitlines() if not line.startswith("step ")] == []
    with sqlite3.connect(tmp_path / "trackio" / "tests.db") as database:
        rows = database.execute("select run_name, step, metrics from metrics order by step").fetchall()
    losses = [(step, json.loads(values)["loss"]) for _, step, values in rows if "loss" in json.loads(values)]
    assert losses == [(step, expected(step)) for step in range(1, STEPS + 1) if step != 2]
    assert len({name for name, _, _ in rows}) == 1
