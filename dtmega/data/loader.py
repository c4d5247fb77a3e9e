"""Batches of samples, one optimizer step at a time. The only state is the number of samples consumed.

After c consumed samples, the next step takes `batch.size_at(c)` sequences: samples c, c + 1, and so on. These samples
are split into R equal, contiguous slices, one for each of the R data ranks. Rank r takes slice r and splits it into
microbatches of B = `[batch] micro_batch_size` sequences. `objectives/rows.py` describes the tensors of a microbatch.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

from torch import Tensor

from dtmega import rooms
from dtmega.config import Batch, Data
from dtmega.data.objectives.rows import IGNORED, Rows

if TYPE_CHECKING:
    from dtmega.data.workers import Workers

# The trainer makes the batches itself if a batch takes less than MOMENT_S, because a worker would need two seconds to
# start and would occupy a core.
MOMENT_S = 2e-3


@dataclass(frozen=True)
class StepBatch:
    """One data rank's share of an optimizer step's global batch.

    Attributes:
        first_sample: index of the first sample in the global batch.
        samples: number of sequences in the global batch, over all data ranks.
        microbatches: this rank's microbatches; each microbatch maps tensor names to tensors (`rows.py`).
    """

    first_sample: int
    samples: int
    microbatches: list[dict[str, Tensor]]


class TrainBatches:
    """An endless iterator of `StepBatch`es from `start_sample` on. A second `for` loop resumes where the first stopped.

    The state is one integer, the number of samples delivered so far. A run resumes exactly from this number, even with
    a different number of workers or data ranks. StatefulDataLoader's own state is less flexible: with a different
    number of workers the loader raises an AssertionError, and with a different number of data ranks the loader silently
    repeats or skips samples.

    This process makes the tensors, or worker processes do (`workers.py`). Because workers are spawned, a script that
    iterates over batches needs `if __name__ == "__main__"`.

    Args:
        rows: mapping from a range of samples to their tensors.
        data: the configuration's [data] section.
        batch: the configuration's [batch] section.
        rank: index of this data rank.
        world: number of data ranks.
        start_sample: number of samples that the run has consumed already.
        pin_memory: whether to deliver tensors in page-locked memory, so that copies to a GPU can overlap with
            compute.

    Raises:
        ValueError: the global batch size or a ramp-up size is not a multiple of micro_batch_size x world.
    """

    def __init__(
        self,
        rows: Rows,
        data: Data,
        batch: Batch,
        rank: int,
        world: int,
        *,
        start_sample: int = 0,
        pin_memory: bool = False,
    ) -> None:
        check_sizes(batch, world)
        self._rows, self._data, self._batch = rows, data, batch
        self._rank, self._world, self._pin_memory = rank, world, pin_memory
        self._consumed = start_sample
        self._iterator: Generator[dict[str, Tensor], None, None] | Workers | None = None

    def __iter__(self) -> TrainBatches:
        return self

    def __next__(self) -> StepBatch:
        if self._iterator is None:
            self.start()
        assert self._iterator is not None
        rows = next(self._iterator)
        first = self._consumed
        size = self._batch.size_at(first)
        self._consumed += size
        return StepBatch(first, size, _microbatches(rows, self._batch.micro_batch_size))

    def state_dict(self) -> dict[str, int]:
        """The number of samples delivered. Samples that workers have prefetched do not count."""
        return {"samples": self._consumed}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue after the first `state["samples"]` samples. Workers that are already at this position are kept."""
        if state["samples"] != self._consumed:
            self.close()
            self._consumed = state["samples"]

    def close(self) -> None:
        """End the worker processes. The next iteration starts new workers."""
        if self._iterator is not None:
            self._iterator.close()
        self._iterator = None

    def start(self) -> None:
        """Start the worker processes, if any, without waiting for them.

        If this method is not called, the first iteration starts the workers.
        """
        n = self._n_workers()
        if n:
            self._iterator = rooms.data_workers().Workers(self._rows, self._slices(), n, self._pin_memory)
        else:
            self._iterator = self._in_this_process()

    def _n_workers(self) -> int:
        """The number of worker processes, from [data] num_workers.

        With num_workers = -1, this method times two batches and returns 0 if either of the batches takes less than
        MOMENT_S, or 1 if both take longer. One batch is not enough, because the first batch may be slow for a reason
        that does not recur.
        """
        if self._data.num_workers >= 0:
            return self._data.num_workers
        # Requests to an object store take longer than MOMENT_S.
        if self._rows.is_stored:
            return 1
        for indices in islice(self._slices(), 2):
            started = time.perf_counter()
            _ = self._rows[indices]
            if time.perf_counter() - started < MOMENT_S:
                return 0
        return 1

    def _slices(self) -> Iterator[range]:
        """Ranges of this rank's samples, one range per step, beginning with the next step."""
        return _slices(self._batch, self._consumed, self._rank, self._world)

    def _in_this_process(self) -> Generator[dict[str, Tensor], None, None]:
        """Make the rows of each step in this process, without workers, and yield the rows."""
        for rows in self._rows.in_turn(self._slices()):
            if self._pin_memory:
                rows = {name: tensor.pin_memory() for name, tensor in rows.items()}
            yield rows


