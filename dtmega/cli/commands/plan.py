"""`dtmega plan`: says whether a run fits on N devices, what each rank holds and sends, and how long a step takes.

dtmega plan --config bloom-7b1.toml --world 64 --mesh.tp 2 --memory 80GiB
dtmega plan --config bloom-176b.toml --world 384 --mesh.tp 4 --mesh.pp 12 --fabric a100-ib --json plan.json
dtmega plan --config bloom.toml --world 2 --mesh.tp 2 --device cpu
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from dtmega.cli.commands.arguments import integer, number
from dtmega.distributed import exit_codes
from dtmega.files import atomic, console

if TYPE_CHECKING:
    from dtmega.planning.answers.job import Job

TAKES_KEYS = True  # any key of a run as --section.key value


def add_arguments(parser: argparse.ArgumentParser) -> None:
    job = parser.add_argument_group(
        "the run", "Any key of a run as --section.key value; `dtmega train --help SECTION` lists a section's keys."
    )
    job.add_argument("--config", required=True, metavar="NAME", help="path of a TOML file, or a name under configs/")
    job.add_argument(
        "--world", type=integer(1), metavar="N", help="number of ranks (default: the product of the mesh's sizes)"
    )
    job.add_argument("--tokens", type=number(0, 1e20), metavar="N", help="tokens to price (default: those of [train])")
    machine = parser.add_argument_group("the machine")
    machine.add_argument(
        "--device",
        choices=("cuda", "cpu"),
        default="cuda",
        help="device of every rank; no GPU is needed (default %(default)s)",
    )
    machine.add_argument(
        "--fabric",
        default="",
        metavar="NAME",
        help="speeds, links and prices: a shipped fabric or a TOML file (default: h100-ib, cpu-gloo for CPUs)",
    )
    machine.add_argument(
        "--memory",
        metavar="SIZE",
        help="memory of one device, such as 80GiB; the exit code is 4 if the run does not fit (default: the fabric's)",
    )
    machine.add_argument(
        "--reserve",
        metavar="SIZE",
        help="memory that tensors cannot use: context, communication library, fragmentation (default: the fabric's)",
    )
    answer = parser.add_argument_group("the answer")
    answer.add_argument("--json", metavar="FILE", help="also write everything as JSON")


def command(args: argparse.Namespace) -> int:
    from dtmega import config
    from dtmega.planning.answers.job import lay_out, machine_of

    machine = machine_of(args.device, args.fabric, args.memory, args.reserve)
    if args.json and not Path(args.json).absolute().parent.is_dir():
        raise ValueError(f"--json {args.json}: expected a file in a folder that is there")
    asked = config.load(["--config", args.config, *args.keys])
    # A search over layouts (`planning.search`) begins here: it needs `asked`, the world and the machine.
    return plan_one(lay_out(asked, args.world, machine), args)


def plan_one(job: Job, args: argparse.Namespace) -> int:
    """Plan one layout, and print the answer.

    Returns:
        The exit code.
    """
    from dtmega.planning.answers import text
    from dtmega.planning.answers.answer import answer_job, as_dict

    answer = answer_job(job, args.tokens, _say_progress)
    print(text.write(answer))
    if args.json:
        with atomic.replaced(Path(args.json)) as file:
            json.dump(as_dict(answer), file, indent=1)
            file.write("\n")
    if job.machine.memory.is_given and not answer.fits:
        return exit_codes.DOES_NOT_FIT
    return exit_codes.DONE


def _say_progress(done: int, all_roles: int) -> None:
    console.say(f"dtmega plan: role {done + 1} of {all_roles}")
