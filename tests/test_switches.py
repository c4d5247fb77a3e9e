"""Switches of the loop that are thrown from outside: a file that stops it, a run that only evaluates."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dtmega.parallelize import ShardedModel
from tests.layouts import write_text
from tests.resumed import Record
from tests.test_faults import alone
from tests.test_loop import SMALL

KEYS = SMALL | {"train.steps": 4, "checkpoint.interval": 2, "checkpoint.keep": 9}


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> dict[str, str]:
    return write_text(tmp_path_factory.mktemp("text"))


def of_run(folder: Path) -> dict[str, bytes]:
    """All files of a run, but for its lock and what eval.only writes."""
    names = (".lock", "evaluation.jsonl")
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name not in names}


def test_a_kill_switch_saves_and_exits_and_lets_no_run_begin(text, tmp_path, monkeypatch, capsys):
    switch = tmp_path / "stop"
    keys = KEYS | text | {"train.kill_switch": str(switch), "train.steps": 5}
    honest = ShardedModel.forward_backward

    def thrown_in_step_3(self: ShardedModel, microbatches: Any, *rest: Any) -> Any:
        if 8 in microbatches[0]["sample_ids"]:
            switch.touch()
        return honest(self, microbatches, *rest)

    monkeypatch.setattr(ShardedModel, "forward_backward", thrown_in_step_3)
    assert alone(keys, tmp_path / "run") == 0
    assert sorted(path.name for path in (tmp_path / "run" / "checkpoints").glob("step*"))[-1] == "step-00000003"
    assert "stopped after step 3 of 5: [train] kill_switch; the same command" in capsys.readouterr().out
    before = of_run(tmp_path / "run")
    assert alone(keys, tmp_path / "run") == 0
    assert of_run(tmp_path / "run") == before
    assert "stopped after step 3 of 5: [train] kill_switch" in capsys.readouterr().out
    switch.unlink()
    assert alone(keys, tmp_path / "run") == 0
    assert list(Record(tmp_path / "run").steps) == [1, 2, 3, 4, 5]


def test_eval_only_says_the_losses_of_a_run_and_touches_nothing_of_it(text, tmp_path):
    keys = KEYS | text
    assert alone(keys, tmp_path / "run") == 0
    lines = Record(tmp_path / "run").lines
    losses = {(line["step"], name): line[name] for line in lines for name in ("val_loss", "test_loss") if name in line}
    before = of_run(tmp_path / "run")
    for checkpoint, step in (("auto", 4), (str(tmp_path / "run" / "checkpoints" / "step-00000002"), 2)):
        assert alone(keys | {"eval.only": True, "checkpoint.resume": checkpoint}, tmp_path / "run") == 0
        assert of_run(tmp_path / "run") == before
        written = (tmp_path / "run" / "evaluation.jsonl").read_text().splitlines()[-2:]
        val, test = (json.loads(line) for line in written)
        assert val == {"step": step, "val_loss": losses[step, "val_loss"]}
        assert test.keys() == {"step", "test_loss"}
        assert test["test_loss"] == losses.get((step, "test_loss"), test["test_loss"])


def test_eval_only_takes_the_weights_that_a_new_run_would_start_with(text, tmp_path):
    keys = KEYS | text
    assert alone(keys, tmp_path / "run") == 0
    assert alone(keys | {"eval.only": True}, tmp_path / "new") == 0
    first = json.loads((tmp_path / "new" / "evaluation.jsonl").read_text().splitlines()[0])
    assert first == Record(tmp_path / "run").lines[0]
    assert {path.name for path in (tmp_path / "new").iterdir()} <= {".lock", "evaluation.jsonl", "checkpoints"}


@pytest.mark.parametrize("pair", [[0, 3], [4, 3], [4]])
def test_a_range_of_steps_that_is_none_is_refused(text, tmp_path, pair, capsys):
    assert alone(KEYS | text | {"train.skip_steps": [pair]}, tmp_path) == 2
    assert "[train] skip_steps has pairs [first, last] with 1 <= first <= last" in "".join(capsys.readouterr())
