"""training/history.py: the line that each start of a run leaves, and whose steps stand in its record."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from dtmega.training import history


def start(folder: Path, step: int, processes: int = 1) -> None:
    history.append(
        folder,
        step=step,
        attempt="",
        config={"optim": {"lr": 0.5}},
        layout={"processes": processes, "tp": processes},
        device=torch.device("cpu"),
        parameters=7,
        steps=300,
    )


def test_each_start_is_read_back_with_its_own_layout(tmp_path: Path):
    start(tmp_path, 0, processes=4)
    start(tmp_path, 100, processes=2)
    found = history.read(tmp_path)
    assert [(s.step, s.layout, s.config, s.device, s.parameters, s.steps) for s in found] == [
        (0, {"processes": 4, "tp": 4}, {"optim": {"lr": 0.5}}, "cpu", 7, 300),
        (100, {"processes": 2, "tp": 2}, {"optim": {"lr": 0.5}}, "cpu", 7, 300),
    ]


@pytest.mark.parametrize(
    "damage",
    [b'{"step": 0, "conf', b"\xff\x00\xfe", b"[1]", b"null", b'{"step": -1}', b"[" * 100_000, b'{"step": "0"}'],
)
def test_a_line_that_is_none_is_left_out_and_hides_no_other(tmp_path: Path, damage: bytes):
    start(tmp_path, 0)
    path = tmp_path / history.NAME
    path.write_bytes(path.read_bytes() + damage)  # without a line end, as of a torn write
    start(tmp_path, 100)
    assert [s.step for s in history.read(tmp_path)] == [0, 100]


ODD = [None, 10**400, 10**30, -1, 0.5, "7", [], {}]


@pytest.mark.parametrize("key", ["step", "steps", "parameters", "layout", "config"])
@pytest.mark.parametrize("odd", ODD, ids=lambda odd: repr(odd)[:12])
def test_a_line_with_a_value_that_no_start_writes_is_left_out(tmp_path: Path, key: str, odd: Any):
    start(tmp_path, 0)
    line = json.loads((tmp_path / history.NAME).read_text())
    line[key] = {"layout": {"processes": odd}, "config": {"optim": {"lr": [odd]}}}.get(key, odd)
    (tmp_path / history.NAME).write_text(json.dumps(line) + "\n")
    start(tmp_path, 100)
    may_be = key == "config" and odd not in (None, 10**400, 10**30)
    assert [s.step for s in history.read(tmp_path)] == ([0, 100] if may_be else [100])


def test_a_run_of_an_earlier_version_has_no_starts(tmp_path: Path):
    assert history.read(tmp_path) == []


@pytest.mark.parametrize(
    ("steps", "whose"),
    [
        ([0], [0]),
        ([0, 100, 200], [0, 1, 2]),
        ([0, 100, 100], [0, 2]),  # killed before another checkpoint: what the first had written is cut
        ([0, 100, 200, 50], [0, 3]),  # went back
        ([0, 100, 0], [2]),  # began anew
    ],
)
def test_the_parts_of_a_record_are_of_those_starts_that_none_went_back_behind(
    tmp_path: Path, steps: list[int], whose: list[int]
):
    for number, step in enumerate(steps):
        start(tmp_path, step, processes=number + 1)
    found = history.parts(history.read(tmp_path))
    assert [s.layout["processes"] - 1 for s in found] == whose
