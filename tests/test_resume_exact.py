"""Runs with [run] exact that go on with another layout, as commands, to the bit; and what they refuse."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.layouts import DEBUG, Run, train_debug_model, write_text

STEPS, CUT = 4, 2
KEYS: dict[str, Any] = {
    **DEBUG,
    "run.exact": True,
    "model.n_layers": 2,
    "train.steps": STEPS,
    "batch.micro_batch_size": 2,
    "optim.warmup": 1,
    "eval.interval": 2,
    "eval.sample_tokens": 0,
    "checkpoint.interval": CUT,
}
CUT_SHORT = {"train.exit_interval": CUT}


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> dict[str, str]:
    return write_text(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def truth(data: dict[str, str], tmp_path_factory) -> Run:
    """The run on one process, without a break."""
    return train_debug_model(1, KEYS | data, tmp_path_factory.mktemp("truth"))


def test_a_run_cut_on_two_processes_and_resumed_on_one_has_the_bits_of_one_that_was_not(data, truth, tmp_path: Path):
    train_debug_model(2, KEYS | data | CUT_SHORT | {"mesh.dp_shard": 2}, tmp_path)
    resumed = train_debug_model(1, KEYS | data, tmp_path)
    assert resumed.loss.tolist() == truth.loss.tolist()
    assert resumed.grad_norm.tolist() == truth.grad_norm.tolist()
    assert resumed.params_norm.tolist() == truth.params_norm.tolist()
    assert resumed.val_loss.tolist() == truth.val_loss.tolist()
    assert resumed.final.keys() == truth.final.keys()
    for name, tensor in truth.final.items():
        assert torch.equal(resumed.final[name], tensor), name
