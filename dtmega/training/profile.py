"""Profiles of chosen steps: a `torch.profiler` trace for Perfetto, and a summary of the trace for `dtmega report`.

    profiles/step-00000010-rank-00000.json.gz          the trace
    profiles/step-00000010-rank-00000.summary.json     seconds and peak memory of each phase, slowest operators
    profiles/step-00000010-rank-00000.memory.pickle    allocations on a GPU, for https://pytorch.org/memory_viz

A profile covers a window of consecutive steps, and the step in the file names is the first step of the window. A window
is either configured (`[profile] steps`) or requested during the run, by a file `profile-now` in the run directory. A
window ends only when the step after the window begins, so the profile also shows the work between steps: evaluation,
checkpoint, output.
"""

from __future__ import annotations

import gzip
import json
import os
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch

from dtmega.config import keys
from dtmega.files import atomic
from dtmega.training import operator_times
from dtmega.training.device_peaks import PeakMemory

FOLDER = "profiles"
MAX_REQUESTED = 100  # maximum number of steps that a request may ask for
N_OPERATORS = 20  # number of operators in a summary
N_ALLOCATIONS = 100_000  # number of events that the memory history of a GPU keeps
COPIED_BYTES = 2**20  # size of the chunks in which a trace is compressed


def check_profile(cfg: keys.Profile, device: torch.device, world_size: int) -> None:
    """Check that the configured profile can be recorded.

    Raises:
        ValueError: a number in [profile] ranks is too large for this run, or a memory history is requested on a CPU.
    """
    if max(cfg.ranks) >= world_size:
        raise ValueError(
            f"ranks={cfg.ranks}: expected ranks below {world_size}, the number of processes ([profile] ranks)"
        )
    if cfg.memory_history and device.type != "cuda":
        raise ValueError(
            f"memory_history = true records the allocations of a GPU, and the device is '{device.type}' "
            f"([profile] memory_history, [run] device)"
        )


class Profiler:
    """The profiler of this rank. A rank that is not in `[profile] ranks` never records.

    Args:
        cfg: section [profile] of the run's configuration.
        run_dir: run directory.
        rank: index of this rank.
        device: device on which this rank computes.
        peak_memory: memory counter of this process.
        say: function that prints a line for the user.
    """

    def __init__(
        self,
        cfg: keys.Profile,
        run_dir: Path,
        rank: int,
        device: torch.device,
        peak_memory: PeakMemory,
        say: Callable[[str], None],
    ) -> None:
        self._cfg, self._folder, self._rank = cfg, run_dir / FOLDER, rank
        self._device, self._peak_memory, self._say = device, peak_memory, say
        self._configured = range(cfg.steps[0], cfg.steps[1] + 1) if cfg.steps else range(0)
        self._requested = range(0)
        self._window: _Window | None = None
        if cfg.memory_history:
            torch.cuda.memory._record_memory_history(max_entries=N_ALLOCATIONS)

    def request(self, first: int, n_steps: int) -> None:
        """Profile `n_steps` steps, beginning with step `first`."""
        self._requested = range(first, first + n_steps)

    def due(self, step: int) -> bool:
        """True if a window begins or ends before this step."""
        return self._wants(step) != (self._window is not None)

    def switch(self, step: int) -> None:
        """Begin a window with this step, or end the current window before this step."""
        if self._window is not None:
            self.close(step - 1)
        else:
            self._window = _Window(self._cfg, step, self._device, self._peak_memory)

    def add(self, phase: str, seconds: float) -> None:
        """Add seconds to the time of a phase in the current window."""
        if self._window is not None:
            self._window.add(phase, seconds)

    def end_of_phase(self, phase: str) -> None:
        """Record the peak memory of a phase that ends in the current window."""
        if self._window is not None:
            self._window.note_peak(phase)

    def close(self, last: int) -> None:
        """End the current window, if there is one, and write its files. If a file cannot be written, print a warning.

        Args:
            last: last step of the window.
        """
        if self._window is None:
            return
        window = self._window
        self._window = None
        name = f"step-{window.first:08d}-rank-{self._rank:05d}"
        try:
            atomic.make_folder(self._folder)
            window.write(self._folder, name, self._rank, last)
        # torch raises RuntimeError if a trace cannot be written.
        except (OSError, RuntimeError) as error:
            self._say(f"WARNING: no profile of step {window.first}: {error}")
            return
        steps = f"step {last}" if last == window.first else f"steps {window.first} to {last}"
        self._say(f"profile of {steps}: {self._folder / name}.json.gz (open it with https://ui.perfetto.dev)")

    def dump_memory_history(self) -> str:
        """Write the recorded allocations of a GPU that has run out of memory. Returns the path, or '' on failure."""
        if not self._cfg.memory_history:
            return ""
        path = self._folder / f"out-of-memory-rank-{self._rank:05d}.memory.pickle"
        with suppress(OSError, RuntimeError):
            atomic.make_folder(self._folder)
            torch.cuda.memory._dump_snapshot(str(path))
            return str(path)
        return ""

    def _wants(self, step: int) -> bool:
        return self._rank in self._cfg.ranks and (step in self._configured or step in self._requested)


