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

import torch.distributed as dist

from dtmega.files import console
from dtmega.fsdp.digests import StepDigests
from dtmega.mesh import World
from dtmega.training.records.lines import StepLines, keep_until

NAME = "digests.jsonl"


class Record:
    """The writer of digests.jsonl.

    Args:
        run_dir: run directory.
        world: processes and mesh of the run. Rank 0 writes for all ranks.
        at_step: number of steps done before this start.

    Raises:
        OSError: the file cannot be written.
    """

    def __init__(self, run_dir: Path, world: World, at_step: int) -> None:
        self._world = world
        self._lines: StepLines | None = None
        self._begun = False
        if world.rank == 0:
            path = run_dir / NAME
            keep_until(path, at_step)
            self._lines = StepLines(path, console.say)

    def write(self, step: int, found: StepDigests) -> None:
        """Write a step's line. All ranks call this method.

        Args:
            step: number of the step.
            found: digests of the step.
        """
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
