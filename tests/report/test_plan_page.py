"""report/plan_page: the numbers on the page of a plan are those of the plan."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch

from dtmega import config, families, mesh
from dtmega.cli.commands.plan import check_page
from dtmega.pipelining.split import plan_stages
from dtmega.pipelining.table import make_table
from dtmega.planning.counting.role import plan_role
from dtmega.planning.plan import Plan
from dtmega.planning.prices import budget, fabric
from dtmega.planning.prices.step_time import StepTime, step_time
from dtmega.report.units import binary, seconds
from dtmega.training import checks, choices
from tests.report.test_page import HOSTILE, Tags

pytest.importorskip("plotly", reason="plotly is not installed (pip install -e '.[report]')")

from dtmega.report.plan_page import write_plan_page
from dtmega.report.plan_page.memory import HELD, LIMIT

ARGUMENTS = ["--config", "bloom.toml", "--mesh.pp", "2", "--batch.micro_batch_size", "2", "--model.n_layers", "2"]
N_MICROBATCHES = 4
UNITS = {"MiB": 2**20, "GiB": 2**30}


@pytest.fixture(scope="module")
def planned() -> tuple[Plan, StepTime]:
    """The plan of a small BLOOM on two pipeline ranks with a GPU in name only, and its time."""
    device = torch.device("cuda", 0)
    cfg = families.resolve(config.load(ARGUMENTS))
    sizes = mesh.resolve(cfg.mesh, 2)
    cfg = choices.with_params_dtype(choices.with_micro_batch_size(cfg, sizes), "bfloat16")
    checks.check(cfg, sizes, device)
    # A pipeline keeps nothing in DTensor's caches, so the roles need no processes of their own.
    roles = {rank: plan_role(cfg, sizes, rank, device, [N_MICROBATCHES]) for rank in (0, 1)}
    stages = plan_stages(cfg, families.pieces(cfg.model), 2).pieces
    table = make_table(cfg.pipeline, 2, N_MICROBATCHES)
    plan = Plan(cfg, sizes, device, N_MICROBATCHES, table, stages, roles, N_MICROBATCHES)
    works = {place: role.works for place, role in roles.items()}
    return plan, step_time(works, table, fabric.load("h100-ib"), sizes, N_MICROBATCHES)


@pytest.fixture(scope="module")
def html(planned: tuple[Plan, StepTime], tmp_path_factory: pytest.TempPathFactory) -> str:
    """The page about a device with 1 GiB, of which 0.95 GiB are the reserve."""
    path = tmp_path_factory.mktemp("page") / "plan.html"
    command = f"dtmega plan {HOSTILE}"
    plan, time = planned
    write_plan_page(plan, time, path, command=command, fabric=HOSTILE, memory_bytes=2**30, reserve_bytes=973 * 2**20)
    return path.read_text(encoding="utf-8")


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Write pages without the 5 MB of plotly."""
    monkeypatch.setattr("plotly.offline.get_plotlyjs", lambda: "/* plotly */")


def figure_of(html: str) -> dict[str, Any]:
    (found,) = re.findall(r'<script type="application/json" data-place="memory">(.*?)</script>', html)
    return json.loads(found)


def panels_of(html: str) -> list[dict[str, list[float]]]:
    """The curves of each panel of the memory: name in the legend -> bytes."""
    figure = figure_of(html)
    panels: dict[str, dict[str, list[float]]] = {}
    for trace in figure["data"]:
        axis = trace["yaxis"]
        unit = UNITS[figure["layout"][axis.replace("y", "yaxis", 1)]["ticksuffix"].strip()]
        panels.setdefault(axis, {})[trace["name"]] = [value * unit for value in trace["y"]]
    return [*panels.values()]


def rows_of(html: str, title: str) -> list[list[str]]:
    """The cells of the first table after a title, as text."""
    table = html[html.index(f"<h2>{title}</h2>") :]
    table = table[table.index("<tbody>") : table.index("</tbody>")]
    rows = []
    for row in re.findall(r"<tr>(.*?)</tr>", table):
        rows.append([Tags(cell).text for cell in re.findall(r"<td>(.*?)</td>", row)])
    return rows


def test_the_areas_add_up_to_the_peak_of_each_action(planned, html):
    plan, _ = planned
    for role, panel in zip(plan.roles.values(), panels_of(html), strict=True):
        areas = [values for name, values in panel.items() if name not in (HELD, LIMIT)]
        assert [sum(values) for values in zip(*areas, strict=True)] == [span.peak_bytes for span in role.spans]
        assert panel[HELD] == [span.held_bytes for span in role.spans]


