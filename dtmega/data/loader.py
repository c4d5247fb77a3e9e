"""Batches made of samples, one optimizer step at a time. The only state is the number of samples consumed.

The step after c consumed samples has `batch.size_at(c)` sequences, samples c, c + 1, ...; data rank r of R takes the
r-th of R equal, contiguous slices of them, cut into microbatches of B = `[batch] micro_batch_size`. What is in one is
said in `rows.py`.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import signal
import threading
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from multiprocessing import resource_tracker, util

import torch
from torch import Tensor
from torchdata.stateful_dataloader import StatefulDataLoader

from dtmega.config import Batch, Data
from dtmega.data.objectives.rows import IGNORED, Rows

LEFT_TO_THE_TRAINER = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2}
IGNORED_BY_THE_TRACKER = {signal.SIGINT, signal.SIGTERM}  # multiprocessing/resource_tracker.py
CAN_TELL_SENDER = hasattr(signal, "sigwaitinfo")  # not on macOS, where workers die of signals as torch's own do
FEEDER = "QueueFeederThread"  # the name that multiprocessing gives them
# To make a batch in less time than this, the trainer needs no help: a worker takes two seconds to start, and a core.
MOMENT_S = 2e-3


@dataclass(frozen=True)
class StepBatch:
    """The part of one data rank in one optimizer step.

    Attributes:
        first_sample: the first of the global batch's samples.
        samples: how many sequences the global batch has, over all data ranks.
        microbatches: this rank's.
    """

    first_sample: int
    samples: int
    microbatches: list[dict[str, Tensor]]


class TrainBatches:
    """Endless `StepBatch`es from `start_sample` on: `for step in batches`, and again from where it stopped.

    The state is one integer, the samples delivered so far, and resumes exactly under any number of workers and of data
    ranks. StatefulDataLoader's own state does neither: another number of workers is an AssertionError, another number
    of data ranks silently repeats or skips data.

    The worker processes ignore SIGINT, SIGTERM, SIGHUP, SIGUSR1 and SIGUSR2, which terminals, torchrun and SLURM send
    to all processes: how the run ends is the trainer's decision. They end with `close()`, at the interpreter's exit, or
    within seconds of the trainer's death. They are spawned, so the script that iterates needs its
    `if __name__ == "__main__"`.

    Args:
        rows: of the samples.
        rank, world: this data rank, and how many there are.
        pin_memory: deliver in page-locked memory, for copies to a GPU that overlap with compute.

    Raises:
        ValueError: a size of the global batch, ramp-up included, is no multiple of B x world.
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
        _check_sizes(batch, world)
        self._rows, self._data, self._batch = rows, data, batch
        self._rank, self._world, self._pin_memory = rank, world, pin_memory
        self._consumed = start_sample
        self._iterator: Iterator[dict[str, Tensor]] | None = None  # owns the worker processes, which end with it
        self._opening: _Opening | None = None  # until its workers have answered
        self._feeders: set[threading.Thread] = set()  # of the queues to the workers

    def __iter__(self) -> TrainBatches:
        return self

    def __next__(self) -> StepBatch:
        if self._iterator is None and self._opening is None:
            self.start()
        self._wait()
        assert self._iterator is not None
        rows = next(self._iterator)
        first, size = self._consumed, self._batch.size_at(self._consumed)
        self._consumed += size
        return StepBatch(first, size, _microbatches(rows, self._batch.micro_batch_size))

    def state_dict(self) -> dict[str, int]:
        """The samples that were delivered; those that workers have prepared beyond them do not count."""
        return {"samples": self._consumed}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._wait()
        if state["samples"] != self._consumed:
            self.close()
            self._consumed = state["samples"]

    def close(self) -> None:
        """End the worker processes. Iterating again starts new ones."""
        with contextlib.suppress(Exception):  # of workers that nobody will ask
            self._wait()
        self._iterator = None
        gc.collect()  # queues in a cycle would be left to the end of the process, which would warn of their semaphores
        # A feeder drops the last semaphore of its queue a moment later; the end of the process in between is a warning.
        for feeder in self._feeders:
            feeder.join(timeout=5)
        self._feeders = set()

    def start(self) -> None:
        """Start the worker processes, if any, and do not wait for them. Iterating does it where this was not called."""
        workers = self._n_workers()
        if workers:
            self._opening = _Opening(self._loader(workers))
        else:
            self._iterator = self._in_this_process()

    def _wait(self) -> None:
        """Wait until workers that are being started have answered."""
        if self._opening is None:
            return
        opening, self._opening = self._opening, None
        self._iterator = opening.result()
        self._feeders = opening.feeders

    def _n_workers(self) -> int:
        """The number of workers: [data] num_workers; of -1 none where one of two batches takes a moment, else one."""
        if self._data.num_workers >= 0:
            return self._data.num_workers
        for indices in islice(self._slices(), 2):
            started = time.perf_counter()
            _ = self._rows[indices]
            if time.perf_counter() - started < MOMENT_S:
                return 0
        return 1

    def _slices(self) -> Iterator[range]:
        return _slices(self._batch, self._consumed, self._rank, self._world)

    def _in_this_process(self) -> Iterator[dict[str, Tensor]]:
        for indices in self._slices():
            rows = self._rows[indices]
            yield {name: tensor.pin_memory() for name, tensor in rows.items()} if self._pin_memory else rows

    def _loader(self, workers: int) -> StatefulDataLoader[dict[str, Tensor]]:
        with warnings.catch_warnings():
            # torchdata 0.11 still calls a counter that torch 2.13 has deprecated.
            warnings.filterwarnings("ignore", "'set_vital' is deprecated")
            return StatefulDataLoader(
                self._rows,  # pyright: ignore[reportArgumentType]  # anything with __getitem__ will do
                batch_size=None,
                sampler=self._slices(),  # pyright: ignore[reportArgumentType]  # anything that can be iterated
                num_workers=workers,
                pin_memory=self._pin_memory,
                # Without a generator of its own, the loader draws from the global one and so moves it.
                generator=torch.Generator(),
                worker_init_fn=_hear_only_the_trainer,
                # A fork of a process with CUDA, gloo or OpenMP threads may hang, and warns from Python 3.12 on; a child
                # of a fork server would not see the trainer die. Spawning costs an import of torch, about a second.
                multiprocessing_context="spawn",
            )


