"""report/: the numbers that are said of a run are those of its files, counted once more here."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli_w

from dtmega import config
from dtmega.checkpoint.files import open_root
from dtmega.files import object_requests
from dtmega.pipelining import draw
from dtmega.pipelining.table import make_table
from dtmega.report import curves, layout, plots, record, run, scores
from dtmega.report.record import Series
from dtmega.training import phases
from tests.object_server import serving
from tests.report.test_page import HOSTILE, drawn, numbers_of, start, step_line, write


def test_of_many_steps_that_were_done_again_in_any_order_the_later_line_counts(tmp_path: Path):
    steps = [*range(1, 101), *range(51, 101), *range(31, 81), *range(51, 61)]
    lines = [{"step": step, "loss": place / 8} for place, step in enumerate(steps)]
    found = record.read(write(tmp_path, lines) / "metrics.jsonl")
    later = {line["step"]: line["loss"] for line in lines}
    assert dict(zip(*(part.tolist() for part in found.series["loss"]), strict=True)) == later
    assert found.last_step == 100


def test_counts_sums_and_the_most_memory_are_of_all_lines(tmp_path: Path):
    memory = [2**30, 3 * 2**30, 2**30, 2**29]
    lines = [step_line(i + 1, peak_memory_bytes=n, tokens=(i + 1) * 10**9) for i, n in enumerate(memory)]
    lines += [{"step": step, "skipped": True} for step in (5, 6)]
    lines += [{"step": 6, "val_loss": 2.0, "val_right": 0.5}, {"step": 6, "test_loss": 3.0}]
    for step in (0, 1, 3, 4):
        start(tmp_path, step)
    (found,) = run.read([str(write(tmp_path, lines))])
    numbers = run.numbers(found)
    assert numbers["peak memory, rank 0"] == "3 GiB"
    assert numbers["tokens"] == "4 G"
    assert (numbers["restarts"], numbers["skipped steps"]) == ("3", "2")
    # A weighted sum of several losses is the logarithm of no perplexity.
    assert (numbers["validation loss"], numbers["test loss"]) == ("2", "3")
    evaluations = [event.text for event in found.events if event.kind == "evaluation"]
    assert evaluations == ["val_loss 2.0, val_right 0.5", "test_loss 3.0"]


def test_a_run_is_the_newest_that_began_anew_and_a_start_that_wrote_no_step_has_no_part(tmp_path: Path):
    for step in (0, 40, 0, 20, 60):
        start(tmp_path, step)
    (tmp_path / "config.toml").write_text("[optim]\nlr = 0.125\n")  # that of the newest start, written out
    (found,) = run.read([str(write(tmp_path, [step_line(step) for step in range(1, 61)]))])
    assert [one.step for one in found.starts] == [0, 20, 60]
    assert [(part.first, part.last) for part in found.parts] == [(1, 20), (21, 60)]
    assert found.config == {"optim": {"lr": 0.125}}


def test_of_more_restarts_than_are_drawn_the_newest_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(curves, "MAX_LINES", 2)
    for step in (0, 5, 10, 15):
        start(tmp_path, step)
    (found,) = run.read([str(write(tmp_path, [step_line(step) for step in range(1, 21)]))])
    assert curves.restarted_after(found) == [10, 15]


def test_a_score_has_the_error_and_the_name_of_its_own_filter(tmp_path: Path):
    values = {"exact,strict": 0.5, "exact_stderr,strict": 0.125, "exact,loose": 0.75, "exact_stderr,loose": 0.25}
    (tmp_path / "evaluations").mkdir()
    content = {"step": 3, "results": {"sums": values | {"acc,none": 1, "bleu": 7.5}}}
    (tmp_path / "evaluations" / "one.json").write_text(json.dumps(content))
    found = {score.metric: (score.value, score.error) for score in scores.read(tmp_path, 3).scores}
    assert found == {
        **{"exact (strict)": (0.5, 0.125), "exact (loose)": (0.75, 0.25)},
        **{"acc": (1.0, None), "bleu": (7.5, None)},
    }


def test_slow_steps_are_the_percentiles_of_all_steps_and_their_sum(tmp_path: Path):
    times_s = np.random.default_rng(0).permutation(np.arange(1, 2001)) * 0.009
    lines = [step_line(step, step_time_s=time_s) for step, time_s in enumerate(times_s.tolist(), 1)]
    said = drawn(write(tmp_path, lines)).text
    # The k-th smallest of them is 9 k ms.
    for label, k in (("median", 1000), ("9 of 10 within", 1800), ("99 of 100", 1980), ("999 of 1,000", 1998)):
        assert f"{label} {k * 0.009:.3g} s" in said, label
    assert f"slowest 18 s, step {1 + int(times_s.argmax()):,}" in said
    assert f"all steps {times_s.sum() / 3600:.3g} h" in said


def test_the_slow_tail_is_drawn_as_shares_of_all_steps(tmp_path: Path):
    times_s = np.arange(1, 401) / 8
    lines = [step_line(step, step_time_s=time_s) for step, time_s in enumerate(times_s.tolist(), 1)]
    (curve,) = json.loads(plots.tail(run.read([str(write(tmp_path, lines))])))["data"]
    expected = [(times_s >= time_s).mean() for time_s in numbers_of(curve["x"])]
    np.testing.assert_allclose(numbers_of(curve["y"]), expected)


def test_steps_beyond_32_bits_are_drawn_where_they_are():
    steps = np.array([1, 2**31 - 1, 2**31, 2**40])
    for n in range(1, 5):
        assert np.array_equal(plots._packable(steps[:n]), steps[:n])
    assert np.array_equal(plots._packable(Series(steps[:0], steps[:0]).steps), [])


def test_of_more_events_than_are_listed_the_newest_are(tmp_path: Path):
    lines = [{"step": step, "skipped": True, "reason": f"reason-{step}."} for step in range(1, 61)]
    said = drawn(write(tmp_path, [step_line(60), *lines])).text
    listed = {int(number) for number in re.findall(r"reason-(\d+)\.", said)}
    assert listed == {*range(11, 61)}


def test_ranks_stand_within_the_box_of_their_group():
    svg = layout.mesh_svg({"pp": 2, "dp_replicate": 2, "dp_shard": 1, "cp": 1, "tp": 4})
    numbers = r'<rect x="([\d.]+)" y="([\d.]+)" width="([\d.]+)" height="([\d.]+)" rx="(\d)"'
    rects = [tuple(map(float, found)) for found in re.findall(numbers, svg)]
    boxes = [rect for rect in rects if rect[4] == 6]
    cells = [rect for rect in rects if rect[4] == 4]
    assert (len(boxes), len(cells)) == (4, 16)
    for x, y, width, height, _ in cells:
        around = [
            box
            for box in boxes
            if box[0] <= x and x + width <= box[0] + box[2] and box[1] <= y and y + height <= box[1] + box[3]
        ]
        assert len(around) == 1


def test_the_drawn_schedule_has_the_microbatches_of_a_data_rank():
    values = {"batch": {"micro_batch_size": 2, "global_batch_size": 24}, "mesh": {"pp": 2, "dp_shard": 3}}
    values["train"] = {"steps": 1}
    sizes = {"pp": 2, "dp_replicate": 1, "dp_shard": 3, "cp": 1, "tp": 1}
    cfg = config.validate(values, "test")
    table = make_table(cfg.pipeline, 2, 24 // (2 * 3))
    assert layout.schedule(values, sizes) == (draw.svg(table, ""), draw.describe(table, cfg.pipeline.schedule))


def kept(folder: Path, name: str) -> None:
    """A folder that looks like a complete checkpoint."""
    (folder / name).mkdir(parents=True)
    (folder / name / "manifest.json").write_text("{}")


def best_in_words(folder: Path) -> str:
    return run.numbers(run.read([str(folder)])[0])["best validation loss"]


@pytest.fixture
def validated(tmp_path: Path) -> Path:
    """A run whose validation loss was best after step 40."""
    losses = {20: 4.5, 40: 4.25, 60: 4.75}
    lines = [{"step": step, "val_loss": loss} for step, loss in losses.items()]
    return write(tmp_path / "run", [*(step_line(step) for step in range(1, 61)), *lines])


def test_the_best_validation_loss_names_its_checkpoint_if_that_is_kept(validated: Path):
    assert best_in_words(validated) == "4.25 (step 40)"
    kept(validated / "checkpoints", "step-00000060")
    kept(validated / "checkpoints", ".tmp-step-00000040")
    kept(validated / "checkpoints" / "superseded-1", "step-00000040")
    assert best_in_words(validated) == "4.25 (step 40)"
    kept(validated / "checkpoints", "step-00000040")
    assert best_in_words(validated) == "4.25 (step 40, checkpoints/step-00000040)"
    assert "4.25 (step 40, checkpoints/step-00000040)" in drawn(validated).text
    (validated / "checkpoints" / "step-00000040" / "manifest.json").unlink()
    assert best_in_words(validated) == "4.25 (step 40)"


def test_the_best_checkpoint_is_looked_for_where_the_run_saves(validated: Path, tmp_path: Path):
    (validated / "config.toml").write_text(f"[checkpoint]\ndir = '{tmp_path}/elsewhere'\n")
    kept(validated / "checkpoints", "step-00000040")
    assert best_in_words(validated) == "4.25 (step 40)"
    kept(tmp_path / "elsewhere", "step-00000040")
    assert best_in_words(validated) == f"4.25 (step 40, {tmp_path}/elsewhere/step-00000040)"


def test_the_path_of_the_best_checkpoint_does_not_become_markup(validated: Path, tmp_path: Path):
    name = HOSTILE.replace("/", "")
    (validated / "config.toml").write_text(tomli_w.dumps({"checkpoint": {"dir": f"{tmp_path}/{name}"}}))
    kept(tmp_path / name, "step-00000040")
    tags = drawn(validated)
    assert "img" not in {tag for tag, _ in tags.tags}
    assert f"{tmp_path}/{name}/step-00000040" in tags.text


def test_checkpoints_under_a_url_are_not_looked_for(validated: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(run.resume, "newest_of_run", lambda run_dir: pytest.fail(f"{run_dir} is looked at"))
    (validated / "config.toml").write_text("[checkpoint]\ndir = 'memory://bucket/run'\n")
    assert best_in_words(validated) == "4.25 (step 40)"


def test_the_best_checkpoint_is_looked_for_in_an_object_store(validated: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(object_requests, "MAX_RETRIES", 0)
    (validated / "config.toml").write_text("[checkpoint]\ndir = 's3://bucket/run'\n")
    with serving() as store:
        for name, value in store.environment.items():
            monkeypatch.setenv(name, value)
        files = open_root("s3://bucket/run")
        for step in (20, 40):
            with files.create(f"step-{step:08d}", "manifest.json") as file:
                file.write(b"{}")
        assert best_in_words(validated) == "4.25 (step 40, s3://bucket/run/step-00000040)"
        files.remove("step-00000040")
        assert best_in_words(validated) == "4.25 (step 40)"
    # The store has ended.
    assert best_in_words(validated) == "4.25 (step 40)"


PHASE_KEYS = ("data_s", "forward_backward_s", "reduce_s", "optimizer_s", "other_s")


def phased(n_steps: int) -> list[dict[str, Any]]:
    """Steps with random times of their phases, which add up to the step time."""
    lines = []
    for step, times_s in enumerate(np.random.default_rng(0).exponential(size=(n_steps, 5)).tolist(), 1):
        lines.append(step_line(step, step_time_s=sum(times_s), **dict(zip(PHASE_KEYS, times_s, strict=True))))
    return lines


def test_the_panel_has_the_phases_that_the_trainer_records():
    assert {key: phase for phase, key in phases.KEYS.items()} | {"other_s": "other"} == curves.STEP_PHASES
    assert curves.STEP_PHASES.keys() == {*PHASE_KEYS}


@pytest.mark.parametrize("n_steps", [1, 7, 40])
def test_the_share_of_a_phase_is_its_part_of_the_step_time(tmp_path: Path, n_steps: int):
    lines = phased(n_steps)
    steps, shares = curves.phase_shares(record.read(write(tmp_path, lines) / "metrics.jsonl").series)
    assert steps == [*range(1, n_steps + 1)]
    assert [*shares] == ["data", "forward+backward", "reduce", "optimizer", "other"]
    for key, of_phase in zip(PHASE_KEYS, shares.values(), strict=True):
        np.testing.assert_allclose(of_phase, [line[key] / line["step_time_s"] for line in lines])


def test_of_many_steps_the_shares_are_of_the_time_of_stretches(tmp_path: Path):
    lines = phased(103)
    steps, shares = curves.phase_shares(record.read(write(tmp_path, lines) / "metrics.jsonl").series, most=10)
    assert len(steps) == 10
    assert steps[-1] == 103
    for key, of_phase in zip(PHASE_KEYS, shares.values(), strict=True):
        first = 0
        for last, share in zip(steps, of_phase, strict=True):
            stretch = lines[first:last]
            assert share == pytest.approx(
                sum(line[key] for line in stretch) / sum(line["step_time_s"] for line in stretch)
            )
            first = last


def test_phases_that_no_run_writes_are_no_traceback(tmp_path: Path):
    odd = [{"data_s": -1.0}, {"data_s": 1e308, "other_s": 1e308}, {"reduce_s": None}, {"optimizer_s": 10**400}]
    odd += [dict.fromkeys(PHASE_KEYS, 0), dict.fromkeys(PHASE_KEYS, -0.0)]
    lines = [line | values for line, values in zip(phased(6), odd, strict=True)]
    (found,) = run.read([str(write(tmp_path, lines))])
    steps, shares = curves.phase_shares(found.record.series)
    assert steps == [1, 2]
    assert all(0 <= share <= 1 for of_phase in shares.values() for share in of_phase)
    assert json.loads(plots.over_steps([found]))
    assert curves.phase_shares({}) == ([], {})


def test_the_phases_of_one_run_share_a_panel_and_those_of_several_have_none(tmp_path: Path):
    for name in ("a", "b"):
        write(tmp_path / name, phased(30))
    alone = run.read([str(tmp_path / "a")])
    figure = json.loads(plots.over_steps(alone))
    stacked = [trace for trace in figure["data"] if "stackgroup" in trace]
    assert [trace["name"] for trace in stacked] == ["data", "forward+backward", "reduce", "optimizer", "other"]
    assert len({trace["yaxis"] for trace in stacked}) == 1
    np.testing.assert_allclose(np.sum([trace["y"] for trace in stacked], axis=0), 1)
    for form in ("layout", "narrow"):
        titles = [title["text"] for title in figure[form]["annotations"]]
        assert len(titles) == 2 + 7  # loss and events, six numbers and the phases
        assert titles.count("Step time by phase") == 1
        assert not set(titles) & {*PHASE_KEYS}
    several = json.loads(plots.over_steps(run.read([str(tmp_path / "a"), str(tmp_path / "b")])))
    assert len(several["layout"]["annotations"]) == 2 + 6
    assert not [trace for trace in several["data"] if "stackgroup" in trace]
