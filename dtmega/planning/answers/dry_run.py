"""`train.py --dry-run`: the refusals of a start, the split of the batch and each rank's memory, and nothing else.

    torchrun --nproc-per-node 2 train.py --config bloom.toml --mesh.tp 2 --dry-run
    python train.py --config bloom-176b.toml --dry-run --world 384 --mesh.tp 4 --mesh.pp 12 --memory 80GiB

Configuration and data are read as in training, on all ranks. The first rank then plans the roles and prints the answer.
The run directory is neither read nor touched, and no process group is made.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from dtmega import config
from dtmega.distributed import exit_codes, process
from dtmega.distributed.agreement import Refused, Startup
from dtmega.files import console
from dtmega.ops import cost
from dtmega.planning.answers import text
from dtmega.planning.answers.job import Job, Memory, device_of, load_fabric, memory_of, read_option, with_dtype
from dtmega.planning.plan import plan_job
from dtmega.training import start

FLAG = "--dry-run"
OPTIONS = ("--world", "--device", "--fabric", "--memory", "--reserve")
INTERRUPTED = 130  # the shells' code for a process ended by SIGINT: 128 + 2
FIRST = "dry run: nothing was started or written"


class Options(NamedTuple):
    """The options of a dry run; None where an option is not given.

    Attributes:
        world: number of ranks, instead of those of this job.
        device: device of every rank, "cuda" or "cpu".
        fabric: name or file of a fabric, whose memory and reserve count; '' for the default one.
        memory_bytes: memory of one device.
        reserve_bytes: memory that tensors cannot use.
    """

    world: int | None
    device: str | None
    fabric: str
    memory_bytes: int | None
    reserve_bytes: int | None


def main(argv: list[str]) -> int:
    """Make a dry run. Returns the exit code."""
    try:
        return _run(argv, Startup())
    except Refused as refused:
        return refused.exit_code
    except KeyboardInterrupt:
        console.say("dtmega: interrupted")
        return INTERRUPTED


def _run(argv: list[str], startup: Startup) -> int:
    with startup.step("options of the dry run"):
        given, rest = separate(argv)
        options = read_options(given, startup.size)
        device = _device(options, rest)
    settings = start.read_configuration(rest, startup, options.world, device)
    opened, batches = start.open_data(settings, startup)
    batches.close()
    with startup.step("plan") as step:
        if startup.rank == 0:
            job = Job(with_dtype(settings.cfg, settings.device), settings.sizes, settings.device)
            memory = _memory(options, job)
            plan = plan_job(job.cfg, job.sizes, job.device, lambda done, all_roles: _progress(startup, done, all_roles))
            n_tokens = opened.samples("train").n_tokens
            first_lines = [FIRST, f"data: {console.counted(n_tokens, 'training token')}", *opened.notes]
            print(text.dry_run(job, plan, memory, cost.n_parameters(settings.pieces), first_lines), flush=True)
            fits = memory.holds(plan.fullest.peak.peak_bytes)
            step.send = exit_codes.DOES_NOT_FIT if memory.is_given and not fits else exit_codes.DONE
    code = step.received
    startup.leave()
    if code:
        process.tell_agent("the run does not fit into --memory")
    return code


def _progress(startup: Startup, done: int, all_roles: int) -> None:
    startup.heartbeat()
    console.say(f"dtmega: role {done + 1} of {all_roles}")


def separate(argv: list[str]) -> tuple[dict[str, str], list[str]]:
    """Separate the options of a dry run from the arguments of the run.

    Raises:
        ValueError: an option has no value, or is given twice.
    """
    given: dict[str, str] = {}
    rest: list[str] = []
    words = iter(argv)
    for word in words:
        flag, equals, value = word.partition("=")
        if flag == FLAG:
            continue
        if flag not in OPTIONS:
            rest.append(word)
            # The value of a key may be anything, also a word that looks like an option.
            if not equals and flag.startswith("--") and (following := next(words, None)) is not None:
                rest.append(following)
            continue
        if not equals:
            value = next(words, "")
        if flag in given:
            raise ValueError(f"{flag} is given twice (--dry-run)")
        if not value or value.startswith("--"):
            raise ValueError(f"{flag} needs a value (--dry-run)")
        given[flag] = value
    return given, rest


def read_options(given: dict[str, str], n_processes: int) -> Options:
    """Parse the options of a dry run.

    Args:
        given: the options by name, with the text of their values.
        n_processes: number of processes of this job.

    Raises:
        ValueError: a value is wrong, or --world contradicts the number of processes.
    """
    world = given.get("--world")
    if world is not None and not (world.isdecimal() and int(world) > 0):
        raise ValueError(f"--world {world:.80}: expected a whole number of 1 or more (--dry-run)")
    if world is not None and n_processes > 1 and int(world) != n_processes:
        raise ValueError(
            f"--world {world}, but there are {n_processes} processes: expected --world without torchrun, or no --world"
        )
    device = given.get("--device")
    if device not in (None, "cuda", "cpu"):
        raise ValueError(f"--device {device:.80}: expected cuda or cpu (--dry-run)")
    return Options(
        world=None if world is None else int(world),
        device=device,
        fabric=given.get("--fabric", ""),
        memory_bytes=read_option("--memory", given.get("--memory")),
        reserve_bytes=read_option("--reserve", given.get("--reserve")),
    )


def _device(options: Options, argv: list[str]) -> torch.device | None:
    """The device of every rank: --device; for the ranks of another job a GPU; for this job None, its own device."""
    if options.device is not None:
        return device_of(options.device)
    if options.world is None or any(word in ("-h", "--help") for word in argv):
        return None
    return device_of("cpu" if config.load(argv).run.device == "cpu" else "cuda")


def _memory(options: Options, job: Job) -> Memory:
    """The memory of one device: --memory, this machine's GPU if the job is to run here, or the fabric's."""
    memory = memory_of(load_fabric(options.fabric, job.device, job.cfg), options.memory_bytes, options.reserve_bytes)
    is_here = options.world is None and options.device is None and not options.fabric
    if is_here and not memory.is_given and job.device.type == "cuda":
        properties = torch.cuda.get_device_properties(job.device)
        return memory._replace(n_bytes=properties.total_memory, source=properties.name)
    return memory
