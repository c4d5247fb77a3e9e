"""Claims about checkpoint/reader.py: any part of a tensor that is stored in boxes, from files that may go meanwhile."""

from __future__ import annotations

import contextlib
import itertools
import resource
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import torch
from torch import Tensor

from dtmega.checkpoint import manifest, reader
from dtmega.checkpoint.data_files import DataFile
from dtmega.checkpoint.files import Disk, open_root
from dtmega.checkpoint.manifest import Damaged, Entry, Manifest
from dtmega.checkpoint.reader import Checkpoint
from dtmega.checkpoint.remote import Remote
from dtmega.checkpoint.resume import open_checkpoint
from dtmega.checkpoint.state import State

Cuts = Mapping[str, Sequence[Sequence[int]]]


def store(path: str, tensors: Mapping[str, Tensor], cuts: Cuts | None = None, step: int = 1, **state: Any) -> str:
    """A checkpoint that was written without a run.

    Args:
        path: of the new folder.
        cuts: name -> for each dim, where the boxes that the tensor is stored in begin. Each box has a file of its own.
        state: arguments of `State.of`.
    """
    root, _, folder = path.rpartition("/")
    files, entries, sizes = open_root(root), {}, {}
    block_bytes = manifest.block_bytes_for(sum(tensor.nbytes for tensor in tensors.values()))
    files.make(folder)
    for name, tensor in tensors.items():
        starts = (cuts or {}).get(name, [[0]] * tensor.ndim)
        edges = [itertools.pairwise([*begin, n]) for begin, n in zip(starts, tensor.shape, strict=True)]
        chunks = []
        for box in itertools.product(*edges):
            file_name = f"data-{len(sizes):05d}.bin"
            with files.create(folder, file_name) as file:
                data = DataFile(file_name, file, block_bytes)
                chunks.append(data.add(tensor[tuple(slice(*ends) for ends in box)], [start for start, _ in box]))
            sizes[file_name] = data.n_bytes
        entries[name] = Entry(tensor.dtype, tuple(tensor.shape), tuple(chunks))
    written = Manifest(step, State.of(state.pop("config", {}), **state).model_dump(), sizes, entries, block_bytes)
    with files.create(folder, manifest.NAME) as file:
        file.write(manifest.dump(written))
    return path


def test_any_part_of_a_tensor_in_boxes_is_what_slicing_gives(tmp_path, monkeypatch):
    monkeypatch.setattr(manifest, "LEAST_BLOCK_BYTES", 16)
    whole = torch.arange(7 * 5.0).view(7, 5)
    checkpoint = open_checkpoint(store(f"{tmp_path}/a", {"x": whole}, {"x": [[0, 3, 4], [0, 2]]}))
    assert len(checkpoint.manifest.tensors["x"].chunks) == 6
    ends = [list(itertools.combinations_with_replacement(range(n + 1), 2)) for n in whole.shape]
    for rows, columns in itertools.product(*ends):
        part = slice(*rows), slice(*columns)
        assert torch.equal(checkpoint.read("x", part), whole[part]), part
    assert torch.equal(checkpoint.read("x", (slice(None), slice(-2, None))), whole[:, -2:])
    assert torch.equal(checkpoint.read("x"), whole)


@pytest.mark.parametrize("file", range(4))
def test_all_boxes_and_all_blocks_of_them_are_verified(tmp_path, monkeypatch, file):
    monkeypatch.setattr(manifest, "LEAST_BLOCK_BYTES", 16)
    path = store(f"{tmp_path}/a", {"x": torch.arange(64.0).view(16, 4)}, {"x": [[0, 8], [0, 2]]})
    open_checkpoint(path).verify()
    data = Path(path, f"data-{file:05d}.bin")
    raw = bytearray(data.read_bytes())
    raw[-1] ^= 1
    data.write_bytes(raw)
    with pytest.raises(Damaged, match=f"{data.name}: the bytes of 'x' from 0 to 64 do not match"):
        open_checkpoint(path).verify()


class Slow:
    """A file that gives some bytes at a time, and at its end none."""

    def __init__(self, file: Any) -> None:
        self._file = file
        self.seek = file.seek
        self.read = file.read

    def readinto(self, view: memoryview) -> int:
        return self._file.readinto(view[:7])


def test_all_is_read_where_a_file_gives_a_part_at_a_time(tmp_path, monkeypatch):
    whole, honest = torch.arange(64.0), Disk.open
    path = store(f"{tmp_path}/a", {"x": whole})

    @contextlib.contextmanager
    def slow(self: Disk, folder: str, name: str) -> Iterator[Any]:
        with honest(self, folder, name) as file:
            yield Slow(file)

    monkeypatch.setattr(Disk, "open", slow)
    checkpoint = open_checkpoint(path)
    assert torch.equal(checkpoint.read("x"), whole)
    assert checkpoint.bytes_read == whole.nbytes


def test_a_file_that_is_cut_short_while_it_is_open_is_damage(tmp_path):
    path = store(f"{tmp_path}/a", {"x": torch.zeros(64)})
    checkpoint = open_checkpoint(path)
    with Path(path, "data-00000.bin").open("r+b") as file:
        file.truncate(100)
    with pytest.raises(Damaged, match="the bytes of 'x' from 0 to 256 do not match"):
        checkpoint.read("x")


# What is held open.

