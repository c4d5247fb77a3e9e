"""A user's text -> Megatron's `.bin/.idx`: what `python -m dtmega tokenize` does.

    python -m dtmega tokenize --input 'corpus/*.jsonl.gz' --tokenizer gpt2 --output data/mine --append-eod

This process reads and writes, workers parse and tokenize. Results are written in the order of the input, so the output
is the same for any number of workers; few batches are in flight, so memory does not grow with the input.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from queue import SimpleQueue
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from dtmega.data import text_files
from dtmega.data.indexed import IndexedWriter, token_dtype
from dtmega.data.tokenizer import load_tokenizer

SHOWN = 5  # malformed records that are printed; all are counted


def add_arguments(parser: argparse.ArgumentParser) -> None:
    kinds = ", ".join(text_files.KINDS)
    parser.add_argument(
        "--input", nargs="+", required=True, metavar="GLOB", help=f"files: {kinds}; text also .gz, .zst"
    )
    parser.add_argument(
        "--tokenizer", required=True, metavar="SPEC", help="stdlib-8k, bytes, a file or a tiktoken name"
    )
    parser.add_argument("--output", required=True, metavar="PREFIX", help="writes PREFIX.bin and PREFIX.idx")
    parser.add_argument("--json-key", default="text", metavar="KEY", help="JSON key or parquet column (%(default)s)")
    parser.add_argument("--append-eod", action="store_true", help="close each document with the end-of-document id")
    parser.add_argument(
        "--workers", type=int, default=_n_cpus(), metavar="N", help="processes (%(default)s, all there are)"
    )
    parser.add_argument(
        "--strict", action="store_true", help="stop at the first malformed record instead of skipping it"
    )


def _n_cpus() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def main(args: argparse.Namespace) -> int:
    """Exit code: 0 done, 1 something broke, 2 an argument or the input cannot be used, 130 interrupted."""
    try:
        print(_run(args))
        return 0
    except ValueError as error:
        code, message = 2, str(error)
    except OSError as error:
        code, message = 1, str(error)
    except KeyboardInterrupt:
        code, message = 130, "interrupted"
    print(f"tokenize: {message}; nothing was written to {args.output}", file=sys.stderr)
    return code


def _run(args: argparse.Namespace) -> str:
    """Writes the pair and returns the summary, or raises and leaves what was there before."""
    if args.workers < 1:
        raise ValueError(f"expected --workers >= 1, got {args.workers}")
    start_s = time.perf_counter()
    paths = text_files.find(args.input)
    dtype = token_dtype(load_tokenizer(args.tokenizer).vocab_size)
    batches = text_files.read(paths, args.json_key)
    n_empty = n_malformed = 0
    with (
        IndexedWriter(args.output, dtype) as writer,
        tqdm(total=sum(map(os.path.getsize, paths)), unit="B", unit_scale=True, desc="tokenize") as bar,
        contextlib.closing(
            _in_order(batches, Job(args.tokenizer, args.json_key, args.append_eod), args.workers)
        ) as results,
    ):
        for result in results:
            for where in result.malformed:
                if args.strict:
                    raise ValueError(f"{where} (--strict)")
                if n_malformed < SHOWN:
                    bar.write(f"skipped {where}", file=sys.stderr)
                n_malformed += 1
            n_empty += result.n_empty
            ends = np.cumsum(result.sizes, dtype=np.int64)
            for size, end in zip(result.sizes, ends, strict=True):
                writer.add(result.ids[end - size : end])
            bar.update(result.position_bytes - bar.n)
        if len(writer) == 0:
            raise ValueError(f"no documents in {len(paths)} files ({n_malformed} malformed, {n_empty} empty)")
    return (
        f"{len(writer):,} documents, {writer.n_tokens:,} tokens, {n_malformed + n_empty:,} skipped ({n_malformed:,} "
        f"malformed, {n_empty:,} empty), {time.perf_counter() - start_s:.1f} s: {args.output}.bin, {args.output}.idx"
    )


@dataclass(frozen=True)
class Job:
    """What every worker needs to know; it pickles."""

    tokenizer: str
    key: str
    append_eod: bool


@dataclass(frozen=True)
class Result:
    """The documents of one batch.

    Attributes:
        ids: [sum(sizes)] in the dtype of the output.
        sizes: tokens per document.
        malformed: "file:line: why" for each record that is no document.
        position_bytes: see Batch.
    """

    ids: NDArray[Any]
    sizes: list[int]
    n_empty: int
    malformed: list[str]
    position_bytes: int


class Worker:
    """Batch -> Result, with the vocabulary loaded once."""

    def __init__(self, job: Job) -> None:
        self.job, self.tokenizer = job, load_tokenizer(job.tokenizer)
        self.dtype = token_dtype(self.tokenizer.vocab_size)
        self.tail = [self.tokenizer.eod_id] if job.append_eod else []

    def __call__(self, batch: text_files.Batch) -> Result:
        documents, malformed, n_empty = [], [], 0
        for number, record in text_files.records(batch):
            try:
                ids = self.tokenizer.encode(text_files.document(record, batch.kind, self.job.key))
            except ValueError as error:
                malformed.append(f"{batch.path}:{number}: {error}")
                continue
            if ids:
                documents.append(np.array(ids + self.tail, self.dtype))
            else:
                n_empty += 1
        ids = np.concatenate(documents) if documents else np.zeros(0, self.dtype)
        return Result(ids, [len(d) for d in documents], n_empty, malformed, batch.position_bytes)


def _in_order(batches: Iterator[text_files.Batch], job: Job, n_workers: int) -> Generator[Result, None, None]:
    """The results of `batches` in their order: batch n is worker n % n_workers's, which has two at most.

    Raises:
        ChildProcessError: a worker died.
    """
    if n_workers == 1:
        yield from map(Worker(job), batches)
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


def _receive(pipe: Connection) -> Result:
    """The next result of a worker.

    Raises:
        EOFError: the worker died, be it in the middle of a message.
    """
    try:
        return pipe.recv()
    except OSError as error:
        raise EOFError from error


def _start_worker(job: Job) -> tuple[BaseProcess, Connection]:
    # spawn: a fork would copy the threads' locks of whatever this process has loaded.
    context = multiprocessing.get_context("spawn")
    pipe, workers_end = context.Pipe()
    process = context.Process(target=_serve, args=(workers_end, job), daemon=True)
    # A terminal sends Ctrl-C to all processes, and it is the parent's to answer: a worker inherits the mask. The
    # tracker that spawn needs clears the mask when it starts, so it starts before.
    resource_tracker.ensure_running()
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        workers_end.close()
    return process, pipe


def _serve(pipe: Connection, job: Job) -> None:
    """A worker's life. It ends with the parent's end of the pipe, in whatever way the parent ended."""
    batches: SimpleQueue[text_files.Batch] = SimpleQueue()

    # Receiving goes on while computing, else parent and worker could each wait for the other to take what it sends.
    def receive() -> None:
        with contextlib.suppress(EOFError, OSError):  # the second where the parent ended in the middle of a message
            while True:
                batches.put(pipe.recv())
        os._exit(0)

    threading.Thread(target=receive, daemon=True).start()
    worker = Worker(job)
    with contextlib.suppress(ConnectionError):
        while True:
            pipe.send(worker(batches.get()))
