"""planning/search.py: against a plain loop over all layouts with given counts, and with real plans."""

from __future__ import annotations

import dataclasses
import functools
import json
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dtmega import config, families, mesh
from dtmega.planning.prices import fabric
from dtmega.planning.prices.step_time import StepTime
from dtmega.planning.search import ranking, search, table
from dtmega.planning.search.estimate import MARGIN, Estimate, Estimator
from dtmega.planning.search.layout import Layout, with_layout
from dtmega.planning.search.layouts import Fallen, Layouts
from dtmega.planning.search.planners import Planners, TooLarge
from dtmega.planning.search.ranking import Found, Progress, Result, Summary
from dtmega.planning.search.shortlist import Entry
from dtmega.training import checks

A100 = fabric.load("a100-ib")
GPU = torch.device("cuda", 0)
WORLD = 4


def small(**sections: dict[str, Any]) -> config.Config:
    values: dict[str, dict[str, Any]] = {
        "model": {"name": "bloom", "vocab_size": 512, "hidden_size": 256, "n_layers": 4, "n_heads": 4},
        "data": {"seq_len": 64},
        "batch": {"micro_batch_size": 1, "global_batch_size": 16},
        "precision": {"params": "bfloat16"},
        "train": {"steps": 1},
    }
    for name, keys in sections.items():
        values[name] = values.get(name, {}) | keys
    return families.resolve(config.validate(values, "test"))


@functools.cache
def of_small() -> dict[Layout, Estimate]:
    cfg = small()
    layouts = Layouts(cfg, (), WORLD, GPU)
    estimator = Estimator(cfg, layouts.pieces, A100)
    return {layout: estimator.estimate(layout) for layout in layouts.legal(Fallen())}


@dataclasses.dataclass
class Counting:
    """Counts that a test gives, in the place of the planner's."""

    counts: Callable[[Entry], tuple[float, float]]  # peak in bytes, seconds
    room_bytes: int
    interrupt_after: int = 10**9
    at_once: int = 2
    gives_up: bool = False  # as the planner does where one rank does not fit
    planned: list[Entry] = dataclasses.field(default_factory=list)
    waiting: list[Entry] = dataclasses.field(default_factory=list)
    imbalances: dict[Layout, float] = dataclasses.field(default_factory=dict)

    def __enter__(self) -> Counting:
        return self

    def __exit__(self, *_: object) -> None:
        self.waiting.clear()

    @property
    def n_running(self) -> int:
        return len(self.waiting)

    def begin(
        self, entry: Entry, cfg: config.Config, sizes: dict[str, int], _device: Any, _finish: Any, imbalance: float
    ) -> None:
        assert len(self.waiting) < self.at_once
        checks.check(cfg, mesh.resolve(cfg.mesh, WORLD), GPU)
        assert sizes == entry.layout.sizes
        self.waiting.append(entry)
        self.imbalances[entry.layout] = imbalance

    def done(self) -> list[tuple[Entry, Result | ValueError]]:
        if len(self.planned) >= self.interrupt_after:
            raise KeyboardInterrupt
        entry = self.waiting.pop(0)
        self.planned.append(entry)
        peak_bytes, seconds = self.counts(entry)
        if self.gives_up and peak_bytes > self.room_bytes:
            return [(entry, TooLarge(round(peak_bytes), self.room_bytes))]
        summary = Summary(0, round(peak_bytes), "0B0", {})
        time = StepTime(seconds, seconds, 0.0, 0.0, {}, {}, {}, {}, None)
        fits = peak_bytes <= self.room_bytes
        return [(entry, Result(entry.layout.overrides, *entry[3:], summary, time, 1024 / seconds, fits))]


def run(monkeypatch, cfg: config.Config, counting: Counting, *fixed: str, top: int = 10, **options: Any) -> Found:
    class Fake:
        def __class_getitem__(cls, _: Any) -> Callable[[int, int], Counting]:
            return lambda at_once, room_bytes: counting

    monkeypatch.setattr(ranking, "Planners", Fake)
    return search(cfg, fixed, WORLD, A100, counting.room_bytes + 100, 100, top, GPU, **options)


