"""`dtmega verify-plan`: prove the sharding plan of a model of transformers.

dtmega verify-plan DIR --tp 2
"""

from __future__ import annotations

import argparse
from pathlib import Path

from dtmega.commands.arguments import integer


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directory", help="a model directory with config.json; weights are not needed")
    parser.add_argument("--tp", type=integer(1), default=2, help="ranks; started here unless torchrun did (default 2)")
    parser.add_argument("--no-sequence-parallel", action="store_true", help="plain tensor parallelism")
    parser.add_argument("--generic", action="store_true", help="a model without a plan computes on DTensors")


def command(args: argparse.Namespace) -> int:
    from dtmega.hf.tp.command import verify_directory

    return verify_directory(
        Path(args.directory), args.tp, sequence_parallel=not args.no_sequence_parallel, generic=args.generic
    )
