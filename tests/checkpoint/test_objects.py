"""Claims about checkpoint/objects.py: two writers, leftovers, faults of the network, bytes, and secrets."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dtmega.checkpoint import manifest, objects, resume, tensor_files
from dtmega.checkpoint.files import open_root
from dtmega.checkpoint.manifest import Damaged
from dtmega.checkpoint.objects import Objects
from dtmega.checkpoint.resume import open_checkpoint
from dtmega.checkpoint.state import Progress, State
from dtmega.checkpoint.weights import Weights
from dtmega.cli.convert import to_checkpoint
from dtmega.config.families.bloom import BloomKeys
from dtmega.files import object_requests
from dtmega.files.outages import Unreachable
from tests.checkpoint.object_faults import HASTY, IDENTITY, KEY, ROOT, Writer, at, client, no_fault, saved
from tests.object_server import Object, Request, Server


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
    monkeypatch.setattr(object_requests, "REQUEST_S", 5.0)
    monkeypatch.setattr(object_requests, "RETRY_S", 10.0)


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
    to_checkpoint.write("s3://bucket/weights/w", source, BloomKeys(), toml="[model]\n")
    assert torch.equal(open_checkpoint("s3://bucket/weights/w").read("model/x"), torch.ones(40, 3))
    assert object_store.objects["weights/w/config.toml"].data == b"[model]\n"
    with pytest.raises(ValueError, match=r"w exists already \(--to\)"):
        to_checkpoint.write("s3://bucket/weights/w", source, BloomKeys())


@pytest.mark.parametrize(("method", "further"), [("retire", ()), ("remove", ()), ("move", ("superseded-1",))])
def test_a_removal_that_is_cut_off_leaves_no_folder_that_counts(object_store, hasty, method, further):
    writer = Writer()
    writer.save(1)
    n_deletions = 0

    def only_one_deletion(request: Request) -> str:
        nonlocal n_deletions
        n_deletions += request.method == "POST"
        return "503" if request.method == "POST" and n_deletions > 1 else ""

    object_store.fault = only_one_deletion
    with pytest.raises(Unreachable):
        getattr(open_root(ROOT), method)("step-00000001", *further)
    assert resume.finished(open_root(ROOT)) == []
    assert len(names(object_store, 1)) == 1


# What changes several objects, cut off at each request: as a kill does from one request on, or at this request alone,
# which may be the last of several that are under way when a process is killed.

SECOND = "step-00000002"
OPERATIONS: dict[str, Callable[[Any], object]] = {
    "retire": lambda files: files.retire(SECOND),
    "remove": lambda files: files.remove(SECOND),
    "move": lambda files: files.move(SECOND, "superseded-1"),
    "move in parts": lambda files: files.move(SECOND, "superseded-1"),
}


def whole_checkpoints() -> list[str]:
    """The checkpoints that count, there or set aside; each byte of them is read."""
    found = []
    for place in ("", "superseded-1/"):
        for folder in resume.finished(open_root(f"{ROOT}/{place}")):
            x = open_checkpoint(f"{ROOT}/{place}{folder}").read("model/x")
            assert torch.equal(x, torch.full((40, 3), float(resume.step_of(folder))))
            found.append(f"{place}{folder}")
    return found


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.full) if "parts" in name else name for name in OPERATIONS]
)
def test_what_is_cut_off_at_any_request_leaves_whole_checkpoints_and_can_be_done_again(
    object_store: Server, hasty: None, monkeypatch: pytest.MonkeyPatch, name: str
):
    monkeypatch.setattr(object_requests, "MAX_RETRIES", 0)
    monkeypatch.setattr(object_requests, "PUBLISH_TRIES", 1)
    if name == "move in parts":
        monkeypatch.setattr(objects, "MAX_COPY_BYTES", 100)
        monkeypatch.setattr(objects, "PART_BYTES", 200)
    writer = Writer()
    assert (writer.save(1), writer.save(2)) == ("", "")
    before = dict(object_store.objects)
    files = open_root(ROOT)
    n_before = len(object_store.seen)
    OPERATIONS[name](files)
    requests = object_store.seen[n_before:]
    done = whole_checkpoints()
    assert "step-00000001" in done

    def from_on(request: Request) -> Callable[[Request], str]:
        first = len(object_store.seen) + request.number - n_before
        return lambda later: "503" if later.number >= first else ""

    def alone(request: Request) -> Callable[[Request], str]:
        return lambda other: "503" if (other.method, other.key) == (request.method, request.key) else ""

    for request in requests:
        for cut in (from_on, alone):
            object_store.objects.clear()
            object_store.objects.update(before)
            files = open_root(ROOT)
            object_store.fault = cut(request)
            with pytest.raises(Unreachable):
                OPERATIONS[name](files)
            object_store.fault = no_fault
            left = whole_checkpoints()
            assert "step-00000001" in left
            assert left == done or SECOND in left or not name.startswith("move")
            resume.set_aside_newer(writer.cfg, 1)
            assert resume.finished(open_root(ROOT)) == ["step-00000001"]


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


def test_no_file_of_a_checkpoint_whose_manifest_is_damaged_is_a_leftover(object_store):
    writer = Writer()
    writer.save(1)
    for key, found in list(object_store.objects.items()):
        data = b"{}" if key.endswith(manifest.NAME) else found.data
        put(object_store, key.removeprefix("run/checkpoints/"), hours_ago=25, data=data)
    before = dict(object_store.objects)
    assert open_root(ROOT).clear_leftovers() == []
    assert object_store.objects == before


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


# Faults of the network; test_object_faults.py has them at every request.


def test_a_store_that_does_not_answer_is_not_saved_and_the_older_one_stays(object_store):
    Writer(keep=1).save(1)
    with client(HASTY):
        writer = Writer(keep=1)
        object_store.fault = lambda request: "silence"
        error = writer.save(2)
    assert error.startswith("Generic S3 error: Error performing")
    object_store.fault = no_fault
    assert saved() == {1: 1.0}
    assert Writer(keep=1).save(2) == ""
    assert saved() == {2: 2.0}


def test_a_save_whose_data_never_arrive_is_told_and_publishes_nothing(object_store):
    with client(HASTY):
        writer = Writer(keep=1)
        writer.save(1)
        object_store.fault = lambda request: "503" if request.method == "PUT" and request.key.endswith(".bin") else ""
        assert "503 Service Unavailable" in writer.save(2)
    assert names(object_store, 2) == []
    assert saved() == {1: 1.0}


def test_a_manifest_whose_answer_is_lost_keeps_its_data(object_store, hasty):
    writer = Writer(keep=1)
    writer.save(1)

    def lost(request: Request) -> str:
        creates = request.method == "PUT" and request.key.endswith(f"2/{manifest.NAME}")
        asks = request.method == "GET" and request.key.endswith(f"2/{manifest.NAME}")
        return "cut" if creates else "503" if asks else ""

    object_store.fault = lost
    assert writer.save(2) != ""
    object_store.fault = no_fault
    assert saved() == {2: 2.0}


class Forgetful:
    """A store that takes an object only after so many failures."""

    def __init__(self, failures: int) -> None:
        self.failures, self.taken = failures, list[bytes]()

    def put(self, key: str, data: bytes, **keywords: object) -> None:
        from obstore.exceptions import GenericError

        assert keywords["mode"] == "create"
        self.failures -= 1
        if self.failures >= 0:
            raise GenericError("no")
        self.taken.append(data)

    def get(self, key: str) -> object:
        raise FileNotFoundError(key)


def test_a_manifest_is_published_at_the_third_try_at_the_latest():
    store = Forgetful(failures=2)
    object_requests.put_new(store, "manifest", b"data")
    assert store.taken == [b"data"]
    with pytest.raises(Unreachable, match="no"):
        object_requests.put_new(Forgetful(failures=3), "manifest", b"data")


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
        monkeypatch.setattr(objects, "PART_BYTES", part_bytes)
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
    object_requests.check_usable(url, "[checkpoint] dir")
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
    object_store.fault = no_fault
    with pytest.raises(FileNotFoundError) as missing, object_requests.reported():
        files._store.head("nothing")
    assert str(object_store.server_port) not in str(missing.value)
    assert object_requests.reason(quoted) == "Error performing GET a request - 403 (InvalidAccessKeyId)"


def test_a_save_whose_upload_breaks_off_does_not_name_the_endpoint(object_store):
    with client(HASTY):
        writer = Writer()
        object_store.fault = at(len(object_store.seen) + 3, "503", times=10**6)
        error = writer.save(1)
    assert "503 Service Unavailable" in error
    assert f":{object_store.server_port}" not in error
