"""report/loads/: each cell of the heat map against sums of our own, and the experts that are said to be unused."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dtmega import __main__ as dtmega
from dtmega.report.loads import columns
from tests.report.test_page import Tags, drawn, numbers_of, step_line, write

pytest.importorskip("plotly", reason="plotly is not installed (pip install -e '.[report]')")
from dtmega.report.loads import plot

N_STEPS = 300  # three in each column


def at(layer: int, step: int) -> list[int]:
    """The loads of one step. Layer 2: expert 1 gets three times as much as expert 0. Layer 10: from one to the other.

    After step 200, no token uses expert 2 of layer 2.
    """
    return [100, 300, 200 * (step <= 200)] if layer == 2 else [step, 400 - step]


def line_of(first: int, last: int) -> dict[str, Any]:
    """A line that has layer 10 before layer 2, as no run writes them."""
    sums = {layer: np.sum([at(layer, step) for step in range(first, last + 1)], axis=0).tolist() for layer in (10, 2)}
    return {"first": first, "step": last, "loads": {str(layer): loads for layer, loads in sums.items()}}


def recorded(folder: Path, lines: list[Any]) -> Path:
    """A run of N_STEPS steps with these lines, objects or bytes, in expert_loads.jsonl."""
    write(folder, [step_line(step) for step in range(1, N_STEPS + 1)])
    raw = (line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines)
    (folder / "expert_loads.jsonl").write_bytes(b"\n".join(raw) + b"\n")
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run with a line for each step up to 150, and then for each second one."""
    lines = [line_of(step, step) for step in range(1, 151)]
    lines += [line_of(step, step + 1) for step in range(151, N_STEPS, 2)]
    return recorded(tmp_path / "run", lines)


def cells_of(panel: Any) -> np.ndarray:
    """The numbers of a panel: [experts, columns]."""
    packed = panel["z"]
    shape = [int(size) for size in packed["shape"].split(",")]
    return np.frombuffer(base64.b64decode(packed["bdata"]), packed["dtype"]).reshape(shape)


def read(folder: Path) -> columns.LoadColumns:
    found = columns.read(folder)
    assert found is not None
    return found


