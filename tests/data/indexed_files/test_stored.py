"""Claims about data sets in an object store: the tokens of a disk, in few requests, and nothing stale."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from dtmega import config, families
from dtmega.config import Config
from dtmega.data import cache_dir, workers
from dtmega.data import text as data_text
from dtmega.data.indexed_files import token_ids
from dtmega.data.indexed_files.dataset import IndexedDataset
from dtmega.data.indexed_files.token_ids import check_token_ids
from dtmega.data.indexed_files.writer import IndexedWriter
from dtmega.data.loader import TrainBatches, eval_batches
from dtmega.data.lost import DataLost
from dtmega.data.objectives.next_token import NEXT_TOKEN
from dtmega.data.objectives.stored_rows import StoredRows
from dtmega.data.text import Text, fingerprint, open_text
from dtmega.files import object_file, object_requests
from dtmega.files.outages import Unreachable
from tests.layouts import FAMILIES, FORMS, write_data
from tests.object_server import BUCKET, Object, Request, Server
from tests.stored_data import reads, store
from tests.test_train import conversations

S = 24


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def text(tmp_path) -> str:
    """A prefix of 300 documents of 3 to 90 random ids."""
    rng = np.random.default_rng(0)
    with IndexedWriter(tmp_path / "text", np.dtype("<u2")) as writer:
        for length in rng.integers(3, 90, 300):
            writer.add(rng.integers(0, 256, length))
    return str(tmp_path / "text")


def words(path: str | list[str], **keys: object) -> Config:
    return config.validate(
        {
            "model": {"vocab_size": 257},
            "data": {"path": path, "tokenizer": "bytes", "seq_len": S, "split": "8,1,1", "num_workers": 0, **keys},
            "batch": {"micro_batch_size": 2, "global_batch_size": 8},
            "eval": {"steps": 1},
            "train": {"steps": 5},
        },
        "a test",
    )


def opened(cfg: Config) -> Text:
    return open_text(cfg, NEXT_TOKEN)


def batches(text: Text, cfg: Config) -> TrainBatches:
    return TrainBatches(text.rows("train"), cfg.data, cfg.batch, 0, 1)


def equal(ours: list[dict[str, torch.Tensor]], theirs: list[dict[str, torch.Tensor]]) -> bool:
    return len(ours) == len(theirs) and all(
        a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
        for a, b in zip(ours, theirs, strict=True)
    )


# Tokens and samples.


def test_slices_of_any_bounds_are_those_of_the_disk(object_store, text):
    disk, far = IndexedDataset(text), IndexedDataset(store(object_store, text, "a/text"))
    assert (len(far), far.n_tokens, far.dtype) == (len(disk), disk.n_tokens, disk.dtype)
    n = disk.n_tokens
    for start, stop in ((0, 1), (n - 1, n), (5, 5), (0, n), (7, 3), (n - 2, n + 9), (None, 4), (n - 4, None)):
        np.testing.assert_array_equal(far.tokens[start:stop], disk.tokens[start:stop])
    for i in (0, 17, 299):
        np.testing.assert_array_equal(far.get(i, 1, 2), disk.get(i, 1, 2))


def objectives(folder: Path) -> dict[str, tuple[dict[str, object], str]]:
    """The keys of a run of each objective, and its data on a disk."""
    data = write_data(folder / "data")
    found: dict[str, tuple[dict[str, object], str]] = {}
    for name in ("bloom", "bert", "t5", "separate-spans"):
        keys = {**(FAMILIES | FORMS)[name], **data[name]}
        found[name] = keys, str(keys["data.path"])
    found["prefix"] = found["bloom"][0] | {"data.objective": "prefix-lm"}, found["bloom"][1]
    chat = {
        "train.steps": 5,
        "data.split": "8,1,1",
        "data.tokenizer": "bytes",
        "data.objective": "conversations",
        "model.vocab_size": 257,
    }
    found["conversations"] = {"data.seq_len": S, **chat}, conversations(folder, 60)
    for order in ("megatron-core", "megatron-deepspeed"):
        keys, path = found["bloom"]
        found[order] = {**keys, "data.order": order}, path
    return found


def configured(keys: dict[str, object], path: object) -> Config:
    nested: dict[str, dict[str, object]] = {}
    for key, value in {**keys, "data.path": path}.items():
        section, _, name = key.partition(".")
        nested.setdefault(section, {})[name] = value
    return config.validate(nested, "a test")


def test_the_rows_of_every_objective_are_those_of_the_disk_and_read_in_one_batch(object_store, tmp_path, monkeypatch):
    monkeypatch.setattr(object_file, "GAP_BYTES", 2**30)  # a batch then is one request
    for name, (keys, path) in objectives(tmp_path).items():
        cfg = configured(keys, path)
        far_cfg = configured(keys, store(object_store, path, f"a/{name}"))
        objective = families.objective(cfg)
        near, far = open_text(cfg, objective), open_text(far_cfg, objective)
        assert near.identity == far.identity
        for split in ("train", "valid"):
            # As a data worker gets them.
            ours: StoredRows = pickle.loads(pickle.dumps(far.rows(split)))
            before = reads(object_store)
            made = ours[range(3, 11)]
            assert reads(object_store) - before == 1, name
            assert equal([made], [near.rows(split)[range(3, 11)]]), name


def test_a_blend_of_disk_and_store_reads_the_samples_of_a_blend_of_disks(object_store, text, tmp_path):
    near, far = words([text, text], weights=[2, 1]), words([text, store(object_store, text, "b")], weights=[2, 1])
    ours, theirs = (opened(cfg).rows("train")[range(40)] for cfg in (far, near))
    assert equal([ours], [theirs])


def test_bytes_of_a_step_are_those_of_its_samples_if_none_are_close(object_store, text, monkeypatch):
    monkeypatch.setattr(object_file, "GAP_BYTES", -1)
    cfg = words(store(object_store, text, "a/text"))
    rows = opened(cfg).rows("train")
    object_store.bytes_sent = 0
    rows[range(20, 28)]
    assert object_store.bytes_sent == 8 * (S + 1) * 2


def test_ranges_with_small_gaps_are_one_request(object_store):
    data = bytes(range(256)) * 1000
    object_store.objects["x"] = Object(data, object_store.now())
    file = object_file.ObjectFile.open(f"s3://{BUCKET}/x", "a test")
    assert file is not None
    gap = object_file.GAP_BYTES
    ranges = [(gap + 10, gap + 20), (0, 10), (5, 8), (3 * gap, 3 * gap + 1), (4, 4)]
    before = len(object_store.seen)
    assert [bytes(piece) for piece in file.read(ranges)] == [data[start:stop] for start, stop in ranges]
    assert len(object_store.seen) - before == 2


def test_batches_are_those_of_the_disk_also_after_a_rewind(object_store, text):
    near, far = words(text), words(store(object_store, text, "a/text"))
    ours, theirs = batches(opened(far), far), batches(opened(near), near)
    for mine, truth in islice(zip(ours, theirs, strict=False), 6):
        assert equal(mine.microbatches, truth.microbatches)
    ours.load_state_dict({"samples": 16})
    theirs.load_state_dict({"samples": 16})
    assert equal(next(ours).microbatches, next(theirs).microbatches)
    ours.close()


def test_a_worker_sends_its_error_as_a_value(object_store, text):
    cfg = words(store(object_store, text, "a/text"))
    answers = workers._Answers(opened(cfg).rows("train"))
    fail(object_store, "deleted")()
    error = pickle.loads(pickle.dumps(answers[range(4)]))
    assert isinstance(error, DataLost)
    assert (str(error), error.is_temporary) == (
        "cannot read tokens: s3://bucket/a/text.bin is gone ([data] path)",
        False,
    )


@pytest.mark.full
def test_a_workers_batches_are_those_of_the_disk_and_its_error_is_one_line(object_store, text, capfd):
    near, far = words(text), words(store(object_store, text, "a/text"), num_workers=1)
    ours, theirs = batches(opened(far), far), batches(opened(near), near)
    for mine, truth in islice(zip(ours, theirs, strict=False), 3):
        assert equal(mine.microbatches, truth.microbatches)
    fail(object_store, "deleted")()
    assert lost(ours) == "cannot read tokens: s3://bucket/a/text.bin is gone ([data] path)"
    ours.close()
    assert "Traceback" not in capfd.readouterr().err


def test_the_next_step_is_read_while_this_one_is_computed(object_store, text):
    cfg = words(store(object_store, text, "a/text"))
    ours = batches(opened(cfg), cfg)
    next(ours)
    started = threading.Event()

    def after(request: Request) -> None:
        if request.key.endswith(".bin"):
            started.set()

    object_store.after = after
    next(ours)  # has been read before
    assert started.wait(10)  # the third step, which nobody has asked for
    ours.close()


def test_an_evaluation_reads_its_steps_and_no_more(object_store, text, monkeypatch):
    monkeypatch.setattr(object_file, "GAP_BYTES", 2**30)
    cfg, near = words(store(object_store, text, "a/text")), words(text)
    rows, truth = opened(cfg).rows("valid"), opened(near).rows("valid")
    before = reads(object_store)
    ours = [step.microbatches for step in eval_batches(rows, cfg.batch, 0, 1, 3)]
    assert reads(object_store) - before == 3
    theirs = [step.microbatches for step in eval_batches(truth, near.batch, 0, 1, 3)]
    assert all(equal(a, b) for a, b in zip(ours, theirs, strict=True))


# The index, the record and the fingerprint.


def test_an_index_is_downloaded_once_and_anew_when_it_has_changed_or_its_copy_is_damaged(object_store, text, tmp_path):
    url = store(object_store, text, "a/text")
    IndexedDataset(url)
    assert reads(object_store, ".idx") == 1
    IndexedDataset(url)
    assert reads(object_store, ".idx") == 1
    (copy,) = cache_dir().glob("index-*.bin")
    copy.write_bytes(b"\0" + copy.read_bytes()[1:])
    assert IndexedDataset(url).n_tokens == IndexedDataset(text).n_tokens
    assert reads(object_store, ".idx") == 2
    with IndexedWriter(tmp_path / "other", np.dtype("<u2")) as writer:
        for length in np.diff(IndexedDataset(text).tokens_before(np.arange(301)))[::-1]:
            writer.add([1] * int(length))
    store(object_store, str(tmp_path / "other"), "a/text")
    np.testing.assert_array_equal(IndexedDataset(url).sizes, IndexedDataset(tmp_path / "other").sizes)
    assert reads(object_store, ".idx") == 3


def test_an_index_that_one_answer_has_damaged_is_downloaded_once_more(object_store, text):
    url = store(object_store, text, "a/text")
    once = iter(["flip"])
    object_store.fault = lambda request: next(once, "") if (request.method, request.key[-4:]) == ("GET", ".idx") else ""
    for _ in range(2):  # the second time from the cache
        np.testing.assert_array_equal(IndexedDataset(url).sizes, IndexedDataset(text).sizes)
        assert reads(object_store, ".idx") == 2


def test_a_damaged_index_is_refused_with_its_url_and_the_file_that_holds_its_copy(object_store, text):
    url = store(object_store, text, "a/text")
    object_store.fault = lambda request: "flip" if (request.method, request.key[-4:]) == ("GET", ".idx") else ""
    with pytest.raises(ValueError, match="expected") as error:
        IndexedDataset(url)
    (copy,) = cache_dir().glob("index-*.bin")
    assert str(error.value).startswith(f"{url}.idx: expected")
    assert str(error.value).endswith(f"(downloaded twice, the last time to {copy})")


def test_a_data_set_without_a_record_of_its_ids_is_scanned_once(object_store, text, capfd):
    url = store(object_store, text, "a/text")
    for _ in range(2):
        check_token_ids(IndexedDataset(url), 256)
    assert reads(object_store) == 1
    assert capfd.readouterr().err.count("reading all ") == 1
    with pytest.raises(ValueError, match=r"expected ids in \[0, 200\), got "):
        check_token_ids(IndexedDataset(url), 200)


def test_a_record_spares_the_scan_but_for_some_blocks(object_store, tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(token_ids, "N_BLOCKS", 3)
    monkeypatch.setattr(token_ids, "BLOCK_TOKENS", 4)
    monkeypatch.setattr(object_file, "GAP_BYTES", -1)
    dataset = IndexedDataset(store(object_store, conversations(tmp_path, 200), "chat"))
    object_store.bytes_sent = 0
    check_token_ids(dataset, 122)
    assert object_store.bytes_sent == 3 * 4 * 2
    assert "reading all" not in capfd.readouterr().err
    with pytest.raises(ValueError, match="all ids: 48 to 121"):
        check_token_ids(dataset, 121)


def test_the_fingerprint_of_a_large_set_is_that_of_the_disk(object_store, tmp_path, monkeypatch):
    monkeypatch.setattr(data_text, "N_BLOCKS", 4)
    with IndexedWriter(tmp_path / "large", np.dtype("<u2")) as writer:
        for _ in range(20):
            writer.add(np.random.default_rng(0).integers(0, 256, 2**15))
    prefix = str(tmp_path / "large")
    dataset = IndexedDataset(store(object_store, prefix, "large"))
    object_store.bytes_sent = 0
    assert fingerprint(dataset.prefix, dataset.stored) == fingerprint(prefix)
    assert object_store.bytes_sent == 4 * data_text.BLOCK_BYTES + Path(f"{prefix}.idx").stat().st_size


# Refusals and faults.


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("s3://user:hunter2@bucket/a/text", "is given with credentials or a query"),
        ("s3://bucket/a/nothing", r"s3://bucket/a/nothing.idx: No such object \(\[data\] path is the PREFIX"),
        ("s3://text", r"cannot open s3://text.idx: .*\(\[data\] path\)"),
    ],
)
@pytest.mark.usefixtures("object_store")
def test_urls_that_lead_to_no_data_set_are_refused(url, message):
    with pytest.raises(ValueError, match=message) as error:
        IndexedDataset(url)
    assert "hunter2" not in str(error.value)


def test_a_bin_that_does_not_fit_its_index_is_refused(object_store, text):
    url = store(object_store, text, "a/text")
    object_store.objects["a/text.bin"] = Object(b"\0" * 10, object_store.now())
    with pytest.raises(ValueError, match=r"text.bin: expected \d+ bytes \(.*got 10"):
        IndexedDataset(url)


@pytest.mark.usefixtures("hasty")
def test_a_store_that_does_not_answer_is_refused_at_a_start(object_store, text):
    url = store(object_store, text, "a/text")
    object_store.fault = lambda request: "503"
    with pytest.raises(Unreachable, match=r"cannot open s3://bucket/a/text.idx: .*503.*\[data\] path") as error:
        IndexedDataset(url)
    assert "127.0.0.1" not in str(error.value)


def fail(server: Server, kind: str) -> Callable[[], None]:
    """Let requests for tokens fail from when the result is called."""

    def begin() -> None:
        if kind == "replaced":
            data = server.objects["a/text.bin"].data
            server.objects["a/text.bin"] = Object(bytes(reversed(data)), server.now())
        elif kind == "shorter":
            server.objects["a/text.bin"] = Object(b"\0\0", server.now())
        elif kind == "deleted":
            del server.objects["a/text.bin"]
        else:
            server.fault = lambda request: kind

    return begin


def lost(batches: TrainBatches) -> str:
    """The error that ends an iteration."""
    with pytest.raises(DataLost) as error:
        list(islice(batches, 9))
    assert error.value.is_temporary == ("Error" in str(error.value))
    return str(error.value)


@pytest.mark.parametrize(
    ("kind", "words_of_it"),
    [
        ("503", "Error performing GET a request"),
        ("cut", "Error performing GET a request"),
        ("silence", "Error performing GET a request"),
        ("replaced", "has been replaced since it was opened"),
        ("shorter", "has been replaced since it was opened"),
        ("deleted", "is gone"),
    ],
)
@pytest.mark.usefixtures("hasty")
def test_lost_tokens_are_told_in_one_line(object_store, text, kind, words_of_it, monkeypatch):
    monkeypatch.setattr(object_requests, "REQUEST_S", 2 if kind == "silence" else 30)
    cfg = words(store(object_store, text, "a/text"))
    ours = batches(opened(cfg), cfg)
    next(ours)
    fail(object_store, kind)()
    error = lost(ours)
    assert error.startswith("cannot read tokens: s3://bucket/a/text.bin")
    assert words_of_it in error
    assert "\n" not in error


@pytest.mark.parametrize(("size", "answer"), [(8, b"abcd"), (7, b"abcd"), (8, b"abc"), (8, b"abcdefgh")])
def test_an_answer_of_another_length_or_of_an_object_of_another_size_is_not_taken_for_the_range(size, answer):
    # Without ETags, a version is a time in seconds, which an object that was replaced at once may have too.
    file = object_file.ObjectFile("s3://bucket/a/text.bin", 8, "one time")
    result = SimpleNamespace(meta={"size": size, "e_tag": "one time"}, bytes=lambda: answer)
    file._store = SimpleNamespace(get=lambda name, options: result)
    if (size, answer) == (8, b"abcd"):
        assert file.read([(2, 6)]) == [b"abcd"]
        return
    with pytest.raises(object_file.Changed, match=r"s3://bucket/a/text.bin has been replaced since"):
        file.read([(2, 6)])


@pytest.mark.parametrize("kind", ["503", "cut"])
@pytest.mark.usefixtures("hasty")
def test_one_failed_answer_is_asked_for_again(object_store, text, kind):
    near, far = words(text), words(store(object_store, text, "a/text"))
    truth = next(batches(opened(near), near)).microbatches
    once = iter([kind])
    object_store.fault = lambda request: next(once, "") if request.key.endswith(".bin") else ""
    assert equal(next(batches(opened(far), far)).microbatches, truth)


def test_a_worker_reads_the_object_that_the_trainer_has_opened_and_no_later_one(object_store, text):
    cfg = words(store(object_store, text, "a/text"))
    pickled = pickle.dumps(opened(cfg).rows("train"))
    fail(object_store, "replaced")()
    with pytest.raises(DataLost, match="has been replaced"):
        pickle.loads(pickled)[range(4)]


def test_left_to_itself_a_loader_of_stored_rows_has_a_worker_and_reads_nothing_to_decide(object_store, text):
    cfg = words(store(object_store, text, "a/text"), num_workers=-1)
    ours = batches(opened(cfg), cfg)
    before = len(object_store.seen)
    assert ours._n_workers() == 1
    assert len(object_store.seen) == before
