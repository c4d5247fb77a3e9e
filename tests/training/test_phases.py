"""phases.py: the times of a step on a clock of this test, and what the watch hears."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from dtmega.training import phases
from dtmega.training.phases import Phases

CPU = torch.device("cpu")


class Clock:
    """The time, and the time in which the thread was busy."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.busy_now_s = 7.0

    def work(self, seconds: float) -> None:
        self.now_s += seconds
        self.busy_now_s += seconds

    def wait(self, seconds: float) -> None:
        self.now_s += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(phases, "time", SimpleNamespace(perf_counter=lambda: clock.now_s))
    thread_time: Any = SimpleNamespace(busy_s=lambda: clock.busy_now_s, close=lambda: None)
    monkeypatch.setattr(phases, "ThreadTime", lambda: thread_time)
    return clock


@pytest.fixture
def watch() -> Mock:
    return Mock()


@pytest.fixture
def run(clock: Clock, watch: Mock) -> Phases:
    return Phases(watch, CPU, 0)


def test_own_time_is_the_wait_for_data_and_the_work_after_it_but_no_wait_for_others(run: Phases, clock: Clock):
    run.begin_step(1)
    clock.wait(1.0)
    clock.work(2.0)  # a loader in this process
    run.enter("counts")
    clock.wait(4.0)
    run.enter(phases.COMPUTING)
    clock.work(8.0)
    clock.wait(16.0)
    run.enter(phases.REDUCE)
    clock.wait(32.0)
    run.enter(phases.OPTIMIZER)
    clock.work(64.0)
    times = run.end_step()
    clock.work(500.0)
    assert times.own_s == 1 + 2 + 8 + 64
    assert times.step_s == 127
    assert times.phases == {
        "data_s": 3,
        "forward_backward_s": 24,
        "reduce_s": 32,
        "optimizer_s": 64,
        "other_s": 4,
    }


def test_what_comes_between_two_steps_belongs_to_neither(run: Phases, clock: Clock):
    for step in (1, 2):
        run.begin_step(step)
        clock.work(1.0)
        run.enter(phases.COMPUTING)
        clock.work(2.0)
        assert run.end_step().step_s == 3
        run.enter("evaluation")
        clock.work(1000.0)


def test_a_phase_that_comes_twice_in_a_step_counts_with_both(run: Phases, clock: Clock):
    run.begin_step(1)
    for _ in range(2):
        run.enter(phases.COMPUTING)
        clock.work(1.0)
        run.enter(phases.REDUCE)
        clock.work(2.0)
    times = run.end_step()
    assert (times.phases["forward_backward_s"], times.phases["reduce_s"]) == (2, 4)


def test_the_watch_hears_of_each_phase_with_the_step_that_it_belongs_to(run: Phases, watch: Mock):
    run.enter("evaluation")
    run.begin_step(1)
    run.enter("counts")
    run.end_step()
    run.enter("checkpoint")
    run.begin_step(2)
    heard = [call.args for call in watch.beat.call_args_list]
    assert heard == [(0, "evaluation"), (1, "data"), (1, "counts"), (1, "report"), (1, "checkpoint"), (2, "data")]


def test_a_step_that_is_not_profiled_has_no_ranges_to_enter(monkeypatch: pytest.MonkeyPatch, run: Phases):
    entered: list[str] = []
    monkeypatch.setattr(torch.profiler, "record_function", entered.append)
    run.begin_step(1)
    run.enter("counts")
    run.end_step()
    run.close()
    assert entered == []


def test_the_line_of_a_log_has_every_time(run: Phases, clock: Clock):
    run.begin_step(1)
    clock.wait(0.25)
    run.enter(phases.COMPUTING)
    clock.work(0.5)
    assert run.end_step().in_words("step 1") == (
        "step 1 | 0.75 s (own work 0.75 s) | data 0.25 s | forward_backward 0.5 s | reduce 0 s | optimizer 0 s | "
        "other 0 s"
    )


def test_the_phases_of_a_gpu_are_told_by_its_events(monkeypatch: pytest.MonkeyPatch, watch: Mock):
    """Events whose clock goes on by 1 ms at each record; nothing of this has run on a GPU."""

    class Event:
        n_recorded = 0

        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            Event.n_recorded += 1
            self.at_ms = Event.n_recorded

        def synchronize(self) -> None:
            pass

        def elapsed_time(self, other: Event) -> float:
            return other.at_ms - self.at_ms

    monkeypatch.setattr(torch.cuda, "Event", Event)
    run = Phases(watch, torch.device("cuda"), 0)
    run.begin_step(1)
    for name in ("counts", phases.COMPUTING, phases.REDUCE, phases.OPTIMIZER):
        time.sleep(0.01)
        run.enter(name)
    times = run.end_step()
    assert times.step_s == pytest.approx(0.005)
    assert set(times.phases.values()) == {0.001}
    assert times.own_s == pytest.approx(0.003)
    run.close()
