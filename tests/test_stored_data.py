"""Claims about runs whose data is in an object store: the numbers of the disk, whatever the network does."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from dtmega.distributed import exit_codes
from dtmega.files import object_requests
from tests.layouts import FAMILIES, write_sentences, write_text
from tests.object_server import Object, Request, Server
from tests.resumed import LAYOUTS, Record, Training, train_all
from tests.stored_data import store
from tests.test_train import conversations

FULL = pytest.mark.full
SHORT: dict[str, Any] = {
    "model.n_layers": 1,
    "train.steps": 4,
    "train.drift_interval": 0,
    "batch.micro_batch_size": 2,
    "batch.global_batch_size": 4,
    "optim.warmup": 2,
    "eval.interval": 2,
    "checkpoint.interval": 2,
    "checkpoint.keep": 9,
}
CHAT = {"data.tokenizer": "bytes", "data.objective": "conversations", "model.vocab_size": 257, "eval.prompt": ""}


def keys_of(kind: str, folder: Path) -> dict[str, Any]:
    """The keys of a short run of an objective, with its data in `folder`."""
    if kind == "bert":
        return {**FAMILIES["bert"], **SHORT, **write_sentences(folder)}
    keys = {**FAMILIES["bloom"], **SHORT}
    if kind == "conversations":
        del keys["data.eod_mask_loss"]
        folder.mkdir()
        return keys | CHAT | {"data.path": conversations(folder, 60)}
    return keys | write_text(folder)


@contextlib.contextmanager
def reaching(environment: Mapping[str, str], cache: str, limits: Mapping[str, float]) -> Iterator[None]:
    """The environment of a node, in a process of a run."""
    os.environ.update(environment)
    os.environ["XDG_CACHE_HOME"] = cache
    for name, value in limits.items():
        setattr(object_requests, name, value)
    with open(f"{cache}-stderr", "a") as file, contextlib.redirect_stderr(file):
        yield


HASTY = {"MAX_RETRIES": 3, "PAUSE_S": 0.01, "REQUEST_S": 1.0, "RETRY_S": 3.0}


def on(server: Server, folder: Path, limits: Mapping[str, float] = HASTY) -> Callable[[], Any]:
    return partial(reaching, server.environment, str(folder / "cache"), limits)


def check_equal(ours: Path, theirs: Path) -> None:
    """All losses, norms and weights of two runs are equal to the bit."""
    ours_record, truth = Record(ours), Record(theirs)
    for key in ("loss", "grad_norm"):
        assert ours_record.series(key) == truth.series(key)
    validations = [[line.get("val_loss") for line in record.lines] for record in (ours_record, truth)]
    assert validations[0] == validations[1]
    assert ours_record.final.keys() == truth.final.keys()
    assert all((ours_record.final[name] == tensor).all() for name, tensor in truth.final.items())


@pytest.mark.parametrize(
    "kind", ["next tokens", pytest.param("bert", marks=FULL), pytest.param("conversations", marks=FULL)]
)
def test_losses_are_those_of_the_disk_and_a_run_goes_on_from_the_other_place(object_store, tmp_path, kind):
    keys = keys_of(kind, tmp_path / "data")
    url = store(object_store, keys["data.path"], "data/text")
    far = keys | {"data.path": url}
    plant = on(object_store, tmp_path)
    disk, stored = tmp_path / "disk", tmp_path / "stored"
    first = {"train.exit_interval": 2}
    train_all(
        [
            Training(1, keys, disk, plant),
            Training(1, far, stored, plant),
            Training(1, far | first, tmp_path / "begun there", plant),
            Training(1, keys, tmp_path / "begun there", plant),
            Training(1, keys | first, tmp_path / "begun here", plant),
            Training(1, far, tmp_path / "begun here", plant),
        ]
    )
    for folder in (stored, tmp_path / "begun there", tmp_path / "begun here"):
        check_equal(folder, disk)


@pytest.mark.parametrize(
    "kind", ["next tokens", *(pytest.param(kind, marks=FULL) for kind in ("bert", "conversations"))]
)
@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=FULL)])
def test_losses_of_two_ranks_are_those_of_the_disk_with_and_without_workers(object_store, tmp_path, kind, workers):
    n, mesh = LAYOUTS["dp 2"]
    keys = keys_of(kind, tmp_path / "data") | mesh
    far = keys | {"data.path": store(object_store, str(keys["data.path"]), "data/text"), "data.num_workers": workers}
    plant = on(object_store, tmp_path)
    train_all([Training(n, keys, tmp_path / "disk", plant), Training(n, far, tmp_path / "stored", plant)])
    check_equal(tmp_path / "stored", tmp_path / "disk")


# Faults.


@pytest.fixture
def run_of_words(object_store, tmp_path) -> tuple[dict[str, Any], Path]:
    """The keys of a run with data in the store, and the folder of the same run with data on a disk."""
    keys = keys_of("next tokens", tmp_path / "data") | {"eval.interval": 0}
    train_all([Training(1, keys, tmp_path / "disk")])
    object_store.seen.clear()
    return keys | {"data.path": store(object_store, str(keys["data.path"]), "data/text")}, tmp_path / "disk"


def at(number: int, kind: str) -> Callable[[Request], str]:
    """A fault that only the request with this number meets."""
    return lambda request: kind if request.number == number else ""


def test_a_run_goes_on_after_a_fault_of_a_request(object_store, tmp_path, run_of_words):
    keys, disk = run_of_words
    kinds = iter(["503", "cut"])
    object_store.fault = lambda request: next(kinds, "") if request.key.endswith(".bin") else ""
    train_all([Training(1, keys, tmp_path / "stored", on(object_store, tmp_path))])
    assert next(kinds, "none") == "none"
    check_equal(tmp_path / "stored", disk)


@FULL
@pytest.mark.parametrize("kind", ["503", "cut", "silence"])
def test_a_run_goes_on_after_a_fault_of_any_request(object_store, tmp_path, run_of_words, kind):
    keys, disk = run_of_words
    train_all([Training(1, keys, tmp_path / "none", on(object_store, tmp_path / "none"))])
    n_requests = len(object_store.seen)
    assert n_requests > 8
    trainings = []
    for number in range(n_requests):
        folder = tmp_path / str(number)
        trainings.append(Training(1, keys, folder, on(object_store, folder)))
    for number, training in enumerate(trainings):
        object_store.seen.clear()
        object_store.fault = at(number, kind)
        train_all([training])
        check_equal(training.folder, disk)


@pytest.mark.parametrize("kind", ["503", pytest.param("replaced", marks=FULL)])
def test_a_run_whose_data_is_lost_ends_with_one_line(object_store, tmp_path, run_of_words, kind):
    keys, _ = run_of_words
    n_tokens = 0

    def fault(request: Request) -> str:
        nonlocal n_tokens
        n_tokens += request.method == "GET" and request.key.endswith(".bin")
        # The first ones are those of the start: ids, fingerprint, losses of the splits.
        if n_tokens < 8 or request.key != "data/text.bin":
            return ""
        if kind == "replaced":
            n_bytes = len(object_store.objects[request.key].data)
            object_store.objects[request.key] = Object(bytes(n_bytes), object_store.now())
            return ""
        return kind

    object_store.fault = fault
    code = exit_codes.FAILED if kind == "replaced" else exit_codes.STUCK
    train_all([Training(1, keys, tmp_path / "run", on(object_store, tmp_path), code)])
    errors = (tmp_path / "cache-stderr").read_text()
    (line,) = [line for line in errors.splitlines() if "cannot read" in line]
    assert "Traceback" not in errors
    why = "has been replaced since it was opened" if kind == "replaced" else "Error performing GET a request"
    assert line.startswith("rank 0: cannot read tokens: s3://bucket/data/text.bin")
    assert why in line
    assert line.endswith(f"([data] path) (exit code {code})")
    assert "127.0.0.1" not in line
    ended = json.loads((tmp_path / "run" / "exit.json").read_text())
    assert (ended["code"], ended["step"] < 4) == (code, True)
    if kind == "replaced":
        return
    object_store.fault = lambda request: ""
    train_all([Training(1, keys, tmp_path / "run", on(object_store, tmp_path))])


def test_a_store_that_is_silent_at_a_start_ends_it_in_one_line_with_the_code_to_try_again(
    object_store, tmp_path, run_of_words
):
    keys, _ = run_of_words
    object_store.fault = lambda request: "503"
    train_all([Training(1, keys, tmp_path / "run", on(object_store, tmp_path), exit_codes.STUCK)])
    assert (tmp_path / "cache-stderr").read_text().count("cannot open s3://bucket/data/text.idx: ") == 1
