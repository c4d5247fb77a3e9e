"""The phases of a step, one after the other without gaps: what a rank does, and how long each phase takes.

    phases.begin_step(7)               # the wait for data
    phases.enter("forward+backward")
    phases.enter("optimizer")
    times = phases.end_step()          # what follows belongs to no step: evaluation, checkpoint, ...

The watch hears of every phase, so that it can name the phase in which a rank hangs. While a profile is recorded, each
phase is a named range of the trace inside of a range for the step, and its peak of memory is kept.
"""

from __future__ import annotations

import itertools
import time
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch

from dtmega.distributed.watchdog import Watch
from dtmega.ops import ranges
from dtmega.ops.cpu.thread_time import ThreadTime
from dtmega.training.profile import Profiler

DATA = "data"
COMPUTING = "forward+backward"
REDUCE = "reduce"
OPTIMIZER = "optimizer"
# Phase -> its key in metrics.jsonl. The rest of a step's time is `other_s`.
KEYS = {DATA: "data_s", COMPUTING: "forward_backward_s", REDUCE: "reduce_s", OPTIMIZER: "optimizer_s"}


class StepTimes(NamedTuple):
    """The time of one step on this rank, in seconds.

    Attributes:
        step_s: time from the wait for data until the device is done with the update.
        phases: key of metrics.jsonl -> time of that phase; with `other_s` they add up to step_s.
        own_s: time in which this rank did not wait for other ranks.
    """

    step_s: float
    phases: dict[str, float]
    own_s: float

    def in_words(self, what: str) -> str:
        """A line with these times, after `what`."""
        parts = [f"{key.removesuffix('_s')} {seconds:.3g} s" for key, seconds in self.phases.items()]
        return " | ".join([what, f"{self.step_s:.3g} s (own work {self.own_s:.3g} s)", *parts])


class Phases:
    """The phases of a run on this rank.

    On a CPU a phase ends when its last operation returns. A GPU runs its work later than the host queues it. There,
    phases are timed by events on the device, which are read at the end of a step, when the host waits for the device
    anyway.

    Args:
        watch: the watchdog of this rank.
        profiler: the profiler of this rank.
        device: the device that this rank computes on.
        step: number of steps that the run has done.

    Attributes:
        name: the present phase.
    """

    def __init__(self, watch: Watch, profiler: Profiler, device: torch.device, step: int) -> None:
        self.name = "start"
        self._watch, self._profiler, self._device, self._step = watch, profiler, device, step
        self._began = time.perf_counter()  # of the present phase, on the host
        # (phase, beginning) of each phase of the present step; None after a step.
        self._marks: list[tuple[str, float | torch.cuda.Event]] | None = None
        self._thread_time = ThreadTime()
        self._busy_after_data_s = 0.0
        self._step_range: AbstractContextManager[object] = nullcontext()
        self._phase_range: AbstractContextManager[object] = nullcontext()

    def request_profile(self, n_steps: int) -> None:
        """Profile the next `n_steps` steps, on the ranks that are to be profiled."""
        self._profiler.request(self._step + 1, n_steps)

    def dump_memory_history(self) -> str:
        """Write the recorded allocations of a GPU (`Profiler.dump_memory_history`)."""
        return self._profiler.dump_memory_history()

    def begin_step(self, step: int) -> None:
        """Begin a step, with the wait for its data."""
        self._end_phase()
        self._step_range.__exit__(None, None, None)
        if self._profiler.due(step):
            # Writing a trace can take long: a report about a hang should say what this rank does.
            self._watch.beat(step, "profile")
            self._profiler.switch(step)
        self._step_range = ranges.named(f"step {step}")
        self._step_range.__enter__()
        self._step = step
        self._marks = []
        self._begin_phase(DATA)

    def enter(self, name: str) -> None:
        """Begin the next phase of this step, or of what follows it.

        Args:
            name: name of the phase, without spaces.
        """
        self._end_phase()
        if self.name == DATA:
            self._busy_after_data_s = self._thread_time.busy_s()
        self._begin_phase(name)

    def end_step(self) -> StepTimes:
        """End the step: the phase "report" begins. On a GPU the host has waited for the device before."""
        assert self._marks is not None
        busy_s = self._thread_time.busy_s() - self._busy_after_data_s
        marks = [*self._marks, ("", self._now())]
        phases = dict.fromkeys(KEYS.values(), 0.0)
        other_s = 0.0
        for (name, began), (_, ended) in itertools.pairwise(marks):
            seconds = _seconds_between(began, ended)
            self._profiler.add(name, seconds)
            if name in KEYS:
                phases[KEYS[name]] += seconds
            else:
                other_s += seconds
        phases["other_s"] = other_s
        own_s = phases["data_s"] + busy_s
        if self._device.type == "cuda":
            # The host does not wait when the device does, so its clock says nothing here. If the device waits for other
            # ranks within forward and backward, that counts as its own time.
            own_s = phases["data_s"] + phases["forward_backward_s"] + phases["optimizer_s"]
        self._profiler.end_of_phase(self.name)
        self._phase_range.__exit__(None, None, None)
        self._marks = None
        self._begin_phase("report")
        return StepTimes(sum(phases.values()), phases, own_s)

    def close(self) -> None:
        """End the last phase, and write the profile that is still open."""
        self._end_phase()
        self._step_range.__exit__(None, None, None)
        self._profiler.close(self._step)
        self._thread_time.close()

    def _begin_phase(self, name: str) -> None:
        self.name = name
        self._phase_range = ranges.named(name)
        self._phase_range.__enter__()
        self._began = time.perf_counter()
        if self._marks is not None:
            self._marks.append((name, self._now()))
        self._watch.beat(self._step, name)

    def _end_phase(self) -> None:
        # The time of a phase within a step is known at the end of the step, on a GPU not before.
        if self._marks is None:
            self._profiler.add(self.name, time.perf_counter() - self._began)
        self._profiler.end_of_phase(self.name)
        self._phase_range.__exit__(None, None, None)

    def _now(self) -> float | torch.cuda.Event:
        """This moment, on the clock of the device."""
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def _seconds_between(began: float | torch.cuda.Event, ended: float | torch.cuda.Event) -> float:
    if isinstance(began, torch.cuda.Event) and isinstance(ended, torch.cuda.Event):
        ended.synchronize()
        return began.elapsed_time(ended) / 1000
    assert not isinstance(began, torch.cuda.Event)
    assert not isinstance(ended, torch.cuda.Event)
    return ended - began
