"""`dtmega replay`: recomputes steps of a run trained with [run] exact; compares every bit with the run's record.

dtmega replay runs/bloom --step 1200
torchrun --nproc-per-node 4 -m dtmega replay runs/bloom --step 1200 --mesh.dp_shard 4
"""

from __future__ import annotations

import argparse

from dtmega.cli.commands.arguments import integer, local_path, path
from dtmega.cli.commands.used import check_is_folder, startup_of

TAKES_KEYS = True  # keys of the layout, and paths to the data


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = f"{parser.description}; its layout as --mesh.* and --pipeline.* (default: the run's tp and cp)"
    parser.add_argument("run", type=path, help="a run directory, which is only read")
    parser.add_argument(
        "--step",
        type=integer(1),
        required=True,
        metavar="N",
        help="last step to compare; the first one follows the newest checkpoint before N",
    )
    parser.add_argument(
        "--scratch",
        type=local_path,
        metavar="DIR",
        help="an existing folder for temporary files, which processes on several machines must share (default: the "
        "system's)",
    )


def command(args: argparse.Namespace) -> int:
    from dtmega.cli.replay import replay
    from dtmega.distributed.agreement import Refused

    try:
        startup = startup_of("dtmega replay")
        with startup.step("options"):
            check_is_folder(args.run)
        return replay(args.run, args.step, args.keys, args.scratch, startup)
    except Refused as refused:
        return refused.exit_code
