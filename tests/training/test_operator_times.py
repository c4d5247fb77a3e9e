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


def test_on_a_gpu_the_kernels_are_added_up_by_name():
    def event(name: str, kind: str, duration_ns: int, is_range: bool = False) -> Any:
        return SimpleNamespace(
            name=lambda: name,
            device_type=lambda: SimpleNamespace(name=kind),
            duration_ns=lambda: duration_ns,
            is_user_annotation=lambda: is_range,
        )

    events = [
        event("gemm", "CUDA", 5),
        event("aten::mm", "CPU", 9),
        event("gemm", "CUDA", 7),
        event("x", "CUDA", 99, True),
    ]
    results = SimpleNamespace(events=lambda: events)
    recorded: Any = SimpleNamespace(profiler=SimpleNamespace(kineto_results=results))
    assert operator_times.largest(recorded, torch.device("cuda"), 5) == [
        {"name": "gemm", "calls": 2, "self_s": 0.0, "self_device_s": 12e-9}
    ]
