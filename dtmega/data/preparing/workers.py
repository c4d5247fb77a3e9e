"""Worker processes that turn batches of records into documents, in the order of the batches.

This process reads and writes; workers parse and tokenize. Only a few batches are in flight, so memory use does not grow
with the input.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from queue import SimpleQueue
from typing import Any, Protocol, TypeVar

from numpy.typing import NDArray

from dtmega.data.indexed_files.writer import IndexedWriter
from dtmega.data.preparing.text_files import RecordBatch


@dataclass(frozen=True)
class Result:
    """The documents of one batch of records.

    Attributes:
        ids: token ids of all documents, one after another, [tokens] in the output's dtype.
        sizes: number of tokens in each sequence, as one list per document.
        n_empty: number of records whose text has no tokens.
        malformed: message "file:line: reason" for each record that could not be read.
        position_bytes: position in the input after this batch, as in `RecordBatch`.
    """

    ids: NDArray[Any]
    sizes: list[list[int]]
    n_empty: int
    malformed: list[str]
    position_bytes: int

    def write(self, writer: IndexedWriter) -> None:
        """Append the documents to a data set."""
        start = 0
        for sizes in self.sizes:
            end = start + sum(sizes)
            writer.add(self.ids[start:end], sizes)
            start = end


R = TypeVar("R", covariant=True)


class Job(Protocol[R]):
    """The settings of a worker, in a form that can be pickled."""

    def worker(self) -> Callable[[RecordBatch], R]:
        """Make the worker. Each worker process calls this method once, because making the worker loads a vocabulary."""
        ...


def in_order(batches: Iterator[RecordBatch], job: Job[R], n_workers: int) -> Generator[R, None, None]:
    """Tokenize batches in worker processes; yield the results in the order of the batches.

    Batch n goes to worker n % n_workers. No worker has more than two unfinished batches.

    Raises:
        ChildProcessError: a worker died.
        ValueError: a worker raised this error.
    """
    if n_workers == 1:
        yield from map(job.worker(), batches)
        return
    workers: list[tuple[BaseProcess, Connection]] = []
    n_sent = n_received = 0
    try:
        for batch in batches:
            if n_sent < n_workers:
                workers.append(_start_worker(job))
            if n_sent - n_received == 2 * n_workers:
                yield _receive(workers[n_received % n_workers][1])
                n_received += 1
            workers[n_sent % n_workers][1].send(batch)
            n_sent += 1
        for n in range(n_received, n_sent):
            yield _receive(workers[n % n_workers][1])
    except (EOFError, ConnectionError):
        raise ChildProcessError("a worker process died (if it was killed for memory: fewer --workers)") from None
    finally:
        for process, pipe in workers:
            pipe.close()
            process.join()


def _receive(pipe: Connection) -> Any:
    """Receive the next result from a worker.

    Raises:
        EOFError: the worker died between two messages or while sending a message.
        ValueError: the worker raised this error.
    """
    try:
        result = pipe.recv()
    except OSError as error:
        raise EOFError from error
    if isinstance(result, ValueError):
        raise result
    return result


def _start_worker(job: Job[R]) -> tuple[BaseProcess, Connection]:
    """Start a worker process; return the process and the parent's end of the pipe."""
    # Spawn the worker, because a fork would copy locks that other threads of this process hold at that moment.
    context = multiprocessing.get_context("spawn")
    pipe, workers_end = context.Pipe()
    process = context.Process(target=_serve, args=(workers_end, job), daemon=True)
    # A terminal sends Ctrl-C to all processes, but only the parent should react. So SIGINT is blocked while the worker
    # starts, and the worker inherits the block. Spawning needs the resource tracker, and starting the tracker
    # unblocks SIGINT in this process, so the tracker is started first.
    resource_tracker.ensure_running()
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        workers_end.close()
    return process, pipe


def _serve(pipe: Connection, job: Job[R]) -> None:
    """Run a worker process until the parent closes its end of the pipe or is killed."""
    batches: SimpleQueue[RecordBatch] = SimpleQueue()

    # A separate thread receives while the main thread computes. Otherwise both processes could block in `send`, each
    # waiting for the other to receive.
    def receive() -> None:
        with contextlib.suppress(EOFError, OSError):  # OSError: the parent ended while it sent a message
            while True:
                batches.put(pipe.recv())
        os._exit(0)

    threading.Thread(target=receive, daemon=True).start()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the workers already use all cores
    worker = job.worker()
    with contextlib.suppress(ConnectionError):
        while True:
            try:
                result = worker(batches.get())
            except ValueError as error:
                result = error
            pipe.send(result)
    # While a thread is still receiving, the interpreter's own shutdown may hang, and the parent would hang too.
    os._exit(0)
