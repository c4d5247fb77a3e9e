"""out_of_memory.py: the one line of a rank whose memory does not suffice, and what the other ranks make of it."""

from __future__ import annotations

import contextlib
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dtmega import config, train
from dtmega.distributed import exit_codes, process
from dtmega.models.model import Model
from dtmega.ops import optim
from dtmega.training import out_of_memory
from tests import ranks
from tests.layouts import DEBUG, write_text
from tests.resumed import flags
from tests.test_faults import alone

KEYS = DEBUG | {
    "model.n_layers": 1,
    "train.steps": 4,
    "eval.interval": 0,
    "batch.micro_batch_size": 2,
    "log.params_norm": False,
}


def ask_for_too_much() -> torch.Tensor:
    """Let the real allocator of this machine fail."""
    return torch.empty(2**50, dtype=torch.uint8)


def run_out_in_step_3(argv: list[str], folder: str) -> None:
    """train.py, whose rank 1 asks for too much memory after backward of the third step; stderr goes to a file."""
    rank, honest, steps = dist.get_rank(), optim.squared_norm, []
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2"}

    def squared_norm(*args: Any) -> Any:
        steps.append(None)
        if len(steps) == 3 and rank == 1:
            ask_for_too_much()
        return honest(*args)

    optim.squared_norm = squared_norm
    with Path(folder, f"stderr-{rank}").open("w") as file, contextlib.redirect_stderr(file):
        process.leave(train.main(argv))


def test_one_line_names_rank_phase_peak_and_keys_and_is_the_reason_of_the_whole_job(tmp_path: Path):
    argv = flags(KEYS | write_text(tmp_path) | {"mesh.dp_replicate": 2}, tmp_path / "run")
    ended = ranks.forks().run(2, run_out_in_step_3, argv, str(tmp_path))
    assert [rank.code for rank in ended] == [exit_codes.FAILED] * 2
    line = (
        r"rank 1: out of memory in step 3, in reduce \(.*DefaultCPUAllocator: can't allocate memory: .*\); "
        r"the peak was [\d.]+ GiB; turn first: \[batch\] micro_batch_size \(now 2\), "
        r"\[recompute\] mode = 'selective' or 'full', \[precision\] params = 'bfloat16'"
    )
    record = json.loads((tmp_path / "run" / "exit.json").read_text())
    assert (record["code"], record["step"]) == (exit_codes.FAILED, 2)
    assert re.fullmatch(line, record["reason"])
    assert re.search(rf"^{line} \(exit code 1\)$", (tmp_path / "stderr-1").read_text(), re.MULTILINE)
    assert "leaving after rank 1" in (tmp_path / "stderr-0").read_text()


def test_an_allocator_is_found_behind_the_errors_that_a_pipeline_wraps_it_in():
    with pytest.raises(RuntimeError) as caught:
        ask_for_too_much()
    wrapped = RuntimeError("stage 0 failed to run forward")
    wrapped.__cause__ = caught.value
    assert out_of_memory.find(wrapped) is caught.value


@pytest.mark.parametrize("error", [MemoryError("in numpy"), torch.OutOfMemoryError("CUDA out of memory. Tried ...")])
def test_the_errors_of_python_and_of_a_gpu_are_found(error: Exception):
    assert out_of_memory.find(error) is error


@pytest.mark.parametrize("error", [RuntimeError("shapes do not match"), ValueError("DefaultCPUAllocator"), None])
def test_other_errors_are_no_lack_of_memory(error: Exception | None):
    assert out_of_memory.find(error) is None


def test_a_model_that_does_not_fit_is_refused_in_one_line_without_a_traceback(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(Model, "move_buffers", lambda *_: ask_for_too_much())
    assert alone(KEYS | write_text(tmp_path), tmp_path / "run") == exit_codes.REFUSED
    said = capsys.readouterr().err
    assert "out of memory while the model is built (" in said
    assert "Traceback" not in said


def test_sizes_that_no_tensor_can_have_are_refused_in_one_line_with_their_keys(tmp_path, capsys):
    keys = KEYS | write_text(tmp_path) | {"model.hidden_size": 12 * 2**40}
    assert alone(keys, tmp_path / "run") == exit_codes.REFUSED
    said = capsys.readouterr().err
    assert "no computer holds a tensor of this model: " in said
    assert "([model] vocab_size, hidden_size, " in said
    assert "Traceback" not in said


def test_keys_that_are_turned_already_are_not_named():
    def keys(**sections: Any) -> list[str]:
        cfg = config.validate({"train": {"steps": 1}, "batch": {"micro_batch_size": 1}} | sections, "test")
        return out_of_memory.keys_to_turn(cfg)

    assert keys()[0].startswith("[recompute] mode")
    turned = {"recompute": {"mode": "full"}, "precision": {"params": "bfloat16"}}
    assert keys(**turned)[0] == "[fsdp] accumulate = 'sharded'"
    assert keys(**turned, mesh={"dp_shard": 1, "dp_replicate": 2})[0].startswith("[mesh] dp_shard")
    assert keys(**turned, fsdp={"accumulate": "sharded"})[0].startswith("[mesh] dp_shard")
