"""A run that goes on with another configuration: what it changes in silence, what it says, and what it may not."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from dtmega import config, train
from dtmega.checkpoint import changes, resume
from dtmega.config import Batch, Config, Optim, Train
from tests import keys
from tests.kept_runs import CUT, KEPT, SMALL, STEPS, flags, write_text

TABLE = keys.read()
# How the table calls a kind, and how the code does.
KINDS = {"free": "free", "printed": "printed", "course": "printed", "refused": "refused", "content": None}


@pytest.mark.parametrize("row", TABLE, ids=lambda row: f"{row.section}.{row.key}")
def test_another_value_of_a_key_is_what_the_table_says_and_nothing_else(row: keys.Key):
    now = config.load(["--config", str(SMALL), *row.family])
    then: dict[str, dict[str, Any]] = now.model_dump()
    value = then[row.section][row.key]
    then[row.section][row.key] = "another"
    found = {kind: changes.changed(then, now, kind) for kind in ("free", "printed", "refused")}
    expected = [changes.Change(row.section, row.key, "another", value)]
    assert found == {kind: expected if kind == KINDS[row.resumed] else [] for kind in found}


def test_a_run_with_the_configuration_that_its_checkpoint_stores_has_no_changes_to_look_for():
    now = config.load(["--config", str(SMALL), "--precision.params", "auto"])
    then = json.loads(json.dumps(now.model_dump()))
    then["precision"]["params"] = "float32"  # what `auto` became
    assert resume.is_unchanged(then, now)
    then["run"]["seed"] += 1
    assert not resume.is_unchanged(then, now)


def named(table: dict[str, tuple[str, ...]]) -> list[tuple[str, str]]:
    return [(section, key) for section, keys_of_it in table.items() for key in keys_of_it]


def test_the_code_names_each_key_once_and_none_that_does_not_exist():
    placed = named(changes.FREE) + named(changes.PRINTED)
    assert len(placed) == len(set(placed))
    assert set(placed) <= {(row.section, row.key) for row in TABLE}


@pytest.mark.parametrize(("kind", "table"), [("course", changes.COURSE), ("content", changes.BY_CONTENT)])
def test_the_keys_of_a_part_are_those_of_the_table(kind: str, table: dict[str, tuple[str, ...]]):
    assert sorted(named(table)) == sorted((row.section, row.key) for row in TABLE if row.resumed == kind)


def test_a_key_that_nobody_has_placed_is_refused():
    assert changes.kind_of("optim", "a_new_key") == "refused"


def test_a_key_that_the_checkpoint_lacks_counts_as_its_default_and_one_that_is_gone_for_nothing():
    now = Config(train=Train(steps=4))
    then: dict[str, dict[str, Any]] = {**now.model_dump(), "gone": {"key": 1}}
    del then["model"]["z_loss"], then["precision"]
    then["optim"]["gone"] = 7
    assert changes.lines(then, now, 1, 16, samples_in) == []
    assert changes.changed(then, now, "refused") == []
    later = now.model_copy(update={"model": now.model.model_copy(update={"z_loss": 0.5})})
    assert changes.lines(then, later, 1, 16, samples_in) == ["changed since the checkpoint: model.z_loss 0.0 → 0.5"]


def samples_in(epochs: int) -> int:
    """Number of samples in some epochs, each of which has 41."""
    return 41 * epochs


def recipe(train: Train, **batch: Any) -> Config:
    optim = Optim(lr=1e-3, min_lr=1e-5)
    return Config(optim=optim, train=train, batch=Batch(**{"micro_batch_size": 1, "global_batch_size": 4, **batch}))


@pytest.mark.parametrize(
    ("before", "now", "at", "lines"),
    [
        (
            recipe(Train(steps=20)),
            recipe(Train(steps=40)),
            (20, 80),
            # Half of a cosine from 1e-3 to 1e-5 is 5.05e-4.
            ["train.steps 20 → 40: 20 steps are left, not 0; the learning rate goes from 1e-05 to 0.000505"],
        ),
        (
            recipe(Train(epochs=1)),  # 10 steps of 4 samples, and a sample that is left out
            recipe(Train(epochs=2)),
            (5, 20),
            ["train.epochs 1 → 2: 15 steps are left, not 5; the learning rate goes from 0.000505 to 0.000855"],
        ),
        (
            recipe(Train(samples=80)),
            recipe(Train(samples=80), global_batch_size=8),
            (10, 40),
            # 10/20 of the steps become 10/15: 1e-5 + 9.9e-4 x (1 + cos(2/3 pi)) / 2 = 2.575e-4.
            [
                "batch.global_batch_size 4 → 8: 5 steps are left, not 10; "
                "the learning rate goes from 0.000505 to 0.000258"
            ],
        ),
        (
            recipe(Train(steps=20)),
            recipe(Train(steps=20, max_skipped=3), micro_batch_size=2),
            (4, 16),
            ["batch.micro_batch_size 1 → 2", "train.max_skipped 10 → 3"],
        ),
        (
            recipe(Train(steps=20)),
            recipe(Train(steps=20), micro_batch_size=2, global_batch_size=8),
            (0, 0),  # nothing is done yet: the first step has the same rate, and as many are left
            ["batch.micro_batch_size 1 → 2", "batch.global_batch_size 4 → 8"],
        ),
        (
            recipe(Train(steps=20), micro_batch_size=4),
            recipe(Train(steps=30), micro_batch_size=2, global_batch_size=2),
            (4, 16),
            # What the last key that counts says is of all of them: 1e-5 + 9.9e-4 x (1 + cos(4/20 pi)) / 2 and 4/30.
            [
                "batch.micro_batch_size 4 → 2",
                "batch.global_batch_size 4 → 2",
                "train.steps 20 → 30: 26 steps are left, not 16; the learning rate goes from 0.000905 to 0.000957",
            ],
        ),
    ],
)
def test_what_a_changed_recipe_comes_to_is_said(before: Config, now: Config, at: tuple[int, int], lines: list[str]):
    said = changes.lines(before.model_dump(), now, *at, samples_in)
    assert said == [f"changed since the checkpoint: {line}" for line in lines]


def test_a_recipe_that_is_refused_today_is_said_without_what_it_comes_to():
    now = recipe(Train(steps=20))
    then: dict[str, dict[str, Any]] = now.model_dump()
    then["batch"]["micro_batch_size"], then["train"]["steps"] = 3, 40
    assert changes.lines(then, now, 4, 16, samples_in) == [
        "changed since the checkpoint: batch.micro_batch_size 3 → 1",
        "changed since the checkpoint: train.steps 40 → 20",
    ]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_text(tmp_path / "text")
    return tmp_path


def go_on(name: str, folder: Path, **changed: Any) -> int:
    """A kept run from its checkpoint to its end; the exit code."""
    run = folder / "run"
    shutil.copytree(KEPT / name, run)
    try:
        return train.main(flags(folder, **{key.replace("__", "."): value for key, value in changed.items()}))
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def losses(folder: Path) -> dict[int, float]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["loss"] for line in lines if "loss" in line}


def test_a_kept_run_resumes_with_the_losses_that_it_had_when_it_was_made(folder: Path, capsys):
    assert go_on("sample-order-2", folder) == 0
    assert losses(folder / "run") == pytest.approx(losses(KEPT / "sample-order-2"), rel=1e-6)
    output = capsys.readouterr().out
    assert "changed since the checkpoint" not in output


def test_a_run_in_samples_goes_on_with_another_batch_through_the_samples_that_are_left(folder: Path, capsys):
    length = {"train__steps": 0, "train__samples": 4 * STEPS}
    assert go_on("sample-order-2", folder, batch__global_batch_size=8, **length) == 0
    left = 4 * (STEPS - CUT) // 8
    assert max(losses(folder / "run")) == CUT + left
    output = capsys.readouterr().out
    assert "changed since the checkpoint: batch.global_batch_size 4 → 8\n" in output
    assert f"changed since the checkpoint: train.samples 0 → 32: {left} steps are left, not {STEPS - CUT}" in output
    assert f"step {CUT + left}/{CUT + left} | loss" in output


def test_a_run_in_steps_ends_at_that_step_whatever_the_batch(folder: Path):
    assert go_on("sample-order-2", folder, batch__global_batch_size=8) == 0
    assert max(losses(folder / "run")) == STEPS


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("model__layer_norm_eps", 1e-6, "[model] layer_norm_eps was 1e-05, is 1e-06"),
        ("model__init_std", 0.01, "[model] init_std was 0.02, is 0.01"),
        ("data__eod_mask_loss", True, "[data] eod_mask_loss was False, is True"),
    ],
)
def test_another_model_or_other_data_is_refused_with_the_key(folder: Path, capsys, key: str, value: Any, words: str):
    assert go_on("sample-order-2", folder, **{key: value}) == 2
    assert words in capsys.readouterr().err
