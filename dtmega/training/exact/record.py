"""`digests.jsonl`: digests of each step of a run with [run] exact, for `dtmega replay`.

    {"step": 1, "layout": {"pp": 1, "dp_replicate": 1, "dp_shard": 2, ...}, "hosts": ["a", "b"]}     a start
    {"step": 1, "update": "77ae09c36b67f07a", "microbatches": ["9b2c6e02a76e0aa4", ...]}             a step

Each start of the run writes a line that lists the host of each rank, before the line of its first step. The line of a
step has a digest (`fsdp/digests.py`) of the weights after the step, and a digest of each microbatch's rounded
gradients, in the order of the global batch. The digests are equal on all data layouts. A resumed run
removes the lines of the steps that it repeats, as in metrics.jsonl.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from dtmega.config import Config
from dtmega.files import console
from dtmega.fsdp import digests
from dtmega.fsdp.exact import ExactSums
from dtmega.mesh import World
from dtmega.ops import host
from dtmega.training.records.lines import StepLines, keep_until

NAME = "digests.jsonl"


class StepDigests(NamedTuple):
    """The digests of a step, equal on all ranks and all data layouts.

    Attributes:
        update: digest of all weights after the step.
        microbatches: digests of each microbatch's rounded gradients, in the order of the global batch.
    """

    update: int
    microbatches: tuple[int, ...]


def digests_of(sums: ExactSums, weights: Mapping[str, Tensor], world: World, n_microbatches: int) -> StepDigests:
    """Add up the digests of all ranks after a step, with one all-reduce.

    Args:
        sums: gradients of the step, added up as fixed-point integers.
        weights: weight name -> this rank's shard of the weight. Each element is on only one rank of the `shards` group.
        world: processes and mesh of the run.
        n_microbatches: number of this rank's microbatches.
    """
    found = torch.zeros(1 + n_microbatches * world.data_size, dtype=torch.int64, device=world.device)
    # The dp_replicate ranks hold copies of the weights. Only the first copy is hashed.
    first_copy = world.coordinate("dp_replicate") == 0
    if first_copy and not host.must_skip("digests of the weights are computed in a run, not here ([run] exact)"):
        found[0] = digests.of_weights(weights, world.device)
    first = 1 + world.data_rank * n_microbatches
    for number, digest in sums.digests.items():
        found[first + number] = digest.total
    dist.all_reduce(found)
    update, *microbatches = host.read(found).tolist()
    return StepDigests(update, tuple(microbatches))


class Record:
    """The writer of digests.jsonl. Without [run] exact, or in an evaluation, the writer touches no file.

    Args:
        cfg: configuration of the run.
        world: processes and mesh of the run. Rank 0 writes for all ranks.
        at_step: number of steps done before this start.

    Raises:
        OSError: the file cannot be written.
    """

    def __init__(self, cfg: Config, world: World, at_step: int) -> None:
        self._world = world
        self._lines: StepLines | None = None
        self._begun = False
        if cfg.run.exact and not cfg.eval.only and world.rank == 0:
            path = Path(cfg.run.dir, NAME)
            keep_until(path, at_step)
            self._lines = StepLines(path, console.say)

    def write(self, step: int, found: StepDigests | None) -> None:
        """Write a step's line. All ranks call this method.

        Args:
            step: number of the step.
            found: digests of the step; None without [run] exact.
        """
        if found is None:
            return
        if not self._begun:
            self._begun = True
            hosts = [""] * self._world.size
            dist.all_gather_object(hosts, socket.gethostname())
            self._line({"step": step, "layout": self._world.sizes, "hosts": hosts})
        update, *microbatches = (f"{digest % 2**64:016x}" for digest in (found.update, *found.microbatches))
        self._line({"step": step, "update": update, "microbatches": microbatches})

    def sync(self) -> None:
        """Flush the file to disk. Call this method before a save: a resumed run keeps the lines of earlier steps."""
        if self._lines is not None:
            self._lines.sync()

    def close(self) -> None:
        if self._lines is not None:
            self._lines.close()

    def _line(self, content: Mapping[str, object]) -> None:
        if self._lines is not None:
            self._lines.write(content)
