"""`dtmega merge`: several token files -> one.

dtmega merge --input 'data/part-*' --output data/mine
"""

from __future__ import annotations

import argparse

from dtmega.commands.arguments import prefix
from dtmega.commands.endings import write_output
from dtmega.data import merge


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--input", nargs="+", required=True, metavar="PREFIX", help="the parts in their order; globs, by name"
    )
    parser.add_argument(
        "--output", required=True, type=prefix, metavar="PREFIX", help="writes PREFIX.bin and PREFIX.idx"
    )
    parser.add_argument(
        "--overwrite", action="store_true", help="replace the files that PREFIX names, if there are any"
    )


def command(args: argparse.Namespace) -> int:
    return write_output(merge.write, args)
