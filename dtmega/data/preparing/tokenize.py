"""Turn a user's text into Megatron's `.bin/.idx` files; `python -m dtmega tokenize` calls `write`.

    python -m dtmega tokenize --input 'corpus/*.jsonl.gz' --tokenizer gpt2 --output data/mine --append-eod
    python -m dtmega tokenize --input corpus --tokenizer bert:vocab.txt --output data/mine --split-sentences

This process reads and writes; workers parse and tokenize. Results are written in input order, so the output
is the same for any number of workers. Only a few batches are in flight, so memory use does not grow with the input.
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

from dtmega.data.indexed_files.dataset import IndexedWriter, check_free, token_dtype
from dtmega.data.indexed_files.record import text_of
from dtmega.data.preparing import input_files, sentences, text_files
from dtmega.data.preparing.documents import document_text, records_of
from dtmega.data.tokenizers.tokenizer import load_tokenizer
from dtmega.files.console import counted

SHOWN = 5  # number of malformed records to print; the other malformed records are only counted

Document = list[list[int]]  # token ids of each sequence: one sequence, or one for each sentence


def write(args: argparse.Namespace) -> str:
    """Write the `.bin/.idx` pair. If writing fails, an existing pair of that name stays unchanged.

    Args:
        args: the options of `python -m dtmega tokenize`.

    Returns:
        A line for the user: counts of documents, tokens and skipped records, the time, and the names of the files.

    Raises:
        ValueError: an argument or the input cannot be used.
        OSError: a file cannot be read or written, or a worker died.
    """
    start_s = time.perf_counter()
    check_free(args.output, args.overwrite)
    files = input_files.find_files(args.input, args.kind)
    _check_kinds(args, files)
    _check_sentences(args)
    tokenizer = load_tokenizer(args.tokenizer)
    cut = args.split_documents
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
            _add_documents(writer, result)
            bar.update(result.position_bytes - bar.n)
        if len(writer) == 0:
            raise ValueError(
                f"no documents in {counted(len(files), 'file')} ({n_malformed:,} malformed, {n_empty:,} empty)"
            )
        is_cut = args.split_sentences is not None
        writer.about = text_of(tokenizer, writer, append_eod=args.append_eod, sentences=is_cut)
    summary = counted(writer.n_documents, "document")
    if is_cut:
        summary += f" of {counted(len(writer), 'sentence')}"
    return (
        f"{summary}, {counted(writer.n_tokens, 'token')}, {n_malformed + n_empty:,} skipped "
        f"({n_malformed:,} malformed, {n_empty:,} empty), {time.perf_counter() - start_s:.1f} s: "
        f"{args.output}.bin, {args.output}.idx"
    )


def _check_kinds(args: argparse.Namespace, files: Sequence[input_files.File]) -> None:
    """Refuse options that do not apply to the kinds of the input files."""
    if args.split_documents and all(file.kind != ".txt" for file in files):
        raise ValueError("--split-documents cuts .txt; a line of JSON and a row of parquet are documents already")
    if args.encoding and any(file.kind == ".parquet" for file in files):
        raise ValueError(f"--encoding {args.encoding} applies to text files; strings in parquet files are UTF-8")


def _check_sentences(args: argparse.Namespace) -> None:
    """Refuse options that contradict --split-sentences."""
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


def _add_documents(writer: IndexedWriter, result: Result) -> None:
    start = 0
    for sizes in result.sizes:
        end = start + sum(sizes)
        writer.add(result.ids[start:end], sizes)
        start = end


@dataclass(frozen=True)
class Job:
    """The settings that a worker needs, in a form that can be pickled.

    Attributes:
        tokenizer: spec of the tokenizer.
        key: key of a JSON object, or column of a parquet file, that holds the text.
        append_eod: whether to end each document with the end-of-document id.
        longest: maximum number of tokens in a piece of a .txt; each piece becomes a document. 0 to leave each .txt
            whole.
        sentences: kind of sentences, "prose" or "blocks"; each sentence becomes a sequence. None to make each document
            one sequence.
    """

    tokenizer: str
    key: str
    append_eod: bool
    longest: int = 0
    sentences: str | None = None


@dataclass(frozen=True)
class Result:
    """The documents of one batch of records.

    Attributes:
        ids: token ids of all documents, one after another, [sum(sizes)] in the output's dtype.
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


