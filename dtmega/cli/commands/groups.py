"""`dtmega groups`: lists the ranks of every process group of a mesh, in Megatron's order.

dtmega groups --world 8 --mesh.tp 2 --mesh.pp 2
"""

from __future__ import annotations

import argparse

from dtmega import config
from dtmega.cli.commands.arguments import integer
from dtmega.distributed import exit_codes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--world", type=integer(1), required=True, metavar="N", help="number of processes")
    for axis, info in config.Mesh.model_fields.items():
        if info.annotation is int:
            parser.add_argument(
                f"--mesh.{axis}", dest=axis, type=integer(-1), default=info.default, metavar="N", help=info.description
            )


def command(args: argparse.Namespace) -> int:
    from dtmega import mesh

    sizes = {axis: getattr(args, axis) for axis in (*mesh.AXES, "ep")}
    print(mesh.describe_groups(mesh.resolve(config.Mesh.model_construct(**sizes), args.world, "--world"), args.ep))
    return exit_codes.DONE
