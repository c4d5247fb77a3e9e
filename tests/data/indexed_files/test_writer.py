"""`IndexedWriter` and `SpilledArray`: data sets of any length, and the range of their ids."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from dtmega.data.indexed_files import spilled_array
from dtmega.data.indexed_files.dataset import IndexedDataset
from dtmega.data.indexed_files.spilled_array import SpilledArray
from dtmega.data.indexed_files.writer import IndexedWriter

DOCUMENTS = [[[1, 2], [3]], [], [[4, 5, 6]], [[7]], [[8], [9, 9], [2]], [[]]]


def write(prefix: Path) -> list[bytes]:
    with IndexedWriter(prefix, np.dtype("<u2")) as writer:
        for document in DOCUMENTS:
            writer.add([i for sequence in document for i in sequence], [len(sequence) for sequence in document])
        assert (len(writer), writer.n_documents, writer.n_tokens) == (8, 6, 11)
    return [Path(f"{prefix}.{suffix}").read_bytes() for suffix in ("bin", "idx")]


@pytest.mark.parametrize("in_memory", [1, 2, 4])
def test_a_long_data_set_is_the_same_bytes_whatever_is_kept_in_memory(tmp_path, monkeypatch, in_memory):
    expected = write(tmp_path / "short")
    monkeypatch.setattr(spilled_array, "IN_MEMORY", in_memory)
    assert write(tmp_path / "long") == expected
    assert sorted(path.name for path in tmp_path.iterdir()) == ["long.bin", "long.idx", "short.bin", "short.idx"]


def test_a_writer_leaves_alone_what_a_living_one_of_the_same_files_has_begun(tmp_path):
    with IndexedWriter(tmp_path / "a", np.dtype("<u2")) as slow:
        slow.add([1, 2, 3])
        with IndexedWriter(tmp_path / "a", np.dtype("<u2")) as fast:
            fast.add([4])
        slow.add([5])
    assert IndexedDataset(tmp_path / "a").tokens.tolist() == [1, 2, 3, 5]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.bin", "a.idx"]


def test_older_entries_of_an_array_are_in_a_file_without_a_name(tmp_path, monkeypatch):
    monkeypatch.setattr(spilled_array, "IN_MEMORY", 2)
    array = SpilledArray("q", tmp_path)
    for i in range(5):
        array.extend([i])
        assert np.concatenate(list(array.pieces())).tolist() == [*range(i + 1)]
    assert len(array) == 5
    assert list(tmp_path.iterdir()) == []
    array.close()


def test_ten_times_the_entries_take_no_more_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(spilled_array, "IN_MEMORY", 1000)
    peaks = []
    for n in (10_000, 100_000):
        array = SpilledArray("i", tmp_path)
        tracemalloc.start()
        for start in range(0, n, 500):
            array.extend(range(start, start + 500))
        assert sum(int(piece.sum()) for piece in array.pieces()) == n * (n - 1) // 2
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        array.close()
    assert peaks[1] < peaks[0] + 4000


def test_the_range_of_ids_is_that_of_all_documents(tmp_path):
    with IndexedWriter(tmp_path / "a", np.dtype("<i4")) as writer:
        assert (writer.min_id, writer.max_id) == (None, None)
        writer.add([])
        for ids in ([5, 7], [6], [5, 12], [3, 4]):
            writer.add(ids)
        assert (writer.min_id, writer.max_id) == (3, 12)
