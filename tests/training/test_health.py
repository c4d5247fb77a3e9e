"""health.py, and what a run makes of it: it saves, ends with code 0, stays ended, and keeps the best checkpoint."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

import pytest

from dtmega.checkpoint.manifest import Manifest
from dtmega.checkpoint.resume import open_checkpoint, state_of
from dtmega.checkpoint.run import Checkpoints
from dtmega.checkpoint.state import HEALTHY, HealthState
from dtmega.checkpoint.tensor_files import Failed
from dtmega.config import keys
from dtmega.training import evaluate
from dtmega.training.health import Health
from tests.test_train import ending, losses, run

STEPS = keys.Train(steps=9)


def checkpoints(run_dir: Path) -> list[int]:
    return [int(path.name[5:]) for path in sorted((run_dir / "checkpoints").glob("step-*"))]


def test_a_run_stops_after_so_many_losses_above_the_limit_in_a_row_and_not_before():
    health = Health(STEPS.model_copy(update={"stop_loss_above": [2.0, 3.0]}), HEALTHY)
    for step, loss in enumerate([3.0, 3.0, 2.0, 3.0, math.nan, math.inf], start=1):
        assert health.state.stopped == ""
        health.after_step(step, loss)
    assert health.state.stopped == "[train] stop_loss_above: the loss was above 2 for 3 steps, up to 6"


def test_losses_are_counted_on_from_a_checkpoint():
    cfg = STEPS.model_copy(update={"stop_loss_above": [2.0, 3.0]})
    health = Health(cfg, HEALTHY._replace(losses_above=2))
    health.after_step(5, 2.5)
    assert health.state.stopped


def test_validations_that_are_not_below_the_best_one_are_counted_and_a_better_one_starts_anew():
    health = Health(STEPS.model_copy(update={"stop_validation_rises": 2}), HEALTHY)
    best = [health.after_validation(step, loss) for step, loss in enumerate([5.0, 4.0, 4.5, 3.0, 3.0], start=1)]
    assert best == [True, True, False, True, False]
    assert health.state == HealthState(rises=1, best_loss=3.0, best_step=4)
    health.after_validation(6, math.nan)
    assert health.state.stopped.endswith("the best one is 3.0000 at step 4")


def test_validations_that_are_no_numbers_stop_a_run_and_none_of_them_is_the_best():
    health = Health(STEPS.model_copy(update={"stop_validation_rises": 2}), HEALTHY)
    assert [health.after_validation(step, math.nan) for step in (1, 2)] == [False, False]
    assert health.state.best_loss is None
    assert health.state.stopped.endswith("no loss was finite")


def test_a_run_that_goes_on_past_its_stop_counts_anew_and_still_compares_with_its_best_loss():
    keys = {"stop_loss_above": [2.0, 3.0], "stop_validation_rises": 3, "past_stop": True}
    stopped = HealthState(losses_above=3, rises=3, best_loss=1.0, best_step=4, stopped="by both")
    health = Health(STEPS.model_copy(update=keys), stopped)
    for step in (11, 12):
        health.after_step(step, 2.5)
        assert not health.after_validation(step, 1.5)
        assert health.state.stopped == ""
    assert health.state == stopped._replace(losses_above=2, rises=2, stopped="")
    health.after_validation(13, 1.5)
    assert health.state.stopped.endswith("the best one is 1.0000 at step 4")


def test_without_the_keys_nothing_is_counted():
    health = Health(STEPS, HEALTHY)
    health.after_step(1, math.inf)
    assert not health.after_validation(1, 2.0)
    assert health.state == HEALTHY


def test_a_run_whose_loss_stays_high_saves_ends_with_code_0_and_does_not_go_on_until_a_key_says_so(
    tmp_path, corpus, capsys
):
    high = {"train__stop_loss_above": "[0.1,3]", "train__steps": 8, "eval__interval": 0}
    for _ in range(2):
        assert run(tmp_path, corpus, **high) == 0
        reason = "[train] stop_loss_above: the loss was above 0.1 for 3 steps, up to 3"
        assert (ending(tmp_path)["code"], ending(tmp_path)["reason"], ending(tmp_path)["step"]) == (0, reason, 3)
        assert f"stopped after step 3 of 8: {reason}; to go on all the same: --train.past_stop true" in (
            capsys.readouterr().out
        )
        assert checkpoints(tmp_path) == [3]
        assert len(losses(tmp_path)) == 3
    assert run(tmp_path, corpus, **high, train__past_stop="true") == 0
    assert ending(tmp_path)["step"] == 6
    assert run(tmp_path, corpus, train__steps=8, eval__interval=0, train__past_stop="true") == 0
    assert (ending(tmp_path)["step"], ending(tmp_path)["reason"]) == (8, "finished")


def validation_losses(monkeypatch: pytest.MonkeyPatch, values: Sequence[float]) -> None:
    """The validation of step n finds values[n]."""
    monkeypatch.setattr(
        evaluate, "mean_losses", lambda run, split: {"lm": values[run.exit_status.step] if split == "valid" else 9.0}
    )


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_run_whose_validation_rises_keeps_the_best_checkpoint_besides_the_newest(
    tmp_path, corpus, monkeypatch, mode: str
):
    validation_losses(monkeypatch, [0.5, 5, 3, 4, 3.5, 3.1, 3.2, 2, 2, 2])
    rises = {
        "train__stop_validation_rises": 3,
        "train__steps": 9,
        "eval__interval": 1,
        "checkpoint__keep": 1,
        "checkpoint__mode": mode,
    }
    assert run(tmp_path, corpus, **rises) == 0
    reason = (
        "[train] stop_validation_rises: 3 validations in a row, up to step 5, were not below the best one before them; "
        "the best one is 3.0000 at step 2"
    )
    assert (ending(tmp_path)["code"], ending(tmp_path)["reason"]) == (0, reason)
    assert checkpoints(tmp_path) == [2, 5]
    assert run(tmp_path, corpus, **rises) == 0
    assert (ending(tmp_path)["reason"], ending(tmp_path)["step"]) == (reason, 5)
    # Going on, the best one stays until a better one is there.
    for step, left in ((6, [2, 6]), (7, [7])):
        assert run(tmp_path, corpus, **rises, train__past_stop="true", train__exit_interval=step) == 0
        assert checkpoints(tmp_path) == left


def test_the_last_validation_decides_before_the_last_checkpoint_and_is_not_made_twice(tmp_path, corpus, monkeypatch):
    validation_losses(monkeypatch, [9, 5, 4])
    keys = {"train__stop_validation_rises": 1, "train__steps": 2, "eval__interval": 2, "checkpoint__keep": 1}
    assert run(tmp_path, corpus, **keys) == 0
    health = state_of(open_checkpoint(str(tmp_path))).health
    assert (health.best_loss, health.best_step) == (4, 2)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["val_loss"] for line in lines if "val_loss" in line] == [9, 4]


def test_rises_without_a_validation_split_are_refused(tmp_path, corpus, capsys):
    keys = {"train__stop_validation_rises": 1, "data__split": "1,0,0"}
    assert run(tmp_path, corpus, **keys) == 2
    assert "there is no validation loss to compare" in capsys.readouterr().err


def test_the_best_checkpoint_stays_if_the_save_of_a_better_one_fails(tmp_path, corpus, monkeypatch):
    validation_losses(monkeypatch, [9, 5, 4, 6, 6])
    honest = Checkpoints._publish

    def publish(self: Checkpoints, written: Manifest) -> str:
        if written.step == 2:
            raise Failed("a full disk")
        return honest(self, written)

    monkeypatch.setattr(Checkpoints, "_publish", publish)
    keys = {"train__stop_validation_rises": 9, "train__steps": 4, "eval__interval": 1, "checkpoint__keep": 1}
    assert run(tmp_path, corpus, **keys) == 0
    assert checkpoints(tmp_path) == [1, 4]