def test_each_area_is_the_sum_of_its_owners(planned, html):
    plan, _ = planned
    beginnings = {
        "parameters": "parameters",
        "optimizer's moments": "optimizer's moments",
        "weights for compute": "weights for compute",
        "activations of blocks": "activations of layers.",
        "activations outside of blocks": "activations outside",
        "input and tensors between stages": ("input and tensors", "rows of the batch"),
        "gradients before their sum": "gradients before",
        "rooms for messages": "rooms",
        "temporaries of backward": "backward:",
    }
    for role, panel in zip(plan.roles.values(), panels_of(html), strict=True):
        for name, beginning in beginnings.items():
            expected = []
            for span in role.spans:
                expected.append(sum(n for owner, n in span.at_peak.items() if owner.startswith(beginning)))
            assert panel.get(name, [0] * len(role.spans)) == expected, name
        assert "other" not in panel


def test_the_actions_below_the_areas_have_the_names_of_the_plan_and_each_its_own_place(planned, html):
    plan, _ = planned
    for role, axis in zip(plan.roles.values(), ("x", "x2"), strict=True):
        (names,) = {tuple(trace["x"]) for trace in figure_of(html)["data"] if trace["xaxis"] == axis}
        assert len(set(names)) == len(names) == len(role.spans)
        in_schedule = [name for name in names if re.fullmatch(r"\d[FB]\d", name)]
        assert in_schedule == [span.action for span in role.spans if re.fullmatch(r"\d[FB]\d", span.action)]


def test_the_owners_listed_for_each_place_are_all_that_stand_at_its_peak(planned, html):
    plan, _ = planned
    for place, role in plan.roles.items():
        listed = html[html.index(f"pipeline rank {place} (rank {role.rank}): {binary(role.peak.peak_bytes)} at") :]
        listed = listed[: listed.index("</details></details>")]
        cells = [Tags(cell).text for cell in re.findall(r"<td>(.*?)</td>", listed)]
        shown = dict(zip(cells[::4], cells[2::4], strict=True))
        assert shown == {owner: f"{n_bytes:,}" for owner, n_bytes in role.peak.at_peak.items()}


def test_a_line_stands_at_the_memory_of_the_device_without_the_reserve(planned, html):
    for panel in panels_of(html):
        assert set(panel[LIMIT]) == {51 * 2**20}
    assert "of 51 MiB: 1 GiB minus a reserve of 973 MiB" in Tags(html).text


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize(("missing_bytes", "verdict"), [(0, "Fits"), (1, "Does not fit")])
def test_a_job_fits_if_its_highest_peak_is_at_most_the_usable_memory(planned, missing_bytes, verdict, tmp_path: Path):
    fullest = planned[0].fullest
    memory_bytes = fullest.peak.peak_bytes + 1000 - missing_bytes
    path = tmp_path / "plan.html"
    write_plan_page(planned[0], planned[1], path, memory_bytes=memory_bytes, reserve_bytes=1000)
    (said,) = re.findall(r'<p class="verdict">(.*?)</p>', path.read_text())
    assert Tags(said).text.startswith(f"{verdict} the fullest rank, {fullest.rank}, holds")


@pytest.mark.usefixtures("short")
def test_a_line_far_above_the_areas_is_said_instead_of_drawn(planned, tmp_path: Path):
    write_plan_page(planned[0], planned[1], tmp_path / "plan.html", memory_bytes=80 * 2**30, reserve_bytes=6 * 2**30)
    html = (tmp_path / "plan.html").read_text()
    assert all(LIMIT not in panel for panel in panels_of(html))
    assert "memory minus the reserve, 74 GiB, is far above" in Tags(html).text


def test_the_schedule_is_drawn_with_the_times_of_the_prediction(planned, html):
    _, time = planned
    drawing = re.search(r'<div class="wide drawing">(<svg.*?</svg>)</div>', html, re.DOTALL)
    assert drawing is not None
    root = ElementTree.fromstring(drawing[1])
    tag = "{http://www.w3.org/2000/svg}"
    rows = [element for element in root.iter(f"{tag}rect") if element.get("class") == "row"]
    left, pixels = float(rows[0].get("x", "")), float(rows[0].get("width", "")) / time.seconds
    drawn = []
    for group in root.iter(f"{tag}g"):
        box, title = group.find(f"{tag}rect"), group.find(f"{tag}title")
        assert box is not None
        assert title is not None
        assert title.text is not None
        x, width = float(box.get("x", "")) - 0.5, float(box.get("width", "")) + 1
        (row,) = (i for i, each in enumerate(rows) if 0 < float(box.get("y", "")) - float(each.get("y", "")) < 40)
        drawn.append((row, title.text.partition(":")[0], (x - left) / pixels, (x - left + width) / pixels))
    expected = []
    for row, steps in enumerate(time.timeline.rows):
        expected += [(row, str(step.action), step.start, step.end) for step in steps]
    assert [cell[:2] for cell in drawn] == [cell[:2] for cell in expected]
    for cell, wanted in zip(drawn, expected, strict=True):
        assert cell[2:] == pytest.approx(wanted[2:], abs=0.03 / pixels)


