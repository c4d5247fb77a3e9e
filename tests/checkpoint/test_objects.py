"""Claims about checkpoint/objects.py: two writers, leftovers, faults of the network, bytes, and secrets."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dtmega import config
from dtmega.checkpoint import manifest, object_requests, objects, resume, tensor_files
from dtmega.checkpoint.files import open_root
from dtmega.checkpoint.manifest import Damaged
from dtmega.checkpoint.object_requests import Unreachable
from dtmega.checkpoint.objects import Objects
from dtmega.checkpoint.resume import open_checkpoint
from dtmega.checkpoint.run import Checkpoints
from dtmega.checkpoint.state import Progress, State
from dtmega.checkpoint.weights import Weights
from dtmega.cli.convert import to_checkpoint
from tests.checkpoint.object_server import Object, Request, Server
from tests.ranks import forks

ROOT = "s3://bucket/run/checkpoints"
IDENTITY = {"data": "xxh3 of it", "order": 1, "seed": 1}
KEY = "run/checkpoints/step-{:08d}/"


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def hasty(monkeypatch) -> None:
    """A client that gives up soon."""
    monkeypatch.setattr(object_requests, "MAX_RETRIES", 2)
    monkeypatch.setattr(object_requests, "PAUSE_S", 0.01)
    monkeypatch.setattr(object_requests, "REQUEST_S", 0.2)
    monkeypatch.setattr(object_requests, "RETRY_S", 0.5)


class Writer:
    """A run that saves tensors filled with one number."""

    def __init__(self, **keys: object) -> None:
        self.cfg = config.validate({"train": {"steps": 9}, "checkpoint": {"dir": ROOT, **keys}}, "a test")
        self.checkpoints = Checkpoints(self.cfg, torch.device("cpu"))

    def save(self, step: int, value: float | None = None) -> str:
        """Save a step, and return the error."""
        tensor = torch.full((40, 3), float(step if value is None else value))
        state = State.of(self.cfg.model_dump(), progress=Progress(step, 8 * step), identity=IDENTITY)
        ended = self.checkpoints.save({"model/x": tensor}, state) + self.checkpoints.wait()
        return ended[0].error


def saved(step: int | None = None) -> dict[int, float]:
    """Step and number of the checkpoint that is opened, each of whose bytes is read."""
    checkpoint = open_checkpoint(ROOT, step)
    numbers = checkpoint.read("model/x").unique().tolist()
    assert len(numbers) == 1
    return {checkpoint.manifest.step: numbers[0]}


def put(store: Server, name: str, hours_ago: float, data: bytes = b"x") -> None:
    """An object of this age under ROOT."""
    key = f"run/checkpoints/{name}"
    store.objects[key] = Object(data, store.now() - timedelta(hours=hours_ago))


def names(store: Server, step: int) -> list[str]:
    prefix = KEY.format(step)
    return sorted(key.removeprefix(prefix) for key in store.objects if key.startswith(prefix))


# Two writers.


def test_of_two_writers_of_a_step_the_second_is_told_and_deletes_nothing_of_the_first(object_store):
    first, second = Writer(), Writer()
    # Both begin before either ends: the second publishes between the first's data and the first's manifest.
    honest = Objects.publish

    def late(self: Objects, folder: str, raw: bytes, attempt: str) -> str:
        Objects.publish = honest
        assert second.save(1, value=2) == ""
        return honest(self, folder, raw, attempt)

    Objects.publish = late
    error = first.save(1, value=1)
    assert error == f"FileExistsError: another process has saved {ROOT}/step-00000001, and this save came second"
    assert saved() == {1: 2.0}
    assert [len(names(object_store, 1)), first.checkpoints.newest] == [2, ""]


def test_a_step_that_another_process_has_saved_is_told_before_anything_is_written(object_store):
    first, second = Writer(), Writer()
    assert first.save(1, value=1) == ""
    before = dict(object_store.objects)
    assert "is a finished checkpoint" in second.save(1, value=2)
    assert object_store.objects == before


def test_a_retired_step_leaves_the_files_of_an_attempt_that_still_writes_it(object_store):
    writer, slow = Writer(keep=1), Writer()
    writer.save(1)
    name = f"data-00000{slow.checkpoints._files.new_attempt()}.bin"
    put(object_store, f"step-00000001/{name}", hours_ago=0)
    writer.save(2)
    assert names(object_store, 1) == [name]


def test_weights_are_converted_to_an_object_store_once(object_store):
    writer = Writer()
    writer.save(1)
    source = Weights(open_checkpoint(ROOT))
    to_checkpoint.write("s3://bucket/weights/w", source, config.Bloom(), toml="[model]\n")
    assert torch.equal(open_checkpoint("s3://bucket/weights/w").read("model/x"), torch.ones(40, 3))
    assert object_store.objects["weights/w/config.toml"].data == b"[model]\n"
    with pytest.raises(ValueError, match=r"w exists already \(--to\)"):
        to_checkpoint.write("s3://bucket/weights/w", source, config.Bloom())


def test_a_removal_that_is_cut_off_leaves_no_folder_that_counts(object_store, hasty):
    writer = Writer()
    writer.save(1)
    n_deletions = 0

    def only_one_deletion(request: Request) -> str:
        nonlocal n_deletions
        n_deletions += request.method == "POST"
        return "503" if request.method == "POST" and n_deletions > 1 else ""

    object_store.fault = only_one_deletion
    with pytest.raises(Unreachable):
        open_root(ROOT).retire("step-00000001")
    assert resume.finished(open_root(ROOT)) == []
    assert len(names(object_store, 1)) == 1


# Leftovers.


def test_leftovers_are_named_and_those_of_more_than_a_day_are_deleted(object_store, capsys):
    writer = Writer()
    writer.save(1)
    whole = set(object_store.objects)
    attempt = f"-{'0' * 32}"
    put(object_store, f"step-00000001/data-00000{attempt}.bin", hours_ago=25)
    put(object_store, f"step-00000002/data-00000{attempt}.bin", hours_ago=23, data=b"1234")
    put(object_store, f"superseded-1/step-00000003/data-00000{attempt}.bin", hours_ago=25)
    put(object_store, ".tmp-step-probe-0/probe", hours_ago=25)
    put(object_store, ".tmp-step-probe-1/probe", hours_ago=0)
    put(object_store, "notes/of the user", hours_ago=999)
    resume.set_aside_newer(writer.cfg, 1)
    kept = {"notes/of the user", f"step-00000002/data-00000{attempt}.bin", ".tmp-step-probe-1/probe"}
    assert set(object_store.objects) == whole | {f"run/checkpoints/{name}" for name in kept}
    said = capsys.readouterr().err
    for folder in ("step-00000001", "step-00000002", "superseded-1/step-00000003", ".tmp-step-probe-0"):
        assert f"{ROOT}/{folder}: 1 files" in said
    assert "step-00000002: 1 files (4 bytes)" in said
    assert "probe-1" not in said
    assert resume.finished(open_root(ROOT)) == ["step-00000001"]


def test_a_checkpoint_that_is_too_large_for_one_copy_is_set_aside_in_parts(object_store, monkeypatch):
    writer = Writer()
    writer.save(1)
    writer.save(2)
    monkeypatch.setattr(objects, "MAX_COPY_BYTES", 100)
    monkeypatch.setattr(objects, "PART_BYTES", 64)
    resume.set_aside_newer(writer.cfg, 1)
    assert saved() == {1: 1.0}
    aside = open_checkpoint(f"{ROOT}/superseded-1/step-00000002")
    assert torch.equal(aside.read("model/x"), torch.full((40, 3), 2.0))
    assert names(object_store, 2) == []


def test_a_damaged_checkpoint_is_set_aside_too(object_store):
    writer = Writer()
    writer.save(1)
    writer.save(2)
    put(object_store, f"step-00000002/{manifest.NAME}", hours_ago=0, data=b"{}")
    resume.set_aside_newer(writer.cfg, 1)
    assert resume.finished(open_root(ROOT)) == ["step-00000001"]
    assert resume.finished(open_root(f"{ROOT}/superseded-1")) == ["step-00000002"]


# Faults of the network.


def at(number: int, fault: str, times: int = 1) -> Callable[[Request], str]:
    """A fault that `times` requests meet, from this one on."""
    return lambda request: fault if number <= request.number < number + times else ""


def requests_of_a_save(store: Server) -> tuple[int, int]:
    """Numbers of the first request of a save of step 2, and of the one after its last."""
    writer = Writer(keep=1)
    writer.save(1)
    start = len(store.seen)
    assert writer.save(2) == ""
    return start, len(store.seen)


@pytest.mark.parametrize("fault", ["503", "cut"])
def test_one_fault_at_any_request_of_a_save_costs_no_checkpoint(object_store, hasty, fault):
    start, end = requests_of_a_save(object_store)
    for number in range(end - start):
        object_store.objects.clear()
        writer = Writer(keep=1)
        writer.save(1)
        object_store.fault = at(len(object_store.seen) + number, fault)
        assert writer.save(2) == "", (number, fault)
        object_store.fault = at(0, "")
        assert saved() == {2: 2.0}


@pytest.mark.full
@pytest.mark.parametrize("fault", ["503", "cut", "silence"])
def test_a_store_that_fails_from_any_request_on_is_reported_in_time_and_a_whole_checkpoint_stays(
    object_store, hasty, fault
):
    start, end = requests_of_a_save(object_store)
    for number in range(end - start):
        object_store.objects.clear()
        writer = Writer(keep=1)
        writer.save(1)
        began = time.monotonic()
        object_store.fault = at(len(object_store.seen) + number, fault, times=10**6)
        error = writer.save(2)
        assert time.monotonic() - began < 20
        object_store.fault = at(0, "")
        (step,) = saved()
        # What is told is true, but for a manifest whose answer was lost: then the new one may be there.
        assert step == (1 if error and fault != "cut" else step), (number, error)
        assert error or step == 2


def save_two(mode: str, pid_file: Path, environment: dict[str, str]) -> None:
    """Save step 2 in a process that says who it is."""
    os.environ.update(environment)
    pid_file.write_text(str(os.getpid()))
    assert Writer(keep=1, mode=mode).save(2) == ""


@pytest.mark.full
@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_process_that_is_killed_at_any_request_leaves_the_old_checkpoint_or_the_new_one(
    object_store, tmp_path, mode, when
):
    pid_file = tmp_path / "pid"
    number, code, found = 0, -signal.SIGKILL, []
    while code == -signal.SIGKILL:
        object_store.objects.clear()
        Writer(keep=1).save(1)
        target = len(object_store.seen) + number

        def kill(request: Request, target: int = target) -> str:
            if request.number == target:
                os.kill(int(pid_file.read_text()), signal.SIGKILL)
            return ""

        def killed_before(request: Request, target: int = target) -> str:
            kill(request)
            return "silence" if request.number == target else ""

        if when == "before":
            object_store.fault = killed_before
        else:
            object_store.after = kill
        (ended,) = forks().run(1, save_two, mode, pid_file, object_store.environment)
        object_store.fault, object_store.after = at(0, ""), lambda request: None
        code = ended.code
        (step,) = saved()
        found.append(step)
        writer = Writer(keep=1)
        resume.set_aside_newer(writer.cfg, step)
        assert writer.save(3) == ""
        assert resume.finished(open_root(ROOT)) == ["step-00000003"]
        number += 1
    assert code == 0
    # The old one until the manifest is there, and the new one from then on.
    assert found == sorted(found)
    assert set(found) == {1, 2}


def test_a_store_that_does_not_answer_is_not_saved_and_the_older_one_stays(object_store, hasty):
    writer = Writer(keep=1)
    writer.save(1)
    object_store.fault = lambda request: "silence"
    error = writer.save(2)
    assert error.startswith("Generic S3 error: Error performing")
    object_store.fault = at(0, "")
    assert saved() == {1: 1.0}
    assert writer.save(2) == ""
    assert saved() == {2: 2.0}


def test_a_manifest_whose_answer_is_lost_keeps_its_data(object_store, hasty):
    writer = Writer(keep=1)
    writer.save(1)

    def lost(request: Request) -> str:
        creates = request.method == "PUT" and request.key.endswith(f"2/{manifest.NAME}")
        asks = request.method == "GET" and request.key.endswith(f"2/{manifest.NAME}")
        return "cut" if creates else "503" if asks else ""

    object_store.fault = lost
    assert writer.save(2) != ""
    object_store.fault = at(0, "")
    assert saved() == {2: 2.0}


def test_a_store_that_fails_during_a_load_is_no_damage(object_store, hasty):
    writer = Writer()
    writer.save(1)
    checkpoint = open_checkpoint(ROOT)
    object_store.fault = lambda request: "503" if request.key.endswith(".bin") else ""
    group = dist.group.WORLD
    assert group is not None
    with pytest.raises(Unreachable, match=rf"{ROOT}/step-00000001: .*503"):
        tensor_files.load_tensors(checkpoint, {"model/x": torch.zeros(40, 3)}, group)


# Bytes.


@pytest.mark.parametrize("part_bytes", [None, 1000])
def test_a_load_reads_each_byte_once(object_store, monkeypatch, part_bytes):
    if part_bytes:
        monkeypatch.setattr(object_requests, "PART_BYTES", part_bytes)
    group = dist.group.WORLD
    assert group is not None
    torch.manual_seed(0)
    tensors = {f"model/{i}": torch.randn(300 + i, 3) for i in range(40)}
    writer = Writer()
    state = State.of(writer.cfg.model_dump(), progress=Progress(1, 8), identity=IDENTITY)
    (outcome,) = writer.checkpoints.save(tensors, state)
    assert outcome.error == ""
    checkpoint = open_checkpoint(ROOT)
    object_store.bytes_sent = 0
    loaded = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    tensor_files.load_tensors(checkpoint, loaded, group)
    assert all(torch.equal(loaded[name], tensors[name]) for name in tensors)
    n_bytes = sum(tensor.nbytes for tensor in tensors.values())
    assert (object_store.bytes_sent, checkpoint.bytes_read) == (n_bytes, n_bytes)


def test_what_is_gone_while_it_is_read_is_named(object_store):
    writer = Writer()
    writer.save(1)
    checkpoint = open_checkpoint(ROOT)
    open_root(ROOT).retire("step-00000001")
    with pytest.raises(Damaged, match="it was deleted while it was read"):
        checkpoint.read("model/x")


# Spellings and secrets.


@pytest.mark.parametrize(
    ("url", "kind"),
    [
        ("s3://bucket/run", "S3Store"),
        ("s3a://bucket/run", "S3Store"),
        ("gs://bucket/run", "GCSStore"),
        ("gcs://bucket/run", "GCSStore"),
        ("az://container/run", "AzureStore"),
        ("abfs://container/run", "AzureStore"),
        ("abfss://container@account.dfs.core.windows.net/run", "AzureStore"),
    ],
)
def test_each_spelling_of_a_url_opens_the_store_of_its_kind(monkeypatch, url, kind):
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "account")
    object_requests.check_usable(url)
    assert type(object_requests.open_store(url)).__name__ == kind


@pytest.mark.parametrize("url", ["s3://user:hunter2@bucket/run", "s3://hunter2@bucket/run", "az://c/run?sig=hunter2"])
def test_a_url_with_credentials_is_refused_without_repeating_them(url):
    with pytest.raises(ValueError, match="is given with credentials or a query") as refused:
        open_root(url)
    assert "hunter2" not in str(refused.value)


def test_no_message_names_the_endpoint_or_repeats_what_the_store_quotes(object_store, hasty):
    files: Any = open_root(ROOT)
    object_store.fault = lambda request: "503"
    with pytest.raises(Unreachable) as failed:
        files.folders()
    assert "503 Service Unavailable" in str(failed.value)
    assert str(object_store.server_port) not in str(failed.value)
    quoted = RuntimeError(
        "Error performing GET https://127.0.0.1/b?sig=hunter2 - 403: <?xml?>\n"
        "<Error><Code>InvalidAccessKeyId</Code><AWSAccessKeyId>hunter3</AWSAccessKeyId></Error>"
    )
    assert object_requests.reason(quoted) == "Error performing GET a request - 403 (InvalidAccessKeyId)"