class _Window:
    """The recording of a window of consecutive steps.

    Args:
        cfg: section [profile] of the run's configuration.
        first: first step of the window.
        device: device on which this rank computes.
        peak_memory: memory counter of this process.
    """

    def __init__(self, cfg: keys.Profile, first: int, device: torch.device, peak_memory: PeakMemory) -> None:
        self.first = first
        self._cfg, self._device = cfg, device
        self._n_steps = 0
        self._seconds: dict[str, float] = {}
        self._peaks_bytes: dict[str, int | None] = {}
        self._peak_memory = peak_memory if cfg.with_memory else None
        if self._peak_memory is not None:
            self._peak_memory.since_restart_bytes()
        self._records_memory = cfg.with_memory and device.type == "cuda" and not cfg.memory_history
        if self._records_memory:
            torch.cuda.memory._record_memory_history(max_entries=N_ALLOCATIONS)
        activities = [torch.profiler.ProfilerActivity.CPU]
        if device.type == "cuda":
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        # Without this variable, torch's profiling library Kineto prints its own lines on stderr.
        os.environ.setdefault("KINETO_LOG_LEVEL", "6")
        self._profile = torch.profiler.profile(
            activities=activities,
            with_stack=cfg.with_stack,
            profile_memory=cfg.with_memory,
        )
        with warnings.catch_warnings():
            # This object records only one window, and torch 2.11 warns that older windows are dropped. The option
            # acc_events would prevent the warning, but torch would then create one Python object per event at the end.
            warnings.filterwarnings("ignore", "Warning: Profiler clears events")
            # Starting the first profiler in a process takes about a second, which the window's clock does not count.
            self._profile.start()
        self._started = time.perf_counter()

    def add(self, phase: str, seconds: float) -> None:
        self._seconds[phase] = self._seconds.get(phase, 0.0) + seconds

    def note_peak(self, phase: str) -> None:
        if self._peak_memory is None:
            return
        peak_bytes = self._peak_memory.since_restart_bytes()
        before = self._peaks_bytes.get(phase)
        if peak_bytes is not None and (before is None or peak_bytes > before):
            self._peaks_bytes[phase] = peak_bytes

    def write(self, folder: Path, name: str, rank: int, last: int) -> None:
        """Stop recording and write the trace and the summary. Each file is written completely or not at all.

        Args:
            folder: folder for the files.
            name: common prefix of the file names.
            rank: index of this rank.
            last: last step of the window.

        Raises:
            OSError: a file cannot be written.
        """
        seconds = time.perf_counter() - self._started
        self._profile.stop()
        trace = f"{name}.json.gz"
        unfinished = folder / f".tmp-{trace}"
        # torch itself would compress line by line, which takes several times as long.
        with tempfile.TemporaryDirectory() as elsewhere:
            plain = Path(elsewhere, "trace.json")
            self._profile.export_chrome_trace(str(plain))
            with plain.open("rb") as text, gzip.open(unfinished, "wb", compresslevel=6) as packed:
                shutil.copyfileobj(text, packed, COPIED_BYTES)
        unfinished.replace(folder / trace)
        if self._device.type == "cuda" and self._cfg.with_memory:
            torch.cuda.memory._dump_snapshot(str(folder / f"{name}.memory.pickle"))
            if self._records_memory:
                torch.cuda.memory._record_memory_history(enabled=None)
        summary = {
            "rank": rank,
            "steps": [self.first, last],
            "device": self._device.type,
            "trace": trace,
            "seconds": seconds,
            "phases": [
                {"name": phase, "seconds": phase_s, "peak_bytes": self._peaks_bytes.get(phase)}
                for phase, phase_s in self._seconds.items()
            ],
            "operators": operator_times.largest(self._profile, self._device, N_OPERATORS),
        }
        with atomic.replaced(folder / f"{name}.summary.json") as file:
            json.dump(summary, file, indent=1)
            file.write("\n")


def take_request(path: Path, step: int) -> int:
    """Take a user's request for a profile from the run directory. Rank 0 calls this function after a step.

    The file is renamed to `profile-taken-00000012`, where 12 is the step that has just ended, so that the request is
    taken only once.

    Args:
        path: file `profile-now` in the run directory.
        step: number of the step that has just ended.

    Returns:
        The number of steps to profile: the number in the file, or 1 for an empty file; 0 if the file cannot be taken.
    """
    try:
        with path.open("rb") as file:
            text = file.read(20).decode("ascii", "replace").strip()
        path.replace(path.with_name(f"profile-taken-{step:08d}"))
    # Ignore a file that cannot be renamed, because the file would otherwise start a new profile after every step.
    except OSError:
        return 0
    n_steps = int(text) if text.isdecimal() and text.isascii() else 1
    return min(max(n_steps, 1), MAX_REQUESTED)
