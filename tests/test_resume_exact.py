"""Runs with [run] exact that go on with another layout, as commands, to the bit; and what they refuse."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dtmega import train
from dtmega.checkpoint import resume
from dtmega.checkpoint.resume import open_checkpoint, state_of
from dtmega.training import start
from dtmega.training.exact import machine
from tests import ranks
from tests.layouts import DEBUG, Run, debug_keys, one_rank, train_debug_model, write_text
from tests.resumed import flags
from tests.training.test_metrics import events

STEPS, CUT = 6, 2
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
    "log.tensorboard": True,
}
# Numbers that the machine decides, besides seconds and rates per second ("_s").
MACHINES = ("mfu", "peak_memory_bytes")
CUT_SHORT = {"train.exit_interval": CUT}
# What a later start may not change -> what is said about it.
CHANGES = {
    "batch.micro_batch_size": (4, "[batch] micro_batch_size was 2, is 4"),
    "recompute.mode": ("full", "[recompute] mode was 'none', is 'full'"),
    "precision.params": ("bfloat16", "[precision] params was 'float32', is 'bfloat16'"),
    "compile.enable": (True, "[compile] enable was False, is True"),
}


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> dict[str, str]:
    return write_text(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def truth_folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("truth")


@pytest.fixture(scope="module")
def truth(data: dict[str, str], truth_folder: Path) -> Run:
    """The run on one process, without a break."""
    return train_debug_model(1, KEYS | data, truth_folder)


def said(argv: list[str]) -> tuple[int, str, int]:
    """The exit code of train.py on this process, all that it prints, and the number of threads that it leaves."""
    torch.set_num_threads(2)
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        code = train.main(argv)
    return code, output.getvalue(), torch.get_num_threads()


def started_again(of_starts: list[list[str]], as_before: list[str]) -> list[tuple[int, str, int]]:
    """What each start says; then one whose products differ, and one of a dtmega that records more."""
    changed = [said(argv) for argv in of_starts]
    torch.set_flush_denormal(True)
    elsewhere = said(as_before)
    torch.set_flush_denormal(False)
    machine.VARIABLES = (*machine.VARIABLES, "A_NEW_LIBRARY")
    return [*changed, elsewhere, said(as_before)]


def test_a_resumed_run_refuses_what_would_change_its_bits(data: dict[str, str], tmp_path: Path):
    train_debug_model(1, KEYS | data | CUT_SHORT, tmp_path)
    run_dir = tmp_path / "run"
    starts = [flags(debug_keys(KEYS | data | {key: value}), run_dir) for key, (value, _) in CHANGES.items()]
    starts.append(flags(debug_keys(KEYS | data | {"run.exact": False}), run_dir))
    as_before = flags(debug_keys(KEYS | data), run_dir)
    *changed, plain, elsewhere, newer = ranks.run(1, started_again, starts, as_before)[0]
    for (code, output, n_threads), (_, words) in zip(changed, CHANGES.values(), strict=True):
        assert code == 2
        assert n_threads == 1
        assert f"the bits of this run would change: {words} ([run] exact" in " ".join(output.split())
    assert plain[0] == 2
    assert "[run] exact was True, is False" in plain[1]
    assert elsewhere[0] == 2
    assert "the bits of this run would change: the bits of products in float32 was" in " ".join(elsewhere[1].split())
    assert newer[0] == 0
    assert "recorded from now on, because the checkpoint's dtmega did not: A_NEW_LIBRARY" in newer[1]


def maxima(folder: Path) -> dict[str, float]:
    """The largest gradients that the last checkpoint holds."""
    state = state_of(open_checkpoint(str(folder / "run" / "checkpoints" / resume.name(STEPS))))
    assert state.exact is not None
    return state.exact.maxima


def shown(folder: Path) -> dict[tuple[int, str], float]:
    """The last value of each number that TensorBoard shows, but for those of the machine."""
    found: dict[tuple[int, str], float] = {}
    for event in events(folder / "run"):
        for value in event.summary.value:
            if value.tag not in MACHINES and not value.tag.endswith("_s"):
                found[event.step, value.tag] = value.simple_value
    return found


def digests(folder: Path) -> tuple[list[dict[str, Any]], list[tuple[int, int]]]:
    """The lines of the steps in a run's digests.jsonl, and the first step and number of ranks of each start."""
    lines = [json.loads(line) for line in (folder / "run" / "digests.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "update" in line]
    return steps, [(line["step"], len(line["hosts"])) for line in lines if "hosts" in line]


def kill_in(step: int) -> None:
    """Let this rank die of SIGKILL in a step, when its weights have changed and nothing is written down."""
    honest = train.train_step

    def train_step(run: Any, batch: Any) -> Any:
        result = honest(run, batch)
        if batch.first_sample + batch.samples == step * run.cfg.batch.global_batch_size:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    train.train_step = train_step


def killed(n: int, keys: dict[str, Any], folder: Path, plant: Callable[[], None]) -> None:
    """Train on n processes, all of which are killed."""
    argv = flags(debug_keys(keys), folder / "run")
    ended = ranks.forks().run(n, one_rank, argv, str(folder), plant)
    assert [rank.code for rank in ended] == [-signal.SIGKILL] * n, ended


def test_a_run_killed_on_four_processes_then_on_two_ends_on_one_with_the_bits_of_one_that_was_not(
    data, truth, truth_folder: Path, tmp_path: Path
):
    killed(4, KEYS | data | {"mesh.dp_shard": 4}, tmp_path, functools.partial(kill_in, 3))
    with (tmp_path / "run" / "digests.jsonl").open("a") as file:
        file.write('{"step": 3, "update": "of a step after the checkpoint"}\n')
    killed(2, KEYS | data | {"mesh.dp_shard": 2}, tmp_path, functools.partial(kill_in, 5))
    resumed = train_debug_model(1, KEYS | data, tmp_path)
    assert resumed.loss.tolist() == truth.loss.tolist()
    assert resumed.grad_norm.tolist() == truth.grad_norm.tolist()
    assert resumed.params_norm.tolist() == truth.params_norm.tolist()
    assert resumed.val_loss.tolist() == truth.val_loss.tolist()
    assert digests(tmp_path) == (digests(truth_folder)[0], [(1, 4), (3, 2), (5, 1)])
    assert [line["step"] for line in digests(tmp_path)[0]] == [*range(1, STEPS + 1)]
    assert maxima(tmp_path) == maxima(truth_folder)
    assert maxima(tmp_path).keys() == truth.final.keys()
    assert resumed.final.keys() == truth.final.keys()
    for name, tensor in truth.final.items():
        assert torch.equal(resumed.final[name], tensor), name
    # What TensorBoard's writer held when it was killed is lost.
    numbers, expected = shown(tmp_path), shown(truth_folder)
    assert numbers == {key: expected[key] for key in numbers}
    after_the_last_kill = {key for key in expected if key[0] > 4}
    assert after_the_last_kill <= numbers.keys()
    assert {"loss", "grad_norm", "val_loss"} <= {name for _, name in after_the_last_kill}


def optimizers_of(argv: list[str]) -> list[object]:
    """What `foreach` is in each group of the optimizer that a run builds."""
    found: list[object] = []
    honest = start.optim.build_optimizer

    def build_optimizer(*args: Any) -> torch.optim.Optimizer:
        optimizer = honest(*args)
        found.extend((group["foreach"], group["fused"]) for group in optimizer.param_groups)
        return optimizer

    start.optim.build_optimizer = build_optimizer
    assert train.main(argv) == 0
    return found


def test_an_exact_run_has_an_elementwise_optimizer(data: dict[str, str], tmp_path: Path):
    argv = flags(debug_keys(KEYS | data | {"train.steps": 1, "optim.warmup": 0}), tmp_path / "run")
    (found,) = ranks.run(1, optimizers_of, argv)
    assert found == [(True, None)] * 2