UNLIMITED = resource.RLIM_INFINITY
WANTED = 1 + 256  # one data file, and what else a process has open


@pytest.mark.parametrize(
    ("limits", "raised", "held"),
    [
        ((WANTED, 4096), None, True),
        ((WANTED - 1, 4096), (WANTED, 4096), True),
        ((WANTED - 1, WANTED), (WANTED, WANTED), True),
        ((WANTED - 1, WANTED - 1), None, False),
        ((100, UNLIMITED), (WANTED, UNLIMITED), True),
        ((UNLIMITED, UNLIMITED), None, True),
    ],
)
def test_files_are_held_open_as_far_as_the_process_may(tmp_path, monkeypatch, limits, raised, held):
    set_to: list[tuple[int, int]] = []
    monkeypatch.setattr(reader.resource, "getrlimit", lambda _: limits)
    monkeypatch.setattr(reader.resource, "setrlimit", lambda _, new: set_to.append(new))
    path = store(f"{tmp_path}/a", {"x": torch.zeros(3)})
    checkpoint = open_checkpoint(path)
    assert set_to == ([raised] if raised else [])
    Disk(str(tmp_path)).remove("a")
    if held:
        assert torch.equal(checkpoint.read("x"), torch.zeros(3))
    else:
        with pytest.raises(Damaged, match="it was deleted while it was read, as the run that writes there has gone on"):
            checkpoint.read("x")


def test_what_is_held_open_is_closed_with_the_checkpoint(tmp_path):
    checkpoint = open_checkpoint(store(f"{tmp_path}/a", {"x": torch.zeros(3), "y": torch.zeros(2)}))
    held = list(checkpoint._held.values())
    assert [file.closed for file in held] == [False, False]
    del checkpoint
    assert [file.closed for file in held] == [True, True]


def test_a_file_that_is_gone_from_a_checkpoint_that_is_there_is_damage(tmp_path):
    checkpoint = Checkpoint(Disk(str(tmp_path)), Path(store(f"{tmp_path}/a", {"x": torch.zeros(3)})).name)
    (tmp_path / "a" / "data-00000.bin").unlink()
    with pytest.raises(Damaged, match=r"^data-00000\.bin: No such file or directory$"):
        checkpoint.read("x")


def test_under_a_url_nothing_is_held(monkeypatch):
    checkpoint = open_checkpoint(store(f"memory://{uuid4().hex}/a", {"x": torch.zeros(3)}))
    assert isinstance(checkpoint.files, Remote)
    checkpoint.files.remove("a")
    with pytest.raises(Damaged, match="it was deleted while it was read"):
        checkpoint.read("x")


# Which one a path means.


@pytest.fixture
def steps(tmp_path) -> Path:
    """A run directory with steps 1 to 3, each of whose tensor tells which."""
    for step in (1, 2, 3):
        store(f"{tmp_path}/run/checkpoints/step-0000000{step}", {"x": torch.tensor([float(step)])}, step=step)
    return tmp_path / "run"


def spoil(steps: Path, *numbers: int) -> None:
    for n in numbers:
        (steps / "checkpoints" / f"step-0000000{n}" / "data-00000.bin").write_bytes(b"")


@pytest.mark.parametrize("text", ["[checkpoint\n", b"\xff", "checkpoint = 3\n", "[checkpoint]\ndir = 3\n", "[run]\n"])
def test_a_run_whose_configuration_says_no_place_has_its_checkpoints_in_it(steps, text):
    (steps / "config.toml").write_bytes(text if isinstance(text, bytes) else text.encode())
    assert open_checkpoint(str(steps)).manifest.step == 3


def test_the_checkpoints_of_a_run_come_before_others_beside_them(steps):
    store(f"{steps}/step-00000009", {"x": torch.zeros(1)}, step=9)
    assert open_checkpoint(str(steps)).manifest.step == 3


@pytest.mark.parametrize("path", ["run", "run/", "run/checkpoints", "./run", "{}/run", "{}/run/checkpoints/"])
def test_a_path_may_be_relative_and_end_in_a_slash(steps, monkeypatch, path):
    monkeypatch.chdir(steps.parent)
    assert open_checkpoint(path.format(steps.parent)).manifest.step == 3


def test_a_path_of_one_word_is_in_the_working_directory_and_one_from_the_root_is_not(steps, monkeypatch):
    monkeypatch.chdir(steps / "checkpoints")
    assert open_checkpoint("step-00000002").manifest.step == 2
    with pytest.raises(ValueError, match=r"^/step-00000002 is neither a checkpoint nor a run directory"):
        open_checkpoint("/step-00000002")


def test_the_newest_intact_one_of_a_run_is_opened_and_where_none_is_each_is_named(steps):
    spoil(steps, 3)
    assert open_checkpoint(str(steps)).manifest.step == 2
    spoil(steps, 1, 2)
    with pytest.raises(Damaged) as stop:
        open_checkpoint(str(steps))
    lines = [f"{steps}/checkpoints/step-0000000{n}: data-00000.bin has 0 bytes, expected 4" for n in (3, 2, 1)]
    assert str(stop.value).splitlines() == lines


def test_a_single_checkpoint_that_is_damaged_is_not_replaced_by_another(steps):
    spoil(steps, 2)
    with pytest.raises(Damaged, match=r"data-00000\.bin has 0 bytes, expected 4"):
        open_checkpoint(str(steps / "checkpoints" / "step-00000002"))
