"""The way of measuring here, such that a busy machine changes little in it.

Times are CPU seconds of this process, which has one thread: what other processes take of the machine does not count.
Forms that are compared take turns, in the opposite order every other round, and a time is the median over the rounds.
"""

from __future__ import annotations

import ctypes
import gc
import statistics
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

SAMPLED_EVERY_S = 0.002
FP32_LOSS = 1e-5  # the largest relative difference of two losses in fp32 that are called equal
SHOWN_OPERATORS = 10


class Row(NamedTuple):
    """A line of the table.

    Attributes:
        name: of what is measured.
        peer: what it is measured beside: another program, a floor, or a closed form.
        ours, theirs: the two figures, in `unit`; smaller is better.
        reach: the largest ratio of the two that counts as reached; None where there is only something to see.
        equal: how the results of the two were compared, and what came out.
        top: the operators that ours spends most of its time in.
    """

    name: str
    peer: str
    ours: float
    theirs: float
    unit: str
    reach: float | None
    equal: str = ""
    top: Sequence[str] = ()

    @property
    def ratio(self) -> float:
        return self.ours / self.theirs if self.theirs else float(self.ours != 0)

    @property
    def falls_short(self) -> bool:
        return self.reach is not None and self.ratio > self.reach


def cpu_ms(forms: Mapping[str, Callable[[], object]], rounds: int, warm_up: int = 2) -> dict[str, float]:
    """The median of CPU milliseconds of each form."""
    return {name: statistics.median(times) for name, times in interleaved(forms, rounds, warm_up).items()}


def interleaved(forms: Mapping[str, Callable[[], object]], rounds: int, warm_up: int = 2) -> dict[str, list[float]]:
    """CPU milliseconds of each round of each form."""
    for form in forms.values():
        for _ in range(warm_up):
            form()
    times: dict[str, list[float]] = {name: [] for name in forms}
    for i in range(rounds):
        names = [*forms] if i % 2 == 0 else [*reversed(forms)]
        for name in names:
            started_s = time.process_time()
            forms[name]()
            times[name].append(1e3 * (time.process_time() - started_s))
    return times


def top_operators(form: Callable[[], object]) -> list[str]:
    """The operators that one call spends most of its CPU time in, the largest first."""
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as seen:
        form()
    events = sorted(seen.key_averages(), key=lambda event: -event.self_cpu_time_total)
    total_us = sum(event.self_cpu_time_total for event in events)
    return [
        f"{event.self_cpu_time_total / total_us:6.1%} {event.self_cpu_time_total / 1e3:8.1f} ms "
        f"x{event.count:<5} {event.key}"
        for event in events[:SHOWN_OPERATORS]
    ]


def peak_mib(form: Callable[[], object]) -> float:
    """The most resident memory during one call, over what was resident before it."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # without it memory that was freed before hides what the call takes
    before_bytes = resident_bytes()
    most_bytes = before_bytes
    done = threading.Event()

    def watch() -> None:
        nonlocal most_bytes
        while not done.wait(SAMPLED_EVERY_S):
            most_bytes = max(most_bytes, resident_bytes())

    watcher = threading.Thread(target=watch)
    watcher.start()
    form()
    done.set()
    watcher.join()
    return (most_bytes - before_bytes) / 2**20


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return 4096 * pages


def difference(ours: float, theirs: float) -> float:
    """The relative difference of two numbers."""
    return abs(ours - theirs) / max(abs(theirs), 1e-30)


def check_losses(ours: float, theirs: float, bound: float = FP32_LOSS) -> str:
    """Say how far two losses are apart.

    Raises:
        AssertionError: they differ by more than `bound`: what is timed would not be the same thing.
    """
    found = difference(ours, theirs)
    assert found <= bound, f"losses {ours!r} and {theirs!r} differ by {found:.1e}, expected at most {bound:.0e}"
    return f"losses within {found:.0e}"


def check_tensors(ours: torch.Tensor, theirs: torch.Tensor, bound: float) -> float:
    """The relative distance of two tensors.

    Raises:
        AssertionError: it is more than `bound`.
    """
    found = float((ours.double() - theirs.double()).norm() / theirs.double().norm().clamp_min(1e-30))
    assert found <= bound, f"tensors differ by {found:.1e}, expected at most {bound:.0e}"
    return found
