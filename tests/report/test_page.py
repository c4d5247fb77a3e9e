"""report/: what the page of a run says is what its directory says, and nobody else's text becomes markup."""

from __future__ import annotations

import base64
import hashlib
import itertools
import json
import math
import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from dtmega import __main__ as dtmega
from dtmega import config, train
from dtmega.cli.commands.report import default_output as page_file
from dtmega.distributed import exit_codes
from dtmega.report import curves, layout, markup, page, record, run, scores
from dtmega.report.record import Series
from dtmega.training import history
from tests.test_train import arguments

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>&amp;\"'<b>"
KEYS = ("loss", "grad_norm", "lr", "tokens_per_s", "mfu", "peak_memory_bytes", "step_time_s")


def step_line(step: int, **others: Any) -> dict[str, Any]:
    values = {key: (step * 37 % 101 + 1) / (place + 3) for place, key in enumerate(KEYS)}
    return {"step": step, "tokens": 64 * step} | values | others


def write(folder: Path, lines: list[Any]) -> Path:
    """A metrics.jsonl of these lines: objects, or bytes as they are."""
    folder.mkdir(parents=True, exist_ok=True)
    raw = (line if isinstance(line, bytes) else json.dumps(line).encode() + b"\n" for line in lines)
    (folder / "metrics.jsonl").write_bytes(b"".join(raw))
    return folder


def start(folder: Path, step: int, **values: Any) -> None:
    """A line of starts.jsonl; `values` are of the mesh, or sections."""
    sections = {key: value for key, value in values.items() if isinstance(value, dict)}
    sizes = {axis: values.get(axis, 1) for axis in ("pp", "dp_replicate", "dp_shard", "cp", "tp")}
    cfg = config.load(["--config", "bloom.toml"]).model_dump()
    history.append(
        folder,
        step=step,
        attempt="",
        config=cfg | {section: cfg.get(section, {}) | keys for section, keys in sections.items()},
        layout={"processes": math.prod(sizes.values()), **sizes},
        device=torch.device("cpu"),
        parameters=5_300_000,
        steps=120,
    )


class Tags(HTMLParser):
    """Every element with its attributes, the text of each script, and the text between tags."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.said: list[str] = []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in ("wbr", "time") and ("class", "word") not in attrs:  # those stand within a word or a line
            self.said.append(" ")
        if tag == "script":
            self.scripts.append("")

    def handle_data(self, data: str) -> None:
        if self.tags and self.tags[-1][0] == "script" and self.cdata_elem == "script":
            self.scripts[-1] += data
        else:
            self.said.append(data)

    @property
    def text(self) -> str:
        return " ".join("".join(self.said).split())


def drawn(*folders: Path, figures: dict[str, str] | None = None) -> Tags:
    """The page of these runs, without plotly."""
    runs = run.read([str(folder) for folder in folders])
    figures = {"curves": "{}", "tail": "{}"} if figures is None else figures
    return Tags(page.page(runs, figures, "/* plotly */", ["#123456"] * len(runs), folders[0]))


def numbers_of(array: Any) -> list[float]:
    """The numbers of an axis in a figure's JSON, which plotly packs."""
    return np.frombuffer(base64.b64decode(array["bdata"]), array["dtype"]).tolist() if "bdata" in array else array


def test_every_number_of_every_line_is_in_its_series(tmp_path: Path):
    lines = [step_line(step) for step in range(1, 40)] + [{"step": 20, "val_loss": 3.25}, {"step": 39, "val_loss": 3.0}]
    found = record.read(write(tmp_path, lines) / "metrics.jsonl")
    assert found.series.keys() == {*KEYS, "val_loss"}
    for key, series in found.series.items():
        of_file = [(line["step"], line[key]) for line in lines if key in line]
        assert list(zip(series.steps.tolist(), series.values.tolist(), strict=True)) == of_file
    assert (found.last_step, found.tokens.values[-1], found.damaged_lines) == (39, 39 * 64, 0)


