"""`dtmega verify-plan`: checks a Hugging Face model's tensor-parallel plan, or the division of its experts over ranks.

dtmega verify-plan DIR --tp 2
dtmega verify-plan DIR --ep 2
"""

from __future__ import annotations

import argparse
from pathlib import Path

from dtmega.cli.commands.arguments import integer, local_path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directory", type=local_path, help="model directory with a config.json; weights are not needed")
    axes = parser.add_mutually_exclusive_group()
    axes.add_argument(
        "--tp",
        type=integer(1),
        default=2,
        help="tensor-parallel ranks; started by this command unless torchrun has started them (default 2)",
    )
    axes.add_argument(
        "--ep", type=integer(2), default=0, help="instead of tp: ranks that a mixture's experts are divided over"
    )
    parser.add_argument(
        "--no-sequence-parallel", action="store_true", help="tensor parallelism without sequence parallelism"
    )
    parser.add_argument("--generic", action="store_true", help="for a model without a plan: compute it on DTensors")


def command(args: argparse.Namespace) -> int:
    from dtmega.interop.hf.tp.command import verify_directory

    if args.ep:
        if args.generic or args.no_sequence_parallel:
            raise ValueError("--generic and --no-sequence-parallel are for tensor parallelism: expected neither (--ep)")
        return verify_directory(Path(args.directory), "ep", args.ep)
    return verify_directory(
        Path(args.directory), "tp", args.tp, sequence_parallel=not args.no_sequence_parallel, generic=args.generic
    )
