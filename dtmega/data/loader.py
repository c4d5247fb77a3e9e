"""Batches of samples, one optimizer step at a time. The only state is the number of samples consumed.

After c consumed samples, the next step takes `batch.size_at(c)` sequences: samples c, c + 1, and so on. These samples
are split into R equal, contiguous slices, one for each of the R data ranks. Rank r takes slice r and splits it into
microbatches of B = `[batch] micro_batch_size` sequences. `objectives/rows.py` describes the tensors of a microbatch.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import signal
import threading
import time
import warnings
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from multiprocessing import connection
from multiprocessing.process import BaseProcess

import torch
from torch import Tensor
from torchdata.stateful_dataloader import StatefulDataLoader

from dtmega.config import Batch, Data
from dtmega.data.indexed_files.stored import DataLost
from dtmega.data.objectives.rows import IGNORED, Rows
from dtmega.data.objectives.stored_rows import StoredRows
from dtmega.data.worker_signals import hear_only_the_trainer, signals_blocked

FEEDER = "QueueFeederThread"  # multiprocessing's name for the threads that feed queues
# The trainer makes the batches itself if a batch takes less than MOMENT_S, because a worker would need two seconds to
# start and would occupy a core.
MOMENT_S = 2e-3
DEATH_S = 2.0  # after a broken connection to a worker, the time to learn that the worker has died


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

    Only the trainer decides how the run ends. So the worker processes ignore SIGINT, SIGTERM, SIGHUP, SIGUSR1 and
    SIGUSR2, which terminals, torchrun and SLURM send to all processes. Workers end at `close()`, at the interpreter's
    exit, or within seconds of the trainer's death. Because workers are spawned, a script that iterates over batches
    needs `if __name__ == "__main__"`.

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
        # When the iterator is deleted, the workers end.
        self._iterator: Iterator[dict[str, Tensor] | DataLost] | None = None
        self._startup: _WorkerStartup | None = None  # None except while the workers are starting
        self._feeders: set[threading.Thread] = set()  # threads that feed the queues to the workers
        self._workers: list[BaseProcess] = []

    def __iter__(self) -> TrainBatches:
        return self

    def __next__(self) -> StepBatch:
        if self._iterator is None and self._startup is None:
            self.start()
        self._wait()
        assert self._iterator is not None
        try:
            rows = next(self._iterator)
        # The death of a worker that sends a batch breaks a connection; torch notices other deaths after some seconds.
        except (RuntimeError, OSError, EOFError):
            lost = self._lost_worker() if self._workers else None
            if lost is None:
                raise
            raise lost from None
        if isinstance(rows, DataLost):
            raise rows
        first = self._consumed
        size = self._batch.size_at(first)
        self._consumed += size
        return StepBatch(first, size, _microbatches(rows, self._batch.micro_batch_size))

    def state_dict(self) -> dict[str, int]:
        """The number of samples delivered. Samples that workers have prefetched do not count."""
        return {"samples": self._consumed}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue after the first `state["samples"]` samples. Workers that are already at this position are kept."""
        self._wait()
        if state["samples"] != self._consumed:
            self.close()
            self._consumed = state["samples"]

    def close(self) -> None:
        """End the worker processes. The next iteration starts new workers."""
        with contextlib.suppress(Exception):  # a failure to start does not matter: the workers are no longer needed
            self._wait()
        self._iterator = None
        # Python warns at exit about semaphores that are still in use, so the queues and their semaphores are freed
        # here. The garbage collector frees the queues in reference cycles. The feeder threads free the remaining queues
        # a moment later.
        gc.collect()
        for feeder in self._feeders:
            feeder.join(timeout=5)
        self._feeders, self._workers = set(), []

    def start(self) -> None:
        """Start the worker processes, if any, without waiting for them.

        If this method is not called, the first iteration starts the workers.
        """
        workers = self._n_workers()
        if workers:
            self._startup = _WorkerStartup(self._loader(workers))
        else:
            self._iterator = self._in_this_process()

    def _wait(self) -> None:
        """Wait until all starting workers have answered; do nothing if no workers are starting."""
        if self._startup is None:
            return
        startup, self._startup = self._startup, None
        self._iterator = startup.result()
        self._feeders, self._workers = startup.feeders, startup.workers

    def _lost_worker(self) -> DataLost | None:
        """The error that names a worker which has died; None if none has."""
        dead = connection.wait([worker.sentinel for worker in self._workers], DEATH_S)
        for worker in self._workers:
            if worker.sentinel in dead:
                worker.join()
                code = worker.exitcode or 0
                how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
                reason = (
                    f"the data worker with process number {worker.pid} {how} (did memory run out?); [data] num_workers"
                )
                return DataLost(reason, is_temporary=code == -signal.SIGKILL)
        return None

    def _n_workers(self) -> int:
        """The number of worker processes, from [data] num_workers.

        With num_workers = -1, this method times two batches and returns 0 if either of the batches takes less than
        MOMENT_S, or 1 if both take longer. One batch is not enough, because the first batch may be slow for a reason
        that does not recur.
        """
        if self._data.num_workers >= 0:
            return self._data.num_workers
        # Requests to an object store take longer than MOMENT_S.
        if isinstance(self._rows, StoredRows):
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

    def _in_this_process(self) -> Iterator[dict[str, Tensor]]:
        """Make the rows of each step in this process, without workers, and yield the rows."""
        for rows in made_in_turn(self._rows, self._slices()):
            if self._pin_memory:
                rows = {name: tensor.pin_memory() for name, tensor in rows.items()}
            yield rows

    def _loader(self, workers: int) -> StatefulDataLoader[dict[str, Tensor] | DataLost]:
        """A loader whose workers make the rows of each step."""
        with warnings.catch_warnings():
            # torchdata 0.11 still calls a counter that torch 2.13 has deprecated.
            warnings.filterwarnings("ignore", "'set_vital' is deprecated")
            return StatefulDataLoader(
                _Answers(self._rows),  # pyright: ignore[reportArgumentType]  # anything with __getitem__ will do
                batch_size=None,
                sampler=self._slices(),  # pyright: ignore[reportArgumentType]  # any iterable will do
                num_workers=workers,
                pin_memory=self._pin_memory,
                # Without this generator, the loader would draw from the global generator, and all later draws from the
                # global generator would change.
                generator=torch.Generator(),
                worker_init_fn=hear_only_the_trainer,
                # A forked copy of a process with CUDA, gloo or OpenMP threads may hang (Python 3.12 and later warn
                # about the fork), and the child of a fork server would not notice the trainer's death. Spawning costs
                # an import of torch, about a second.
                multiprocessing_context="spawn",
            )