@pytest.mark.parametrize(
    "line",
    [
        b'{"step": 3, "loss": 4.0',  # torn
        b"\xff\xfe\x00garbage\n",
        b"\n",
        b'{"loss": 4.0}\n',
        b'{"step": "3", "loss": 4.0}\n',
        b'{"step": true, "loss": 4.0}\n',
        b'{"step": -3, "loss": 4.0}\n',
        b'{"step": 1e400, "loss": 4.0}\n',
        b'{"step": 1' + b"0" * 30 + b', "loss": 4.0}\n',
        b'["step", 3]\n',
        b"[" * 100_000 + b"\n",
    ],
)
def test_a_damaged_line_is_left_out_and_counted_and_hides_no_other(tmp_path: Path, line: bytes):
    path = write(tmp_path, [step_line(1), line if line.endswith(b"\n") else line + b"\n", step_line(2)])
    found = record.read(path / "metrics.jsonl")
    assert (found.series["loss"].steps.tolist(), found.last_step, found.damaged_lines) == ([1, 2], 2, 1)


@pytest.mark.parametrize("value", [b"NaN", b"Infinity", b"null", b'"4"', b"[4]", b"true", b"1" + b"0" * 400])
def test_a_loss_that_is_no_finite_number_is_a_gap(tmp_path: Path, value: bytes):
    path = write(tmp_path, [step_line(1), b'{"step": 2, "loss": ' + value + b"}\n", step_line(3)])
    assert record.read(path / "metrics.jsonl").series["loss"].steps.tolist() == [1, 3]


def test_of_a_step_that_stands_twice_the_later_line_counts(tmp_path: Path):
    lines = [step_line(1, loss=1.0), step_line(2, loss=2.0), step_line(3, loss=3.0), step_line(2, loss=2.5)]
    series = record.read(write(tmp_path, lines) / "metrics.jsonl").series["loss"]
    assert (series.steps.tolist(), series.values.tolist()) == ([1, 2, 3], [1.0, 2.5, 3.0])


def test_a_file_with_a_name_a_line_does_not_become_a_panel_a_line(tmp_path: Path):
    lines = [step_line(1), *({"step": step, f"x{step}": 1.0} for step in range(2, 2000))]
    found = record.read(write(tmp_path, lines) / "metrics.jsonl")
    assert len(found.series) <= record.MAX_KEYS
    assert len(curves.panels(found.series, alone=True)) == 6 + curves.MAX_OTHERS


def test_what_happened_is_told_with_its_step(tmp_path: Path):
    lines = [
        {"step": 3, "loss": None, "grad_norm": 2.0, "skipped": True, "sample_ids": [8, 12], "reason": "loss is nan"},
        {"step": 4, "loss": 9.0, "grad_norm": 2.0, "skipped": True},
        {"step": 5, "checkpoint": 5, "checkpoint_stall_s": 0.25},
        {"step": 6, "checkpoint": 6, "checkpoint_stall_s": 0.25, "checkpoint_error": "no space"},
        {"step": 7, "val_loss": 3.5},
    ]
    found = record.read(write(tmp_path, lines) / "metrics.jsonl")
    assert [tuple(event) for event in found.events] == [
        (3, "skipped", "loss is nan; samples 8 to 11"),
        (4, "skipped", "a spike: loss 9.0, grad_norm 2.0"),
        (5, "checkpoint", "of step 5; training stood still for 0.25 s"),
        (6, "failed checkpoint", "no space"),
        (7, "evaluation", "val_loss 3.5"),
    ]


