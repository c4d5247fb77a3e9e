"""Kill ranks at every file event of a save, and damage every byte of a checkpoint: `python benchmarks/faults.py`.

    python benchmarks/faults.py [kills | damage | all]

tests/checkpoint/test_kill.py and tests/checkpoint/test_damage.py try some of these events and bytes; this script tries
all of them. Two ranks hold a small BLOOM, sharded by FSDP2, on this machine's CPU. A kill passes if the rank that is
not killed ends by itself, and one process then loads the expected step bit-identically, clears up, and saves the next
step. A damage passes if the message names the damaged checkpoint and the damage, and the older checkpoint is loaded
bit-identically. The exit code is 1 if any kill or damage does not pass.
"""

import argparse
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from tests.checkpoint.test_damage import Victim
from tests.checkpoint.test_kill import MODES, PUBLISHES, RANKS, Crash
from tests.faults import alone
from tests.ranks import Forks


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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=["kills", "damage", "all"], default="all")
    what = parser.parse_args().what
    torch.set_num_threads(1)
    found = {}
    with tempfile.TemporaryDirectory() as folder, alone(), Forks() as forks:
        for name, sweep, counted in (("kills", kills, "kill points"), ("damage", damage, "damages")):
            if what in (name, "all"):
                started = time.monotonic()
                found[name] = list(sweep(forks, Path(folder)))
                took_s = time.monotonic() - started
                print(f"{sum(found[name])} of {len(found[name])} {counted}, {took_s:.0f} s", flush=True)
    return 0 if all(all(each) for each in found.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
