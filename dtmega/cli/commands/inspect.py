"""`dtmega inspect`: shows a checkpoint's content and verifies its digests; compares two checkpoints.

dtmega inspect runs/bloom
dtmega inspect runs/bloom runs/other --quick
"""

from __future__ import annotations

import argparse

from dtmega.cli.commands.arguments import path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "checkpoint", type=path, help="folder or URL of a checkpoint, or a run directory (its newest checkpoint)"
    )
    parser.add_argument(
        "other",
        type=path,
        nargs="?",
        help="a second checkpoint: print the differences, with exit code 1 if there are any",
    )
    parser.add_argument("--quick", action="store_true", help="do not read the tensors, nor verify their digests")


def command(args: argparse.Namespace) -> int:
    from dtmega.cli.convert import inspect

    return inspect.show(args.checkpoint, args.other, verify=not args.quick)
