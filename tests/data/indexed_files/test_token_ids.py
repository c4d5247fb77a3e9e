"""`check_token_ids` of data sets whose record says the range of their ids."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from dtmega.data.indexed_files import token_ids
from dtmega.data.indexed_files.dataset import IndexedDataset
from dtmega.data.indexed_files.token_ids import check_token_ids
from dtmega.data.indexed_files.writer import IndexedWriter, text_of
from dtmega.data.tokenizers.load import load_tokenizer


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def write(prefix: Path, sequences: list[list[int]], **changes: int | None) -> IndexedDataset:
    """Write a data set with its record, of which some entries are replaced, or left out if they are None."""
    with IndexedWriter(prefix, np.dtype("<u2")) as writer:
        for ids in sequences:
            writer.add(ids)
        made = json.loads(text_of(load_tokenizer("bytes"), writer)) | changes
        writer.about = json.dumps({key: value for key, value in made.items() if value is not None})
    return IndexedDataset(prefix)


def test_the_record_says_the_range_of_ids_and_nothing_is_scanned(tmp_path, monkeypatch):
    def scan(*args: object) -> tuple[int, int]:
        raise AssertionError

    dataset = write(tmp_path / "a", [[5, 8], [], [3]])
    monkeypatch.setattr(token_ids, "_token_range", scan)
    check_token_ids(dataset, 9)
    with pytest.raises(ValueError, match=r"expected ids in \[0, 8\), got 8 in sequence 0 \(all ids: 3 to 8\)"):
        check_token_ids(dataset, 8)


@pytest.mark.parametrize("changes", [{"min_id": None, "max_id": None}, {"tokens": 4}, {"documents": 1}])
def test_a_record_without_a_range_or_of_another_bin_counts_for_nothing(tmp_path, changes):
    dataset = write(tmp_path / "a", [[5, 8], [3]], **({"max_id": 4} | changes))
    with pytest.raises(ValueError, match=r"got 8 in sequence 0 \(all ids: 3 to 8\)"):
        check_token_ids(dataset, 6)


@pytest.mark.parametrize("changes", [{"max_id": 7}, {"min_id": 4}])
def test_a_record_that_contradicts_its_ids_is_refused(tmp_path, monkeypatch, changes):
    monkeypatch.setattr(token_ids, "BLOCK_TOKENS", 2)
    dataset = write(tmp_path / "a", [[5]] * 500 + [[3, 8]], **changes)
    with pytest.raises(
        ValueError, match=r"a\.meta\.json: expected ids from . to . .*, got [38] in sequence 500: this is"
    ):
        check_token_ids(dataset, 257)
