"""`dtmega tokenize`: turns text files into a corpus in Megatron's format, `.bin/.idx`.

dtmega tokenize --input texts --tokenizer stdlib-8k --output data/mine
dtmega tokenize --input play.txt --split-documents blank-lines --tokenizer gpt2 --output data/play
dtmega tokenize --input 'corpus/*.jsonl.gz' --tokenizer DIR/tokenizer.json --append-eod --output data/corpus
"""

from __future__ import annotations

import argparse
import os

from dtmega.cli.commands.arguments import encoding, integer, places_to_cut, prefix
from dtmega.cli.commands.endings import write_output
from dtmega.data.preparing import tokenize
from dtmega.data.preparing.input_files import KINDS
from dtmega.data.preparing.sentences import BLOCKS, PROSE


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--input",
        nargs="+",
        required=True,
        metavar="PATH",
        help=f"files, globs, folders (their {', '.join(KINDS)} files, by path; text also .gz, .zst), or - for stdin",
    )
    parser.add_argument(
        "--tokenizer",
        required=True,
        metavar="SPEC",
        help="stdlib-8k, stdlib-wordpiece, bert:VOCAB, a tiktoken name (gpt2), or a file",
    )
    parser.add_argument(
        "--output", required=True, type=prefix, metavar="PREFIX", help="write PREFIX.bin and PREFIX.idx"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace PREFIX.bin and PREFIX.idx if they exist")
    parser.add_argument(
        "--json-key", default="text", metavar="KEY", help="JSON key or parquet column of the text (default %(default)s)"
    )
    parser.add_argument("--append-eod", action="store_true", help="end each document with the end-of-document token")
    parser.add_argument(
        "--split-documents",
        type=places_to_cut,
        metavar="WHERE",
        help="cut .txt files, one document each, at blank lines (blank-lines) or every N tokens (a number)",
    )
    parser.add_argument(
        "--split-sentences",
        nargs="?",
        const=PROSE,
        choices=(PROSE, BLOCKS),
        help="for BERT: one sequence per sentence (prose, the default), or per block between blank lines (blocks)",
    )
    parser.add_argument(
        "--kind",
        choices=("txt", "jsonl"),
        help="format of all files, whatever their suffix (default: by suffix; stdin is txt)",
    )
    parser.add_argument(
        "--encoding",
        type=encoding,
        default="utf-8",
        metavar="NAME",
        help="encoding of the text: latin-1, cp1252, utf-16, gb18030, ... (default %(default)s)",
    )
    parser.add_argument(
        "--workers",
        type=integer(1),
        default=_n_cpus(),
        metavar="N",
        help="processes (default: one per CPU, here %(default)s)",
    )
    parser.add_argument(
        "--strict", action="store_true", help="stop at the first malformed record instead of skipping it with a warning"
    )


def command(args: argparse.Namespace) -> int:
    return write_output(tokenize.write, args)


def _n_cpus() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