def eval_batches(rows: Rows, batch: Batch, rank: int, world: int, steps: int) -> Iterator[StepBatch]:
    """Yield this rank's share of the first `steps` global batches of a split. All evaluations read the same batches.

    The batches are made in this process, without workers. A split with too few samples continues in its next epoch.

    Args:
        rows: mapping from a range of the split's samples to their tensors.
        batch: the configuration's [batch] section; its ramp-up is not used.
        rank: index of this data rank.
        world: number of data ranks.
        steps: number of batches.

    Raises:
        ValueError: global_batch_size is not a multiple of micro_batch_size x world.
    """
    full = batch.model_copy(update={"rampup": []})
    check_sizes(full, world)
    size = full.global_batch_size
    made = rows.in_turn(islice(_slices(full, 0, rank, world), steps))
    for step, rows_of_step in enumerate(made):
        yield StepBatch(step * size, size, _microbatches(rows_of_step, full.micro_batch_size))


def bears_loss(rows: Rows, g: int) -> bool:
    """True if sample g has a label that counts in the loss."""
    return bool((rows[range(g, g + 1)]["labels"] != IGNORED).any())


def _slices(batch: Batch, first: int, rank: int, world: int) -> Iterator[range]:
    """Ranges of this rank's samples, one range per step, beginning with the step that starts at sample `first`."""
    while True:
        size = batch.size_at(first)
        share = size // world
        mine = first + share * rank
        yield range(mine, mine + share)
        first += size


def _microbatches(rows: dict[str, Tensor], size: int) -> list[dict[str, Tensor]]:
    """Split the tensors of a step into microbatches of `size` sequences."""
    pieces = zip(*(tensor.split(size) for tensor in rows.values()), strict=True)
    return [dict(zip(rows, piece, strict=True)) for piece in pieces]


def check_sizes(batch: Batch, world: int) -> None:
    """Check that every step's global batch can be divided into whole microbatches for all data ranks.

    Args:
        batch: the configuration's [batch] section.
        world: number of data ranks.

    Raises:
        ValueError: the global batch size or a ramp-up size is not a multiple of micro_batch_size x world.
    """
    unit = batch.micro_batch_size * world
    for size in batch.sizes:
        if size % unit:
            raise ValueError(
                f"a global batch of {size} sequences does not divide into micro_batch_size x data ranks = "
                f"{batch.micro_batch_size} x {world} = {unit}: {size} % {unit} = {size % unit}, expected 0 "
                f"([batch] global_batch_size, rampup, micro_batch_size; [mesh] dp_replicate, dp_shard)"
            )
