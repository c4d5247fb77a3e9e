"""Switches of the loop that are thrown from outside: a file that stops it, a run that only evaluates."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dtmega import config
from dtmega.data.indexed_files.writer import IndexedWriter
from dtmega.data.objectives.next_token import NEXT_TOKEN
from dtmega.data.text import open_text
from dtmega.training.sharded_model import ShardedModel
from tests.layouts import write_text
from tests.resumed import Record
from tests.test_faults import alone
from tests.test_loop import SMALL

KEYS = SMALL | {"train.steps": 4, "checkpoint.interval": 2, "checkpoint.keep": 9}


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> dict[str, str]:
    return write_text(tmp_path_factory.mktemp("text"))


def of_run(folder: Path) -> dict[str, bytes]:
    """All files of a run, but for its lock, what eval.only writes, its starts, and how it ended."""
    names = (".lock", "evaluation.jsonl", "exit.json", "starts.jsonl")
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
    how = f"while '{switch}' exists, no start trains; without it, the same command goes on from there"
    assert f"stopped after step 3 of 5: [train] kill_switch; {how}" in capsys.readouterr().out
    before = of_run(tmp_path / "run")
    assert alone(keys, tmp_path / "run") == 0
    assert of_run(tmp_path / "run") == before
    assert "stopped after step 3 of 5: [train] kill_switch" in capsys.readouterr().out
    switch.unlink()
    assert alone(keys, tmp_path / "run") == 0
    assert list(Record(tmp_path / "run").steps) == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.EACCES])
def test_a_kill_switch_that_cannot_be_asked_for_is_not_thrown(text, tmp_path, monkeypatch, number):
    switch, honest, failed = str(tmp_path / "stop"), os.stat, []

    def fails(path: Any, *rest: Any, **keywords: Any) -> os.stat_result:
        if str(path) == switch:
            failed.append(path)
            raise OSError(number, os.strerror(number))
        return honest(path, *rest, **keywords)

    monkeypatch.setattr(os, "stat", fails)
    assert alone(KEYS | text | {"train.kill_switch": switch, "train.steps": 2}, tmp_path / "run") == 0
    assert len(failed) == 3  # at the start, and after each step


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
    weights = {"model.init_from": str(tmp_path / "run" / "checkpoints" / "step-00000004")}
    keys = KEYS | text
    assert alone(keys, tmp_path / "run") == 0
    assert alone(keys | weights | {"eval.only": True}, tmp_path / "new") == 0
    first = json.loads((tmp_path / "new" / "evaluation.jsonl").read_text().splitlines()[0])
    *_, trained = [line["val_loss"] for line in Record(tmp_path / "run").lines if "val_loss" in line]
    assert first == {"step": 0, "val_loss": trained}
    assert {path.name for path in (tmp_path / "new").iterdir()} <= {
        ".lock",
        "evaluation.jsonl",
        "checkpoints",
        "exit.json",
    }


@pytest.mark.parametrize("resume", ["auto", "none"])
def test_eval_only_of_a_run_that_is_not_there_is_refused_before_anything_is_made(text, tmp_path, capsys, resume):
    folder = tmp_path / "mistyped"
    assert alone(KEYS | text | {"eval.only": True, "checkpoint.resume": resume}, folder) == 2
    assert f"nothing to evaluate: expected a checkpoint in {folder}/checkpoints, or weights" in capsys.readouterr().err
    assert not folder.exists()


@pytest.mark.parametrize("pair", [[0, 3], [4, 3], [4]])
def test_a_range_of_steps_that_is_none_is_refused(text, tmp_path, pair, capsys):
    assert alone(KEYS | text | {"train.skip_steps": [pair]}, tmp_path) == 2
    assert "[train] skip_steps has pairs [first, last] with 1 <= first <= last" in "".join(capsys.readouterr())


@pytest.fixture(scope="module")
def sets(tmp_path_factory) -> dict[str, str]:
    """Two more sets of documents: of one word each, and of words that count down."""
    folder = tmp_path_factory.mktemp("sets")
    words = {"same": [[word] * 40 for word in range(1, 9)], "down": [[*range(100, 50, -1)] for _ in range(8)]}
    for name, documents in words.items():
        with IndexedWriter(folder / name, np.dtype(np.uint16)) as writer:
            for document in documents:
                writer.add(document)
    return {name: str(folder / name) for name in words}


def test_each_validation_set_has_a_loss_of_its_own_by_its_name(text, sets, tmp_path):
    named = {"data.validation": [f"{name}={prefix}" for name, prefix in sets.items()]}
    keys = KEYS | text | {"eval.interval": 2, "eval.steps": 5}
    assert alone(keys, tmp_path / "without") == 0
    assert alone(keys | named, tmp_path / "with") == 0
    without, with_sets = Record(tmp_path / "without"), Record(tmp_path / "with")
    # Nothing of the training knows of them.
    for key in ("loss", "grad_norm"):
        assert with_sets.series(key) == without.series(key)
    names = ["val_loss", "val_same_loss", "val_down_loss"]
    losses = {name: {line["step"]: line[name] for line in with_sets.lines if name in line} for name in names}
    assert losses["val_loss"] == {line["step"]: line["val_loss"] for line in without.lines if "val_loss" in line}
    assert all(list(found) == [0, 2, 4] for found in losses.values())
    # Each is what a run whose only validation set it is would say of the same weights.
    weights = {"model.init_from": f"{tmp_path}/with/checkpoints/step-00000004"}
    for name, prefix in sets.items():
        only = {"data.path": prefix, "data.split": "1,0,0", "data.validation": [f"{name}={prefix}"], "eval.only": True}
        assert alone(keys | only | weights | {"train.steps": 4}, tmp_path / name) == 0
        (line,) = [json.loads(line) for line in (tmp_path / name / "evaluation.jsonl").read_text().splitlines()]
        assert line == {"step": 0, f"val_{name}_loss": losses[f"val_{name}_loss"][4]}


def test_a_validation_set_is_the_whole_of_its_file(text, sets):
    cfg = config.load(["--config", "bloom.toml", "--data.split", "8,1,1", "--data.seq_len", "12"])
    data = cfg.data.model_copy(
        update={"path": text["data.path"], "tokenizer": text["data.tokenizer"], "validation": [f"down={sets['down']}"]}
    )
    opened = open_text(cfg.model_copy(update={"data": data}), NEXT_TOKEN)
    assert opened.samples("down").n_tokens == 8 * 50
    assert opened.evaluated == ["valid", "down"]


@pytest.mark.parametrize("written", ["wiki", "=prefix", "wiki=", "valid=a", "a b=c"])
def test_a_validation_set_without_a_name_or_a_prefix_is_refused(written):
    with pytest.raises(ValueError, match=r"\[data\] validation(: expected| has) 'NAME=PREFIX'"):
        config.Data(validation=[written])
    with pytest.raises(ValueError, match=r"each NAME once"):
        config.Data(validation=["a=b", "a=c"])
