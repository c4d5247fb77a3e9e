"""Read a run's profiles: the profiler's summaries of how long phases and operators took in each window of steps.

A summary may be damaged or written by a different program. Summaries that do not fit the class `Summary` are left out
and counted. The trace next to a summary may take hundreds of MB and is never opened.
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
MAX_BYTES = 2**20  # maximum size of a summary that is read; 20 kernels with names of 4,000 characters take 80 KB
MAX_FILES = 500  # maximum number of summaries that are read; this limit is reached only if many summaries are damaged
MAX_WINDOWS, MAX_RANKS = 8, 8  # maximum number of windows per run, and of ranks per window

Seconds = Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=0, lt=2**60)]
Step = Annotated[int, Field(ge=0, le=MAX_STEP)]


class Phase(BaseModel):
    """The time and memory of one phase in a window of steps.

    Attributes:
        name: name of the phase, for example "forward+backward".
        seconds: time that the phase took in the window.
        peak_bytes: peak memory in use during the phase; None if memory was not measured.
    """

    model_config = ConfigDict(strict=True, frozen=True)
    name: str
    seconds: Seconds
    peak_bytes: Count | None


class Operator(BaseModel):
    """The time of one operator in a window of steps.

    Attributes:
        name: name of the operator or kernel, for example "aten::addmm".
        calls: number of calls to the operator.
        self_s: seconds on the host, excluding operators called by this operator.
        self_device_s: seconds on the GPU, excluding operators called by this operator.
    """

    model_config = ConfigDict(strict=True, frozen=True)
    name: str
    calls: Count
    self_s: Seconds
    self_device_s: Seconds


class Summary(BaseModel):
    """The content of a summary file, which describes one rank in one window of steps.

    A summary also contains the name of its trace. The file is not trusted, so links ignore that name and use the
    summary's own file name with a different suffix.

    Attributes:
        rank: rank that the file describes.
        steps: first and last step of the window.
        device: type of the device, for example "cuda".
        seconds: length of the window, measured on the host.
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
        """The number of seconds that counts as 100 % for the shares of the phases.

        The result is the length of the window, or the sum of the phases if the sum is larger. On a GPU, phases
        are timed on the device and the window is timed on the host, so the sum can be slightly larger.
        """
        return max(self.seconds, sum(phase.seconds for phase in self.phases))

    @property
    def on_gpu(self) -> bool:
        """True if operators were timed on a GPU as well as on the host."""
        return self.device != "cpu"


class Profile(NamedTuple):
    """A summary, and the path (without suffix) of the trace and the memory snapshot next to it.

    Attributes:
        summary: content of the summary.
        stem: path without suffix. The trace has the suffix `.json.gz`, and the memory snapshot `.memory.pickle`.
    """

    summary: Summary
    stem: Path


class Profiles(NamedTuple):
    """The profiles of a run.

    Attributes:
        windows: one list of profiles per window, the newest window first. Each list is ordered by rank.
        damaged: number of summaries that cannot be read.
        left_out: number of summaries that were not read because a limit was exceeded.
    """

    windows: list[list[Profile]]
    damaged: int
    left_out: int


def read(directory: Path) -> Profiles:
    """Read the summaries in a run directory, for at most MAX_WINDOWS windows and MAX_RANKS ranks per window."""
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
        # pydantic's ValidationError is also a ValueError.
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
    """One tuple (first step, rank, file name without suffix) per summary, ordered by window (newest first) and rank."""
    try:
        files = os.listdir(folder)
    except OSError:
        return []
    names = []
    for match in filter(None, map(NAME.fullmatch, files)):
        stem, first, rank = match.groups()
        names.append((int(first), int(rank), stem))
    return sorted(names, key=lambda name: (-name[0], name[1], name[2]))
