"""Kill ranks at every file event of a save, and damage every byte of a checkpoint: `python benchmarks/faults.py`.

    python benchmarks/faults.py [kills | damage | objects | all]

tests/checkpoint/test_kill.py and tests/checkpoint/test_damage.py try some of these events and bytes; this script tries
all of them. Two ranks hold a small BLOOM, sharded by FSDP2, on this machine's CPU. A kill passes if the rank that is
not killed ends by itself, and one process then loads the expected step bit-identically, clears up, and saves the next
step. A damage passes if the message names the damaged checkpoint and the damage, and the older checkpoint is loaded
bit-identically.

`objects` does the like in an object store on the loopback interface: a rank is killed before and after every request of
a save, each request of a save or load meets each fault once or from then on, and two processes save the same steps at
the same time. tests/checkpoint/object_faults.py says what passes.

The exit code is 1 if anything does not pass.
"""

import argparse
import itertools
import os
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed as dist

from tests import ranks
from tests.checkpoint import object_faults
from tests.checkpoint.test_damage import Victim
from tests.checkpoint.test_kill import MODES, PUBLISHES, RANKS, Crash
from tests.faults import alone
from tests.object_server import Server, serving
from tests.ranks import Forks

ROUNDS = 20


def holds(what: str, check: Callable[..., object], *args: object) -> bool:
    """True if the check neither raises an exception nor returns False. Otherwise print `what` on stderr."""
    try:
        if check(*args) is not False:
            return True
        print(what, file=sys.stderr)
    except Exception as error:
        print(f"{what}: {type(error).__name__}: {error}", file=sys.stderr)
    return False


def kills(forks: Forks, folder: Path) -> Iterator[bool]:
    print("| kill points | rank | survived | old one found | new one found |\n| --- |" + " --- |" * 4)
    for mode in MODES:
        (folder / mode).mkdir()
        crash = Crash(forks, folder / mode, mode)
        for rank in RANKS:
            events = crash.events[rank]
            points = [(f"{mode}, rank {rank}, before {event} ({k})", rank, k) for k, event in enumerate(events)]
            survived = [holds(what, crash.survives, *point) for what, *point in points]
            new = len(events) - 1 - events.index(PUBLISHES) if PUBLISHES in events else 0
            cells = (mode, rank, f"{sum(survived)} of {len(survived)}", len(events) - new, new)
            print("| " + " | ".join(map(str, cells)) + " |", flush=True)
            yield from survived


def damage(forks: Forks, folder: Path) -> Iterator[bool]:
    (folder / "damage").mkdir()
    victim = Victim(forks, folder / "damage")
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for wound in (*victim.flips(every=1), *victim.others()):
        detected = holds(f"{wound.names} {wound.kind}", victim.detects, wound)
        counts[wound.kind] += Counter({wound.file: detected, "tried " + wound.file: 1})
        yield detected
    print("\n| damage | " + " | ".join(victim.files) + " |\n| --- |" + " --- |" * len(victim.files))
    for kind, count in counts.items():
        cells = [f"{count[file]} of {count['tried ' + file]}" for file in victim.files]
        print(f"| {kind} | " + " | ".join(cells) + " |", flush=True)


def in_objects(forks: Forks, folder: Path) -> Iterator[bool]:
    with serving() as server:
        os.environ.update(server.environment)
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        print("| ranks | mode | requests | kill points survived |\n| --- | --- | ---: | ---: |")
        for n_ranks, mode in itertools.product((1, 2), MODES):
            crash = object_faults.Crash(forks, server, n_ranks, mode)
            survived = [holds(str(point), crash.survives, point) for point in crash.points]
            n_requests = len(crash.points) // len(object_faults.WHEN)
            print(f"| {n_ranks} | {mode} | {n_requests} | {sum(survived)} of {len(survived)} |", flush=True)
            yield from survived
        yield from failing_requests(server)
        server.objects.clear()
        errors = ranks.run(2, object_faults.save_against, server.environment, str(folder / "meeting"), ROUNDS)
        told = [object_faults.told(server, errors, step) for step in range(1, ROUNDS + 1)]
        print(f"\ntwo writers of a step: {sum(told)} of {len(told)} times one saved it and the other was told")
        yield from told


def failing_requests(server: Server) -> Iterator[bool]:
    print("\n| requests that fail | " + " | ".join(object_faults.FAULTS) + " |\n| --- |" + " ---: |" * 3)
    sweeps = {
        "one of a save": (object_faults.count_of_a_save, object_faults.one_fault_in_a_save),
        "all of a save from one on": (object_faults.count_of_a_save, object_faults.endless_fault_in_a_save),
        "one of a load": (object_faults.count_of_a_load, object_faults.one_fault_in_a_load),
        "all of a load from one on": (object_faults.count_of_a_load, object_faults.endless_fault_in_a_load),
    }
    for name, (count, check) in sweeps.items():
        cells = []
        for fault in object_faults.FAULTS:
            n_requests = count(server)
            passed = [holds(f"{name}, {fault}, {n}", check, server, n, fault) for n in range(n_requests)]
            cells.append(f"{sum(passed)} of {n_requests}")
            yield from passed
        print(f"| {name} | " + " | ".join(cells) + " |", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=["kills", "damage", "objects", "all"], default="all")
    what = parser.parse_args().what
    torch.set_num_threads(1)
    found = {}
    with tempfile.TemporaryDirectory() as folder, alone(), Forks() as forks:
        sweeps = (
            ("kills", kills, "kill points"),
            ("damage", damage, "damages"),
            ("objects", in_objects, "faults in an object store"),
        )
        for name, sweep, counted in sweeps:
            if what in (name, "all"):
                started = time.monotonic()
                found[name] = list(sweep(forks, Path(folder)))
                took_s = time.monotonic() - started
                print(f"{sum(found[name])} of {len(found[name])} {counted}, {took_s:.0f} s", flush=True)
    return 0 if all(all(each) for each in found.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