def as_estimated(entry: Entry) -> tuple[float, float]:
    return entry.estimate.peak_bytes, entry.estimate.seconds


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_the_best_is_the_fastest_of_all_that_fit(monkeypatch, share: float):
    cfg = small()
    all_of = of_small()
    peaks = sorted(estimate.peak_bytes for estimate in all_of.values())
    room_bytes = peaks[int(share * len(peaks))]
    found = run(monkeypatch, cfg, Counting(as_estimated, room_bytes))
    fastest_s = min(estimate.seconds for estimate in all_of.values() if estimate.peak_bytes <= room_bytes)
    assert found.best is not None
    assert found.best.time.seconds == fastest_s
    assert len(found.ranked) == 10
    seconds = [result.time.seconds for result in found.ranked if result.fits]
    assert seconds == sorted(seconds)
    assert not any(result.fits for result in found.ranked[len(seconds) :])


def test_what_only_counts_know_to_fit_is_found(monkeypatch):
    """All estimates exceed the room, by less than the margin for one layout, and its counts fit."""
    cfg = small()
    all_of = of_small()
    smallest = min(all_of, key=lambda layout: all_of[layout].peak_bytes)
    room_bytes = round(all_of[smallest].peak_bytes / MARGIN) + 1
    counting = Counting(lambda entry: (entry.estimate.peak_bytes / MARGIN, 1.0), room_bytes)
    found = run(monkeypatch, cfg, counting, top=2)
    assert found.best is not None
    assert found.best.estimate.peak_bytes == all_of[smallest].peak_bytes
    assert "does not fit by estimate" in table.text(found)


