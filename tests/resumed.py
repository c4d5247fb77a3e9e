"""Runs that save on one layout and go on on another: for `test_resume.py` and the table of `benchmarks/resume.py`.

The model of `layouts.py` with a vocabulary that nothing divides. Its global batch grows from 4 to 8 sequences after
step 15, so that its first checkpoint, of step 10, is in the middle of the ramp. Many trainings share one group of
processes.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from dtmega import train
from dtmega.checkpoint import resume
from dtmega.training import device_peaks
from tests import ranks
from tests.layouts import DEBUG, FP32, PAIRS, ROOT, tensors

RAMPING = {
    "model.vocab_size": 131,
    "batch.rampup": [4, 4, 60],
    "checkpoint.interval": 10,
    "log.num_zeros": False,
    "log.params_norm": False,
}
KEYS = DEBUG | RAMPING
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "1": (1, {}),
    "dp 2": (2, {"mesh.dp_shard": 2}),
    "tp 2": (2, {"mesh.tp": 2} | PAIRS),
    "pp 2, 1F1B": (2, {"mesh.pp": 2}),
    "pp 2, ZBV": (2, {"mesh.pp": 2, "pipeline.schedule": "ZBVZeroBubble", "batch.micro_batch_size": 1}),
    "HSDP 2 x 2": (4, {"mesh.dp_replicate": 2, "mesh.dp_shard": 2}),
    "pp 2 x tp 2": (4, {"mesh.pp": 2, "mesh.tp": 2} | PAIRS),
}
# Not in that table. By 'auto' the first one gathers keys and the second one exchanges heads.
WITH_CP: dict[str, tuple[int, dict[str, Any]]] = {
    "cp 2": (2, {"mesh.cp": 2} | PAIRS),
    "cp 4": (4, {"mesh.cp": 4} | PAIRS),
}
WITH_EP: dict[str, tuple[int, dict[str, Any]]] = {
    "dp_shard 2, ep 2": (2, {"mesh.dp_shard": 2, "mesh.ep": 2, "batch.micro_batch_size": 1}),
    "dp_shard 4, ep 2": (4, {"mesh.dp_shard": 4, "mesh.ep": 2, "batch.micro_batch_size": 1}),
}
TIMEOUT_S = 600.0  # of a message, and of a few trainings
EACH_S = 30.0  # of a training among many, on a machine that is busy


class Training(NamedTuple):
    """train.py on `n` processes in `folder`; what came of it is there, and what it printed in `stdout-RANK`.

    Attributes:
        plant: a context in which each rank trains.
        code: that main must return.
    """

    n: int
    keys: Mapping[str, Any]
    folder: Path
    plant: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext
    code: int = 0


class Record:
    """The record that a training left behind, by step."""

    def __init__(self, folder: Path) -> None:
        self.lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        self.steps = {line["step"]: line for line in self.lines if "loss" in line}
        self.final = tensors(folder / "checkpoints", max(self.steps))

    def series(self, key: str, first: int = 1) -> list[float]:
        """Values of a metric from that step on."""
        return [line[key] for step, line in sorted(self.steps.items()) if step >= first]


def whole(layout: str, folder: Path, keys: Mapping[str, Any]) -> Training:
    """The run that is never stopped; its first checkpoint is what others go on from."""
    n, mesh = (LAYOUTS | WITH_CP | WITH_EP)[layout]
    return Training(n, {**keys, **mesh, "checkpoint.keep": 9}, folder)


def rest(layout: str, writer: Path, folder: Path, keys: Mapping[str, Any]) -> Training:
    """Train from the first checkpoint of the training in `writer` to the end."""
    n, mesh = (LAYOUTS | WITH_CP | WITH_EP)[layout]
    named = str(writer / "checkpoints" / resume.name(keys["checkpoint.interval"]))
    return Training(n, {**keys, **mesh, "checkpoint.resume": named}, folder)


def next_step(layout: str, folder: Path, keys: Mapping[str, Any]) -> Training:
    """Train one more step of the run in `folder`."""
    n, mesh = (LAYOUTS | WITH_CP | WITH_EP)[layout]
    return Training(n, {**keys, **mesh, "train.exit_interval": 1}, folder)


def train_all(trainings: Sequence[Training]) -> list[list[list[list[int]]]]:
    """One after the other; for each training, rank and step: the numbers of the samples that the rank was given."""
    timeout_s = max(TIMEOUT_S, EACH_S * len(trainings))
    with tempfile.TemporaryDirectory() as stores:
        results = ranks.run(max(t.n for t in trainings), _one_rank, list(trainings), stores, timeout_s=timeout_s)
    return [[results[rank][i] for rank in range(training.n)] for i, training in enumerate(trainings)]


def _one_rank(trainings: list[Training], stores: str) -> list[list[list[int]]]:
    rank = dist.get_rank()
    dist.destroy_process_group()
    seen: list[list[list[int]]] = []
    honest = train.train_step

    def noting(run, batch):
        seen[-1].append(torch.cat([m["sample_ids"] for m in batch.microbatches]).tolist())
        return honest(run, batch)

    train.train_step = noting
    device_peaks.matmul_flops = lambda device, dtype: 1e12  # MFU is not looked at
    for i, training in enumerate(trainings):
        seen.append([])
        if rank < training.n:
            training.folder.mkdir(parents=True, exist_ok=True)
            store = dist.FileStore(str(Path(stores, str(i))), training.n)  # pyright: ignore[reportPrivateImportUsage]
            timeout = timedelta(seconds=TIMEOUT_S)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=training.n, timeout=timeout)
            os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(training.n)}
            output = training.folder / f"stdout-{rank}"
            with output.open("w") as file, contextlib.redirect_stdout(file), training.plant():
                code = train.main(flags(training.keys, training.folder))
            assert code == training.code, f"{training} gave {code}"
            gc.collect()  # gloo aborts if a tensor with pending work outlives its group
            dist.barrier()
            dist.destroy_process_group()
    train.train_step = honest
    return seen


def flags(keys: Mapping[str, Any], folder: Path) -> list[str]:
    every = {**keys, "run.dir": str(folder)}
    words = [word for k, v in every.items() for word in (f"--{k}", v if isinstance(v, str) else json.dumps(v))]
    return ["--config", str(ROOT / "tests" / "small.toml"), *words]


class Deviation(NamedTuple):
    """The differences of a resumed run from one that went on; the largest relative one of each.

    Attributes:
        first_loss: of the first step after the checkpoint.
        same_bits: every loss, gradient norm and parameter is equal to the bit.
    """

    first_loss: float
    loss: float
    grad_norm: float
    parameter: float
    same_bits: bool

    def within_bounds(self) -> bool:
        return (
            self.first_loss <= 1e-6
            and self.loss <= FP32["loss"]
            and self.grad_norm <= FP32["grad_norm"]
            and self.parameter <= FP32["parameter"]
        )


def deviation(resumed: Record, truth: Record, first: int | None = None) -> Deviation:
    """Compare from step `first` (default: of those that were resumed) to the end, which both must have."""
    first = first or min(resumed.steps)
    assert [step for step in resumed.steps if step >= first] == [step for step in truth.steps if step >= first] != []
    assert resumed.final.keys() == truth.final.keys()
    relative, same_bits = {}, True
    for key in ("loss", "grad_norm"):
        ours, theirs = np.array(resumed.series(key, first)), np.array(truth.series(key, first))
        relative[key] = np.abs(ours / theirs - 1)
        same_bits &= bool((ours == theirs).all())
    same_bits &= all(torch.equal(resumed.final[name], t) for name, t in truth.final.items())
    parameters = {n: (resumed.final[n].double(), t.double()) for n, t in truth.final.items()}
    parameter = max(float((a - b).norm() / b.norm()) for a, b in parameters.values())
    return Deviation(
        float(relative["loss"][0]),
        float(relative["loss"].max()),
        float(relative["grad_norm"].max()),
        parameter,
        same_bits,
    )