class _Opening:
    """The start of a loader's workers, in a thread: torchdata waits until each has answered, which takes seconds.

    Attributes:
        feeders: the threads of multiprocessing that feed the queues to the workers.
    """

    def __init__(self, loader: StatefulDataLoader[dict[str, Tensor]]) -> None:
        self.feeders: set[threading.Thread] = set()
        self._iterator: Iterator[dict[str, Tensor]] | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._open, args=(loader,), name="open-loader", daemon=True)
        self._thread.start()

    def _open(self, loader: StatefulDataLoader[dict[str, Tensor]]) -> None:
        before = set(threading.enumerate())
        try:
            with _signals_blocked():
                self._iterator = iter(loader)
        except BaseException as error:  # for the thread that asks for the result
            self._error = error
        self.feeders = {t for t in threading.enumerate() if t not in before and t.name == FEEDER}

    def result(self) -> Iterator[dict[str, Tensor]]:
        """The rows of each step, once the workers have answered; raises what has ended the start."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        assert self._iterator is not None
        return self._iterator


def eval_batches(rows: Rows, batch: Batch, rank: int, world: int, steps: int) -> Iterator[StepBatch]:
    """The first `steps` full global batches, the same ones in each evaluation, read in this process.

    A split with fewer samples goes on into its next epoch.

    Raises:
        ValueError: global_batch_size is no multiple of B x world.
    """
    full = batch.model_copy(update={"rampup": []})
    _check_sizes(full, world)
    for step, indices in zip(range(steps), _slices(full, 0, rank, world), strict=False):
        size = full.global_batch_size
        yield StepBatch(step * size, size, _microbatches(rows[indices], full.micro_batch_size))


def bears_loss(rows: Rows, g: int) -> bool:
    """Tell whether a token of sample g counts in the loss."""
    return bool((rows[range(g, g + 1)]["labels"] != IGNORED).any())


def _slices(batch: Batch, first: int, rank: int, world: int) -> Iterator[range]:
    """This rank's samples in each step, from the step on that starts at sample `first`."""
    while True:
        size = batch.size_at(first)
        share = size // world
        mine = first + share * rank
        yield range(mine, mine + share)
        first += size


def _microbatches(rows: dict[str, Tensor], size: int) -> list[dict[str, Tensor]]:
    pieces = zip(*(tensor.split(size) for tensor in rows.values()), strict=True)
    return [dict(zip(rows, piece, strict=True)) for piece in pieces]


def _check_sizes(batch: Batch, world: int) -> None:
    unit = batch.micro_batch_size * world
    for size in batch.sizes:
        if size % unit:
            raise ValueError(
                f"a global batch of {size} sequences does not divide into micro_batch_size x data ranks = "
                f"{batch.micro_batch_size} x {world} = {unit}: {size} % {unit} = {size % unit}, expected 0 "
                f"([batch] global_batch_size, rampup, micro_batch_size; [mesh] dp_replicate, dp_shard)"
            )


@contextlib.contextmanager
def _signals_blocked() -> Iterator[None]:
    """Block signals for the processes that start here: they inherit the mask, so none ends them while they import."""
    blocked = LEFT_TO_THE_TRAINER if CAN_TELL_SENDER else set()
    # The tracker of semaphores, which they share, ignores two of them by itself; to do so it lifts their mask here (up
    # to Python 3.11).
    before = signal.pthread_sigmask(signal.SIG_BLOCK, blocked - IGNORED_BY_THE_TRACKER)
    resource_tracker.ensure_running()
    signal.pthread_sigmask(signal.SIG_BLOCK, blocked)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _hear_only_the_trainer(worker: int) -> None:
    """Let SIGTERM end a worker only if it comes from its trainer: multiprocessing sends it at exit, and waits.

    So does the trainer's death, even before the worker came here: torch's own watchdog would take init for its parent.
    """
    trainer = multiprocessing.parent_process()
    if trainer is not None and os.getppid() != trainer.pid:
        os._exit(0)

    def wait() -> None:  # without a timeout: a thread that wakes up while Python shuts down aborts the process
        while signal.sigwaitinfo({signal.SIGTERM}).si_pid != os.getppid():
            pass
        os._exit(0)

    if CAN_TELL_SENDER:
        threading.Thread(target=wait, daemon=True).start()
    # The interpreter's own shutdown aborts now and then ("terminate called ..."), with that thread or one of torch's.
    util.Finalize(None, os._exit, args=(0,), exitpriority=-10)  # after multiprocessing's own, which end at -5
