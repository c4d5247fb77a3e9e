"""Code shared by the commands that read a run: checkpoint and mesh options, a path check, and a model loader."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from dtmega import config
from dtmega.cli.commands.arguments import integer
from dtmega.cli.commands.endings import explained

if TYPE_CHECKING:
    from dtmega.distributed.agreement import Startup
    from dtmega.inference.trained import TrainedModel

# All axes except cp (context parallel), because generation works on whole sequences.
AXES = tuple(axis for axis, info in config.Mesh.model_fields.items() if info.annotation is int and axis != "cp")


def add_checkpoint_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that choose a run's checkpoint and, for several processes, the mesh."""
    parser.add_argument(
        "--step", type=integer(0), metavar="N", help="use the checkpoint of step N (default: the newest)"
    )
    for axis in AXES:
        info = config.Mesh.model_fields[axis]
        parser.add_argument(
            f"--mesh.{axis}", dest=axis, type=integer(-1), default=info.default, metavar="N", help=info.description
        )


def check_is_folder(run: str) -> None:
    """Check that `run` is a local path, because the command needs the files in the run directory.

    Raises:
        ValueError: `run` is a URL.
    """
    if "://" in run:
        raise ValueError(
            f"{run} is no run directory: expected the folder that has config.toml and metrics.jsonl of the run, whose "
            f"checkpoints may be at a URL"
        )


def startup_of(program: str) -> Startup:
    """Make a command's `Startup`, which coordinates the processes and prints any error in one line.

    Args:
        program: the command's name, printed at the beginning of the error line.

    Raises:
        Refused: the launcher set invalid environment variables; the reason has been printed.
    """
    from dtmega.distributed.agreement import Startup

    return Startup(program=program, explain=lambda error, what: explained(error))


def open_run(path: str, args: argparse.Namespace, startup: Startup) -> TrainedModel:
    """Load a run's model from the chosen checkpoint onto the chosen mesh. All processes call this function.

    Args:
        path: a run directory, or the folder of one checkpoint.
        args: parsed command line, with the options of `add_checkpoint_options`.
        startup: `Startup` of all processes.

    Raises:
        Refused: the model cannot be loaded. Every process raises this error, after the reason has been printed.
    """
    from dtmega.inference.trained import open_trained

    return open_trained(path, args.step, {axis: getattr(args, axis) for axis in AXES}, startup)
