"""operator_times.py beside torch's own sums over a profile."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile, record_function

from dtmega.training import operator_times


def test_operators_on_a_cpu_have_the_calls_and_self_times_of_torchs_averages():
    model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(5)))
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as recorded, record_function("a range"):
        for _ in range(3):
            model(torch.ones(2, 8)).sum().backward()
    found = {row["name"]: row for row in operator_times.largest(recorded, torch.device("cpu"), 1000)}
    # torch counts no call that it has merged into its caller, so only the times are its own.
    truth = {event.key: event.self_cpu_time_total / 1e6 for event in recorded.key_averages() if event.key in found}
    assert {name: row["self_s"] for name, row in found.items()} == pytest.approx(truth, abs=1e-8)
    assert found["aten::addmm"]["calls"] == 3 * 5
    assert "a range" not in found
    assert len(operator_times.largest(recorded, torch.device("cpu"), 3)) == 3


def event(name: str, kind: str, duration_ns: int, is_range: bool = False, start_ns: int = 0, thread: int = 1) -> Any:
    return SimpleNamespace(
        name=lambda: name,
        device_type=lambda: SimpleNamespace(name=kind),
        start_ns=lambda: start_ns,
        duration_ns=lambda: duration_ns,
        start_thread_id=lambda: thread,
        is_user_annotation=lambda: is_range,
    )


def profiled(*events: Any) -> Any:
    """A stopped profile with these events."""
    results = SimpleNamespace(events=lambda: events)
    return SimpleNamespace(profiler=SimpleNamespace(kineto_results=results))


def test_an_operator_that_begins_when_another_ends_is_not_called_by_it_nor_is_one_of_another_thread():
    recorded = profiled(
        event("after", "CPU", 20, start_ns=100),
        event("inner", "CPU", 30, start_ns=0),  # begins with its caller
        event("outer", "CPU", 100, start_ns=0),
        event("last inner", "CPU", 50, start_ns=50),  # ends with its caller
        event("meanwhile", "CPU", 1, start_ns=60, thread=2),
        event("allocation", "CPU", 0, start_ns=60),
    )
    rows = operator_times.largest(recorded, torch.device("cpu"), 9)
    found = {row["name"]: row["self_s"] for row in rows}
    nanoseconds = {"outer": 20, "inner": 30, "last inner": 50, "after": 20, "meanwhile": 1}
    assert found == {name: duration / 1e9 for name, duration in nanoseconds.items()}
    assert {row["self_device_s"] for row in rows} == {0.0}
    assert [row["name"] for row in operator_times.largest(recorded, torch.device("cpu"), 2)] == ["last inner", "inner"]


def test_on_a_gpu_the_kernels_are_added_up_by_name():
    events = [
        event("gemm", "CUDA", 5),
        event("aten::mm", "CPU", 9),
        event("gemm", "CUDA", 7),
        event("x", "CUDA", 99, True),
    ]
    assert operator_times.largest(profiled(*events), torch.device("cuda"), 5) == [
        {"name": "gemm", "calls": 2, "self_s": 0.0, "self_device_s": 12e-9}
    ]
