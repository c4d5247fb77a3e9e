"""`dtmega verify-plan`: checks the tensor-parallel plan of a Hugging Face model.

dtmega verify-plan DIR --tp 2
"""

from __future__ import annotations

import argparse
from pathlib import Path

from dtmega.cli.commands.arguments import integer


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directory", help="model directory with a config.json; weights are not needed")
    parser.add_argument(
        "--tp",
        type=integer(1),
        default=2,
        help="tensor-parallel ranks; started by this command unless torchrun has started them (default 2)",
    )
    parser.add_argument(
        "--no-sequence-parallel", action="store_true", help="tensor parallelism without sequence parallelism"
    )
    parser.add_argument("--generic", action="store_true", help="for a model without a plan: compute it on DTensors")


def command(args: argparse.Namespace) -> int:
    from dtmega.interop.hf.tp.command import verify_directory

    return verify_directory(
        Path(args.directory), args.tp, sequence_parallel=not args.no_sequence_parallel, generic=args.generic
    )