def test_the_printed_parts_are_those_of_the_prediction_and_add_up_to_the_step(planned, html):
    _, time = planned
    printed = {name: value for name, _, value in rows_of(html, "Time of a step")}
    shares = [float(share.rstrip("%")) for _, share, _ in rows_of(html, "Time of a step")]
    assert printed["forward"] == seconds(time.compute_by_action["F"])
    assert printed["backward"] == seconds(time.compute_by_action["B"])
    assert printed["exposed: pp"] == seconds(time.exposed_by_axis["pp"])
    assert printed["bubble"] == seconds(time.bubble_fraction * time.seconds)
    assert printed["step"] == seconds(time.seconds)
    assert sum(shares[:-1]) == pytest.approx(100, abs=0.05 * len(shares))


def test_the_wire_has_one_tensor_for_each_microbatch_and_direction(planned, html):
    plan, time = planned
    rows = {row[0]: row for row in rows_of(html, "Wire by axis")}
    cfg = plan.cfg
    tensor_bytes = 2 * cfg.batch.micro_batch_size * cfg.data.seq_len * cfg.model.hidden_size
    assert rows["pp, between stages"][1:3] == [str(N_MICROBATCHES), binary(N_MICROBATCHES * tensor_bytes)]
    assert rows["pp"][3:5] == [seconds(time.communication_by_axis["pp"]), seconds(time.exposed_by_axis["pp"])]


def test_the_totals_of_each_place_are_those_of_its_role(planned, html):
    plan, _ = planned
    rows = rows_of(html, "Totals of one rank and one step")
    for place, row in enumerate(rows):
        role = plan.roles[place]
        peak, held = binary(role.peak.peak_bytes), binary(sum(role.held.values()))
        assert row[2:5] == [peak, role.peak.action, held]
    assert [row[1] for row in rows] == ["embed, layers.0, layers.1", "head"]


def test_the_page_loads_nothing_and_shows_strange_names_letter_by_letter(html):
    page = Tags(html)
    assert [tag for tag, attributes in page.tags if {"src", "href"} & attributes.keys()] == []
    assert [tag for tag, _ in page.tags if tag in ("img", "link", "iframe")] == []
    policies = [attributes.get("content") for tag, attributes in page.tags if tag == "meta"]
    assert any((policy or "").startswith("default-src 'none'") for policy in policies)
    assert len(page.scripts) == 3
    assert f"dtmega plan {HOSTILE}" in page.text
    assert f"A prediction on {HOSTILE}." in page.text


@pytest.mark.usefixtures("short")
def test_a_plan_without_a_pipeline_and_without_a_fabric_has_its_memory_alone(planned, tmp_path: Path):
    plan, _ = planned
    alone = plan._replace(table=None, stages=[["embed", "head"]], roles={0: plan.roles[0]}, run_microbatches=3)
    write_plan_page(alone, None, tmp_path / "plan.html")
    html = (tmp_path / "plan.html").read_text()
    assert "<h2>Time of a step</h2>" not in html
    assert len(panels_of(html)) == 1
    assert "exposed" not in Tags(html).text
    assert "3 of 4 microbatches were run" in Tags(html).text


@pytest.mark.usefixtures("short")
def test_the_cost_of_the_run_is_that_of_the_budget(planned, tmp_path: Path):
    cost = budget.Budget(2e6, 1e6, 0.41, 12.5, 600, 420, 1234, "EUR", 0.07)
    write_plan_page(planned[0], planned[1], tmp_path / "plan.html", budget=cost)
    said = Tags((tmp_path / "plan.html").read_text()).text
    for part in ("tokens/s 2 M", "MFU 41.0%", "(12.5 days)", "GPU-hours 600", "420 kWh", "1.23 K EUR", "7.0%"):
        assert part in said


@pytest.mark.parametrize("place", ["missing/plan.html", "folder", "file/plan.html"])
def test_a_page_that_cannot_be_written_is_refused_in_one_line(place: str, planned, tmp_path: Path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ValueError, match=r"^cannot write the page to [^\n]*, expected [^\n]* \(--page\)$"):
        check_page(tmp_path / place)
    with pytest.raises(ValueError, match=r"^cannot write the page to [^\n]* \(--page\)$"):
        write_plan_page(planned[0], planned[1], tmp_path / place)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("n_bytes", "written"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1 KiB"), (1536, "1.5 KiB"), (1000 * 2**20, "1000 MiB"), (2**40, "1024 GiB")],
)
def test_bytes_are_written_in_powers_of_two(n_bytes: int, written: str):
    assert binary(n_bytes) == written
