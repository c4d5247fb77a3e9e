"""The trainer as a user starts it, up to its first step: what every benchmark of a step times is `train_step`."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import torch.distributed as dist

from dtmega import train
from dtmega.data.loader import StepBatch
from dtmega.distributed.agreement import Startup
from dtmega.distributed.exit_codes import ExitStatus
from dtmega.training.step import Run, StepResult, train_step

# Keys that a step alone does not need, whatever a configuration says of them.
ALONE: dict[str, Any] = {
    "batch.rampup": "[]",
    "train.samples": 0,
    "train.tokens": 0,
    "train.steps": 1000,
    "optim.unit": "steps",
    "optim.warmup": 10,
    "optim.decay": 0,
    "log.tensorboard": "false",
    "data.path": "stdlib",
    "data.tokenizer": "stdlib-8k",
    "data.split": "90,5,5",  # some Pythons come with too few files for the shares of published runs
    "data.num_workers": 0,
}


def begin(config: str, keys: Mapping[str, Any], closing: ExitStack) -> Run:
    """The trainer, ready for its first step; all ranks call it, and share a folder until `closing` ends."""
    folder = closing.enter_context(tempfile.TemporaryDirectory())
    if dist.is_initialized():
        folders = [folder]
        dist.broadcast_object_list(folders)
        (folder,) = folders
    run, _ = train.begin(arguments(config, ALONE | {"run.dir": folder} | dict(keys)), Startup(), closing, ExitStatus())
    return run


def arguments(config: str, keys: Mapping[str, Any]) -> list[str]:
    words = ["--config", config]
    for key, value in keys.items():
        words += [f"--{key}", str(value)]
    return words


class Stepper:
    """Steps of one run on one batch, over and over."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.batch: StepBatch = next(run.batches)

    def __call__(self) -> StepResult:
        return train_step(self.run, self.batch)
