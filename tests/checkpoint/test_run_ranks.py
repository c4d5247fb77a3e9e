"""Claims about checkpoint/{run,pieces}.py on two ranks: what one of them meets, both report, and at the same step.

And what each holds of a tensor that is cut in parts is saved and filled.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from dtmega.checkpoint import manifest, resume, tensor_files
from dtmega.checkpoint.files import Disk
from dtmega.checkpoint.reader import Checkpoint
from dtmega.checkpoint.run import Checkpoints, SaveOutcome
from dtmega.ops.shards import local
from tests import ranks
from tests.faults import IDENTITY, Trained


def full(*args: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def saves(root: Path, mode: str, plant: Callable[[], object]) -> list[list[SaveOutcome]]:
    """The results of each poll after a save of step 1 on this rank, up to the first that has one."""
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


def nobody_can_write() -> None:
    """And each rank for its own reason."""

    def create(self: Disk, folder: str, name: str) -> Any:
        if dist.get_rank() == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), name)
        raise RuntimeError("not foreseen")

    Disk.create = create


def test_a_save_that_fails_on_all_ranks_names_the_reason_of_each(tmp_path):
    for ((outcome,),) in ranks.run(2, saves, tmp_path, "sync", nobody_can_write):
        reasons = "RuntimeError: not foreseen; [Errno 28] No space left on device: 'data-00000.bin'"
        assert outcome.error.startswith(f"{reasons} (")
    assert [*tmp_path.iterdir()] == []


def thread_of_rank_1_is_late(rank_0_is_done: Path) -> None:
    """It ends when this rank has polled three times since that of rank 0 did."""
    honest, poll, polled, n_polls = tensor_files.save, Checkpoints.poll, threading.Event(), [0]

    def save(*args: Any) -> Any:
        written = honest(*args)
        if dist.get_rank() == 0:
            rank_0_is_done.touch()
        else:
            assert polled.wait(60)
        return written

    def counted(self: Checkpoints) -> list[SaveOutcome]:
        n_polls[0] += rank_0_is_done.exists()
        if n_polls[0] == 4:
            polled.set()
        return poll(self)

    tensor_files.save = save
    if dist.get_rank() == 1:
        Checkpoints.poll = counted


def test_nobody_waits_for_the_thread_of_another_rank_and_all_publish_at_the_same_poll(tmp_path):
    plant = partial(thread_of_rank_1_is_late, tmp_path / "rank 0 is done")
    ours, theirs = ranks.run(2, saves, tmp_path / "checkpoints", "async", plant)
    assert len(ours) == len(theirs) >= 1 + 4
    assert [outcome.error for outcome in (*ours[-1], *theirs[-1])] == ["", ""]


def refused(root: Path) -> str:
    """The message of each rank, of which one has a tensor of another shape than the checkpoint."""
    trained = Trained(root)
    trained.save(1)
    if dist.get_rank() == 1:
        trained.parameters["head.weight"] = torch.nn.Parameter(torch.zeros(3))
    candidates, _ = resume.find_checkpoints(trained.cfg, IDENTITY)
    try:
        trained.checkpoints.load(candidates, trained.parameters.items(), trained.optimizer, [])
    except ValueError as error:
        return str(error)
    return "loaded"


def test_a_tensor_that_one_rank_misses_is_a_refusal_of_all(tmp_path):
    ours, theirs = ranks.run(2, refused, tmp_path)
    assert "is of another model: it has no 'model/head.weight'" in ours
    assert ours == theirs


FUSED = torch.arange(24.0, dtype=torch.bfloat16).view(12, 2)  # [q | k | v], of four rows each
CUTS: dict[str, Placement] = {"in parts": _StridedShard(0, split_factor=3), "cut": Shard(0), "whole": Replicate()}


def from_layout_to_layout(root: Path) -> tuple[list[tuple[str, str]], int]:
    """The CUTS that are not equal to the bit when loaded from each of CUTS; boxes of the one in parts."""
    mesh, group, files = init_device_mesh("cpu", (2,)), dist.group.WORLD, Disk(str(root))
    assert group is not None
    saved = {name: distribute_tensor(FUSED, mesh, [cut], src_data_rank=None) for name, cut in CUTS.items()}
    written = tensor_files.save(files, "a", saved, 1, {}, group)
    if written is not None:
        with files.create("a", manifest.NAME) as file:
            file.write(manifest.dump(written))
    dist.barrier()
    checkpoint, wrong = Checkpoint(files, "a"), []
    for now, cut in CUTS.items():
        loaded = {name: distribute_tensor(torch.zeros_like(FUSED), mesh, [cut], src_data_rank=None) for name in CUTS}
        tensor_files.load_tensors(checkpoint, loaded, group)
        wrong += [(then, now) for then in CUTS if not torch.equal(local(loaded[then]), local(saved[now]))]
    wrong += [(then, "read") for then in CUTS if not torch.equal(checkpoint.read(then), FUSED)]
    return wrong, len(checkpoint.manifest.tensors["in parts"].chunks)


def test_a_tensor_in_parts_is_saved_and_loaded_as_any_other(tmp_path):
    assert ranks.run(2, from_layout_to_layout, tmp_path) == [([], 6)] * 2
