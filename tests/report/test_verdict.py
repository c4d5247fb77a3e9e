"""The verdict of a report: how a run stands, by files that are made up for each rule of docs/report.md."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

import numpy as np
import pytest

from dtmega.distributed import process
from dtmega.report import record, run, verdict
from tests.report.test_page import start, step_line, write

NOW = 1_800_000_000.0  # seconds since 1970


def judged(folder: Path, silent_s: float = 0.0) -> verdict.Verdict:
    """The verdict on a run that has written nothing for so long."""
    for path in folder.iterdir():
        os.utime(path, (NOW - silent_s, NOW - silent_s))
    (found,) = run.read([str(folder)])
    return verdict.judge(found, datetime.fromtimestamp(NOW, timezone.utc))


def going(folder: Path, step_time_s: float = 0.5, **config: Any) -> Path:
    """A run of 120 steps that is at its 60th."""
    write(folder, [step_line(step, step_time_s=step_time_s) for step in range(1, 61)])
    start(folder, 0, **config)
    (folder / "config.toml").write_text("".join(f"[{key}]\ntimeout_s = {config[key]['timeout_s']}\n" for key in config))
    return folder


@pytest.mark.parametrize(
    ("step_time_s", "timeout_s", "silent_s", "state"),
    [
        (0.5, 100.0, 100.0, "going on"),
        (0.5, 100.0, 101.0, "stalled"),  # a run that hangs would have left by itself
        (60.0, 100.0, 20 * 60, "going on"),
        (60.0, 100.0, 20 * 60 + 1, "stalled"),
        (0.5, 5000.0, 4999.0, "going on"),
    ],
)
def test_a_run_that_writes_nothing_for_its_timeout_and_for_twenty_steps_is_stalled(
    tmp_path: Path, step_time_s: float, timeout_s: float, silent_s: float, state: str
):
    found = judged(going(tmp_path, step_time_s, run={"timeout_s": timeout_s}), silent_s)
    assert found.state == state
    assert "step 60 of 120" in found.why


def locked_by(folder: Path, host: str) -> None:
    (folder / process.LOCK).write_text(json.dumps({"pid": 1, "host": host, "since": "2026-11-23"}))


@pytest.mark.parametrize(
    ("host", "state"), [(socket.gethostname(), "killed"), ("another-machine", "going on"), (None, "going on")]
)
def test_a_run_whose_process_on_this_machine_is_gone_and_has_told_nothing_was_killed(
    tmp_path: Path, host: str | None, state: str
):
    going(tmp_path)
    if host is not None:
        locked_by(tmp_path, host)
    assert judged(tmp_path, silent_s=5).state == state


@pytest.mark.parametrize(("silent_s", "state"), [(5.0, "going on"), (5000.0, "stalled")])
def test_a_run_whose_process_is_there_was_not_killed(tmp_path: Path, silent_s: float, state: str):
    claim = process.Claim(going(tmp_path))
    try:
        found = judged(tmp_path, silent_s)
    finally:
        claim.close()
    assert found.state == state
    assert ("its process is still there" in found.why) == (state == "stalled")
    assert judged(tmp_path, silent_s).state == "killed"


def test_a_directory_in_which_nothing_was_written_yet_is_not_begun(tmp_path: Path):
    (tmp_path / "config.toml").touch()
    assert judged(tmp_path).state == "not begun"


def losses(of_step: Callable[[int], float], n: int, noise: float) -> list[dict[str, Any]]:
    noises = np.random.default_rng(n).normal(scale=noise, size=n)
    return [{"step": step, "loss": of_step(step) + noises[step - 1]} for step in range(1, n + 1)]


@pytest.mark.parametrize(
    ("of_step", "n", "noise", "diverges"),
    [
        (lambda step: 2 + 7 * 0.99**step, 1000, 0.1, False),
        (lambda step: 2 + 7 * 0.99**step, 1000, 1.0, False),
        (lambda step: 9.0, 25, 0.02, False),
        (lambda step: 2 + 7 * 0.99**step + 5 * (step == 990), 1000, 0.1, False),  # one spike
        (lambda step: 2 + 7 * 0.99**step + 5 * (300 < step < 400), 1000, 0.1, False),  # it has come back
        (lambda step: 2 + 7 * 0.99**step + 0.4 * (step > 900), 1000, 0.1, False),  # a tenth of the fall is 0.44
        (lambda step: 2 + 7 * 0.99**step + 0.5 * (step > 900), 1000, 0.1, True),
        (lambda step: 2 + 7 * 0.99**step + 5 * (step > 980), 1000, 0.1, True),  # just now
        (lambda step: 9 + 0.05 * step, 40, 0.02, True),  # it never fell
        (lambda step: 9 + 0.05 * step, 19, 0.02, False),  # too short to say
        (lambda step: 2.0 if step < 900 else 1e300, 1000, 0.1, True),
    ],
)
def test_a_loss_that_has_risen_clearly_over_its_best_mean_diverges(
    tmp_path: Path, of_step: Callable[[int], float], n: int, noise: float, diverges: bool
):
    path = write(tmp_path, losses(of_step, n, noise)) / "metrics.jsonl"
    assert bool(verdict.diverging(record.read(path))) == diverges


def diverges_by_the_rule(losses: list[float]) -> bool:
    """docs/report.md in plain lists: the last tenth against each equally long window that shares no step with it."""
    length = max(len(losses) // 10, 10)
    windows = [losses[start : start + length] for start in range(len(losses) - 2 * length + 1)]
    if not windows:
        return False
    best = min(windows, key=fmean)
    tolerances = (fmean(windows[0]) - fmean(best)) / 10, abs(fmean(best)) / 50, 5 * pstdev(best) / length**0.5
    return fmean(losses[-length:]) - fmean(best) > max(tolerances)


@pytest.mark.parametrize("n", [1, 10, 11, 19, 20, 21, 25, 30, 199, 200, 210])
def test_windows_that_overlap_are_never_compared_whatever_the_number_of_steps(tmp_path: Path, n: int):
    """Losses that rise, that fall, and that are lowest in a middle that the last window may reach into."""
    shapes = {
        "rise": [2 + 0.1 * step for step in range(n)],
        "fall": [9 - 0.02 * step for step in range(n)],
        "dip": [3 - (abs(2 * step - n + 1) < 10) for step in range(n)],
        "early dip": [3 - (step < min(n - 10, 10)) for step in range(n)],
    }
    for name, values in shapes.items():
        (tmp_path / name).mkdir()
        path = write(tmp_path / name, [{"step": step + 1, "loss": float(loss)} for step, loss in enumerate(values)])
        assert bool(verdict.diverging(record.read(path / "metrics.jsonl"))) == diverges_by_the_rule(values), name
    assert diverges_by_the_rule(shapes["rise"]) == (n >= 20)


@pytest.mark.parametrize(
    ("n_skipped", "line", "diverges"),
    [
        (5, {"loss": None, "grad_norm": None}, True),
        (5, {"loss": 4.0, "grad_norm": None}, True),
        (4, {"loss": None, "grad_norm": None}, False),
        (10, {"loss": 4.0, "grad_norm": 50.0}, False),  # spikes
        (10, {"loss": 4.0, "grad_norm": None, "loss_scale": 2.0**24}, False),  # float16 looks for its scale
        (10, {"loss": None, "grad_norm": None, "loss_scale": 1.0}, True),
        (10, {"reason": "[train] skip_steps"}, False),
    ],
)
def test_a_run_diverges_when_five_of_its_last_ten_steps_are_not_finite(
    tmp_path: Path, n_skipped: int, line: dict[str, Any], diverges: bool
):
    lines = [step_line(step, loss=4.0) for step in range(1, 12)]
    lines += [{"step": step, "skipped": True} | line for step in range(12, 12 + n_skipped)]
    lines += [step_line(step, loss=4.0) for step in range(12 + n_skipped, 22)]
    assert bool(verdict.diverging(record.read(write(tmp_path, lines) / "metrics.jsonl"))) == diverges
    later = [step_line(step, loss=4.0) for step in range(22, 33)]
    assert not verdict.diverging(record.read(write(tmp_path, lines + later) / "metrics.jsonl"))


def test_the_tenth_newest_step_counts_among_the_last_ten_and_the_eleventh_does_not(tmp_path: Path):
    lines = [step_line(step, loss=4.0) for step in range(1, 21)]
    lines[10:15] = [{"step": step, "skipped": True, "loss": None, "grad_norm": None} for step in range(11, 16)]
    assert verdict.diverging(record.read(write(tmp_path, lines) / "metrics.jsonl"))
    assert not verdict.diverging(record.read(write(tmp_path, [*lines, step_line(21)]) / "metrics.jsonl"))


def test_the_verdict_has_the_best_validation_its_step_the_time_the_tokens_and_the_speed(tmp_path: Path):
    lines = [step_line(step, step_time_s=30.0, tokens_per_s=1500.0 + step) for step in range(1, 10)]
    lines += [{"step": step, "val_loss": loss} for step, loss in ((2, 3.0), (4, 2.0), (6, 2.0), (8, 2.5))]
    (found,) = run.read([str(write(tmp_path, lines))])
    assert verdict.facts(found) == [
        "best validation loss 2 (ppl 7.389) at step 4",  # e² = 7.389
        "4.5 min of steps",
        "576 tokens",
        "1.5 K tokens/s",
    ]


def test_of_several_validation_sets_the_verdict_names_the_one_it_tells_of(tmp_path: Path):
    lines = [step_line(1), {"step": 1, "val_web_loss": 3.0}, {"step": 1, "val_code_loss": 2.0}]
    (found,) = run.read([str(write(tmp_path, lines))])
    assert verdict.facts(found)[0] == "best validation code loss 2 (ppl 7.389) at step 1"