class Worker:
    """A callable that turns a batch of records into documents. The constructor loads the vocabulary once."""

    def __init__(self, job: Job) -> None:
        self.job, self.tokenizer = job, load_tokenizer(job.tokenizer)
        self.dtype = token_dtype(self.tokenizer.vocab_size)
        self.tail = [self.tokenizer.eod_id] if job.append_eod else []

    def __call__(self, batch: text_files.RecordBatch) -> Result:
        texts: list[str] = []
        malformed: list[str] = []
        for number, record in records_of(batch):
            try:
                texts.append(document_text(record, number, batch.kind, self.job.key))
            except ValueError as error:
                malformed.append(f"{batch.path}:{number}: {error}")
        by_text = self._in_sentences(texts) if self.job.sentences else self._in_documents(texts, batch.kind)
        sequences: list[NDArray[Any]] = []
        sizes: list[list[int]] = []
        for documents in by_text:
            for document in documents:
                sequences += [np.array(ids, self.dtype) for ids in document]
                sizes.append([len(ids) for ids in document])
        return Result(
            ids=np.concatenate(sequences) if sequences else np.zeros(0, self.dtype),
            sizes=sizes,
            n_empty=by_text.count([]),
            malformed=malformed,
            position_bytes=batch.position_bytes,
        )

    def _in_sentences(self, texts: Sequence[str]) -> list[list[Document]]:
        """The documents of each text: one document with a sequence per sentence, or [] if the text has no tokens."""
        assert self.job.sentences
        documents = [sentences.encode(text, self.job.sentences, self.tokenizer) for text in texts]
        return [[document] if document else [] for document in documents]

    def _in_documents(self, texts: Sequence[str], kind: str) -> list[list[Document]]:
        """The documents of each text, with one sequence per document.

        A text that is cut has several documents. A text without tokens has an empty list of documents.
        """
        return [self._pieces(ids, kind) for ids in self.tokenizer.encode_all(texts)]

    def _pieces(self, ids: list[int], kind: str) -> list[Document]:
        longest = self.job.longest if kind == ".txt" and self.job.longest else len(ids)
        return [[ids[start : start + longest] + self.tail] for start in range(0, len(ids), longest or 1)]


def _in_order(batches: Iterator[text_files.RecordBatch], job: Job, n_workers: int) -> Generator[Result, None, None]:
    """Tokenize batches in worker processes; yield the results in the order of the batches.

    Batch n goes to worker n % n_workers. No worker has more than two unfinished batches.

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
    """Receive the next result of a worker.

    Raises:
        EOFError: the worker died, between two messages or while it sent a message.
    """
    try:
        return pipe.recv()
    except OSError as error:
        raise EOFError from error


def _start_worker(job: Job) -> tuple[BaseProcess, Connection]:
    """Start a worker process; return the worker and this process's end of the worker's pipe."""
    # Spawn the worker: a fork would copy locks that other threads of this process hold at that moment.
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


def _serve(pipe: Connection, job: Job) -> None:
    """Run a worker process until the parent closes its end of the pipe, or is killed."""
    batches: SimpleQueue[text_files.RecordBatch] = SimpleQueue()

    # A separate thread receives while the main thread computes. Otherwise both processes could block in `send`, each
    # waiting for the other to receive.
    def receive() -> None:
        with contextlib.suppress(EOFError, OSError):  # OSError: the parent ended while it sent a message
            while True:
                batches.put(pipe.recv())
        os._exit(0)

    threading.Thread(target=receive, daemon=True).start()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the workers already use all cores
    worker = Worker(job)
    with contextlib.suppress(ConnectionError):
        while True:
            pipe.send(worker(batches.get()))
    # While a thread is still receiving, the interpreter's own shutdown may hang, and the parent would hang too.
    os._exit(0)
