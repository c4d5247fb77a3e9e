"""`train.py --dry-run`: check whether training would start; print how the batch is split and each rank's memory.

    torchrun --nproc-per-node 2 train.py --config bloom.toml --mesh.tp 2 --dry-run
    python train.py --config bloom-176b.toml --dry-run --world 384 --mesh.tp 4 --mesh.pp 12 --memory 80GiB

All ranks read the configuration and the data as in training. The first rank then plans the roles and prints the answer.
The run directory is neither read nor changed, and no process group is created.
"""

from __future__ import annotations

import torch

from dtmega import config, mesh
from dtmega.distributed import exit_codes, process
from dtmega.distributed.agreement import Refused, Startup
from dtmega.files import console
from dtmega.ops import cost
from dtmega.planning.answers import text
from dtmega.planning.answers.job import Job, Machine, check_imbalance, machine_of, priced, with_dtype
from dtmega.planning.plan import plan_job
from dtmega.training import choices, start

FLAG = "--dry-run"
OPTIONS = ("--world", "--device", "--fabric", "--memory", "--reserve", "--imbalance")
Elsewhere = tuple[int, torch.device, int | None] | None  # type of `elsewhere` in `start.read_configuration`
INTERRUPTED = 130  # exit code that shells report for a process that SIGINT ended: 128 + 2
FIRST = "dry run: nothing was started or written"


def main(argv: list[str]) -> int:
    """Perform a dry run and return the exit code."""
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
        elsewhere, machine = read_options(given, rest, startup.size)
        imbalance = read_imbalance(given)
    settings = start.read_configuration(rest, startup, elsewhere)
    settings, opened, batches = start.open_data(settings, startup)
    batches.close()
    with startup.step("plan") as step:
        check_imbalance(imbalance, settings.cfg.mesh.ep)
        if startup.rank == 0:
            job = priced(Job(with_dtype(settings.cfg, settings.device), settings.sizes, machine, imbalance))
            plan = plan_job(
                job.cfg,
                job.sizes,
                machine.device,
                lambda done, n: _progress(startup, done, n),
                imbalance=job.imbalance,
            )
            lines = [FIRST, f"data: {console.counted(opened.samples('train').n_tokens, 'training token')}"]
            lines += choices.accumulation_note(settings.saved_cfg, settings.sizes, settings.memory_bytes)
            print(text.dry_run(job, plan, cost.n_parameters(settings.pieces), [*lines, *opened.notes]), flush=True)
            fits = machine.memory.holds(plan.fullest.peak.peak_bytes)
            step.send = exit_codes.DOES_NOT_FIT if machine.memory.is_given and not fits else exit_codes.DONE
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
        ValueError: an option has no value or is given twice.
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
            # The value of a key may be any word, even a word that looks like an option.
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


def read_imbalance(given: dict[str, str]) -> float:
    """The largest load of a rank's experts, as a multiple of the mean load; 1 without --imbalance.

    Args:
        given: name of each option -> text of its value.

    Raises:
        ValueError: the value is not a number.
    """
    text = given.get("--imbalance", "1")
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"--imbalance {text:.80}: expected a number of 1 or more (--dry-run)") from None


def read_options(given: dict[str, str], argv: list[str], n_processes: int) -> tuple[Elsewhere, Machine]:
    """Decide which processes a dry run plans: the processes of this job, or the processes that the options describe.

    Args:
        given: name of each option -> text of its value.
        argv: arguments of the run.
        n_processes: number of processes of this job.

    Returns:
        The processes (None for the processes of this job), and the machine that they run on.

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
    kind = given.get("--device")
    if kind not in (None, "cuda", "cpu"):
        raise ValueError(f"--device {kind:.80}: expected cuda or cpu (--dry-run)")
    device = None
    if world is None and kind is None:
        device = mesh.pick_device(config.load(argv).run.device)
        kind = device.type
    elif kind is None:
        # The planned processes run elsewhere: on GPUs, unless the configuration selects the CPU.
        kind = "cpu" if config.load(argv).run.device == "cpu" else "cuda"
    machine = machine_of(kind, given.get("--fabric", ""), given.get("--memory"), given.get("--reserve"))
    if device is None:
        return (int(world or n_processes), machine.device, machine.gpu_bytes), machine
    if kind == "cuda" and not machine.memory.is_given and "--fabric" not in given:
        properties = torch.cuda.get_device_properties(device)
        own = machine.memory._replace(n_bytes=properties.total_memory, source=properties.name)
        machine = machine._replace(memory=own)
    return None, machine
