"""A rank is killed at some file event of a save, and what is loaded afterwards is the old checkpoint or the new one.

All events, of which these are some, are in `benchmarks/faults.py`. Two ranks hold a small BLOOM cut by FSDP2; step 1 is
saved, and one of them dies while they save step 2 and may keep one checkpoint.
"""

from __future__ import annotations

import json
import re
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from dtmega.checkpoint import data_files, manifest, resume
from dtmega.checkpoint.files import Disk
from dtmega.checkpoint.resume import open_checkpoint
from tests.faults import BLOCK_BYTES, IDENTITY, FileEvents, Trained, alone, value
from tests.ranks import Ended, Forks, forks

MODES = ("sync", "async")
RANKS = (0, 1)
PUBLISHES = "rename .tmp-step-00000002 to step-00000002"


class Crash:
    """Attributes:
    events: by rank, the names of those in a save of step 2 that nobody disturbs.
    kernel: what the kernel saw of them.
    """

    def __init__(self, forks: Forks, folder: Path, mode: str) -> None:
        self._forks, self._mode, self._root, self._before = forks, mode, folder / "checkpoints", folder / "before"
        assert [ended.code for ended in self._save(1)] == [0, 0]
        shutil.copytree(self._root, self._before)
        assert [ended.code for ended in self._save(2, None, folder)] == [0, 0]
        recorded = [json.loads(Path(folder, str(rank)).read_text()) for rank in RANKS]
        self.events: list[list[str]] = [names for names, _ in recorded]
        self.kernel: list[list[str]] = [kernel for _, kernel in recorded]
        self._next = Trained(self._root)

    def survives(self, rank: int, k: int, plant: Callable[[], None] | None = None) -> None:
        """A rank is killed at its event k; then one process finds the step it must find, to the bit, clears up and
        saves the next; the other rank has ended by itself."""
        shutil.rmtree(self._root)
        shutil.copytree(self._before, self._root)
        ended = self._save(2, (rank, k), None, plant)
        assert ended[rank] == Ended(-signal.SIGKILL, "", late=False)
        assert (ended[1 - rank].code, ended[1 - rank].late) == (1, False)
        expected = 2 if rank == 0 and PUBLISHES in self.events[0][:k] else 1

        trained = self._next
        candidates, damage = resume.find_checkpoints(trained.cfg, IDENTITY)
        trained.fill(0)
        state = trained.checkpoints.load(candidates, trained.parameters.items(), trained.optimizer, damage)
        assert state is not None
        assert (state.progress.step, state.updates, damage) == (expected, expected, [])
        is_filled(trained.tensors(), expected)

        resume.set_aside_newer(trained.cfg, expected)
        trained.fill(3)
        assert [outcome.error for outcome in trained.save(3)] == [""]
        assert [path.name for path in self._root.iterdir()] == ["step-00000003"]
        checkpoint = open_checkpoint(str(self._root))
        is_filled({name: checkpoint.read(name) for name in checkpoint.tensors}, 3)

    def _save(self, *args: Any) -> list[Ended]:
        return self._forks.run(len(RANKS), save, self._root, self._mode, *args)


def save(
    root: Path,
    mode: str,
    step: int,
    die: tuple[int, int] | None = None,
    record: Path | None = None,
    plant: Callable[[], None] | None = None,
) -> None:
    """Run a rank; it dies if `die` names it and one of its events."""
    manifest.LEAST_BLOCK_BYTES = data_files.WRITE_BYTES = BLOCK_BYTES
    if plant is not None:
        plant()
    trained, rank = Trained(root, mode), dist.get_rank()
    trained.fill(step)
    events = FileEvents(root, rank, die[1] if die is not None and die[0] == rank else -1)
    ended = trained.save(step)
    trained.fill(0)  # training goes on
    while not ended:
        time.sleep(0.001)
        ended = trained.checkpoints.poll()
    assert [outcome.error for outcome in ended] == [""]
    events.watch()
    if record is not None:
        Path(record, str(rank)).write_text(json.dumps([events.names, events.kernel]))


def is_filled(tensors: Mapping[str, Tensor], step: int) -> None:
    wrong = [name for name, tensor in tensors.items() if not torch.equal(tensor, value(name, tensor.shape, step))]
    assert wrong == []


def some(events: list[str]) -> list[int]:
    """The first event of each name, and the last of those that come often."""
    found: set[int] = set()
    for name in events:
        at = [i for i, other in enumerate(events) if other == name]
        found |= {at[0]} if len(at) < 3 else {at[0], at[-1]}
    return sorted(found)


@pytest.fixture(scope="module")
def crashes(tmp_path_factory) -> Iterator[dict[str, Crash]]:
    with alone():
        yield {mode: Crash(forks(), tmp_path_factory.mktemp(mode), mode) for mode in MODES}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("rank", RANKS)
def test_what_is_counted_is_all_that_the_kernel_sees(crashes, mode, rank):
    counted = [e for e in crashes[mode].events[rank] if not e.startswith(("fsync", "half"))]
    seen = " ".join(crashes[mode].kernel[rank])
    assert seen == " ".join(counted)
    assert seen.count("write") > 50


@pytest.mark.parametrize("mode", ["sync", pytest.param("async", marks=pytest.mark.full)])
@pytest.mark.parametrize("rank", RANKS)
def test_a_rank_killed_at_any_of_some_events_leaves_the_old_or_the_new_checkpoint_whole(crashes, mode, rank):
    points = some(crashes[mode].events[rank])
    assert len(points) >= 7
    for k in points:
        crashes[mode].survives(rank, k)


@pytest.mark.parametrize("mode", MODES)
def test_everything_is_on_the_disk_before_it_is_published_and_that_before_the_old_one_goes(crashes, mode):
    events = crashes[mode].events[0]
    order = [
        *("write data-00000.bin", "fsync data-00000.bin", "create manifest.json"),
        *("write manifest.json", "fsync manifest.json", "fsync .tmp-step-00000002", PUBLISHES, "fsync checkpoints"),
        "rename step-00000001 to .old-step-00000001",
    ]
    last = {name: i for i, name in enumerate(events)}
    assert sorted(order, key=lambda name: last[name]) == order
    events = crashes[mode].events[1]
    last = {name: i for i, name in enumerate(events)}
    assert last["fsync data-00001.bin"] > last["write data-00001.bin"]


def write_in_place() -> None:
    Disk.unpublished = lambda self, folder: folder


def test_a_save_that_is_not_written_aside_is_found_out(crashes):
    k = crashes["sync"].events[0].index("create manifest.json")
    with pytest.raises(AssertionError, match=re.escape("manifest.json is missing")):
        crashes["sync"].survives(0, k, write_in_place)
