"""Compare saves and loads of 1 GB with torch.save and dcp.save, and time how long an asynchronous save stops training.

    python benchmarks/checkpoint.py [--gigabytes 1] [--repeats 5]

One process saves fp32 tensors of 64 MB. Every save ends with the data on the disk (fsync). Loads read from the page
cache, so they measure the work, not the disk. Only dtmega verifies the data that it reads, and only dtmega keeps the
old checkpoint until the new checkpoint is complete. torch.save overwrites the old checkpoint, and the script deletes
the old checkpoint before dcp.save.
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
from dtmega.checkpoint.resume import find_checkpoints
from dtmega.checkpoint.run import Checkpoints
from dtmega.checkpoint.state import Progress, State
from dtmega.checkpoint.tensors import tensors_of

MEGABYTES = 64


def timed(action: Callable[[], object]) -> float:
    """The seconds that an action takes."""
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


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

    def torch_save() -> None:
        torch.save(tensors, root / "torch.pt")
        sync(root / "torch.pt")

    def dcp_save() -> None:
        shutil.rmtree(root / "dcp", ignore_errors=True)
        plain_dcp.save(tensors, checkpoint_id=str(root / "dcp"))  # pyright: ignore[reportPrivateImportUsage]

    def dcp_load() -> None:
        plain_dcp.load(tensors, checkpoint_id=str(root / "dcp"))  # pyright: ignore[reportPrivateImportUsage]

    def ours() -> None:
        assert not any(outcome.error for outcome in synchronous.save(tensors_of(parameters, optimizer), state()))

    def ours_load() -> None:
        found, _ = find_checkpoints(
            config.load(["--config", "bloom.toml", "--checkpoint.dir", str(root / "sync")]), {"": 1}
        )
        assert synchronous.load(found, parameters.items(), optimizer, []) is not None

    def step() -> float:
        """Multiply matrices, as training would during a save. Returns the seconds."""
        return timed(lambda: torch.mm(matrix, matrix))

    def ours_async() -> None:
        asynchronous.save(tensors_of(parameters, optimizer), state())
        while not (ended := asynchronous.poll()):
            during.append(step())
        assert not ended[0].error
        stalls.append(ended[0].stall_s)

    matrix = torch.randn(500, 500)
    stalls, during = [], []
    try:
        synchronous, asynchronous = dtmega("sync"), dtmega("async")
        actions = {
            "torch.save / torch.load": (torch_save, lambda: torch.load(root / "torch.pt", weights_only=True)),
            "dcp.save / dcp.load": (dcp_save, dcp_load),
            "dtmega, verified": (ours, ours_load),
        }
        # Take turns, so that other load on the machine affects all actions equally. The first round does not count.
        rounds = [
            {name: (timed(save), timed(load)) for name, (save, load) in actions.items()}
            for _ in range(args.repeats + 1)
        ][1:]
        alone = statistics.median(step() for _ in range(100))
        total_s = statistics.median([timed(ours_async) for _ in range(args.repeats + 1)][1:])
    finally:
        shutil.rmtree(root)
    print(f"{gigabytes:.2f} GB, torch {torch.__version__}, median (fastest) of {args.repeats}\n")
    print("| | save s | load s |\n| --- | --- | --- |")
    for name in actions:
        saves, loads = zip(*(seconds[name] for seconds in rounds), strict=True)
        cells = [f"{statistics.median(each):.2f} ({min(each):.2f})" for each in (saves, loads)]
        print(f"| {name} | {' | '.join(cells)} |")
    print(
        f"\nasynchronous: training stands still for {statistics.median(stalls[1:]):.2f} s of the {total_s:.2f} s "
        f"that a save takes; a step meanwhile takes {statistics.median(during) / alone:.2f} x its time"
    )


if __name__ == "__main__":
    main()
