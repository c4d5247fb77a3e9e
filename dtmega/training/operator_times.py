"""The time of each operator in a profile, computed from the events of torch's profiler."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch


@dataclass
class _OperatorTime:
    """The total time of all calls to one operator.

    Attributes:
        is_range: whether this is a named range in the trace rather than an operator.
        calls: number of calls.
        nanoseconds: total time of all calls, in nanoseconds.
    """

    is_range: bool = False
    calls: int = 0
    nanoseconds: int = 0

    def add(self, nanoseconds: int) -> None:
        """Add the time of one call."""
        self.calls += 1
        self.nanoseconds += nanoseconds

    @property
    def seconds(self) -> float:
        return max(self.nanoseconds, 0) / 1e9


def largest(profile: torch.profiler.profile, device: torch.device, n: int) -> list[dict[str, Any]]:
    """The operators with the largest self times; on a GPU, the kernels with the largest times.

    An operator's self time excludes the time of the operators that it calls.

    Args:
        profile: stopped profile.
        device: device that was profiled.
        n: number of operators to return.

    Returns:
        Dicts, one per operator, largest time first. The keys are `name`, `calls` (number of calls), `self_s` (seconds
        on the host; 0 for a GPU) and `self_device_s` (seconds on the GPU; 0 for a CPU).
    """
    assert profile.profiler is not None
    results = profile.profiler.kineto_results
    assert results is not None
    # `key_averages()` is too slow: it takes 50 microseconds per event, and a step has tens of thousands of events.
    events = results.events()
    on_device = device.type == "cuda"
    times = _kernel_times(events) if on_device else _self_times(events)
    rows = []
    for name, spent in sorted(times.items(), key=lambda item: item[1].seconds, reverse=True)[:n]:
        seconds = {"self_s": 0.0, "self_device_s": 0.0}
        seconds["self_device_s" if on_device else "self_s"] = spent.seconds
        rows.append({"name": name, "calls": spent.calls, **seconds})
    return rows


def _kernel_times(events: Iterable[Any]) -> dict[str, _OperatorTime]:
    """The total time of each kernel on the device, keyed by kernel name."""
    times: dict[str, _OperatorTime] = {}
    for event in events:
        if event.device_type().name == "CUDA" and not event.is_user_annotation():
            times.setdefault(event.name(), _OperatorTime()).add(event.duration_ns())
    return times


def _self_times(events: Iterable[Any]) -> dict[str, _OperatorTime]:
    """The total self time of each operator on the host, keyed by operator name."""
    of_threads: dict[int, list[Any]] = {}
    for event in events:
        # Allocations are events without a duration.
        if event.device_type().name == "CPU" and event.duration_ns() > 0:
            of_threads.setdefault(event.start_thread_id(), []).append(event)
    times: dict[str, _OperatorTime] = {}
    for thread in of_threads.values():
        # Sort callers before the operators that they call. A caller begins earlier, or begins at the same time and
        # ends later.
        thread.sort(key=lambda event: (event.start_ns(), -event.duration_ns()))
        callers: list[tuple[int, str]] = []  # (end, name) of the operators that are still running
        for event in thread:
            start_ns, duration_ns = event.start_ns(), event.duration_ns()
            while callers and callers[-1][0] <= start_ns:
                callers.pop()
            if callers:
                times[callers[-1][1]].nanoseconds -= duration_ns
            times.setdefault(event.name(), _OperatorTime(event.is_user_annotation())).add(duration_ns)
            callers.append((start_ns + duration_ns, event.name()))
    # Leave out named ranges, which are not operators.
    return {name: spent for name, spent in times.items() if not spent.is_range}
