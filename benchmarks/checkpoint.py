"""Save and load of 1 GB beside torch.save and plain dcp.save, and how long an asynchronous save stops training.

    python benchmarks/checkpoint.py [--gigabytes 1] [--repeats 5]

One process, fp32 tensors of 64 MB. Every way ends with the data on the disk (fsync), and the median is printed. Reading
comes from the page cache: it measures the work, not the disk. Only dtmega verifies what it reads.
"""

from __future__ import annotations

import argparse
import itertools
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as plain_dcp
from torch import nn

from dtmega import config
from dtmega.checkpoint.resume import Progress, State, find
from dtmega.checkpoint.run import Checkpoints, tensors_of

MEGABYTES = 64


def median(repeats: int, action: Callable[[int], None]) -> float:
    """Seconds; one run first that does not count."""
    seconds = []
    for i in range(repeats + 1):
        started = time.perf_counter()
        action(i)
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds[1:])


def sync(path: Path) -> None:
    for file in [path] if path.is_file() else path.iterdir():
        with file.open("rb") as opened:
            os.fsync(opened.fileno())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    n = round(args.gigabytes * 1000 / MEGABYTES)
    names = [f"layers.{i}.weight" for i in range(n)]
    parameters = {name: nn.Parameter(torch.randn(MEGABYTES * 250_000 // 1000, 1000)) for name in names}
    optimizer = torch.optim.AdamW(parameters.values())
    tensors = {name: p.detach() for name, p in parameters.items()}
    gigabytes = sum(t.nbytes for t in tensors.values()) / 1e9
    root, steps = Path(tempfile.mkdtemp(dir=".")), itertools.count(1)

    def dtmega(mode: str) -> Checkpoints:
        flags = ["--config", "bloom.toml", "--checkpoint.dir", str(root / mode), "--checkpoint.mode", mode]
        return Checkpoints(config.load([*flags, "--checkpoint.keep", "1"]), torch.device("cpu"))

    def state() -> State:
        return State.of(
            config.load(["--config", "bloom.toml"]).model_dump(), progress=Progress(next(steps)), identity={"": 1}
        )

    def torch_save(i: int) -> None:
        torch.save(tensors, root / "torch.pt")
        sync(root / "torch.pt")

    def dcp_save(i: int) -> None:
        shutil.rmtree(root / "dcp", ignore_errors=True)
        plain_dcp.save(tensors, checkpoint_id=str(root / "dcp"))  # pyright: ignore[reportPrivateImportUsage]

    def dcp_load(i: int) -> None:
        plain_dcp.load(tensors, checkpoint_id=str(root / "dcp"))  # pyright: ignore[reportPrivateImportUsage]

    def ours(i: int) -> None:
        assert not any(outcome.error for outcome in synchronous.save(tensors_of(parameters, optimizer), state()))

    def ours_load(i: int) -> None:
        found, _ = find(config.load(["--config", "bloom.toml", "--checkpoint.dir", str(root / "sync")]), {"": 1})
        assert synchronous.load(found, parameters.items(), optimizer, []) is not None

    def step() -> float:
        """What training would do meanwhile."""
        started = time.perf_counter()
        torch.mm(matrix, matrix)
        return time.perf_counter() - started

    def ours_async(i: int) -> None:
        asynchronous.save(tensors_of(parameters, optimizer), state())
        while not (ended := asynchronous.poll()):
            during.append(step())
        assert not ended[0].error
        stalls.append(ended[0].stall_s)

    matrix = torch.randn(500, 500)
    stalls, during = [], []
    try:
        synchronous, asynchronous = dtmega("sync"), dtmega("async")
        rows = {
            "torch.save / torch.load": (
                median(args.repeats, torch_save),
                median(args.repeats, lambda i: torch.load(root / "torch.pt", weights_only=True)),
            ),
            "dcp.save / dcp.load": (median(args.repeats, dcp_save), median(args.repeats, dcp_load)),
            "dtmega, verified": (median(args.repeats, ours), median(args.repeats, ours_load)),
        }
        alone = statistics.median(step() for _ in range(100))
        total_s = median(args.repeats, ours_async)
    finally:
        shutil.rmtree(root)
    print(f"{gigabytes:.2f} GB, torch {torch.__version__}, median of {args.repeats}")
    print("| | save s | load s |\n| --- | --- | --- |")
    for name, (save_s, load_s) in rows.items():
        print(f"| {name} | {save_s:.2f} | {load_s:.2f} |")
    print(
        f"asynchronous: training stands still for {statistics.median(stalls[1:]):.2f} s of the {total_s:.2f} s that a "
        f"save takes; a step meanwhile takes {statistics.median(during) / alone:.2f} x its time"
    )


if __name__ == "__main__":
    main()