@pytest.mark.parametrize("n", [1, 39, 40, 41, 1000, 12_345])
def test_a_thinned_curve_has_both_ends_each_stretchs_extremes_and_the_marked_steps(n: int):
    steps = np.arange(n) * 3 + 1
    values = np.random.default_rng(n).normal(size=n)
    marked = steps[[n // 2, n // 3]].tolist()
    thin = curves.thinned(Series(steps, values), marked, buckets=20)
    kept = dict(zip(thin.steps.tolist(), thin.values.tolist(), strict=True))
    whole = dict(zip(steps.tolist(), values.tolist(), strict=True))
    assert kept.items() <= whole.items()
    assert list(kept) == sorted(kept)
    assert {1, int(steps[-1]), *marked} <= kept.keys()
    if n <= 40:
        assert kept == whole
    else:
        assert len(kept) <= 2 * 20 + 4
        cuts = [int(n * i / 20) for i in range(21)]
        stretches = [values[a:b] for a, b in itertools.pairwise(cuts)]
        assert {e for stretch in stretches for e in (stretch.min(), stretch.max())} <= set(kept.values())


def test_a_running_mean_is_over_the_last_steps():
    values = np.random.default_rng(1).normal(size=500)
    mean, window = curves.running_mean(Series(np.arange(1, 501), values))
    assert window == 10
    expected = [values[step - window : step].mean() for step in range(window, 501)]
    np.testing.assert_allclose(mean.values, expected, rtol=1e-9, atol=1e-12)
    assert mean.steps.tolist() == [*range(window, 501)]


def test_the_tail_tells_how_many_steps_are_at_least_so_slow():
    values = np.random.default_rng(1).exponential(size=5000)
    counts, slowness = curves.tail(Series(np.arange(5000), values))
    assert [int((values >= slow).sum()) for slow in slowness] == counts.tolist()
    assert (counts.max(), counts.min(), slowness.max()) == (5000, 1, values.max())


def test_the_first_numbers_are_those_of_the_file(tmp_path: Path):
    lines = [step_line(step, step_time_s=step / 100) for step in range(1, 101)]
    start(tmp_path, 0)
    start(tmp_path, 40)
    lines += [{"step": 100, "val_loss": 2.0}, {"step": 100, "test_loss": 3.0}, {"step": 101, "skipped": True}]
    numbers = run.numbers(run.read([str(write(tmp_path, lines))])[0])
    found = {key: numbers[key] for key in ("steps", "tokens", "validation loss", "test loss", "step time, median")}
    assert found == {
        "steps": "101 of 120",
        "tokens": "6.4 K",
        "validation loss": "2 (ppl 7.389)",
        "test loss": "3 (ppl 20.09)",
        "step time, median": "500 ms",
    }
    assert numbers["99th percentile"] == "990 ms"
    assert (numbers["restarts"], numbers["skipped steps"]) == ("1", "1")
    assert numbers["training loss"] == f"{lines[99]['loss']:.4g}"


def test_a_run_that_was_resumed_on_another_layout_shows_both_parts_and_what_differs(tmp_path: Path):
    write(tmp_path, [step_line(step) for step in range(1, 121)])
    start(tmp_path, 0, tp=2, dp_shard=2, mesh={"tp": 2}, optim={"lr": 0.25})
    start(tmp_path, 60, pp=2, mesh={"pp": 2})
    said = drawn(tmp_path).text
    assert "steps 1 to 60 4 processes: dp_shard 2 × tp 2 on cpu" in said
    assert "steps 61 to 120 2 processes: pp 2 on cpu" in said
    assert "2 ranks, 2 stages · " in said
    assert "Between the parts key steps 1 to 60 steps 61 to 120 " in said
    assert all(row in said for row in ("optim.lr 0.25 0.006 ", "mesh.pp 1 2 ", "mesh.tp 2 1 "))
    assert "60 restart started again after step 60 on 2 processes: pp 2" in said


def test_a_run_without_its_starts_has_its_state_and_numbers_and_no_layout(
    tmp_path: Path, corpus: str, capsys: pytest.CaptureFixture[str]
):
    try:
        assert train.main(arguments(tmp_path, corpus, train__steps=2, eval__interval=0)) == 0
    finally:
        dist.destroy_process_group()
    (tmp_path / history.NAME).unlink()
    said = drawn(tmp_path).text
    assert "Finished after step 2 of 2" in said
    assert "steps 1 to 2 Not recorded: starts.jsonl is missing or damaged." in said


def test_every_rank_has_its_place_in_the_drawn_mesh():
    sizes = {"pp": 2, "dp_replicate": 1, "dp_shard": 3, "cp": 1, "tp": 2}
    svg = layout.mesh_svg(sizes)
    texts = re.findall(r'<text x="([\d.]+)" y="([\d.]+)"[^>]*>(\d+)</text>', svg)
    places = {int(rank): (float(y), float(x)) for x, y, rank in texts}
    # Megatron's order: tp fastest, then data, pp slowest, so reading the picture by rows gives 0, 1, 2, ...
    assert sorted(places, key=lambda rank: places[rank]) == [*range(12)]
    assert len({y for y, _ in places.values()}) == 2
    assert svg.count('rx="6"') == 2 * 3  # a box for each tp group


def test_two_runs_stand_beside_each_other_with_the_keys_that_differ(tmp_path: Path):
    for name, lr in (("a", 0.25), ("b", 0.125)):
        write(tmp_path / name, [step_line(1, loss=lr)])
        start(tmp_path / name, 0, optim={"lr": lr}, run={"dir": name})
    said = drawn(tmp_path / "a", tmp_path / "b").text
    assert "Configuration between the runs key a b optim.lr 0.25 0.125 Numbers a b training loss 0.25 0.125" in said
    differences, equal = said.split("equal: steps, tokens, ")
    assert "0.125" not in equal.partition("Layout")[0]
    assert "steps 1 of 120" not in differences


@pytest.mark.parametrize(
    ("raw", "shown"),
    [
        (b'{"step": 2, "text": "def f"}', "def f"),
        (b'{"step": 3, "text": "def f"}', ""),  # of the run that was here before
        (b'{"step": 2, "te', ""),
        (b'{"step": 2, "text": 4}', ""),
    ],
)
def test_the_sample_is_that_of_the_run_if_it_can_be_read(tmp_path: Path, raw: bytes, shown: str):
    (write(tmp_path, [step_line(1), step_line(2)]) / "sample.json").write_bytes(raw)
    assert run.read([str(tmp_path)])[0].sample == shown
    assert ("Sample" in drawn(tmp_path).text) == bool(shown)


def test_a_long_sample_is_cut_and_the_rest_is_behind_a_click(tmp_path: Path):
    words = " ".join(f"<{number}>" for number in range(40_000))
    write(tmp_path, [step_line(1)])
    (tmp_path / "sample.json").write_text(json.dumps({"step": 1, "text": words}))
    said = drawn(tmp_path).said
    left_out = len(words) - markup.MAX_CHARACTERS
    assert f"{len(words) - 1000:,} more characters, the last {left_out:,} not in this page" in said
    shown, rest = words[:1000], words[1000 : markup.MAX_CHARACTERS]
    assert shown in said
    assert rest in said


def test_a_sample_of_many_lines_is_cut_after_some_of_them():
    tags = Tags(markup.cut("\n".join("abcdefghijklmnopqrstuvwxyz"), keep="\n"))
    assert [text for text in tags.said if text.strip()] == [
        "\n".join("abcdefghijklmno") + "\n",
        "21 more characters",
        "\n".join("pqrstuvwxyz"),
    ]
    assert [tag for tag, _ in tags.tags] == ["pre", "details", "summary", "pre"]
    assert "details" not in [tag for tag, _ in Tags(markup.cut("abc")).tags]


@pytest.mark.parametrize("lines", [[step_line(1)], [{"step": 0, "val_loss": 9.0}, step_line(1)]])
def test_a_run_of_one_step_has_its_cards_and_no_figure_of_slow_steps(tmp_path: Path, lines: list[Any]):
    pytest.importorskip("plotly", reason="plotly is not installed (pip install -e '.[report]')")
    start(write(tmp_path, lines), 0)
    assert dtmega.main(["report", str(tmp_path)]) == 0
    tags = Tags((tmp_path / "report.html").read_text(encoding="utf-8"))
    cards = [attributes for _, attributes in tags.tags if attributes.get("class") == "number"]
    assert len(cards) >= 11
    assert "1 of 120 steps" in tags.text
    assert "Slow steps" not in tags.text
    assert len(tags.scripts) == 3


def test_a_comparison_does_not_take_the_place_of_the_page_of_one_run(tmp_path: Path):
    runs = [str(write(tmp_path / name, [step_line(1)])) for name in ("a", "b", "c")]
    outputs = [page_file(runs[:1]), page_file(runs[:2]), page_file([runs[0], runs[2]]), page_file(runs)]
    names = ["report.html", "report-with-b.html", "report-with-c.html", "report-with-b-c.html"]
    assert outputs == [tmp_path / "a" / name for name in names]
    many = page_file([runs[0], *(f"{'ü' * 60}{number}" for number in range(9))])
    assert len(many.name.encode()) < 230
    assert page_file([runs[0], "\udcff"]).name == "report-with-\udcff.html"  # a name that is no UTF-8


def scored(folder: Path, step: int, task: str = "mine", **values: Any) -> None:
    """A file of `dtmega evaluate`, with what it does not need left out."""
    results = {task: {"alias": task, "acc,none": step / 100, "acc_stderr,none": 0.125} | values}
    content = {"step": step, "date": "2026-11-22", "results": results, "n-samples": {task: {"effective": 20}}}
    (folder / "evaluations").mkdir(exist_ok=True)
    (folder / "evaluations" / f"step-{step:08d}-mine.json").write_text(json.dumps(content | {"n-shot": {task: 5}}))


def test_scores_of_checkpoints_are_listed_and_those_of_several_make_a_curve(tmp_path: Path):
    write(tmp_path, [step_line(step) for step in range(1, 61)])
    for step in (20, 60, 80):  # the last one is of a run that was here before
        scored(tmp_path, step)
    (tmp_path / "evaluations" / "torn.json").write_text('{"step": 20, "resul')
    (tmp_path / "evaluation.jsonl").write_text('{"step": 60, "val_loss": 2.0}\n{"step": 60, "val_loss": 2.5}\n{"st')
    (found,) = run.read([str(tmp_path)])
    series = found.record.series["Score: mine, acc"]
    assert list(zip(series.steps.tolist(), series.values.tolist(), strict=True)) == [(20, 0.2), (60, 0.6)]
    assert [event.text for event in found.events if event.step == 60] == [
        "[eval] only: val_loss 2.5",
        "mine: acc 0.6 ± 0.12",
    ]
    said = drawn(tmp_path).text
    asked = "5 examples before each, 20 questions, 2026-11-22"
    rows = f"[eval] only val_loss 60 2.5 mine acc 20 0.2 ± 0.12 {asked} mine acc 60 0.6 ± 0.12 {asked}"
    assert f"Scores of checkpoints task metric step asked {rows}" in said
    assert "evaluations/torn.json cannot be read" in said


def test_of_more_files_of_scores_than_are_read_the_newest_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(scores, "MAX_FILES", 2)
    for step in (9, 10, 100):
        scored(tmp_path, step)
    assert [score.step for score in scores.read(tmp_path, 100).scores] == [10, 100]


def test_scores_of_several_runs_stand_below_each_other(tmp_path: Path):
    for name in ("a", "b"):
        write(tmp_path / name, [step_line(step) for step in range(1, 61)])
        scored(tmp_path / name, 20)
    said = drawn(tmp_path / "a", tmp_path / "b").text
    assert re.search(r"metric run step asked mine acc a 20 0\.2 ± .* mine acc b 20 0\.2 ±", said)


@pytest.mark.parametrize(
    "content",
    [
        {"step": "20", "results": {"mine": {"acc,none": 0.5}}},
        {"step": -1, "results": {"mine": {"acc,none": 0.5}}},
        {"step": 1, "results": [3]},
        {"step": 1, "results": {"mine": "acc"}},
        {"step": 1, "results": {"mine": {"acc,none": "0.5", "other": None, "third": 10**400, "fourth": True}}},
    ],
)
def test_what_is_no_score_of_a_checkpoint_is_left_out(tmp_path: Path, content: dict[str, Any]):
    folder = write(tmp_path, [step_line(1)])
    (folder / "evaluations").mkdir()
    (folder / "evaluations" / "x.json").write_text(json.dumps(content))
    assert run.read([str(folder)])[0].scores.scores == []
    assert "Scores" not in drawn(folder).text


WHEN, SAID = "2026-11-23T14:03:20+00:00", "2026-11-23 14:03:20 UTC"


@pytest.mark.parametrize(
    ("told", "steps", "said", "marked"),
    [
        ((0, "finished"), 120, "Finished after step 120 of 120 ·", []),
        ((0, "[train] exit_interval"), 60, "Stopped after step 60 of 120: [train] exit_interval (exit code 0) ·", [60]),
        ((75, "a signal came"), 60, "Stopped after step 60 of 120: a signal came (exit code 75) ·", [60]),
        (
            (2, "no such file"),
            60,
            f"Stopped after step 60 of 120; the last start was refused at {SAID} with exit code 2: no such file ·",
            [],
        ),
        (
            (3, "damaged"),
            120,
            f"Finished after step 120 of 120; the last start was refused at {SAID} with exit code 3: damaged ·",
            [],
        ),
        ((76, "disk full"), 120, "Stopped after step 120 of 120: disk full (exit code 76) ·", [120]),
        (None, 60, "Going on at step 60 of 120, last written ", []),
    ],
)
def test_how_a_run_has_ended_is_said_and_marked(
    tmp_path: Path, told: tuple[int, str] | None, steps: int, said: str, marked: list[int]
):
    write(tmp_path, [step_line(step) for step in range(1, steps + 1)])
    start(tmp_path, 0)
    if told is not None:
        content = {"code": told[0], "reason": told[1], "time": WHEN, "step": steps}
        content |= {"checkpoint": "runs/x/checkpoints/step-00000060"}
        (tmp_path / exit_codes.EXIT).write_text(json.dumps(content))
    assert said in drawn(tmp_path).text
    assert [event.step for event in run.read([str(tmp_path)])[0].events if event.kind == "end"] == marked


def test_without_a_told_end_the_newest_checkpoint_is_that_of_the_record(tmp_path: Path):
    write(tmp_path, [step_line(1), *({"step": i, "checkpoint": i, "checkpoint_stall_s": 0.5} for i in (1, 2))])
    (tmp_path / exit_codes.EXIT).write_text('{"code": "75"}')
    assert "newest checkpoint step 2 " in drawn(tmp_path).text


def test_runs_of_one_name_are_told_apart_by_their_paths():
    assert run.names(["x/a", "y/b"]) == ["a", "b"]
    assert run.names(["x/a", "y/a"]) == ["x/a", "y/a"]


@pytest.fixture
def hostile(tmp_path: Path) -> Path:
    """A run whose name, configuration, reasons, keys and sample are markup."""
    lines = [
        step_line(1, **{HOSTILE: 1.0}),
        {"step": 2, "skipped": True, "reason": HOSTILE},
        {"step": 2, "checkpoint": 2, "checkpoint_error": HOSTILE},
    ]
    folder = write(tmp_path / HOSTILE.replace("/", "\\"), lines)
    (folder / "sample.json").write_text(json.dumps({"step": 2, "text": f"{HOSTILE}\n\ud800\x1b[2J\u202e"}))
    scored(folder, 1, HOSTILE, **{HOSTILE: 1.0})
    (folder / "evaluations" / f"{HOSTILE.replace('/', '_')}.json").touch()
    told = {"code": 1, "reason": HOSTILE, "step": 2, "checkpoint": HOSTILE}
    (folder / exit_codes.EXIT).write_text(json.dumps(told))
    start(folder, 0, data={"path": HOSTILE}, optim={HOSTILE: HOSTILE})
    start(folder, 1, data={"path": f"{HOSTILE}2"})
    return folder


def test_nobody_elses_text_becomes_markup(hostile: Path, tmp_path: Path):
    write(tmp_path / "other", [step_line(1)])
    tags = drawn(hostile, tmp_path / "other", figures={"curves": json.dumps({"x": HOSTILE})})
    assert [tag for tag, _ in tags.tags if tag in ("img", "b", "a", "link", "iframe")] == []
    assert len(tags.scripts) == 3
    assert json.loads(tags.scripts[0]) == {"x": HOSTILE}
    allowed = {"class", "style", "id", "data-place", "type", "lang", "charset", "name", "content", "http-equiv"}
    drawing = {*("x", "y", "width", "height", "rx", "fill", "stroke", "viewbox", "xmlns", "text-anchor", "role")}
    drawing |= {"font-size", "font-family", "font-weight", "fill-opacity", "aria-label"}
    assert {name for _, attributes in tags.tags for name in attributes} <= allowed | drawing
    assert tags.text.count(HOSTILE) >= 8  # sample, reasons, scores, the end: letter by letter
    assert "\\ud800\\x1b[2J\\u202e" in tags.text


def test_the_policy_names_the_two_scripts_by_their_digests_and_lets_nothing_be_fetched(tmp_path: Path):
    tags = drawn(write(tmp_path, [step_line(1)]))
    (policy,) = [a["content"] for tag, a in tags.tags if a.get("http-equiv") == "Content-Security-Policy"]
    assert policy
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    digests = [base64.b64encode(hashlib.sha256(s.encode()).digest()).decode() for s in tags.scripts[2:]]
    assert rules == {
        "default-src": "'none'",
        "style-src": "'unsafe-inline'",
        "img-src": "data: blob:",
        "script-src": " ".join(f"'sha256-{digest}'" for digest in digests),
        "base-uri": "'none'",
        "form-action": "'none'",
    }
    assert not [a for _, a in tags.tags if a.keys() & {"src", "href", "srcset", "action"}]


def leaves(value: Any, *place: Any) -> list[tuple[Any, ...]]:
    """The places of all values in a JSON object, but of configurations those of one section."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    found = [place] if place else []
    for key, child in inside:
        if place != ("config",) or key == "batch":
            found += leaves(child, *place, key)
    return found


@pytest.mark.parametrize(
    "odd", [None, 10**400, 10**30, 2**53, -1, 1e308, "x", [None], {"a": None}], ids=lambda odd: f"{odd}"[:8]
)
def test_a_value_that_nothing_of_ours_writes_is_no_traceback(tmp_path: Path, odd: Any):
    folder = write(tmp_path / "run", [step_line(step) for step in range(1, 5)])
    start(folder, 0, pp=2, dp_shard=2, pipeline={"n_microbatches": 4})
    start(folder, 2, pp=2, dp_shard=2)
    score = {"step": 2, "date": "today", "results": {"arc": {"acc,none": 0.5}}, "n-shot": {"arc": 1}}
    event = {
        "step": 3,
        "checkpoint": 3,
        "checkpoint_stall_s": 0.5,
        "skipped": True,
        "sample_ids": [1, 2],
        "val_loss": 1,
    }
    (folder / "evaluations").mkdir()
    first, second = (folder / history.NAME).read_text().splitlines()
    files = {
        "metrics.jsonl": ((folder / "metrics.jsonl").read_text(), event),
        history.NAME: (first + "\n", json.loads(second)),
        exit_codes.EXIT: ("", {"code": 75, "reason": "x", "step": 3, "checkpoint": "y"}),
        "sample.json": ("", {"step": 4, "text": "z"}),
        "evaluations/a.json": ("", score),
    }
    for name, (before, value) in files.items():
        path = folder / name
        for place in leaves(value):
            changed = json.loads(json.dumps(value))
            inside = changed
            for key in place[:-1]:
                inside = inside[key]
            inside[place[-1]] = odd
            path.write_text(before + json.dumps(changed) + "\n")
            assert drawn(folder).text, (name, place)
        path.write_text(before + json.dumps(value) + "\n")


def test_a_configuration_nested_too_deeply_is_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    folder = write(tmp_path / "run", [step_line(1)])
    for toml in ("a = " + "[" * 500 + "]" * 500, "[train]\n" + ".".join("a" * 5000) + " = 1"):
        (folder / "config.toml").write_text(toml)
        assert drawn(folder).text
        for argv in (["inspect", str(folder)], ["generate", str(folder), "--prompt", "x"]):
            assert dtmega.main(argv) in (exit_codes.REFUSED, exit_codes.DAMAGED)
            assert capsys.readouterr().err.count("\n") == 1


def test_a_directory_that_is_no_run_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    pytest.importorskip("plotly", reason="plotly is not installed (pip install -e '.[report]')")
    assert dtmega.main(["report", str(tmp_path)]) == exit_codes.REFUSED
    assert capsys.readouterr().err == (
        f"dtmega report: {tmp_path} is not a run directory: it has no metrics.jsonl and no config.toml\n"
    )


def test_plotly_that_is_missing_is_one_line_that_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setitem(sys.modules, "plotly", None)
    assert dtmega.main(["report", str(tmp_path)]) == exit_codes.REFUSED
    assert capsys.readouterr().err == (
        "dtmega report: the page needs plotly, which is not installed: pip install -e '.[report]'\n"
    )
    assert list(tmp_path.iterdir()) == []


def test_the_figures_hold_the_numbers_of_the_file_and_the_steps_at_which_it_restarted(tmp_path: Path):
    pytest.importorskip("plotly", reason="plotly is not installed (pip install -e '.[report]')")
    from dtmega.report import plots

    lines = [step_line(step) for step in range(1, 31)]
    write(tmp_path, [*lines, {"step": 10, "val_loss": 3.5}, {"step": 30, "test_loss": 3.25}])
    start(tmp_path, 0)
    start(tmp_path, 12)
    figure = json.loads(plots.over_steps(run.read([str(tmp_path)])))
    curves_of_file = {key: [line[key] for line in lines] for key in KEYS}
    drawn_curves = [numbers_of(trace["y"]) for trace in figure["data"]]
    assert all(values in drawn_curves for values in curves_of_file.values())
    assert [3.5] in drawn_curves
    assert [3.25] in drawn_curves
    for form in ("layout", "narrow"):
        shapes = figure[form]["shapes"]
        assert {line["x0"] for line in shapes} == {12.5}
        # Each panel has its line: loss, events, and six numbers.
        assert len({line["xref"] for line in shapes}) == len(shapes) == 8


@pytest.mark.parametrize("n", [10_000, pytest.param(1_000_000, marks=pytest.mark.full)])
def test_a_page_of_many_steps_is_written_where_it_is_asked_for_and_has_the_one_spike(
    n: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    pytest.importorskip("plotly", reason="plotly is not installed (pip install -e '.[report]')")
    with (write(tmp_path / "run", []) / "metrics.jsonl").open("w") as file:
        file.writelines(json.dumps(step_line(step)) + "\n" for step in range(1, n + 1) if step != n // 3)
        file.write(json.dumps(step_line(n // 3, loss=1234.5678)) + "\n")
    assert dtmega.main(["report", str(tmp_path / "run")]) == 0
    assert dtmega.main(["report", str(tmp_path / "run"), "--output", str(tmp_path / "page.html")]) == 0
    written = [tmp_path / "run" / "report.html", tmp_path / "page.html"]
    assert capsys.readouterr().out.split() == [str(path) for path in written]
    tags = Tags(written[0].read_text(encoding="utf-8"))
    assert len(tags.scripts) == 4
    loss = next(trace for trace in json.loads(tags.scripts[0])["data"] if trace.get("yaxis", "y") == "y")
    values = numbers_of(loss["y"])
    assert max(values) == 1234.5678
    assert len(values) <= 2 * curves.BUCKETS + 2
    assert written[0].stat().st_size < 6.5e6
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["metrics.jsonl", "report.html"]
