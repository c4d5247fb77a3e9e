"""Claims about the table of speed: who takes turns with whom, what counts as reached, and what a wrong result does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tomli
import torch

from benchmarks import __main__ as table
from benchmarks import commits
from benchmarks.rows.measure import Row, check_losses, check_tensors, cpu_ms, interleaved

ROOT = Path(__file__).resolve().parent.parent
MACHINE = {"processor": "CPU", "cores": 2, "bf16 instructions": [], "python": "3", "versions": {"torch": "2"}}


def row(ratio: float, reach: float | None, name: str = "a step") -> Row:
    return Row(name, "a peer", 3 * ratio, 3.0, "CPU ms", reach, "losses within 0e+00", ["50 % aten::mm"])


def said(*rows: Row) -> str:
    about: dict[str, Any] = {"benchmark": "step.x", "date": "2026-11-22 10:00", "load": 0.5, "quick": False}
    about["commit"] = "abcdef0"
    record = [about | r._asdict() | {"ratio": r.ratio, "falls_short": r.falls_short} for r in rows]
    return "\n".join(table.markdown({"machine": MACHINE, "rows": record}))


def test_forms_take_turns_in_the_opposite_order_every_other_round():
    calls: list[str] = []
    forms = {name: lambda name=name: calls.append(name) for name in "abc"}
    times = interleaved(forms, rounds=3, warm_up=1)
    assert "".join(calls) == "abc" + "abc" + "cba" + "abc"
    assert {name: len(found) for name, found in times.items()} == {"a": 3, "b": 3, "c": 3}


def test_a_time_is_the_median_of_the_process_and_not_of_the_clock(monkeypatch: pytest.MonkeyPatch):
    now_s = [0.0, 1.0, 1.0, 6.0, 6.0, 8.0]  # three rounds of 1, 5 and 2 seconds
    monkeypatch.setattr("time.process_time", lambda: now_s.pop(0))
    assert cpu_ms({"a": int}, rounds=3, warm_up=0) == {"a": 2000.0}


@pytest.mark.parametrize(("ratio", "reach", "short"), [(0.5, 0.5, False), (0.51, 0.5, True), (9.0, None, False)])
def test_a_row_falls_short_above_its_reach(ratio: float, reach: float | None, short: bool):
    assert row(ratio, reach).falls_short is short
    assert ("falls short" in said(row(ratio, reach))) is short


def test_a_count_that_should_be_none_is_reached_at_none_only():
    assert not Row("breaks", "none", 0.0, 0.0, "", 0.0).falls_short
    assert Row("breaks", "none", 2.0, 0.0, "", 0.0).falls_short


def test_only_a_row_that_falls_short_shows_its_operators():
    assert said(row(0.9, 0.5), row(0.1, 0.5, "another")).count("aten::mm") == 1


def test_results_that_differ_are_an_error_and_not_a_row():
    assert check_losses(1.0, 1.0) == "losses within 0e+00"
    with pytest.raises(AssertionError, match="differ by"):
        check_losses(1.0001, 1.0)
    with pytest.raises(AssertionError, match="tensors differ"):
        check_tensors(torch.ones(3), torch.tensor([1.0, 1.0, 1.001]), 1e-5)


def test_a_record_goes_on_where_it_was_begun_and_nowhere_else(monkeypatch, tmp_path: Path):
    output = tmp_path / "benchmarks.json"
    assert table.recorded(output) == []
    monkeypatch.setattr(table, "machine", lambda: MACHINE)
    output.write_text(json.dumps({"machine": MACHINE, "rows": [{"benchmark": "step.x"}]}))
    assert table.recorded(output) == [{"benchmark": "step.x"}]
    for key, value in {"processor": "another", "versions": {"torch": "3"}}.items():
        monkeypatch.setattr(table, "machine", lambda changed=MACHINE | {key: value}: changed)
        with pytest.raises(SystemExit, match="--output"):
            table.recorded(output)


@pytest.mark.parametrize("name", ["RESULTS", "RESULTS-zen4"])
def test_a_page_of_results_is_that_of_its_record(name: str):
    record = json.loads((ROOT / f"benchmarks/{name}.json").read_text(encoding="utf-8"))
    page = (ROOT / f"benchmarks/{name}.md").read_text(encoding="utf-8")
    assert page == "\n".join(table.markdown(record)) + "\n"


def test_notes_are_of_rows_that_there_are():
    notes = tomli.loads((ROOT / "benchmarks/notes.toml").read_text(encoding="utf-8"))
    records = [json.loads(path.read_text())["rows"] for path in ROOT.glob("benchmarks/RESULTS*.json")]
    recorded = [found for record in records for found in record]
    assert records
    assert notes.keys() <= {found["name"] for found in recorded}
    assert all(found["name"] in notes for found in recorded if found["falls_short"])


def chunk(offsets: list[int], sizes: list[int], start: int) -> list[Any]:
    return [offsets, sizes, "data-00000.bin", start, []]


def write_checkpoint(folder: Path, chunks: list[list[Any]], values: list[float]) -> None:
    entry = {"dtype": "float32", "shape": [2, 2], "chunks": chunks}
    folder.mkdir()
    folder.joinpath("manifest.json").write_text(json.dumps({"content": {"tensors": {"model/w": entry}}}))
    folder.joinpath("data-00000.bin").write_bytes(torch.tensor(values).numpy().tobytes())


def test_a_tensor_has_one_digest_on_every_division_and_another_with_a_bit_flipped(tmp_path: Path):
    columns = [chunk([0, 1], [2, 1], 0), chunk([0, 0], [2, 1], 8)]
    write_checkpoint(tmp_path / "whole", [chunk([0, 0], [2, 2], 0)], [1.0, 2.0, 3.0, 4.0])
    write_checkpoint(tmp_path / "columns", columns, [2.0, 4.0, 1.0, 3.0])
    write_checkpoint(tmp_path / "flipped", columns, [2.0, 4.0, 1.0, 3.0000002])
    digests = [dict(commits.tensor_digests(tmp_path / name)) for name in ("whole", "columns", "flipped")]
    assert digests[0] == digests[1] != digests[2]


@pytest.mark.parametrize(
    ("changed", "what"),
    [
        ({}, ""),
        ({"metrics": [{"loss": 1.0000000000000002}]}, "metrics line 1"),
        ({"metrics": []}, "metrics line 1"),
        ({"tensors": {"w": "a", "v": "b"}}, "1 tensors differ, such as v"),
        ({"refused": "exit code 2: no"}, "the new tree refuses it: exit code 2: no"),
    ],
)
def test_the_first_difference_between_two_commits_is_named(changed: dict[str, Any], what: str):
    old = {"metrics": [{"loss": 1.0}], "tensors": {"w": "a"}}
    assert commits.difference(old, old | changed).startswith(what)
    assert (commits.difference(old, old | changed) == "") == (what == "")
