"""Claims that a reader finds the old, the new, or what it refuses after a power cut: every writer, by one recorder.

Writers of checkpoints: checkpoint/test_kill.py. First that the recorder finds out writers that are wrong.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dtmega.__main__ import main
from dtmega.data import default_corpus
from dtmega.data.indexed_files.dataset import IndexedDataset
from dtmega.data.indexed_files.token_ids import check_token_ids
from dtmega.data.indexed_files.writer import IndexedWriter
from dtmega.data.preparing import corpus
from dtmega.data.sampling import order
from dtmega.data.sampling.order import document_order
from dtmega.data.tokenizers.load import load_tokenizer
from dtmega.distributed import exit_codes
from dtmega.files import atomic
from dtmega.training.records.lines import StepLines, keep_until
from tests.data.sampling.test_samples import write_corpus
from tests.power_cuts import Disk


@pytest.fixture
def elsewhere(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("left") / "disk"


# ------------------------------------------------------------------------------------------------------- the recorder


def by_hand(*steps: str) -> Callable[[Path], None]:
    """A writer of a file `a` that does these things, in this order."""

    def write(folder: Path) -> None:
        with open(folder / "aside", "w") as file:
            for step in steps:
                if step == "write":
                    file.write("new")
                elif step == "flush":
                    file.flush()
                elif step == "fsync":
                    os.fsync(file.fileno())
                elif step == "rename":
                    os.replace(folder / "aside", folder / "a")
                elif step == "move":
                    (folder / "below").mkdir(exist_ok=True)
                    os.replace(folder / "aside", folder / "below" / "a")
                else:
                    atomic.sync_folder(folder / step)

    return write


def contents(folder: Path) -> str | None:
    path = folder / "a"
    return path.read_text() if path.exists() else None


@pytest.mark.parametrize(
    ("steps", "left", "uncertain"),
    [
        ("write flush fsync rename .", {"old", "new"}, []),
        ("write flush fsync rename", {"old", "new"}, ["a", "aside"]),
        ("write flush rename .", {"old", "new", ""}, ["a: content"]),
        ("write fsync flush rename .", {"old", "new", ""}, ["a: content"]),
        ("write fsync rename .", {"old", "new", ""}, ["a: content"]),
        ("write flush rename fsync .", {"old", "new", ""}, []),
        ("write flush fsync move below .", {"old"}, []),
        ("write flush fsync move .", {"old"}, ["below/a"]),
    ],
)
def test_a_power_cut_leaves_what_is_not_synced_or_not(tmp_path, elsewhere, steps, left, uncertain):
    (tmp_path / "a").write_text("old")
    with Disk(tmp_path) as disk:
        by_hand(*steps.split())(tmp_path)
    assert {contents(folder) for folder in disk.left(elsewhere)} == left
    assert disk.uncertain() == uncertain


def test_a_rename_that_is_not_synced_may_be_there_without_the_one_before_it(tmp_path, elsewhere):
    for name in ("a", "b"):
        (tmp_path / name).write_text("old")
    with Disk(tmp_path) as disk:
        for name in ("a", "b"):
            by_hand("write", "flush", "fsync")(tmp_path)
            os.replace(tmp_path / "aside", tmp_path / name)
    found = {((folder / "a").read_text(), (folder / "b").read_text()) for folder in disk.left(elsewhere)}
    assert found == {("old", "old"), ("new", "old"), ("old", "new"), ("new", "new")}


def test_what_is_in_a_new_folder_counts_when_the_folder_is_there(tmp_path, elsewhere):
    with Disk(tmp_path) as disk:
        (tmp_path / ".tmp").mkdir()
        (tmp_path / ".tmp" / "a").write_text("new")
        (tmp_path / ".tmp").rename(tmp_path / "step")
    found = {contents(folder / "step") for folder in disk.left(elsewhere) if (folder / "step").exists()}
    assert found == {None, "", "new"}


# -------------------------------------------------------------------------------------------------------- the writers


def data_set(folder: Path, old_about: str, new_about: str) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """Two versions of PREFIX.bin, .idx and .meta.json."""

    def write(tokens: list[list[int]], about: str) -> None:
        with IndexedWriter(folder / "a", np.dtype("uint16")) as writer:
            writer.about = about
            for sequence in tokens:
                writer.add(sequence)

    # As long as the old ones, so that no size tells them apart.
    return lambda: write([[1, 2], [3]], old_about), lambda: write([[4, 5], [6]], new_about)


def tokens_and_about(folder: Path) -> tuple[list[int], str | None] | None:
    try:
        dataset = IndexedDataset(folder / "a")
    except ValueError:
        return None
    about = folder / "a.meta.json"
    return dataset.tokens.tolist(), about.read_text() if about.exists() else None


@pytest.mark.parametrize(("old_about", "new_about"), [("old", "new"), ("", "new"), ("old", ""), ("", "")])
def test_a_data_set_is_the_old_one_or_the_new_one_with_what_is_said_of_it_or_is_refused(
    tmp_path, elsewhere, old_about, new_about
):
    write_old, write_new = data_set(tmp_path, old_about, new_about)
    write_old()
    with Disk(tmp_path) as disk:
        write_new()
    old, new = ([1, 2, 3], old_about or None), ([4, 5, 6], new_about or None)
    found = [tokens_and_about(folder) for folder in disk.left(elsewhere)]
    assert [one for one in found if one not in (old, new, None)] == []
    assert old in found
    assert new in found
    assert disk.uncertain() == []


def test_the_first_data_set_of_a_name_is_there_when_the_writer_has_returned(tmp_path, elsewhere):
    _, write = data_set(tmp_path, "", "new")
    with Disk(tmp_path) as disk:
        write()
    assert {str(tokens_and_about(folder)) for folder in disk.left(elsewhere)} == {"None", "([4, 5, 6], 'new')"}
    assert disk.uncertain() == []


def test_merged_parts_are_there_as_a_whole_or_not_at_all(tmp_path, elsewhere):
    (tmp_path / "parts").mkdir()
    for i in range(2):
        with IndexedWriter(tmp_path / "parts" / f"{i}", np.dtype("uint16")) as writer:
            writer.add([2 * i, 2 * i + 1])
    argv = ["merge", "--input", f"{tmp_path}/parts/*", "--output", f"{tmp_path}/a"]
    with Disk(tmp_path) as disk:
        assert main(argv) == exit_codes.DONE
    assert {str(tokens_and_about(folder)) for folder in disk.left(elsewhere)} == {"None", "([0, 1, 2, 3], None)"}
    assert disk.uncertain() == []


def test_lines_of_steps_are_there_when_a_save_begins_and_those_of_another_run_are_aside(tmp_path, elsewhere):
    path = tmp_path / "digests.jsonl"
    path.write_text("another run's")
    with Disk(tmp_path) as disk:
        keep_until(path, 0)
    assert disk.uncertain() == []
    with Disk(tmp_path) as disk:
        lines = StepLines(path, print)
        lines.write({"step": 1})
        lines.sync()
    lines.close()
    assert disk.uncertain() == []
    found = {(f / path.name).read_text() if (f / path.name).exists() else None for f in disk.left(elsewhere)}
    assert found == {None, "", '{"step": 1}\n'}


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    """The folder of caches."""
    folder = tmp_path / "cache" / "dtmega"
    folder.mkdir(parents=True)
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder.parent))
    return folder


def left_of(cache: Path, write: Callable[[], object]) -> Iterator[None]:
    """Nothing is in the folder of caches but what a power cut could leave of what a writer does there."""
    with Disk(cache) as disk:
        write()
    for _ in disk.left(cache):
        yield


def test_the_default_corpus_is_whole_or_made_again(monkeypatch, cache):
    monkeypatch.setattr(corpus, "documents", lambda: iter([("a", "first"), ("b", "second")]))
    monkeypatch.setattr(corpus, "MIN_CHARS", 1)
    tokenizer = load_tokenizer("bytes")

    def prepare() -> str:
        return IndexedDataset(default_corpus.prepare(tokenizer)).tokens.tobytes().decode("utf-16-le")

    for _ in left_of(cache, prepare):
        assert prepare() == "first\u0100second\u0100"


def test_an_order_of_documents_is_whole_or_made_again(tmp_path, monkeypatch, cache):
    dataset = IndexedDataset(write_corpus(tmp_path))
    expected = [array.tolist() for array in document_order(dataset, (0, 12), "7/train/0", 0)]
    monkeypatch.setattr(order, "LONG", 1)
    for _ in left_of(cache, lambda: document_order(dataset, (0, 12), "7/train/0", 0)):
        assert [array.tolist() for array in document_order(dataset, (0, 12), "7/train/0", 0)] == expected


def test_what_a_killed_process_has_left_in_the_folder_of_caches_goes_when_the_file_is_made(
    tmp_path, monkeypatch, cache
):
    dataset = IndexedDataset(write_corpus(tmp_path))
    monkeypatch.setattr(order, "LONG", 1)
    document_order(dataset, (0, 12), "7/train/0", 0)
    (made,) = cache.glob("order-*.bin")
    made.rename(f"{made}.0123abcd.tmp")
    other = cache / f"other-{made.name}.0123abcd.tmp"
    other.touch()
    document_order(dataset, (0, 12), "7/train/0", 0)
    assert [*cache.glob("*.tmp")] == [other]


def test_the_range_of_ids_is_right_or_looked_for_again(tmp_path, cache):
    dataset = IndexedDataset(write_corpus(tmp_path))  # ids 0 to 74
    for _ in left_of(cache, lambda: check_token_ids(dataset, 75)):
        check_token_ids(dataset, 75)
        with pytest.raises(ValueError, match=r"got 74 in sequence 11 \(all ids: 0 to 74\)"):
            check_token_ids(dataset, 74)
