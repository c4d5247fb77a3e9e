"""Claims about cli/convert/inspect.py: every line of what it says of one checkpoint, and of how two differ."""

from __future__ import annotations

import pytest
import torch

from dtmega.checkpoint.state import Progress
from dtmega.cli.convert import inspect
from dtmega.distributed import exit_codes
from tests.checkpoint.test_reader import store


def test_each_fact_about_a_checkpoint_is_a_line(tmp_path, capsys):
    tensors = {
        "model/a": torch.zeros(600, 2, dtype=torch.bfloat16),
        "model/b": torch.zeros(3),
        "optimizer/exp_avg/a": torch.zeros(600, 2),
    }
    path = store(
        f"{tmp_path}/step-00001200",
        tensors,
        step=1200,
        progress=Progress(1200, 9600, 3),
        updates=1197,
        identity={"data": "abc", "order": 2},
        layout={"processes": 4, "tp": 2},
        config={"model": {"name": "bloom"}, "data": {"seq_len": 16}},
    )
    assert inspect.show(path, None, verify=True) == exit_codes.DONE
    said = capsys.readouterr().out.splitlines()
    versions = said.pop(5)
    assert versions.startswith("written by  dtmega ")
    assert f"torch {torch.__version__}, python 3." in versions
    assert said.pop().startswith("integrity   every digest matches (7,212 bytes read in ")
    assert said == [
        f"checkpoint  {path}",
        "step        1,200: 9,600 samples, 153,600 tokens, 3 steps skipped",
        "model       bloom: 1,203 parameters in 2 tensors, 2,412 bytes",
        "optimizer   1 tensor, 4,800 bytes, 1,197 updates",
        "written on  processes=4, tp=2",
        "identity    data abc, order 2",
        "files       3, 7,212 bytes",
    ]


def test_weights_of_nobody_knows_where_are_said_to_be_that(tmp_path, capsys):
    inspect.show(store(f"{tmp_path}/w", {"model/a": torch.zeros(1)}, config={"data": {"seq_len": "x"}}), None, False)
    said = capsys.readouterr().out
    assert "written on  no layout\n" in said
    assert "identity    weights only\n" in said
    assert "integrity" not in said


def test_what_would_move_the_cursor_is_written_out(tmp_path, capsys):
    paths = [store(f"{tmp_path}/{n}", {}, identity={"data": f"\x1b[2J{n}"}) for n in "ab"]
    inspect.show(paths[0], None, verify=False)
    inspect.show(*paths, verify=False)
    said = capsys.readouterr().out
    assert "\x1b" not in said
    assert r"identity.data: \x1b[2Ja | \x1b[2Jb" in said


def test_each_difference_is_a_line_and_what_is_only_stored_in_another_way_is_none(tmp_path, capsys):
    same, cut = torch.arange(6.0), {"cut": [[0, 2]]}
    first = {"cut": same, "dtype": same, "first": same, "shape": same, "value": same}
    other = {"cut": same, "dtype": same.double(), "second": same, "shape": same[:5], "value": same.clone()}
    other["value"][1:4] -= torch.tensor([0.5, 2.0, 0.25])
    paths = [
        store(f"{tmp_path}/a", first, config={"data": {"seq_len": 8}}),
        store(f"{tmp_path}/b", other, cut, step=2, updates=1, config={"data": {"seq_len": 16}, "run": {"seed": 3}}),
    ]
    assert inspect.show(*paths, verify=False) == 1
    assert capsys.readouterr().out.splitlines() == [
        "config.data.seq_len: 8 | 16",
        "config.run.seed: None | 3",
        "step: 1 | 2",
        "updates: 0 | 1",
        "dtype: float32 [6] | float64 [6]",
        "first: float32 [6] | not there",
        "second: not there | float32 [6]",
        "shape: float32 [6] | float32 [5]",
        "value: 3 of 6 elements differ, by at most 2",
    ]
    assert inspect.show(paths[0], paths[0], verify=False) == exit_codes.DONE
    assert capsys.readouterr().out == "no differences\n"


@pytest.mark.parametrize(
    ("n", "last"), [(10, "9"), (11, "... and 1 more tensor of 12"), (12, "... and 2 more tensors of 13")]
)
def test_ten_differing_tensors_are_shown_and_the_others_counted(tmp_path, capsys, n, last):
    equal = {"equal": torch.zeros(1)}
    paths = [
        store(f"{tmp_path}/{value}", equal | {f"{i:02}": torch.full((1,), value) for i in range(n)})
        for value in (0.0, 1.0)
    ]
    assert inspect.show(*paths, verify=False) == 1
    said = capsys.readouterr().out.splitlines()
    assert len(said) == min(n, 11)
    assert said[-1].startswith(last) or said[-1].startswith(f"0{last}: 1 of 1 elements differ, by at most 1")
