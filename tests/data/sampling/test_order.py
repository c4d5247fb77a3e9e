"""The order of documents as a file: the same as in memory, made once, made again when damaged or stale."""

import os
import time
from pathlib import Path

import numpy as np
import pytest

from dtmega.data import cache_dir
from dtmega.data.indexed_files.dataset import IndexedDataset
from dtmega.data.indexed_files.shared_file import SharedFile
from dtmega.data.sampling import order
from dtmega.data.sampling.order import document_order, permutation
from dtmega.data.sampling.samples import Samples
from tests import ranks
from tests.data.sampling.test_samples import LENGTHS, read, write_corpus

PART, STREAM = (1, 11), "7/train/0"


@pytest.fixture
def corpus(tmp_path, monkeypatch):
    """A corpus whose orders are worth a file, and a cache directory of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(order, "LONG", 1)
    return IndexedDataset(write_corpus(tmp_path))


def files():
    return sorted(path for path in cache_dir().glob("order-*") if path.suffix == ".bin")


LONG_DOCUMENTS = [300, 1, 0, 255, 256, 70_000, 2, 65_535, 65_536, 3, 9, 4]  # of one, two and four bytes


def made(path: Path):
    """The facts that tell one making of a file from the next."""
    return path.stat().st_ino, path.stat().st_mtime_ns


def expected(epoch: int, lengths=LENGTHS):
    documents = permutation(PART[1] - PART[0], f"{STREAM}/{epoch}/documents")
    return documents.tolist(), np.cumsum([0, *np.array(lengths)[PART[0] + documents]]).tolist()


def found(dataset: IndexedDataset, epoch: int = 0):
    documents, starts = document_order(dataset, PART, STREAM, epoch)
    return documents.tolist(), starts.tolist()


@pytest.mark.parametrize("long", [1, 1000])
def test_an_order_is_the_shuffled_documents_and_where_each_starts_in_the_file_and_in_memory(corpus, monkeypatch, long):
    monkeypatch.setattr(order, "LONG", long)
    monkeypatch.setattr(order, "CHUNK", 3)
    assert found(corpus) == expected(0)
    assert len(files()) == (long == 1)


@pytest.mark.parametrize("chunk", [1, 3, 1 << 20])
def test_documents_of_any_length_start_where_those_before_them_end(corpus, tmp_path, monkeypatch, chunk):
    monkeypatch.setattr(order, "CHUNK", chunk)
    long = IndexedDataset(write_corpus(tmp_path, LONG_DOCUMENTS, "long"))
    assert found(long) == expected(0, LONG_DOCUMENTS)


def test_an_order_of_more_documents_than_two_bytes_can_number_has_each_once():
    assert np.array_equal(np.sort(permutation(70_000, "key")), np.arange(70_000))


def test_samples_read_through_the_file_are_those_read_from_memory(corpus, monkeypatch):
    through_file = read(Samples(corpus, PART, 4, 7, "train"), 60)
    monkeypatch.setattr(order, "LONG", 1000)
    np.testing.assert_array_equal(read(Samples(corpus, PART, 4, 7, "train"), 60), through_file)


def test_an_order_is_made_once_and_mapped_by_all(corpus):
    found(corpus)
    (path,) = files()
    before = made(path)
    again = document_order(corpus, PART, STREAM, 0)
    assert made(path) == before
    assert all(isinstance(array.base, np.memmap) and not array.flags.writeable for array in again)


def make_on_rank(folder: str, prefix: str) -> list[int]:
    os.environ["XDG_CACHE_HOME"] = folder
    order.LONG = 1
    makings = []
    make = SharedFile._make

    def counted(self):
        makings.append(1)
        time.sleep(0.2)  # the others come while one is at it
        make(self)

    SharedFile._make = counted
    assert found(IndexedDataset(prefix)) == expected(0)
    return makings


def test_of_processes_that_come_together_one_makes_the_file_and_all_read_it(corpus, tmp_path):
    makings = ranks.run(3, make_on_rank, str(tmp_path / "cache"), corpus.prefix)
    assert sum(map(len, makings)) == 1


@pytest.mark.parametrize("damage", ["truncated", "empty", "longer", "a start", "a document", "the digest"])
def test_a_damaged_file_is_made_again(corpus, damage):
    found(corpus)
    (path,) = files()
    content = bytearray(path.read_bytes())
    place = {"a start": 10, "a document": 8 * 11 + 3, "the digest": len(content) - 1}
    if damage in place:
        content[place[damage]] ^= 1
    content = {"truncated": content[:-5], "empty": b"", "longer": content + b"\0"}.get(damage, content)
    path.write_bytes(content)
    assert found(corpus) == expected(0)


def test_a_file_of_another_epoch_under_this_ones_name_is_made_again(corpus):
    found(corpus)
    (path,) = files()
    path.rename(str(path).replace("-0.bin", "-1.bin"))
    assert found(corpus, epoch=1) == expected(1)


@pytest.mark.parametrize("changes", ["time", "size"])
def test_a_file_of_data_that_have_changed_is_made_again(corpus, tmp_path, changes):
    os.utime(tmp_path / "corpus.idx", ns=(0, 0))
    found(corpus)
    lengths = LENGTHS[:2] + LENGTHS[2:][::-1]  # as many documents and tokens
    changed = IndexedDataset(write_corpus(tmp_path, lengths if changes == "time" else [*lengths, 1]))
    os.utime(tmp_path / "corpus.idx", ns=(0, 1 if changes == "time" else 0))
    assert found(changed) == expected(0, lengths)
    assert len(files()) == 1


def test_streams_parts_and_epochs_have_files_of_their_own_and_old_epochs_none(corpus):
    for epoch in range(4):
        assert found(corpus, epoch) == expected(epoch)
    document_order(corpus, PART, "8/train/0", 0)
    document_order(corpus, (0, 12), STREAM, 0)
    assert sorted(path.stem.rpartition("-")[2] for path in files()) == ["0", "0", "2", "3"]


def test_locks_and_what_killed_processes_left_of_epochs_before_the_last_one_go_with_them(corpus):
    found(corpus, 4)
    (name,) = (path.name.removesuffix("-4.bin") for path in files())
    for epoch in range(2, 5):
        for suffix in (".lock", ".0123abcd.tmp"):
            (cache_dir() / f"{name}-{epoch}.bin{suffix}").touch()
    found(corpus, 5)
    left = {path.name.removeprefix(f"{name}-") for path in cache_dir().iterdir()} - {"5.bin.lock"}
    assert left == {"4.bin", "4.bin.lock", "4.bin.0123abcd.tmp", "5.bin"}


def test_without_room_for_the_file_the_order_is_kept_in_memory_and_that_is_said(corpus, monkeypatch, capfd):
    def full(fd):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    assert found(corpus) == expected(0)
    assert "No space left on device: the order of 10 documents is kept in the memory" in capfd.readouterr().err
    assert [path for path in cache_dir().iterdir() if path.suffix != ".lock"] == []
