"""`dtmega plan`: predicts whether a run fits on N devices, what each rank holds and sends, and how long a step takes.

dtmega plan --config bloom-7b1.toml --world 64 --mesh.tp 2 --memory 80GiB
dtmega plan --config bloom-176b.toml --world 384 --mesh.tp 4 --mesh.pp 12 --fabric a100-ib --json plan.json
dtmega plan --config bloom.toml --world 2 --mesh.tp 2 --device cpu
dtmega plan --config bloom-7b1.toml --world 64 --search --write best.toml
dtmega plan --calibrate here.toml
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dtmega.cli.commands.arguments import integer, local_path, number
from dtmega.distributed import exit_codes
from dtmega.files import atomic, console, optional_imports

if TYPE_CHECKING:
    from dtmega.config import Config
    from dtmega.planning.answers.answer import Answer
    from dtmega.planning.answers.job import Job, Machine

TAKES_KEYS = True  # accepts any configuration key as --section.key value


def add_arguments(parser: argparse.ArgumentParser) -> None:
    job = parser.add_argument_group(
        "the run", "Any key of a run as --section.key value; `dtmega train --help SECTION` lists a section's keys."
    )
    job.add_argument("--config", type=local_path, metavar="NAME", help="path of a TOML file, or a name under configs/")
    job.add_argument(
        "--world", type=integer(1), metavar="N", help="number of ranks (default: the product of the mesh's sizes)"
    )
    job.add_argument(
        "--imbalance",
        type=number(0, 1e6),
        metavar="X",
        help="with --mesh.ep: largest load of a rank's experts, as a multiple of the mean (default: 1, even)",
    )
    job.add_argument("--tokens", type=number(0, 1e20), metavar="N", help="tokens to price (default: those of [train])")
    machine = parser.add_argument_group("the machine")
    machine.add_argument(
        "--device",
        choices=("cuda", "cpu"),
        help="device of every rank; a plan needs no GPU (default: cuda; for --calibrate the GPU if there is one)",
    )
    machine.add_argument(
        "--fabric",
        type=local_path,
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
    machine.add_argument(
        "--calibrate",
        type=local_path,
        metavar="FILE",
        help="plan nothing: measure this machine, with all processes of torchrun, and write the file for --fabric",
    )
    answer = parser.add_argument_group("the answer")
    answer.add_argument("--json", type=local_path, metavar="FILE", help="also write everything as JSON")
    answer.add_argument(
        "--page", type=local_path, metavar="FILE", help="also write a page of the report (extra `report`)"
    )
    search = parser.add_argument_group(
        "search", "Compare all layouts of --world ranks; keys given here stay as they are."
    )
    search.add_argument("--search", action="store_true", help="search for the layout with the most tokens per second")
    search.add_argument(
        "--top", type=integer(1), default=10, metavar="N", help="number of layouts to plan (default %(default)s)"
    )
    search.add_argument(
        "--write", type=local_path, metavar="FILE", help="write the best layout as a TOML that `train` accepts"
    )


def command(args: argparse.Namespace) -> int:
    if args.calibrate:
        return measure_machine(args)
    if not args.config:
        raise ValueError("expected --config NAME, the run to plan (or --calibrate FILE, to measure this machine)")
    from dtmega import config
    from dtmega.planning.answers.job import lay_out, machine_of

    machine = machine_of(args.device or "cuda", args.fabric, args.memory, args.reserve)
    check_files(args)
    asked = config.load(["--config", args.config, *args.keys])
    for line in asked.replaced:
        console.say(line)
    if args.search:
        return search_layouts(asked, machine, args)
    return plan_one(lay_out(asked, args.world, machine, args.imbalance or 1.0), args)


def measure_machine(args: argparse.Namespace) -> int:
    """Measure this machine with all ranks and write the results to a fabric file.

    Returns:
        The exit code.

    Raises:
        ValueError: a planning option is given together with `--calibrate`, or the fabric file's folder does not exist.
    """
    from dtmega import config, mesh
    from dtmega.planning.prices import calibrate

    taken = ("config", "world", "imbalance", "tokens", "fabric", "memory", "reserve", "json", "page", "search", "write")
    given = [f"--{name}" for name in taken if getattr(args, name)] + list(args.keys)
    if given:
        raise ValueError(f"--calibrate measures this machine and plans nothing: expected no {given[0]}")
    check_folder("calibrate", args.calibrate)
    device = mesh.pick_device(args.device or "auto")
    n_ranks = mesh.world_size()
    world = mesh.start(device, mesh.resolve(config.Mesh(), n_ranks)) if n_ranks > 1 else None
    fabric = calibrate.calibrate(device)
    if world is None or world.rank == 0:
        calibrate.write(fabric, args.calibrate)
        print(f"measured: {fabric.gpu.name}, {n_ranks} processes\nwritten: {args.calibrate}")
    if world is not None:
        mesh.stop()
    return exit_codes.DONE


def check_files(args: argparse.Namespace) -> None:
    """Check the options for output files and for the search. Planning may take minutes, so these checks come first.

    Raises:
        ValueError: an output file cannot be written, two options exclude each other, or a required option is missing.
    """
    for option in ("json", "write"):
        path = getattr(args, option)
        if path:
            check_folder(option, path)
    if args.write and not args.search:
        raise ValueError("--write needs --search: without a search there is no best layout")
    if args.page and args.search:
        raise ValueError("--page shows one layout, but --search compares many: plan the best one with --page")
    if args.search and args.world is None:
        raise ValueError("--search needs --world N, the number of ranks to lay out")
    if args.page:
        check_page(args.page)


def check_page(path: str | Path) -> None:
    """Check that the page can be written. Call this function before making the plan, which takes a long time.

    Args:
        path: path of the page.

    Raises:
        ValueError: the folder does not exist or cannot be written to, the path is a folder, or plotly is not installed.
    """
    path = Path(path)
    optional_imports.check("plotly", "report", "--page")
    folder = path.parent
    reason = ""
    if not folder.is_dir():
        reason = f"{folder} is not a folder"
    elif path.is_dir():
        reason = "it is a folder"
    elif not os.access(folder, os.W_OK | os.X_OK):
        reason = f"{folder} cannot be written to"
    if reason:
        raise ValueError(f"cannot write the page to {path}: {reason}, expected a file in an existing folder (--page)")


def check_folder(option: str, path: str) -> None:
    """Check that the folder of an output file exists.

    Raises:
        ValueError: the folder does not exist.
    """
    if not Path(path).absolute().parent.is_dir():
        raise ValueError(f"--{option} {path}: expected a file in a folder that is there")


def search_layouts(asked: Config, machine: Machine, args: argparse.Namespace) -> int:
    """Search for the fastest layout that fits; print the results.

    Returns:
        The exit code.
    """
    from dtmega import families
    from dtmega.planning import search
    from dtmega.planning.answers.text import priced_as

    cfg = families.resolve(asked)
    names = {flag.removeprefix("--").partition("=")[0] for flag in args.keys if flag.startswith("--")}
    fixed = names.intersection(search.KEYS)
    memory = machine.memory
    found = search.search(
        cfg,
        fixed,
        args.world,
        machine.fabric,
        memory.n_bytes,
        memory.reserve_bytes,
        args.top,
        machine.device,
        lambda progress: console.say(f"dtmega plan: {progress}"),
        args.imbalance or 1.0,
    )
    print("\n".join([search.text(found), *priced_as(machine)]))
    if args.json:
        _write_json(args.json, search.as_dict(found))
    if args.write and found.best is not None:
        with atomic.replaced(Path(args.write)) as file:
            file.write(search.best_toml(cfg, found))
        print(f"written: {args.write}")
    if found.best is None and memory.is_given:
        return exit_codes.DOES_NOT_FIT
    return exit_codes.DONE


def plan_one(job: Job, args: argparse.Namespace) -> int:
    """Plan one layout and print the plan.

    Returns:
        The exit code.
    """
    from dtmega.planning.answers import text
    from dtmega.planning.answers.answer import answer_job, as_dict

    answer = answer_job(job, args.tokens, _say_progress)
    print(text.write(answer))
    if args.json:
        _write_json(args.json, as_dict(answer))
    if args.page:
        _write_page(args, answer)
    if job.machine.memory.is_given and not answer.fits:
        return exit_codes.DOES_NOT_FIT
    return exit_codes.DONE


def _write_json(path: str, values: dict[str, Any]) -> None:
    with atomic.replaced(Path(path)) as file:
        json.dump(values, file, indent=1)
        file.write("\n")


def _write_page(args: argparse.Namespace, answer: Answer) -> None:
    from dtmega.report.plan_page import write_plan_page

    machine = answer.job.machine
    words = ["dtmega", "plan", "--config", args.config, *args.keys]
    if args.world is not None:
        words += ["--world", str(args.world)]
    if args.imbalance is not None:
        words += ["--imbalance", str(args.imbalance)]
    write_plan_page(
        answer.plan,
        answer.step,
        args.page,
        command=shlex.join(words),
        memory_bytes=machine.memory.n_bytes,
        reserve_bytes=machine.memory.reserve_bytes,
        fabric=machine.fabric_name,
        budget=answer.budget,
    )


def _say_progress(done: int, all_roles: int) -> None:
    console.say(f"dtmega plan: role {done + 1} of {all_roles}")