@pytest.mark.parametrize("width", [3, 6, 12])
def test_each_cell_is_the_load_in_its_steps_as_a_multiple_of_its_layers_mean(folder: Path, width: int):
    figure = json.loads(plot.heat_map(read(folder), max_cells=5 * N_STEPS // width))
    panels = figure["data"]
    titles = [title["text"] for title in figure["layout"]["annotations"]]
    assert titles == ["Layer 2", "Layer 10"] == [title["text"] for title in figure["narrow"]["annotations"]]
    assert [panel["xaxis"] for panel in panels] == ["x", "x2"]
    for layer, panel in zip((2, 10), panels, strict=True):
        truth = []
        for first in range(1, N_STEPS + 1, width):
            # A line of two steps is shared by two columns, so the loads of its steps count as equal.
            loads = np.zeros(len(at(layer, 1)))
            for step in range(first, first + width):
                pair = [step] if step <= 150 else [step - 1 + step % 2, step + step % 2]
                loads += np.mean([at(layer, each) for each in pair], axis=0)
            truth.append(loads / loads.mean())
        np.testing.assert_allclose(cells_of(panel), np.transpose(truth), rtol=1e-6)
        assert numbers_of(panel["x"]) == [0.5 + step for step in range(0, N_STEPS + 1, width)]
        assert numbers_of(panel["y"]) == [*range(len(at(layer, 1)))]


def test_a_column_without_loads_is_a_gap(tmp_path: Path):
    found = read(recorded(tmp_path, [line_of(1, 10), line_of(21, 30)]))
    assert np.isnan(found.multiples(2)[:, 10:20]).all()
    assert np.isfinite(np.delete(found.multiples(2), range(10, 20), axis=1)).all()


def test_experts_without_a_token_in_the_last_tenth_of_the_steps_are_listed(folder: Path):
    said = drawn(folder).text
    assert "Experts that no token used in steps 271 to 300" in said
    assert "2 1 of 3 2 (step 200)" in said
    never = {"first": 1, "step": 300, "loads": {"0": [0, 9, 0, 9]}}
    assert "0 2 of 4 0 (never), 2 (never)" in drawn(recorded(folder, [never])).text
    assert "Tokens of steps 181 to 200 used every expert." in drawn(recorded(folder, [line_of(1, 200)])).text


def test_of_many_unused_experts_some_are_listed_and_of_many_layers_some_are_unfolded(tmp_path: Path):
    loads = {str(layer): [0] * 40 + [1] for layer in range(20)}
    tags = drawn(recorded(tmp_path, [{"first": 1, "step": 2, "loads": loads}]))
    assert "29 (never), 10 more" in tags.text
    assert "8 more layers" in tags.text


def test_of_many_layers_some_have_a_map(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(plot, "MAX_PANELS", 5)
    loads = {str(layer): [1, 2] for layer in range(3, 20)}
    figure = json.loads(plot.heat_map(read(recorded(tmp_path, [{"first": 1, "step": 1, "loads": loads}]))))
    assert [title["text"] for title in figure["layout"]["annotations"]] == [f"Layer {n}" for n in (3, 7, 11, 15, 19)]
    assert len(figure["data"]) == 5


def test_each_run_of_a_comparison_that_has_experts_has_its_map(folder: Path, tmp_path: Path):
    dense = write(tmp_path / "dense", [step_line(step) for step in range(1, 20)])
    other = recorded(tmp_path / "other", [line_of(1, 5)])
    assert drawn(dense).text.count("Loads of the experts") == 0
    page = tmp_path / "page.html"
    assert dtmega.main(["report", str(folder), str(dense), str(other), "--output", str(page)]) == 0
    tags = Tags(page.read_text(encoding="utf-8"))
    assert tags.text.count("Loads of the experts") == 1
    places = [attributes["id"] for tag, attributes in tags.tags if tag == "div" and "id" in attributes]
    figures = [attributes["data-place"] for tag, attributes in tags.tags if "data-place" in attributes]
    assert [place for place in places if place in ("loads-0", "loads-1", "loads-2")] == ["loads-0", "loads-2"]
    assert {*figures} == {*places}
    maps = {place: json.loads(script) for place, script in zip(figures, tags.scripts, strict=False)}
    assert cells_of(maps["loads-2"]["data"][1]).shape == (2, 5)
    assert cells_of(maps["loads-0"]["data"][1]).shape == (2, 100)


DAMAGED: dict[str, Any] = {
    "half a line": json.dumps(line_of(4, 4)).encode()[:30],
    "no object": [],
    "no loads": {"first": 4, "step": 4},
    "no layers": {"first": 4, "step": 4, "loads": {}},
    "a last step before the first": line_of(4, 4) | {"first": 5},
    "a first step of 0": line_of(4, 4) | {"first": 0},
    "a step that is no number": line_of(4, 4) | {"first": None},
    "a layer that is no number": {"first": 4, "step": 4, "loads": {"x": [1]}},
    "a layer of too many digits": {"first": 4, "step": 4, "loads": {"1" * 5000: [1]}},
    "a load that is no list": {"first": 4, "step": 4, "loads": {"2": 4}},
    "no experts": {"first": 4, "step": 4, "loads": {"2": [], "10": [1, 1]}},
    "a load that is no count": {"first": 4, "step": 4, "loads": {"2": [1, 2.5, 3], "10": [1, 1]}},
    "a load below 0": {"first": 4, "step": 4, "loads": {"2": [1, -2, 3], "10": [1, 1]}},
    "a load beyond floats": {"first": 4, "step": 4, "loads": {"2": [1, 10**400, 3], "10": [1, 1]}},
    "other experts": {"first": 4, "step": 4, "loads": {"2": [1, 1], "10": [1, 1]}},
    "too many experts": {"first": 4, "step": 4, "loads": {"2": [1] * (columns.MAX_EXPERTS + 1)}},
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_line_is_left_out_and_counted_and_hides_no_other(name: str, tmp_path: Path):
    whole = [line_of(step, step) for step in (1, 2, 3, 5)]
    damaged = drawn(recorded(tmp_path, [*whole[:3], DAMAGED[name], whole[3]]))
    assert "1 damaged or unfinished line of expert_loads.jsonl left out." in damaged.text
    found = read(tmp_path)
    assert found.n_columns == 5
    np.testing.assert_array_equal(found.loads[2].T, [at(2, 1), at(2, 2), at(2, 3), [0, 0, 0], at(2, 5)])
