"""Claims about checkpoint/run.py on two ranks: what one of them meets, both report, and at the same step."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dtmega.checkpoint import dcp, resume
from dtmega.checkpoint.files import Disk
from dtmega.checkpoint.run import Outcome
from tests import ranks
from tests.faults import IDENTITY, Trained


def full(*args: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def saves(root: Path, mode: str, plant: Callable[[], object]) -> list[list[Outcome]]:
    """What each poll after a save of step 1 gives on this rank, up to the first that gives something."""
    plant()
    trained = Trained(root, mode)
    ended = [trained.save(1)]
    while not ended[-1]:
        ended.append(trained.checkpoints.poll())
    return ended


def rank_0_cannot_publish() -> None:
    if dist.get_rank() == 0:
        Disk.rename = full


def test_a_checkpoint_that_rank_0_cannot_publish_is_reported_by_all_in_the_same_words(tmp_path):
    ((ours,),), ((theirs,),) = ranks.run(2, saves, tmp_path, "sync", rank_0_cannot_publish)
    assert "No space left on device" in ours.error
    assert "bytes free" in ours.error
    assert (theirs.step, theirs.error, theirs.warning) == (ours.step, ours.error, ours.warning)


def parent_cannot_be_synced() -> None:
    honest = Disk.sync
    Disk.sync = lambda self, folder: honest(self, folder) if folder else full()


def test_a_checkpoint_that_a_power_cut_may_undo_is_reported_by_all(tmp_path):
    ((ours,),), ((theirs,),) = ranks.run(2, saves, tmp_path, "sync", parent_cannot_be_synced)
    assert "No space left on device" in ours.warning
    assert (ours.error, theirs.error, theirs.warning) == ("", "", ours.warning)


def thread_of_rank_1_is_late() -> None:
    """It has written, and ends when this rank has polled three times."""
    honest, polled, n_polls = dcp.save, threading.Event(), [0]
    all_reduce = dist.all_reduce

    def save(*args: Any) -> Any:
        written = honest(*args)
        assert polled.wait(60)
        return written

    def counted(done: torch.Tensor, *args: Any) -> None:
        all_reduce(done, *args)
        n_polls[0] += 1
        if n_polls[0] == 3:
            polled.set()

    if dist.get_rank() == 1:
        dcp.save, dist.all_reduce = save, counted


def test_nobody_waits_for_the_thread_of_another_rank_and_all_publish_at_the_same_poll(tmp_path):
    ours, theirs = ranks.run(2, saves, tmp_path, "async", thread_of_rank_1_is_late)
    assert len(ours) == len(theirs) >= 1 + 4
    assert [outcome.error for outcome in (*ours[-1], *theirs[-1])] == ["", ""]


def refused(root: Path) -> str:
    """The message of each rank, of which one has a tensor of another shape than the checkpoint."""
    trained = Trained(root)
    trained.save(1)
    if dist.get_rank() == 1:
        trained.parameters["head.weight"] = torch.nn.Parameter(torch.zeros(3))
    candidates, _ = resume.find(trained.cfg, IDENTITY)
    try:
        trained.checkpoints.load(candidates, trained.parameters.items(), trained.optimizer, [])
    except ValueError as error:
        return str(error)
    return "loaded"


def test_a_tensor_that_one_rank_misses_is_a_refusal_of_all(tmp_path):
    ours, theirs = ranks.run(2, refused, tmp_path)
    assert "is of another model: it has no 'model/head.weight'" in ours
    assert ours == theirs
