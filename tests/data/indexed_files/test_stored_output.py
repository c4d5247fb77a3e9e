"""Claims about writing data sets into an object store: whole or absent, and the second of two writers is told."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from dtmega.__main__ import main as command
from dtmega.data.indexed_files import stored_output
from dtmega.data.indexed_files.dataset import IndexedDataset
from dtmega.data.indexed_files.stored_output import StoredPairFiles
from dtmega.data.indexed_files.writer import IndexedWriter
from tests.object_server import Object, Request, Server

URL = "s3://bucket/data/mine"
NAMES = ["data/mine.bin", "data/mine.idx", "data/mine.meta.json"]


@pytest.fixture(autouse=True)
def own_folders(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(stored_output.tempfile, "tempdir", str(tmp_path / "temp"))
    (tmp_path / "temp").mkdir()


def write(value: int, about: bool = True) -> None:
    """A data set of this number, three times, with a record of it or without."""
    with IndexedWriter(URL, np.dtype("<u2")) as writer:
        writer.add([value] * 3)
        writer.about = f'{{"value": {value}}}' if about else ""


def content() -> list[int]:
    return IndexedDataset(URL).tokens[:].tolist()


def texts(folder: Path) -> Path:
    path = folder / "text.jsonl"
    path.write_text("".join(f'{{"text": "line {i}"}}\n' for i in range(40)))
    return path


def made(folder: Path, server: Server) -> list[bytes]:
    """The files that a command has written on a disk, which must be the objects that it has written."""
    files = [Path(folder, name).read_bytes() for name in ("mine.bin", "mine.idx", "mine.meta.json")]
    assert [server.objects[name].data for name in NAMES] == files
    return files


# Commands.


def test_tokenize_and_merge_write_the_bytes_that_they_write_on_a_disk(object_store, tmp_path, capsys):
    options = ["--input", str(texts(tmp_path)), "--tokenizer", "bytes", "--workers", "1"]
    for output in (str(tmp_path / "mine"), URL):
        assert command(["tokenize", *options, "--output", output]) == 0
    assert sorted(object_store.objects) == NAMES
    whole = made(tmp_path, object_store)
    object_store.objects.clear()
    for part in range(3):
        assert command(["tokenize", *options, "--output", URL, "--part", f"{part}/3"]) == 0
    before = len(object_store.objects)
    assert command(["tokenize", *options, "--output", URL, "--part", "1/3"]) == 0
    assert "part 1 of 3" in (output := capsys.readouterr().out)
    assert "skipped, because s3://bucket/data/mine.part-1-of-3.idx is there" in output
    assert len(object_store.objects) == before
    assert command(["merge", "--input", f"{URL}.part-*", "--output", URL]) == 0
    assert made(tmp_path, object_store) == whole
    assert list((tmp_path / "temp").iterdir()) == []


def test_an_existing_data_set_is_replaced_only_if_asked_to(object_store, tmp_path, capsys):
    write(1)
    options = ["tokenize", "--input", str(texts(tmp_path)), "--tokenizer", "bytes", "--workers", "1", "--output", URL]
    assert command(options) == 2
    assert f"{URL}.idx is there: expected another --output, or --overwrite" in capsys.readouterr().err
    assert content() == [1, 1, 1]
    assert command([*options, "--overwrite"]) == 0
    assert len(content()) > 3


def test_credentials_in_the_output_are_refused_and_not_repeated(tmp_path, capsys):
    options = ["tokenize", "--input", str(texts(tmp_path)), "--tokenizer", "bytes"]
    with pytest.raises(SystemExit, match="2"):
        command([*options, "--output", "s3://user:hunter2@bucket/x"])
    error = capsys.readouterr().err
    assert "is given with credentials or a query" in error
    assert "hunter2" not in error


# Writers that are killed, and two writers.


@pytest.mark.parametrize("overwriting", [False, True])
def test_a_writer_that_stops_at_any_request_leaves_the_old_set_the_new_one_or_none(
    object_store, overwriting, monkeypatch
):
    monkeypatch.setattr("dtmega.files.object_requests.MAX_RETRIES", 0)
    monkeypatch.setattr("dtmega.files.object_requests.PUBLISH_TRIES", 1)
    write(1)
    old = dict(object_store.objects)
    object_store.seen.clear()
    object_store.objects.clear()
    object_store.objects.update(old if overwriting else {})
    write(2)
    n_requests = len(object_store.seen)
    assert n_requests > 8
    seen = set()
    for number in range(n_requests):
        object_store.objects.clear()
        object_store.objects.update(old if overwriting else {})
        object_store.seen.clear()
        # The connection is refused from this request on, as if the process were gone.
        object_store.fault = lambda request, number=number: "503" if request.number >= number else ""
        # The last two requests delete the claim.
        if number >= n_requests - 2:
            write(2)
        else:
            with pytest.raises((OSError, ValueError), match=URL) as error:
                write(2)
            assert "127.0.0.1" not in str(error.value)
        object_store.fault = lambda request: ""
        if "data/mine.idx" not in object_store.objects:
            seen.add("none")
            continue
        (value,) = set(content())
        about = object_store.objects["data/mine.meta.json"].data
        assert about == f'{{"value": {value}}}'.encode()
        seen.add("old" if value == 1 else "new")
    assert seen == ({"old", "none", "new"} if overwriting else {"none", "new"})


def test_what_a_killed_writer_has_left_on_this_machine_goes_with_the_next_writer(object_store, tmp_path, monkeypatch):
    with monkeypatch.context() as killed:
        killed.setattr(StoredPairFiles, "discard", lambda self: self._lock.close())
        write(1)
    (left,) = (tmp_path / "temp").iterdir()
    with IndexedWriter("s3://bucket/data/other", np.dtype("<u2")) as living:
        living.add([1])
        write(2)
        (of_living,) = (tmp_path / "temp").iterdir()
    assert left != of_living
    assert not [*(tmp_path / "temp").iterdir()]
    assert content() == [2] * 3


def interrupted(server: Server, number: int, other: Callable[[], None]) -> None:
    """Let another writer run when this many requests have been done."""

    def after(request: Request) -> None:
        if request.number == number:
            server.after = lambda request: None
            other()

    server.after = after


def tell(told: list[str], value: int, about: bool = True) -> None:
    """Write, and note the error of who comes second."""
    try:
        write(value, about)
    except FileExistsError as error:
        told.append(str(error))


@pytest.mark.parametrize("stride", [5, pytest.param(1, marks=pytest.mark.full)])
def test_of_two_writers_that_meet_at_any_request_one_is_told_and_the_other_one_is_whole(object_store, stride):
    write(1)
    n_requests = len(object_store.seen)
    for number in range(0, n_requests, stride):
        object_store.objects.clear()
        object_store.seen.clear()
        told: list[str] = []
        interrupted(object_store, number, partial(tell, told, 2))
        tell(told, 1)
        values = set(content())
        assert len(values) == 1
        assert object_store.objects["data/mine.meta.json"].data == f'{{"value": {values.pop()}}}'.encode()
        assert sorted(object_store.objects) == NAMES
        # The first request is the one that asks whether there is a data set, and the last ones come after the end.
        assert len(told) == 1 or number >= n_requests - 2, number
        assert all(line.startswith("another process ") for line in told)


def test_the_claim_of_a_killed_writer_is_in_the_way_for_ten_minutes(object_store):
    object_store.objects["data/mine.writing"] = Object(b"process 7 on there", object_store.now() - timedelta(minutes=9))
    with pytest.raises(FileExistsError, match=re.escape("mine.writing says (process 7 on there): wait for its end")):
        write(1)
    assert sorted(object_store.objects) == ["data/mine.writing"]
    object_store.objects["data/mine.writing"] = Object(b"", object_store.now() - timedelta(minutes=11))
    write(1)
    assert sorted(object_store.objects) == NAMES


@pytest.mark.parametrize(("overwriting", "about"), [(False, True), (True, False)])
def test_a_writer_that_was_silent_after_any_request_changes_nothing_of_the_one_that_took_over(
    object_store: Server, overwriting: bool, about: bool
):
    write(0)
    old = dict(object_store.objects) if overwriting else {}
    object_store.objects.clear()
    object_store.objects.update(old)
    object_store.seen.clear()
    write(1, about=about)
    requests = [*object_store.seen]

    def take_over() -> None:
        """What another process does when this one was silent for ten minutes: it removes the claim, and writes all."""
        object_store.objects.pop("data/mine.writing", None)
        write(2)

    for request in requests:
        # A process that has just looked at its claim goes on, and could only be stopped by a store with transactions.
        if request.key == "data/mine.writing" and request.method in ("GET", "PUT"):
            continue
        object_store.objects.clear()
        object_store.objects.update(old)
        object_store.seen.clear()
        told: list[str] = []
        interrupted(object_store, request.number - requests[0].number, take_over)
        tell(told, 1, about=about)
        # What took over before the claim was made was replaced, or is told; what did after the .idx has replaced.
        claimed = request != requests[0]
        published = request in requests[-3:]
        assert len(told) == 1 or not claimed or published, request
        assert all(line.startswith("another process has ") for line in told)
        first_is_there = not told and not published
        assert content() == ([1, 1, 1] if first_is_there else [2, 2, 2])
        assert ("data/mine.meta.json" in object_store.objects) == (about or not first_is_there)
        assert "data/mine.writing" not in object_store.objects


def test_a_writer_whose_claim_was_taken_over_publishes_nothing(object_store, monkeypatch):
    monkeypatch.setattr(stored_output, "RENEW_S", 0.0)
    files = StoredPairFiles(URL)
    for suffix in ("bin", "meta.json", "idx"):
        files.write(suffix, [b"x"])

    def take_over(request: Request) -> None:
        if request.key == "data/mine.bin":
            object_store.objects["data/mine.writing"] = Object(b"another", object_store.now())

    object_store.after = take_over
    with pytest.raises(FileExistsError, match="another process has begun to write s3://bucket/data/mine"):
        files.publish()
    files.discard()
    assert "data/mine.idx" not in object_store.objects
    assert object_store.objects["data/mine.writing"].data == b"another"
