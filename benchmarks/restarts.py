"""Restart a dying job with torchrun, time the restarts, and count the attempts that fail and the runs that end well.

    python benchmarks/restarts.py [--restarts 12] [--runs 20] [--start dtmega plain]

A job has two gloo ranks. In each attempt, one rank dies after the first collective. `plain` starts with
`dist.init_process_group()`, and `dtmega` starts with `mesh.start`. "failed" is the number of attempts that did not
reach the first collective. A time is the number of seconds from a death to the first collective of the next attempt
that reaches one.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MODES = ("static", "standalone", "c10d")
TIMEOUT_S = 400
WORKER = """
import os, sys, time
from datetime import timedelta
from pathlib import Path
import torch, torch.distributed as dist
from dtmega import config, mesh
from dtmega.distributed import exit_codes, process

def note(name, text):
    with open(name, "a") as file:
        file.write(text)

def count(name):
    return len(Path(name).read_text().split()) if Path(name).exists() else 0

start, deaths = sys.argv[1], int(sys.argv[2])
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
if rank == 0:
    note("attempts", "x ")
if start == "plain":
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
else:
    mesh.start(torch.device("cpu"), mesh.resolve(config.Mesh(), world), timeout_s=30)
dist.all_reduce(torch.ones(1))
died = count("deaths")
if rank == 0:
    note("begun", f"{died}:{time.time()} ")
dist.barrier()
if died < deaths:
    if rank == world - 1:
        note("deaths", f"{time.time()} ")
        os._exit(1)
    dist.all_reduce(torch.ones(1))
dist.barrier()
process.leave(exit_codes.DONE)
"""


def torchrun(folder: str, mode: str, start: str, deaths: int) -> int | None:
    """Run the job under torchrun. Returns torchrun's exit code; None if the job took too long."""
    (Path(folder) / "worker.py").write_text(WORKER)
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    options = {
        "static": ["--master-addr", "127.0.0.1", "--master-port", str(port)],
        "standalone": ["--standalone"],
        "c10d": ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "restarts"],
    }[mode]
    argv = [sys.executable, "-m", "torch.distributed.run", *options, "--nproc-per-node", "2"]
    argv += ["--max-restarts", str(3 * deaths), "worker.py", start, str(deaths)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    try:
        return subprocess.run(
            argv, cwd=folder, env=environment, capture_output=True, timeout=TIMEOUT_S, check=False
        ).returncode
    except subprocess.TimeoutExpired:
        return None


def words(folder: str, name: str) -> list[str]:
    path = Path(folder, name)
    return path.read_text().split() if path.exists() else []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--restarts", type=int, default=12)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--start", nargs="+", default=["dtmega", "plain"])
    args = parser.parse_args()
    print("| start | rendezvous | restarts that ran | failed | median s | slowest s |", flush=True)
    print("| --- | --- | --- | --- | --- | --- |")
    for start in args.start:
        for mode in MODES:
            with tempfile.TemporaryDirectory() as folder:
                torchrun(folder, mode, start, args.restarts)
                deaths = [float(word) for word in words(folder, "deaths")]
                begun = [word.split(":") for word in words(folder, "begun")]
                failed = len(words(folder, "attempts")) - len(begun)
            took = [float(at) - deaths[int(n) - 1] for n, at in begun if int(n) > 0]
            times = f"{statistics.median(took):.1f} | {max(took):.1f}" if took else "- | -"
            print(f"| {start} | {mode} | {len(took)} of {args.restarts} | {failed} | {times} |", flush=True)
    codes = []
    for _ in range(args.runs):
        with tempfile.TemporaryDirectory() as folder:
            codes.append(torchrun(folder, "standalone", "dtmega", 0))
    print(f"runs that finished with exit code 0: {codes.count(0)} of {len(codes)}")


if __name__ == "__main__":
    main()
