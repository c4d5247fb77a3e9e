"""Claims about [lora] and [train] freeze in whole runs: what is trained, saved and gone on with, on any layout."""

from __future__ import annotations

import functools
import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from dtmega.checkpoint.resume import open_checkpoint, state_of
from tests.layouts import DEBUG, FAMILIES, PAIRS, write_text
from tests.resumed import Record, Training, train_all

FEW = {"train.steps": 10, "checkpoint.interval": 4, "checkpoint.keep": 9, "eval.interval": 0, "train.drift_interval": 5}
KEYS = FAMILIES["llama"] | FEW | {"log.num_zeros": False, "log.params_norm": False, "model.vocab_size": 131}
LORA = {"lora.rank": 3, "lora.alpha": 6.0}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "1": (1, {}),
    "tp 2": (2, {"mesh.tp": 2} | PAIRS),
    "tp 4, few heads": (4, {"mesh.tp": 4, "mesh.sequence_parallel": False} | PAIRS),
    "pp 2": (2, {"mesh.pp": 2}),
    "pp 2, ZBV": (2, {"mesh.pp": 2, "pipeline.schedule": "ZBVZeroBubble"}),
    "dp_shard 2": (2, {"mesh.dp_shard": 2}),
    "HSDP 2 x 2": (4, {"mesh.dp_replicate": 2, "mesh.dp_shard": 2}),
}
LOSS, STEPPED = 1e-5, 1e-4


@functools.cache
def folder() -> Path:
    return Path(tempfile.mkdtemp())


@functools.cache
def records() -> dict[str, Path]:
    """Folders of all runs, by name, which one group has trained."""
    text = write_text(folder() / "data")
    base = folder() / "base"
    keys = KEYS | text
    trainings = [Training(1, keys | {"train.steps": 1, "checkpoint.interval": 0}, base)]
    lora = keys | LORA | {"model.init_from": str(base)}
    for name, (n, mesh) in LAYOUTS.items():
        trainings.append(Training(n, lora | mesh, folder() / name))
    # One run on three layouts.
    for steps, layout in ((4, "tp 2"), (8, "pp 2"), (10, "1")):
        n, mesh = LAYOUTS[layout]
        stop = {} if steps == 10 else {"train.exit_interval": 4}
        trainings.append(Training(n, lora | mesh | stop, folder() / "three layouts"))
    train_all(trainings)
    return {training.folder.name: training.folder for training in trainings}


def record(name: str) -> Record:
    return Record(records()[name])


def worst(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    assert a.keys() == b.keys()
    return max(float((a[name] - b[name]).norm() / b[name].norm()) for name in b)


@pytest.mark.parametrize("name", [*(name for name in LAYOUTS if name != "1"), "three layouts"])
def test_adapters_train_on_every_layout_as_on_one_process(name: str):
    ours, truth = record(name), record("1")
    losses = zip(ours.series("loss"), truth.series("loss"), strict=True)
    assert max(abs(a / b - 1) for a, b in losses) <= LOSS
    assert worst(ours.final, truth.final) <= STEPPED


def test_a_checkpoint_holds_the_adapters_and_their_moments_alone_and_the_digest_of_the_base_on_any_layout():
    bases = []
    for name in LAYOUTS:
        checkpoint = open_checkpoint(str(records()[name]))
        kinds = {tensor.split("/")[-2] for tensor in checkpoint.tensors}
        assert kinds == {"model", "exp_avg", "exp_avg_sq"}
        assert all(tensor.endswith((".lora_a", ".lora_b")) for tensor in checkpoint.tensors)
        assert len(checkpoint.tensors) == 3 * 2 * 7 * 4  # kinds x (A, B) x layers with adapters x blocks
        bases.append(state_of(checkpoint).base)
    assert all(base == bases[0] for base in bases)
    assert bases[0].path == open_checkpoint(str(records()["base"])).path
