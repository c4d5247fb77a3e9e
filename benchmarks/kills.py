"""Kill random ranks at random times under torchrun, and check the results: `python benchmarks/kills.py`.

On each layout, the debug model of tests/layouts.py (dropout 0.1) trains under `torchrun --max-restarts=1000` and saves
every second step. A kill sends SIGKILL to one rank. Most kills come some milliseconds after a step, while the next step
or a save is under way. Every third kill comes some seconds after the previous kill, while the job imports, meets and
loads. At the end, every loss and gradient norm in metrics.jsonl and every weight must be bit-identical to the values of
an undisturbed run. The exit code is 1 if any value differs.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.layouts import ROOT, write_text
from tests.resumed import KEYS, Record, flags

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "dp2": (2, {"mesh.dp_shard": 2}),
    "tp2": (2, {"mesh.tp": 2}),
    "pp2": (2, {"mesh.pp": 2}),
    "tp2xdp2": (4, {"mesh.tp": 2, "mesh.dp_shard": 2}),
}
EVERY_STEP = {"log.interval": 1, "eval.interval": 0}
STEPS_PER_KILL = 5
PATIENCE_S = 300.0


class Kill(NamedTuple):
    """One kill of a rank.

    Attributes:
        at_s: time of the kill (`time.monotonic`).
        during: "start" (no step since the previous kill), "save" or "step".
    """

    at_s: float
    during: str


class Job:
    """A job under torchrun, and the steps that its first rank reports.

    Attributes:
        said: pairs (time, step), one for each finished step. Step 0 means that an attempt has started.
    """

    def __init__(self, n: int, keys: dict[str, Any], folder: Path) -> None:
        self.folder = folder
        self.said: list[tuple[float, int]] = []
        folder.mkdir(parents=True)
        with (folder / "stderr").open("w") as stderr:
            self.process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts=1000"),
                    *(f"--nproc-per-node={n}", str(ROOT / "train.py"), *flags(keys, folder)),
                ],
                env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
            )
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if found := re.match(r"run: |step (\d+)/\d+ \| loss", line):
                self.said.append((time.monotonic(), int(found[1] or 0)))

    def wait_until(self, condition: Callable[[], Any]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the job ended or stood still; {self.folder / 'stderr'}")
            time.sleep(0.005)

    def step_since(self, at_s: float) -> tuple[float, int]:
        """Find the first step of an attempt that started after `at_s`: its time and number; (0, 0) if there is none."""
        later = [(when, step) for when, step in self.said if when > at_s]
        starts = [i for i, (_, step) in enumerate(later) if step == 0]
        steps = [said for said in later[starts[0] :] if said[1]] if starts else []
        return steps[0] if steps else (0.0, 0)

    def workers(self) -> list[int]:
        """The process ids of all ranks that are running."""
        found = []
        for path in Path("/proc").glob("[0-9]*/stat"):
            try:
                state, parent = path.read_text().rpartition(")")[2].split()[:2]
            except (FileNotFoundError, ProcessLookupError):
                continue
            if int(parent) == self.process.pid and state != "Z":
                found.append(int(path.parent.name))
        return found

    def kill_one(self, rng: random.Random, before: Kill) -> Kill:
        self.wait_until(self.workers)
        during = "step" if self.step_since(before.at_s)[1] else "start"
        if during == "step" and any((self.folder / "checkpoints").glob(".tmp-*")):
            during = "save"
        os.kill(rng.choice(self.workers()), signal.SIGKILL)
        return Kill(time.monotonic(), during)

    def end(self) -> int:
        code = self.process.wait()
        self._reader.join()
        return code


def torment(job: Job, kills: int, rng: random.Random) -> list[Kill]:
    done = [Kill(0.0, "")]
    restart_s = 3.0
    for i in range(kills):
        if i % 3 == 2:
            time.sleep(rng.uniform(0.0, restart_s))
        else:
            wanted = i * STEPS_PER_KILL + rng.randrange(STEPS_PER_KILL)
            job.wait_until(lambda: job.step_since(done[-1].at_s)[1] and job.said[-1][1] >= wanted)  # noqa: B023
            restart_s = job.step_since(done[-1].at_s)[0] - done[-1].at_s if i else restart_s
            time.sleep(rng.uniform(0.0, 0.2))
        done.append(job.kill_one(rng, done[-1]))
    return done[1:]


def measure(layout: str, kills: int, folder: Path, rng: random.Random) -> bool:
    n, mesh = LAYOUTS[layout]
    steps = {"train.steps": (kills + 5) * STEPS_PER_KILL, "checkpoint.interval": 2}
    keys = KEYS | write_text(folder) | EVERY_STEP | steps | mesh
    records, done, job = [], [], None
    for name in ("untouched", "killed"):
        job = Job(n, keys, folder / name)
        try:
            done = torment(job, kills, rng) if name == "killed" else []
        except BaseException:
            job.process.kill()
            raise
        finally:
            code = job.end()
        if code:
            raise RuntimeError(f"{layout}: torchrun gave {code}; {job.folder / 'stderr'}")
        records.append(Record(job.folder))
    assert job is not None
    untouched, killed = records
    lines = [
        all(killed.steps.get(step, {}).get(key) == line[key] for key in ("loss", "grad_norm"))
        for step, line in untouched.steps.items()
    ]
    weights = [killed.final[weight].equal(tensor) for weight, tensor in untouched.final.items()]
    ends = [*[kill.at_s for kill in done[1:]], float("inf")]
    restarts_s = [
        job.step_since(kill.at_s)[0] - kill.at_s
        for kill, end in zip(done, ends, strict=True)
        if 0 < job.step_since(kill.at_s)[0] < end
    ]
    where = ", ".join(f"{count} in a {during}" for during, count in sorted(Counter(k.during for k in done).items()))
    print(
        f"{layout}: {len(done)} kills ({where}); bit-identical: {sum(lines)} of {len(lines)} losses and gradient "
        f"norms, {sum(weights)} of {len(weights)} weights; from a kill to the next step: median "
        f"{statistics.median(restarts_s):.1f} s, max {max(restarts_s):.1f} s of {len(restarts_s)}",
        flush=True,
    )
    return all(lines) and all(weights) and killed.steps.keys() == untouched.steps.keys()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS))
    parser.add_argument("--seed", type=int, default=0, help="of ranks and times")
    options = parser.parse_args()
    rng = random.Random(options.seed)
    passed = []
    for layout in options.layouts:
        with tempfile.TemporaryDirectory() as folder:
            passed.append(measure(layout, options.kills, Path(folder), rng))
    print(f"{sum(passed)} of {len(passed)} layouts bit-identical after {options.kills} kills each")
    return 0 if all(passed) else 1


if __name__ == "__main__":
    sys.exit(main())
