"""The trained model that a command uses: options that choose its checkpoint and mesh, and a function that loads it."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from dtmega import config
from dtmega.cli.commands.arguments import integer
from dtmega.cli.commands.endings import explained

if TYPE_CHECKING:
    from dtmega.distributed.agreement import Startup
    from dtmega.inference.trained import TrainedModel

AXES = tuple(axis for axis, info in config.Mesh.model_fields.items() if info.annotation is int)


def add_checkpoint_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that choose a checkpoint of a run, and the mesh for several processes."""
    parser.add_argument(
        "--step", type=integer(0), metavar="N", help="use the checkpoint of step N (default: the newest)"
    )
    for axis in AXES:
        info = config.Mesh.model_fields[axis]
        parser.add_argument(
            f"--mesh.{axis}", dest=axis, type=integer(-1), default=info.default, metavar="N", help=info.description
        )


def startup_of(program: str) -> Startup:
    """The `Startup` of a command. It prints a refusal in one line.

    Args:
        program: name of the command, printed at the beginning of that line.

    Raises:
        Refused: an error of `Startup`.
    """
    from dtmega.distributed.agreement import Startup

    return Startup(program=program, explain=lambda error, what: explained(error))


def open_run(path: str, args: argparse.Namespace, startup: Startup) -> TrainedModel:
    """Read the model of a run, from the checkpoint and on the mesh that the options name. All processes call this.

    Args:
        path: a run directory, or the folder of one checkpoint.
        args: parsed options of `add_checkpoint_options`.
        startup: startup of the processes.

    Raises:
        Refused: the model cannot be read. Every process raises this, after the reason has been printed.
    """
    from dtmega.inference.trained import open_trained

    return open_trained(path, args.step, {axis: getattr(args, axis) for axis in AXES}, startup)
