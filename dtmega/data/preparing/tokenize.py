"""Turn a user's text into Megatron's `.bin/.idx` files; `python -m dtmega tokenize` calls `write`.

    python -m dtmega tokenize --input 'corpus/*.jsonl.gz' --tokenizer gpt2 --output data/mine --append-eod
    python -m dtmega tokenize --input corpus --tokenizer bert:vocab.txt --output data/mine --split-sentences

This process reads and writes; workers parse and tokenize (`workers.py`). Results are written in input order, so the
output is the same for any number of workers.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from dtmega.data.indexed_files.dataset import token_dtype
from dtmega.data.indexed_files.stored_output import check_free
from dtmega.data.indexed_files.writer import IndexedWriter, text_of
from dtmega.data.preparing import input_files, sentences, text_files
from dtmega.data.preparing.documents import document_text, records_of
from dtmega.data.preparing.parts import share_of
from dtmega.data.preparing.workers import Result, in_order
from dtmega.data.tokenizers.load import load_tokenizer
from dtmega.files.console import counted, quoted

TEXT_KEY = "text"
SHOWN = 5  # number of malformed records to print; the other malformed records are only counted

Document = list[NDArray[Any]]  # token ids of each sequence; a sequence is the whole document or one sentence


def write(args: argparse.Namespace) -> str:
    """Write the `.bin/.idx` pair. If writing fails, an existing pair at the output's path stays unchanged.

    Args:
        args: the options of `python -m dtmega tokenize`.

    Returns:
        A line for the user: counts of documents, tokens and skipped records; the time taken; and the file names.

    Raises:
        ValueError: an argument or the input is invalid, or a different part already has the output's name.
        OSError: a file cannot be read or written, or a worker died.
    """
    start_s = time.perf_counter()
    if args.part is None:
        check_free(args.output, args.overwrite)
    files = input_files.find_files(args.input, args.kind)
    _check_kinds(args, files)
    _check_sentences(args)
    tokenizer = load_tokenizer(args.tokenizer)
    cut = args.split_documents
    if args.prepend_bos and tokenizer.first_id is None:
        raise ValueError(
            f"--prepend-bos: tokenizer '{args.tokenizer}' names no bos_token; expected a tokenizer.json with "
            f"one in the tokenizer_config.json beside it"
        )
    at_blank_lines = cut == text_files.BLANK_LINES
    key = args.json_key or TEXT_KEY
    job = Job(
        tokenizer=args.tokenizer,
        key=key,
        append_eod=args.append_eod,
        prepend_bos=args.prepend_bos,
        longest=cut if isinstance(cut, int) else 0,
        sentences=args.split_sentences,
    )
    settings = dataclasses.asdict(job) | {"tokenizer": tokenizer.fingerprint, "eod_id": tokenizer.eod_id}
    settings["at_blank_lines"] = at_blank_lines
    share = share_of(args.output, files, args.part, encoding=args.encoding, settings=settings)
    if line := share.made(args.overwrite):
        return line
    batches = text_files.read_batches(share.files, key, at_blank_lines=at_blank_lines, encoding=args.encoding)
    total_bytes = sum(file.n_bytes for file in share.files) or None  # None: the size of standard input is not known
    n_empty = n_malformed = 0
    first = ""
    with (
        IndexedWriter(share.prefix, token_dtype(tokenizer.vocab_size)) as writer,
        tqdm(total=total_bytes, unit="B", unit_scale=True, desc="tokenize", disable=None) as bar,
        contextlib.closing(in_order(batches, job, args.workers)) as results,
    ):
        for result in results:
            for where in result.malformed:
                first = first or f"; the first: {where}"
                if args.strict:
                    raise ValueError(f"{where} (--strict)")
                if n_malformed < SHOWN:
                    bar.write(quoted(f"skipped {where}"), file=sys.stderr)
                n_malformed += 1
            n_empty += result.n_empty
            result.write(writer)
            bar.update(result.position_bytes - bar.n)
        if len(writer) == 0 and share.part is None:
            raise ValueError(
                f"no documents in {counted(len(files), 'file')} ({n_malformed:,} malformed, {n_empty:,} empty){first}"
            )
        is_cut = args.split_sentences is not None
        writer.about = text_of(
            *(tokenizer, writer),
            append_eod=args.append_eod,
            first_id=tokenizer.first_id if args.prepend_bos else None,
            sentences=is_cut,
            part=share.part,
        )
    summary = share.name + counted(writer.n_documents, "document")
    if is_cut:
        summary += f" of {counted(len(writer), 'sentence')}"
    return (
        f"{summary}, {counted(writer.n_tokens, 'token')}, {n_malformed + n_empty:,} skipped "
        f"({n_malformed:,} malformed, {n_empty:,} empty), {time.perf_counter() - start_s:.1f} s: "
        f"{share.prefix}.bin, {share.prefix}.idx"
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
    if option := next((name for name in ("append_eod", "prepend_bos") if getattr(args, name)), None):
        raise ValueError(
            f"--{option.replace('_', '-')} with --split-sentences: such a file has no special ids, [CLS] and [SEP] "
            f"come with the samples"
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
    """The settings that a worker needs, in a form that can be pickled.

    Attributes:
        tokenizer: spec of the tokenizer.
        key: JSON key or parquet column that holds the text.
        append_eod: whether to end each document with the end-of-document id.
        longest: maximum number of tokens in a piece of a .txt; each piece becomes a document. 0 to leave each .txt
            whole.
        sentences: kind of sentences, "prose" or "blocks"; each sentence becomes a sequence. None to make each document
            one sequence.
        prepend_bos: whether to begin each document with the id of the tokenizer's own `bos_token`.
    """

    tokenizer: str
    key: str
    append_eod: bool
    longest: int = 0
    sentences: str | None = None
    prepend_bos: bool = False

    def worker(self) -> Worker:
        """Make a worker with these settings."""
        return Worker(self)


class Worker:
    """A callable that turns a batch of records into documents. The constructor loads the vocabulary once."""

    def __init__(self, job: Job) -> None:
        self.job, self.tokenizer = job, load_tokenizer(job.tokenizer)
        self.dtype = token_dtype(self.tokenizer.vocab_size)
        first_id = self.tokenizer.first_id if job.prepend_bos else None
        self.head = np.array([] if first_id is None else [first_id], self.dtype)
        self.tail = np.array([self.tokenizer.eod_id] if job.append_eod else [], self.dtype)

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
                sequences += document
                sizes.append([len(ids) for ids in document])
        return Result(
            ids=np.concatenate(sequences) if sequences else np.zeros(0, self.dtype),
            sizes=sizes,
            n_empty=by_text.count([]),
            malformed=malformed,
            position_bytes=batch.position_bytes,
        )

    def _in_sentences(self, texts: Sequence[str]) -> list[list[Document]]:
        """One list per text: a single document with one sequence per sentence, or [] for a text without tokens."""
        assert self.job.sentences
        by_text = [sentences.encode(text, self.job.sentences, self.tokenizer) for text in texts]
        documents = [[np.array(ids, self.dtype) for ids in found] for found in by_text]
        return [[document] if document else [] for document in documents]

    def _in_documents(self, texts: Sequence[str], kind: str) -> list[list[Document]]:
        """One list of documents per text; each document is one sequence.

        A text that is cut into pieces has several documents. A text without tokens has an empty list.
        """
        return [self._pieces(np.asarray(ids, self.dtype), kind) for ids in self.tokenizer.encode_all(texts)]

    def _pieces(self, ids: NDArray[Any], kind: str) -> list[Document]:
        longest = self.job.longest if kind == ".txt" and self.job.longest else len(ids)
        pieces = [ids[start : start + longest] for start in range(0, len(ids), longest or 1)]
        return [[np.concatenate([self.head, piece, self.tail])] for piece in pieces]
