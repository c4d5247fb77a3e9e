"""The model that a command uses: which checkpoint of a run, and on which processes."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from dtmega import config
from dtmega.cli.commands.arguments import integer
from dtmega.cli.commands.endings import explained

if TYPE_CHECKING:
    from dtmega.distributed.agreement import Startup
    from dtmega.inference.trained import Used

AXES = tuple(axis for axis, info in config.Mesh.model_fields.items() if info.annotation is int)


def add_where(parser: argparse.ArgumentParser) -> None:
    """The options for a checkpoint of a run, and for the mesh of several processes."""
    parser.add_argument(
        "--step", type=integer(0), metavar="N", help="use the checkpoint of step N (default: the newest)"
    )
    for axis in AXES:
        info = config.Mesh.model_fields[axis]
        parser.add_argument(
            f"--mesh.{axis}", dest=axis, type=integer(-1), default=info.default, metavar="N", help=info.description
        )


def started(program: str) -> Startup:
    """The processes of a command, which say in one line why they do not go on.

    Raises:
        Refused: as `Startup`.
    """
    from dtmega.distributed.agreement import Startup

    return Startup(program=program, explain=lambda error, what: explained(error))


def open_run(path: str, args: argparse.Namespace, startup: Startup) -> Used:
    """The model that `add_where` has asked for.

    Raises:
        Refused: on every process, after it was said.
    """
    from dtmega.inference.trained import opened

    return opened(path, args.step, {axis: getattr(args, axis) for axis in AXES}, startup)
