"""The phases of a step, which follow each other without gaps, and the time that each phase takes.

    phases.begin_step(7)               # the step begins with the wait for data
    phases.enter("forward+backward")
    phases.enter("optimizer")
    times = phases.end_step()          # later phases belong to no step: evaluation, checkpoint, ...

Every phase is reported to the watchdog, which can then name the phase in which a rank hangs. While a profile is
recorded, each phase is a named range in the trace, within the range of its step, and the phase's peak memory is
recorded.
"""

from __future__ import annotations

import itertools
import time
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, NamedTuple

import torch

from dtmega.distributed.watchdog import Watch
from dtmega.ops import ranges
from dtmega.ops.cpu.thread_time import ThreadTime

if TYPE_CHECKING:
    from dtmega.training.profile import Profiler

DATA = "data"
COMPUTING = "forward+backward"
REDUCE = "reduce"
OPTIMIZER = "optimizer"
# The key of each phase in metrics.jsonl. The rest of a step's time has the key `other_s`.
KEYS = {DATA: "data_s", COMPUTING: "forward_backward_s", REDUCE: "reduce_s", OPTIMIZER: "optimizer_s"}


class StepTimes(NamedTuple):
    """The time of one step on this rank, in seconds.

    Attributes:
        step_s: time from the beginning of the wait for data until the device has finished the update.
        phases: key in metrics.jsonl -> time of the phase, including the key `other_s`. These times add up to step_s.
        own_s: time that this rank spent on its own work rather than waiting for other ranks.
    """

    step_s: float
    phases: dict[str, float]
    own_s: float

    def in_words(self, what: str) -> str:
        """Format the times as one line that begins with `what`."""
        parts = [f"{key.removesuffix('_s')} {seconds:.3g} s" for key, seconds in self.phases.items()]
        return " | ".join([what, f"{self.step_s:.3g} s (own work {self.own_s:.3g} s)", *parts])


class Phases:
    """Timer of a run's phases on this rank, which also reports each phase to the watchdog and to a profiler.

    On a CPU, a phase ends when its last operation returns. A GPU runs an operation after the host has queued it, so
    on a GPU, phases are timed by events on the device. These events are read at the end of a step, when the host waits
    for the device anyway.

    Args:
        watch: watchdog of this rank.
        device: device on which this rank computes.
        step: number of steps that the run has done.

    Attributes:
        name: name of the current phase.
        profiler: profiler of this rank; None until a profile is wanted.
    """

    def __init__(self, watch: Watch, device: torch.device, step: int) -> None:
        self.name = "start"
        self.profiler: Profiler | None = None
        self._watch, self._device, self._step = watch, device, step
        self._began = time.perf_counter()  # start of the current phase, on the host's clock
        # (name, start) of each phase of the current step; None between two steps.
        self._marks: list[tuple[str, float | torch.cuda.Event]] | None = None
        self._thread_time = ThreadTime()
        self._busy_after_data_s = 0.0
        self._step_range: AbstractContextManager[object] = nullcontext()
        self._phase_range: AbstractContextManager[object] = nullcontext()

    def begin_step(self, step: int) -> None:
        """Begin a step with its first phase, the wait for data."""
        self._end_phase()
        self._step_range.__exit__(None, None, None)
        if self.profiler is not None and self.profiler.due(step):
            # Writing a trace can take long. This heartbeat tells the watchdog that this rank is writing a profile.
            self._watch.beat(step, "profile")
            self.profiler.switch(step)
        self._step_range = ranges.named(f"step {step}")
        self._step_range.__enter__()
        self._step = step
        self._marks = []
        self._begin_phase(DATA)

    def enter(self, name: str) -> None:
        """Begin the next phase, within a step or after it.

        Args:
            name: name of the phase, without spaces.
        """
        self._end_phase()
        if self.name == DATA:
            self._busy_after_data_s = self._thread_time.busy_s()
        self._begin_phase(name)

    def end_step(self) -> StepTimes:
        """End the step and begin the phase "report". On a GPU, the host must already have waited for the device."""
        assert self._marks is not None
        busy_s = self._thread_time.busy_s() - self._busy_after_data_s
        marks = [*self._marks, ("", self._now())]
        phases = dict.fromkeys(KEYS.values(), 0.0)
        other_s = 0.0
        for (name, began), (_, ended) in itertools.pairwise(marks):
            seconds = _seconds_between(began, ended)
            if self.profiler is not None:
                self.profiler.add(name, seconds)
            if name in KEYS:
                phases[KEYS[name]] += seconds
            else:
                other_s += seconds
        phases["other_s"] = other_s
        own_s = phases["data_s"] + busy_s
        if self._device.type == "cuda":
            # On a GPU, the host's busy time does not show when the device waits for other ranks. The whole time of
            # forward and backward, including the device's waits, therefore counts as this rank's own time.
            own_s = phases["data_s"] + phases["forward_backward_s"] + phases["optimizer_s"]
        self._leave_phase()
        self._marks = None
        self._begin_phase("report")
        return StepTimes(sum(phases.values()), phases, own_s)

    def close(self) -> None:
        """End the last phase. If a profile is still being recorded, write it."""
        self._end_phase()
        self._step_range.__exit__(None, None, None)
        if self.profiler is not None:
            self.profiler.close(self._step)
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
        # Within a step, `end_step` adds the times of the phases, because on a GPU the times are not known earlier.
        if self._marks is None and self.profiler is not None:
            self.profiler.add(self.name, time.perf_counter() - self._began)
        self._leave_phase()

    def _leave_phase(self) -> None:
        if self.profiler is not None:
            self.profiler.end_of_phase(self.name)
        self._phase_range.__exit__(None, None, None)

    def _now(self) -> float | torch.cuda.Event:
        """The current time on the device's clock: seconds on a CPU, an event on a GPU."""
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