def test_more_are_planned_while_none_fits_and_room_is_kept_for_what_fits_for_certain(monkeypatch):
    cfg = small()
    all_of = of_small()
    peaks = sorted(estimate.peak_bytes for estimate in all_of.values())
    room_bytes = peaks[len(peaks) // 2]
    # Counts are as much above the estimates as the margin allows: doubtful layouts do not fit, certain ones do.
    counting = Counting(lambda entry: (entry.estimate.peak_bytes * MARGIN, entry.estimate.seconds), room_bytes)
    found = run(monkeypatch, cfg, counting, top=4)
    fits = [estimate.seconds for estimate in all_of.values() if estimate.peak_bytes * MARGIN <= room_bytes]
    assert found.best is not None
    assert found.best.time.seconds == min(fits)
    never = run(monkeypatch, cfg, Counting(lambda entry: (10**18, 1.0), room_bytes), top=4)
    assert never.best is None
    assert len(never.ranked) > 4
    with pytest.raises(ValueError, match=r"no layout to write: .* \(--write, --memory, --reserve\)"):
        table.best_toml(cfg, never)


@pytest.mark.parametrize("gives_up", [False, True])
def test_every_layout_is_ranked_or_counted_among_the_fallen(monkeypatch, gives_up: bool):
    cfg = small()
    room_bytes = sorted(estimate.peak_bytes for estimate in of_small().values())[5]
    found = run(monkeypatch, cfg, Counting(as_estimated, room_bytes, gives_up=gives_up), top=3)
    assert found.n_layouts == len(found.ranked) + sum(reason.n for reason in found.fallen)
    assert gives_up == ("does not fit by counts: " in table.text(found))
    assert found.n_legal == len(of_small())


def test_of_layouts_that_differ_in_their_schedule_alone_the_smallest_is_planned(monkeypatch):
    counting = Counting(as_estimated, 2**40)
    run(monkeypatch, small(mesh={"pp": 4}), counting, "mesh.pp")
    times = [(entry.layout._replace(schedule=""), entry.speed) for entry in counting.planned]
    assert len(times) == len(set(times))
    for layout in (entry.layout for entry in counting.planned):
        # 1F1B needs a microbatch for each of the 4 stages, and then keeps fewer than GPipe.
        assert layout.schedule != "GPipe" or layout.micro_batch_size > 4


def test_only_layouts_with_ep_have_an_imbalance_and_none_has_more_than_all_tokens_of_its_group(monkeypatch):
    model = {"name": "moe", "n_experts": 4, "n_kv_heads": 2, "expert_ffn_hidden_size": 64}
    cfg = small(model=model)
    counting = Counting(as_estimated, 2**40)
    found = run(monkeypatch, cfg, counting, "mesh.pp", "mesh.tp", "recompute.mode", top=100, imbalance=3.0)
    assert {(layout.ep, imbalance) for layout, imbalance in counting.imbalances.items()} == {(1, 1), (2, 2), (4, 3)}
    words = "assumed with ep: a largest load of 3 times the mean; the loads of a run depend on the data"
    assert words in table.text(found)


def test_an_interrupted_search_gives_what_is_known(monkeypatch):
    cfg = small()
    counting = Counting(as_estimated, 2**40, interrupt_after=3)
    found = run(monkeypatch, cfg, counting)
    assert found.interrupted
    assert [result.layout for result in found.ranked] == [entry.layout for entry in sorted(counting.planned)[::-1]]
    first = run(monkeypatch, cfg, Counting(as_estimated, 2**40, interrupt_after=0))
    assert first.interrupted
    assert first.ranked == []
    assert [entry.layout for entry in first.estimated][:3] == [result.layout for result in found.ranked]
    assert "interrupted" in table.text(first)
    assert first.n_layouts == sum(reason.n for reason in first.fallen)


def test_progress_says_how_much_is_done_and_how_long_the_rest_takes(monkeypatch):
    told: list[Progress] = []
    run(monkeypatch, small(), Counting(as_estimated, 2**40), top=4, on_progress=told.append)
    told = [progress for progress in told if progress.doing == "planning layouts"]
    assert [progress.done for progress in told] == [0, 1, 2, 3]
    assert {progress.all for progress in told} == {4}
    assert told[0].left_s is None
    assert told[-1].left_s is not None
    assert "planning layouts: 3 of 4, about 0 s left; best so far " in str(told[-1])


@pytest.mark.parametrize("mode", ["full", "none"])
def test_the_best_is_written_as_toml_that_train_reads_and_accepts(monkeypatch, tmp_path: Path, mode: str):
    cfg = small(recompute={"mode": "full", "layers": 2})
    chance = random.Random(7)
    counting = Counting(lambda entry: (1.0, (entry.layout.mode != mode) + chance.random()), 2**40)
    found = run(monkeypatch, cfg, counting, "mesh.tp") if mode == "none" else run(monkeypatch, cfg, counting)
    file = tmp_path / "best.toml"
    file.write_text(table.best_toml(cfg, found), encoding="utf-8")
    again = config.load(["--config", str(file)])
    assert found.best is not None
    assert again == with_layout(cfg, found.best.layout)
    checks.check(again, mesh.resolve(again.mesh, WORLD), GPU)


def test_the_result_is_json_with_the_keys_to_set(monkeypatch):
    found = run(monkeypatch, small(mesh={"tp": 2}), Counting(as_estimated, 2**40), "mesh.tp", top=2)
    values = json.loads(json.dumps(table.as_dict(found)))
    assert values["fixed"] == {"mesh.tp": 2}
    assert len(values["ranked"]) == 2
    assert all(row["keys"]["mesh.tp"] == 2 and row["fits"] for row in values["ranked"])
    assert values["layouts"] == 2 + sum(reason["n"] for reason in values["fallen"])


@pytest.mark.full
def test_a_real_search_plans_real_steps():
    """The two fastest layouts of 2 ranks are planned in processes of their own."""
    cfg = small(model={"n_layers": 2}, compile={"enable": False}, mesh={"dp_shard": 2})
    found = search(cfg, ["mesh.dp_shard"], 2, A100, 2**30, 2**20, top=1, device=GPU)
    assert found.best is not None
    assert found.best.layout.dp_shard == 2
    error = found.best.summary.peak_bytes / found.best.estimate.peak_bytes
    assert 0.3 < error < 3  # a tiny model, of which constants are a large part
    assert found.best.tokens_per_s == pytest.approx(16 * 64 / found.best.time.seconds)


@pytest.mark.full
def test_leaving_early_ends_the_processes_at_once():
    cfg = small(compile={"enable": False})
    layout = next(layout for layout in of_small() if layout.pp == 2)
    processes: list[Any] = []
    with Planners[str, object](2, 2**40) as planners:
        for name in ("first", "second"):
            planners.begin(name, with_layout(cfg, layout), layout.sizes, GPU, lambda plan: plan)
        while len(planners._processes) < 2:
            time.sleep(0.01)
        processes += planners._processes
        began_s = time.monotonic()
    assert time.monotonic() - began_s < 3
    for process in processes:
        process.join(3)
        assert process.exitcode == -signal.SIGKILL
