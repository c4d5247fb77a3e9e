"""Processes that make a run's rows ahead of the trainer ([data] num_workers).

Only the trainer decides how the run ends. So the worker processes ignore SIGINT, SIGTERM, SIGHUP, SIGUSR1 and SIGUSR2,
which terminals, torchrun and SLURM send to all processes (`worker_signals.py`). Workers end at `close()`, at the
interpreter's exit, or within seconds of the trainer's death. Because workers are spawned, a script that iterates over
batches needs `if __name__ == "__main__"`.
"""

from __future__ import annotations

import gc
import multiprocessing
import signal
import threading
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing import connection
from multiprocessing.process import BaseProcess

import torch
from torch import Tensor
from torchdata.stateful_dataloader import StatefulDataLoader

from dtmega.data.lost import DataLost
from dtmega.data.objectives.rows import Rows
from dtmega.data.worker_signals import hear_only_the_trainer, signals_blocked

FEEDER = "QueueFeederThread"  # multiprocessing's name for the threads that feed queues
DEATH_S = 2.0  # after a broken connection to a worker, the time to learn that the worker has died


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


class Workers:
    """An iterator over the rows of each range of samples, which worker processes make.

    The workers start in a thread, because torchdata waits several seconds for each worker to answer. The first
    `next()` waits for them.

    Args:
        rows: mapping from a range of samples to their tensors.
        slices: the ranges of samples.
        n: number of processes.
        pin_memory: whether to deliver tensors in page-locked memory.
    """

    def __init__(self, rows: Rows, slices: Iterator[range], n: int, pin_memory: bool) -> None:
        self._feeders: set[threading.Thread] = set()  # threads that feed the queues to the workers
        self._processes: list[BaseProcess] = []
        # When the iterator is deleted, the workers end.
        self._iterator: Iterator[dict[str, Tensor] | DataLost] | None = None
        self._error: BaseException | None = None
        loader = _loader(rows, slices, n, pin_memory)
        self._thread = threading.Thread(target=self._open, args=(loader,), name="open-loader", daemon=True)
        self._thread.start()

    def __iter__(self) -> Workers:
        return self

    def __next__(self) -> dict[str, Tensor]:
        """The rows of the next range.

        Raises:
            DataLost: tokens cannot be read, or a worker has died.
            Exception: the workers did not start; the original error is raised again.
        """
        self._thread.join()
        if self._error is not None:
            raise self._error
        assert self._iterator is not None
        try:
            rows = next(self._iterator)
        # The death of a worker that sends a batch breaks a connection; torch notices other deaths after some seconds.
        except (RuntimeError, OSError, EOFError):
            lost = self._lost_worker()
            if lost is None:
                raise
            raise lost from None
        if isinstance(rows, DataLost):
            raise rows
        return rows

    def close(self) -> None:
        """End the processes, once they have started."""
        self._thread.join()
        self._iterator = None
        # Python warns at exit about semaphores that are still in use, so the queues and their semaphores are freed
        # here. The garbage collector frees the queues in reference cycles. The feeder threads free the remaining queues
        # a moment later.
        gc.collect()
        for feeder in self._feeders:
            feeder.join(timeout=5)

    def _open(self, loader: StatefulDataLoader[dict[str, Tensor] | DataLost]) -> None:
        before = {*threading.enumerate(), *multiprocessing.active_children()}
        try:
            with signals_blocked():
                self._iterator = iter(loader)
        except BaseException as error:  # `__next__` raises the error in its caller's thread
            self._error = error
        self._feeders = {t for t in threading.enumerate() if t not in before and t.name == FEEDER}
        self._processes = [process for process in multiprocessing.active_children() if process not in before]

    def _lost_worker(self) -> DataLost | None:
        """The error that names a worker which has died; None if none has."""
        dead = connection.wait([worker.sentinel for worker in self._processes], DEATH_S)
        for worker in self._processes:
            if worker.sentinel in dead:
                worker.join()
                code = worker.exitcode or 0
                how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
                reason = (
                    f"the data worker with process number {worker.pid} {how} (did memory run out?); [data] num_workers"
                )
                return DataLost(reason, is_temporary=code == -signal.SIGKILL)
        return None


def _loader(
    rows: Rows, slices: Iterator[range], n: int, pin_memory: bool
) -> StatefulDataLoader[dict[str, Tensor] | DataLost]:
    """A loader whose workers make the rows of each range."""
    with warnings.catch_warnings():
        # torchdata 0.11 still calls a counter that torch 2.13 has deprecated.
        warnings.filterwarnings("ignore", "'set_vital' is deprecated")
        return StatefulDataLoader(
            _Answers(rows),  # pyright: ignore[reportArgumentType]  # anything with __getitem__ will do
            batch_size=None,
            sampler=slices,  # pyright: ignore[reportArgumentType]  # any iterable will do
            num_workers=n,
            pin_memory=pin_memory,
            # Without this generator, the loader would draw from the global generator, and all later draws from the
            # global generator would change.
            generator=torch.Generator(),
            worker_init_fn=hear_only_the_trainer,
            # A forked copy of a process with CUDA, gloo or OpenMP threads may hang (Python 3.12 and later warn
            # about the fork), and the child of a fork server would not notice the trainer's death. Spawning costs
            # an import of torch, about a second.
            multiprocessing_context="spawn",
        )
