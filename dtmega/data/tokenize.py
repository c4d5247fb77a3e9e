"""Make Megatron's `.bin/.idx` of a user's text; `python -m dtmega tokenize` calls it.

    python -m dtmega tokenize --input 'corpus/*.jsonl.gz' --tokenizer gpt2 --output data/mine --append-eod
    python -m dtmega tokenize --input corpus --tokenizer bert:vocab.txt --output data/mine --split-sentences

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
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from queue import SimpleQueue
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from dtmega.data import sentences, text_files
from dtmega.data.indexed import IndexedWriter, check_free, token_dtype
from dtmega.data.record import text_of
from dtmega.data.tokenizer import load_tokenizer
from dtmega.output import counted

SHOWN = 5  # malformed records that are printed; all are counted


def write(args: argparse.Namespace) -> str:
    """Write the pair and return what is to be said of it, or raise and leave what was there before.

    Raises:
        ValueError: an argument or the input cannot be used.
        OSError: something cannot be read or written, or a worker died.
    """
    start_s = time.perf_counter()
    check_free(args.output, args.overwrite)
    files = text_files.find_files(args.input, args.kind)
    cut = args.split_documents
    if cut and all(file.kind != ".txt" for file in files):
        raise ValueError("--split-documents cuts .txt; a line of JSON and a row of parquet are documents already")
    if args.encoding and any(file.kind == ".parquet" for file in files):
        raise ValueError(f"--encoding {args.encoding} is of text files; the strings of parquet are UTF-8")
    _check_sentences(args)
    tokenizer = load_tokenizer(args.tokenizer)
    at_blank_lines = cut == text_files.BLANK_LINES
    batches = text_files.read_batches(files, args.json_key, at_blank_lines=at_blank_lines, encoding=args.encoding)
    job = Job(
        tokenizer=args.tokenizer,
        key=args.json_key,
        append_eod=args.append_eod,
        longest=cut if isinstance(cut, int) else 0,
        sentences=args.split_sentences,
    )
    total_bytes = sum(file.n_bytes for file in files) or None  # None: the size of standard input is not known
    n_empty = n_malformed = 0
    with (
        IndexedWriter(args.output, token_dtype(tokenizer.vocab_size)) as writer,
        tqdm(total=total_bytes, unit="B", unit_scale=True, desc="tokenize", disable=None) as bar,
        contextlib.closing(_in_order(batches, job, args.workers)) as results,
    ):
        for result in results:
            for where in result.malformed:
                if args.strict:
                    raise ValueError(f"{where} (--strict)")
                if n_malformed < SHOWN:
                    bar.write(f"skipped {where}", file=sys.stderr)
                n_malformed += 1
            n_empty += result.n_empty
            start = 0
            for sizes in result.sizes:
                end = start + sum(sizes)
                writer.add(result.ids[start:end], sizes)
                start = end
            bar.update(result.position_bytes - bar.n)
        if len(writer) == 0:
            there = f"{counted(len(files), 'file')} ({n_malformed:,} malformed, {n_empty:,} empty)"
            raise ValueError(f"no documents in {there}")
        is_cut = args.split_sentences is not None
        writer.about = text_of(tokenizer, writer, append_eod=args.append_eod, sentences=is_cut)
    documents = counted(writer.n_documents, "document")
    if is_cut:
        documents += f" of {counted(len(writer), 'sentence')}"
    return (
        f"{documents}, {counted(writer.n_tokens, 'token')}, {n_malformed + n_empty:,} skipped "
        f"({n_malformed:,} malformed, {n_empty:,} empty), {time.perf_counter() - start_s:.1f} s: "
        f"{args.output}.bin, {args.output}.idx"
    )


def _check_sentences(args: argparse.Namespace) -> None:
    """Refuse what would spoil sentences."""
    if args.split_sentences is None:
        return
    if args.append_eod:
        raise ValueError(
            "--append-eod with --split-sentences: such a file has no special ids, [CLS] and [SEP] come with the samples"
        )
    if isinstance(args.split_documents, int):
        raise ValueError(
            f"--split-documents {args.split_documents} would cut within sentences; with --split-sentences it may be "
            f"{text_files.BLANK_LINES}"
        )
    if args.split_documents and args.split_sentences == sentences.BLOCKS:
        raise ValueError(
            f"--split-documents {args.split_documents} would make a document of each block that --split-sentences "
            f"{sentences.BLOCKS} finds, and a BERT needs two in a document"
        )


@dataclass(frozen=True)
class Job:
    """The settings that a worker needs; they pickle.

    Attributes:
        longest: tokens of a document that is a piece of a .txt; 0 leaves each .txt whole.
        sentences: the kind of sentences that are sequences; None: documents are.
    """

    tokenizer: str
    key: str
    append_eod: bool
    longest: int = 0
    sentences: str | None = None


@dataclass(frozen=True)
class Result:
    """The documents of one batch.

    Attributes:
        ids: [sum(sizes)] in the dtype of the output.
        sizes: for each document, the tokens of each of its sequences.
        malformed: "file:line: why" for each record that is no document.
        position_bytes: see `RecordBatch`.
    """

    ids: NDArray[Any]
    sizes: list[list[int]]
    n_empty: int
    malformed: list[str]
    position_bytes: int


class Worker:
    """A function from RecordBatch to Result, with the vocabulary loaded once."""

    def __init__(self, job: Job) -> None:
        self.job, self.tokenizer = job, load_tokenizer(job.tokenizer)
        self.dtype = token_dtype(self.tokenizer.vocab_size)
        self.tail = [self.tokenizer.eod_id] if job.append_eod else []

    def __call__(self, batch: text_files.RecordBatch) -> Result:
        texts: list[str] = []
        malformed: list[str] = []
        for number, record in text_files.records(batch):
            try:
                texts.append(text_files.document(record, number, batch.kind, self.job.key))
            except ValueError as error:
                malformed.append(f"{batch.path}:{number}: {error}")
        found = self._sentences(texts) if self.job.sentences else self._whole(texts, batch.kind)
        documents = [document for of_text in found for document in of_text]
        sequences = [np.array(ids, self.dtype) for document in documents for ids in document]
        return Result(
            ids=np.concatenate(sequences) if sequences else np.zeros(0, self.dtype),
            sizes=[[len(ids) for ids in document] for document in documents],
            n_empty=found.count([]),
            malformed=malformed,
            position_bytes=batch.position_bytes,
        )

    def _sentences(self, texts: Sequence[str]) -> list[list[list[list[int]]]]:
        """The documents of each text, one or none: the ids of its sentences."""
        assert self.job.sentences
        found = [sentences.encode(text, self.job.sentences, self.tokenizer) for text in texts]
        return [[document] if document else [] for document in found]

    def _whole(self, texts: Sequence[str], kind: str) -> list[list[list[list[int]]]]:
        """The documents of each text, none without tokens: each the ids of its one sequence."""
        return [self._pieces(ids, kind) for ids in self.tokenizer.encode_all(texts)]

    def _pieces(self, ids: list[int], kind: str) -> list[list[list[int]]]:
        longest = self.job.longest if kind == ".txt" and self.job.longest else len(ids)
        return [[ids[start : start + longest] + self.tail] for start in range(0, len(ids), longest or 1)]


def _in_order(batches: Iterator[text_files.RecordBatch], job: Job, n_workers: int) -> Generator[Result, None, None]:
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
    """Run a worker until the parent's end of the pipe is gone, in whatever way the parent ended."""
    batches: SimpleQueue[text_files.RecordBatch] = SimpleQueue()

    # Receiving goes on while computing, else parent and worker could each wait for the other to take what it sends.
    def receive() -> None:
        with contextlib.suppress(EOFError, OSError):  # the second where the parent ended in the middle of a message
            while True:
                batches.put(pipe.recv())
        os._exit(0)

    threading.Thread(target=receive, daemon=True).start()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # each core has a worker
    worker = Worker(job)
    with contextlib.suppress(ConnectionError):
        while True:
            pipe.send(worker(batches.get()))
    os._exit(0)  # the interpreter's own shutdown, with a thread that receives, may hang, and the parent with it
