"""`dtmega merge`: joins several corpora, or the parts that `dtmega tokenize --part` made, into one corpus.

dtmega merge --input 'data/mine.part-*' --output data/mine
dtmega merge --input data/old data/new --output data/both
"""

from __future__ import annotations

import argparse

from dtmega.cli.commands.arguments import path, prefix
from dtmega.cli.commands.endings import write_output
from dtmega.data.preparing import merge


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--input",
        type=path,
        nargs="+",
        required=True,
        metavar="PREFIX",
        help="the corpora to join, in this order (a glob: of the numbers in the names); or all parts of a text",
    )
    parser.add_argument(
        "--output", required=True, type=prefix, metavar="PREFIX", help="write PREFIX.bin and PREFIX.idx"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace PREFIX.bin and PREFIX.idx if they exist")


def command(args: argparse.Namespace) -> int:
    return write_output(merge.write, args)
