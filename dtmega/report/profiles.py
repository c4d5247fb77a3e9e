"""Profiles of a run: the time of each phase and operator in windows of steps, from the profiler's summaries.

The summaries may be damaged or come from elsewhere: one that does not fit `Summary` is left out and counted. The trace
beside a summary can have hundreds of MB and is never opened.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Annotated, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

from dtmega.distributed.exit_codes import MAX_STEP
from dtmega.files.untrusted_json import read_object

FOLDER = "profiles"  # folder in a run directory
NAME = re.compile(r"(step-(\d{8,18})-rank-(\d{5,9}))\.summary\.json", re.ASCII)
MAX_BYTES = 2**20  # largest summary that is read; 20 kernels with names of 4,000 characters have 80 KB
MAX_FILES = 500  # maximum number of summaries read, if most of them are damaged
MAX_WINDOWS, MAX_RANKS = 8, 8  # maximum number of windows of a run, and of ranks of a window

Seconds = Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=0, lt=2**60)]
Step = Annotated[int, Field(ge=0, le=MAX_STEP)]


class Phase(BaseModel):
    """A phase in a window of steps.

    Attributes:
        name: name of the phase, such as "forward+backward".
        seconds: time that it took in the window.
        peak_bytes: largest amount of memory in use during it; None if this was not measured.
    """

    model_config = ConfigDict(strict=True, frozen=True)
    name: str
    seconds: Seconds
    peak_bytes: Count | None


class Operator(BaseModel):
    """An operator in a window of steps.

    Attributes:
        name: name of the operator or kernel, such as "aten::addmm".
        calls: number of its calls.
        self_s: seconds on the host, without the operators that it called.
        self_device_s: seconds on the GPU.
    """

    model_config = ConfigDict(strict=True, frozen=True)
    name: str
    calls: Count
    self_s: Seconds
    self_device_s: Seconds


class Summary(BaseModel):
    """The content of a summary: one rank in one window of steps.

    The name of the trace that it also has is not used: a link leads to the file that has the summary's own name.

    Attributes:
        rank: number of the rank.
        steps: first and last step of the window.
        device: type of the device, such as "cuda".
        seconds: length of the window.
        phases: phases in the order of their first appearance.
        operators: operators that took the most time.
    """

    model_config = ConfigDict(strict=True, frozen=True)
    rank: Count
    steps: Annotated[list[Step], Field(min_length=2, max_length=2)]
    device: str
    seconds: Annotated[float, Field(ge=1e-6, le=1e9, allow_inf_nan=False)]
    phases: Annotated[list[Phase], Field(max_length=100)]
    operators: Annotated[list[Operator], Field(max_length=100)]

    @property
    def whole_s(self) -> float:
        """The time that the phases are shares of: the length of the window.

        On a GPU host and device measure with different clocks, so the phases can add up to slightly more. Then it is
        their sum.
        """
        return max(self.seconds, sum(phase.seconds for phase in self.phases))

    @property
    def on_gpu(self) -> bool:
        """True if operators are measured on the device and not only on the host."""
        return self.device != "cpu"


class Profile(NamedTuple):
    """A summary and the path of the files that belong to it.

    Attributes:
        summary: content of the summary.
        stem: path of the trace without its suffix `.json.gz`, and of a memory snapshot without `.memory.pickle`.
    """

    summary: Summary
    stem: Path


class Profiles(NamedTuple):
    """The profiles of a run.

    Attributes:
        windows: profiles of each window by ascending ranks, the newest window first.
        damaged: number of summaries that cannot be read.
        left_out: number of profiles beyond the limits.
    """

    windows: list[list[Profile]]
    damaged: int
    left_out: int


def read(directory: Path) -> Profiles:
    """Read the summaries in a run directory. At most MAX_WINDOWS windows of MAX_RANKS ranks are returned."""
    names = _names(directory / FOLDER)
    windows: dict[int, list[Profile]] = {}
    shown = damaged = 0
    for first, rank, stem in names:
        if len(windows.get(first, [])) == MAX_RANKS or (first not in windows and len(windows) == MAX_WINDOWS):
            continue
        if shown + damaged == MAX_FILES:
            break
        path = directory / FOLDER / stem
        try:
            summary = Summary.model_validate(read_object(path.with_name(f"{stem}.summary.json"), MAX_BYTES))
        # pydantic's error is a ValueError too.
        except ValueError:
            damaged += 1
            continue
        if (summary.steps[0], summary.rank) != (first, rank) or summary.steps[1] < first:
            damaged += 1
            continue
        windows.setdefault(first, []).append(Profile(summary, path))
        shown += 1
    return Profiles([*windows.values()], damaged, len(names) - damaged - shown)


def _names(folder: Path) -> list[tuple[int, int, str]]:
    """(first step, rank, file name without its suffix) of each summary: the newest window first, then by rank."""
    try:
        files = os.listdir(folder)
    except OSError:
        return []
    names = []
    for match in filter(None, map(NAME.fullmatch, files)):
        stem, first, rank = match.groups()
        names.append((int(first), int(rank), stem))
    return sorted(names, key=lambda name: (-name[0], name[1], name[2]))