@dataclass(frozen=True)
class _Answers:
    """A wrapper around `Rows` that returns a `DataLost` error in place of tensors that cannot be read.

    The error is returned rather than raised, because the trainer would receive a raised error only as the text of a
    traceback.
    """

    rows: Rows

    def __getitem__(self, indices: range) -> dict[str, Tensor] | DataLost:
        try:
            return self.rows[indices]
        except DataLost as error:
            return error


class _WorkerStartup:
    """Starts a loader's workers in a thread, because torchdata waits several seconds for each worker to answer.

    Args:
        loader: loader with the workers to start.

    Attributes:
        feeders: multiprocessing's threads that put items into the workers' queues.
        workers: processes that make batches.
    """

    def __init__(self, loader: StatefulDataLoader[dict[str, Tensor] | DataLost]) -> None:
        self.feeders: set[threading.Thread] = set()
        self.workers: list[BaseProcess] = []
        self._iterator: Iterator[dict[str, Tensor] | DataLost] | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._open, args=(loader,), name="open-loader", daemon=True)
        self._thread.start()

    def _open(self, loader: StatefulDataLoader[dict[str, Tensor] | DataLost]) -> None:
        before = {*threading.enumerate(), *multiprocessing.active_children()}
        try:
            with signals_blocked():
                self._iterator = iter(loader)
        except BaseException as error:  # `result` raises the error in its caller's thread
            self._error = error
        self.feeders = {t for t in threading.enumerate() if t not in before and t.name == FEEDER}
        self.workers = [process for process in multiprocessing.active_children() if process not in before]

    def result(self) -> Iterator[dict[str, Tensor] | DataLost]:
        """Wait until the workers have answered; return an iterator over the rows of each step.

        Raises:
            Exception: the workers did not start; the original error is raised again.
        """
        self._thread.join()
        if self._error is not None:
            raise self._error
        assert self._iterator is not None
        return self._iterator


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
    made = made_in_turn(rows, islice(_slices(full, 0, rank, world), steps))
    for step, rows_of_step in enumerate(made):
        yield StepBatch(step * size, size, _microbatches(rows_of_step, full.micro_batch_size))


def made_in_turn(rows: Rows, slices: Iterator[range]) -> Iterator[dict[str, Tensor]]:
    """Make the rows for each range of samples in this process and yield them in order.

    If the rows are in an object store, a thread reads one range ahead of the caller.

    Raises:
        DataLost: an object store does not answer, or an object has changed.
    """
    if not isinstance(rows, StoredRows):
        for indices in slices:
            yield rows[indices]
        return
    reader = ThreadPoolExecutor(1, "read-ahead")
    ahead: deque[Future[dict[str, Tensor]]] = deque()
    try:
        for indices in slices:
            ahead.append(reader.submit(rows.__getitem__, indices))
            if len(ahead) > 1:
                yield ahead.popleft().result()
        while ahead:
            yield ahead.popleft().result()
    finally:
        reader.shutdown(wait=False, cancel_futures=True)


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
