"""A run directory as `dtmega report` sees it: record, starts, configuration, and the numbers that sum them up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dtmega.checkpoint import resume
from dtmega.config.reading import read_toml
from dtmega.distributed import exit_codes
from dtmega.distributed.exit_codes import MAX_STEP, Ended
from dtmega.files.untrusted_json import read_object
from dtmega.report import record, scores
from dtmega.report.record import Event, Record, Series, is_validation
from dtmega.report.scores import Scores
from dtmega.training import history
from dtmega.training.history import Start
from dtmega.training.metrics import perplexity

Config = Mapping[str, Mapping[str, Any]]  # by section, as written; another version's, or half of one, is shown too


class Part(NamedTuple):
    """Steps `first` to `last` of a run, all of one start; the start is None where nothing tells of it."""

    first: int
    last: int
    start: Start | None


class Best(NamedTuple):
    """The best of a run's validations.

    Attributes:
        key: name of the validation loss in the record.
        loss: its smallest value.
        step: the first step at which it was measured.
    """

    key: str
    loss: float
    step: int


class Run(NamedTuple):
    """A run directory, read.

    Attributes:
        name: for people, another one for each run of a page.
        config: of the newest start.
        starts: the newest that began anew and those after it, oldest first.
        parts: by ascending steps, at least one.
        end: the step at which it is done; 0 where nothing tells.
        ended: why the newest attempt ended, which may have been refused; None while it goes on, or was killed.
        sample: what the finished model made of the prompt, or ''.
        scores: evaluations of its checkpoints.
        written: when its record was last written, or None.
        is_claimed: True if a process writes here, as `job.is_claimed`.
    """

    directory: Path
    name: str
    record: Record
    config: Config
    starts: list[Start]
    parts: list[Part]
    end: int
    ended: Ended | None
    sample: str
    scores: Scores
    written: datetime | None
    is_claimed: bool | None

    @property
    def is_done(self) -> bool:
        """True if the record has all steps of the run."""
        return 0 < self.end <= self.record.last_step

    @property
    def refused(self) -> str:
        """The words for the newest attempt where it was refused, and so changed nothing of the run; else ''."""
        ended = self.ended
        if ended is None or ended.code not in exit_codes.NOT_STARTED:
            return ""
        at = f" at {moment(ended.time)}" if ended.time else ""
        return f"the last start was refused{at} with exit code {ended.code}: {ended.reason}"

    @property
    def layout(self) -> str:
        """The newest layout, in words."""
        start = self.parts[-1].start
        if start is None:
            return "layout not recorded"
        return layout_in_words(start.layout) + (f" on {start.device}" if start.device else "")

    @property
    def newest_checkpoint(self) -> str:
        """The path of the one that exit.json names, else the step of the newest that the record tells of; or ''."""
        if self.ended is not None:
            return self.ended.checkpoint
        saved = [event.text for event in self.record.events if event.kind == "checkpoint"]
        return saved[-1].partition(";")[0].removeprefix("of ") if saved else ""

    @property
    def events(self) -> list[Event]:
        """Those of the record, each start after the first, scores, and an end that is none of a finished run."""
        found = [*self.record.events, *self.scores.events]
        found += [Event(start.step, "restart", _restarted(start)) for start in self.starts[1:]]
        ended = self.ended
        if self.refused and ended is not None:
            found.append(Event(ended.step, "refused start", self.refused))
        elif ended is not None and (ended.code != exit_codes.DONE or ended.step < self.end):
            found.append(Event(ended.step, "end", f"exit code {ended.code}: {ended.reason}"))
        return sorted(found, key=lambda event: event.step)


def read(directories: Sequence[str]) -> list[Run]:
    """The runs in these directories.

    Raises:
        ValueError: one of them is not a run directory.
    """
    return [_read(Path(directory), name) for directory, name in zip(directories, names(directories), strict=True)]


def names(directories: Sequence[str]) -> list[str]:
    """The last part of each path where all of these differ, else the paths."""
    last = [Path(directory).resolve().name for directory in directories]
    return last if len(set(last)) == len(last) else list(directories)


def _read(directory: Path, name: str) -> Run:
    is_claimed = exit_codes.is_claimed(
        directory
    )  # before exit.json is read: a run gives the claim back after writing it
    path = directory / "metrics.jsonl"
    if not path.exists() and not (directory / "config.toml").exists():
        raise ValueError(f"{directory} is not a run directory: it has no metrics.jsonl and no config.toml")
    found = record.read(path)
    of_checkpoints = scores.read(directory, found.last_step)
    found = found._replace(series=found.series | of_checkpoints.series)
    every = history.read(directory) or _start_of_checkpoint(directory)
    anew = max((i for i, start in enumerate(every) if start.step == 0), default=0)
    config = _config(directory) or (every[-1].config if every else {})
    planned = config.get("train", {}).get("steps", 0)
    planned = planned if type(planned) is int and 0 <= planned <= MAX_STEP else 0
    return Run(
        directory=directory,
        name=name,
        record=found,
        config=config,
        starts=every[anew:],
        parts=_parts(every, found.last_step),
        end=every[-1].steps if every else planned,
        ended=Ended.read(directory),
        sample=_sample(directory, found.last_step),
        scores=of_checkpoints,
        written=_written(path, directory / history.NAME, directory / exit_codes.LOCK),
        is_claimed=is_claimed,
    )


def _written(*paths: Path) -> datetime | None:
    """The time at which one of these files was last written; None if there is none of them."""
    times = [path.stat().st_mtime for path in paths if path.exists()]
    return datetime.fromtimestamp(max(times), timezone.utc) if times else None


def _config(directory: Path) -> Config:
    try:
        table = read_toml(directory / "config.toml")
    except ValueError:
        return {}
    return {section: keys for section, keys in table.items() if isinstance(keys, dict)}


def _sample(directory: Path, last_step: int) -> str:
    """The text in sample.json; '' if there is none, or it is of steps that the run has gone back behind."""
    try:
        sample = read_object(directory / "sample.json")
    except ValueError:
        return ""
    step, text = sample.get("step"), sample.get("text")
    return text if isinstance(text, str) and isinstance(step, int) and step <= last_step else ""


def _start_of_checkpoint(directory: Path) -> list[Start]:
    """What the newest checkpoint of a run of an earlier version, which has no starts.jsonl, knows of its layout."""
    try:
        state = resume.state_of(resume.open_checkpoint(str(directory)))
        start = Start(
            step=0,
            time="",
            config=state.config,
            layout=state.layout,
            device="",
            parameters=0,
            steps=state.config.get("train", {}).get("steps", 0),
            versions=state.versions,
        )
    except (ValueError, OSError):
        return []
    return [start]


def _parts(every: Sequence[Start], last_step: int) -> list[Part]:
    written = history.parts(every)
    written = [start for start in written if start.step < last_step] or written[-1:]
    if not written:
        return [Part(1, last_step, None)]
    ends = [*(start.step for start in written[1:]), max(last_step, written[-1].step)]
    return [Part(start.step + 1, end, start) for start, end in zip(written, ends, strict=True)]


def _restarted(start: Start) -> str:
    return f"started again after step {start.step} on {layout_in_words(start.layout)}, {moment(start.time)}"


def layout_in_words(layout: Mapping[str, int]) -> str:
    """4 processes: dp_shard 2 x tp 2"""
    n = layout.get("processes", 1)
    axes = " × ".join(f"{axis} {size}" for axis, size in layout.items() if axis != "processes" and size > 1)
    return f"{n} process{'es' if n != 1 else ''}" + (f": {axes}" if axes else "")


def numbers(run: Run) -> dict[str, str]:
    """What a person asks first, in words."""
    series = run.record.series
    found: dict[str, str] = {}
    last_step = run.record.last_step
    found["steps"] = f"{last_step:,} of {run.end:,}" if run.end else f"{last_step:,}"
    if run.record.tokens.values.size:
        found["tokens"] = short(run.record.tokens.values[-1])
    for key, label in (("loss", "training loss"), ("val_loss", "validation loss"), ("test_loss", "test loss")):
        if key in series:
            last = series[key].values[-1]
            found[label] = loss_in_words(run, last) if key != "loss" else f"{last:.4g}"
    best = best_validation(run)
    if best is not None:
        found["best validation loss"] = f"{best.loss:.4g} (step {best.step:,})"
    for key, label, write in (
        ("tokens_per_s", "tokens/s, median", short),
        ("mfu", "MFU, median", lambda value: f"{value:.1%}"),
        ("step_time_s", "step time, median", seconds),
    ):
        if key in series:
            found[label] = write(percentile(series[key], 50))
    if "step_time_s" in series:
        found["99th percentile"] = seconds(percentile(series["step_time_s"], 99))
        found["time in steps"] = duration(float(series["step_time_s"].values.sum()))
    if "peak_memory_bytes" in series:
        found["peak memory, rank 0"] = gibibytes(series["peak_memory_bytes"].values.max())
    kinds = [event.kind for event in run.events]
    found["restarts"] = str(kinds.count("restart"))
    found["skipped steps"] = str(kinds.count("skipped"))
    return found


def best_validation(run: Run) -> Best | None:
    """The smallest validation loss, on the split or else on the first named set; None if nothing was validated."""
    keys = sorted(filter(is_validation, run.record.series))
    if not keys:
        return None
    key = "val_loss" if "val_loss" in keys else keys[0]
    steps, losses = run.record.series[key]
    place = int(np.argmin(losses))
    return Best(key, float(losses[place]), int(steps[place]))


def loss_in_words(run: Run, loss: float) -> str:
    """4.23 (ppl 68.72); a weighted sum of several losses has no perplexity."""
    is_sum = any(key.startswith("val_") and not is_validation(key) for key in run.record.series)
    return f"{loss:.4g}" + ("" if is_sum else f" (ppl {perplexity(loss):.4g})")


def percentile(series: Series, percent: float) -> float:
    """The smallest value that so many of the values are no larger than."""
    return float(np.percentile(series.values, percent, method="inverted_cdf"))


def short(value: float) -> str:
    """1,234 -> 1.23 K, as people write large counts."""
    for factor, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "K")):
        if abs(value) >= factor:
            return f"{value / factor:.3g} {letter}"
    return f"{value:.3g}"


def seconds(value: float) -> str:
    return f"{value:.3g} s" if value >= 1 else f"{1000 * value:.3g} ms"


def duration(value: float) -> str:
    """7,260 -> 2.02 h, from seconds."""
    if value >= 3600:
        return f"{value / 3600:.3g} h"
    return f"{value / 60:.3g} min" if value >= 60 else seconds(value)


def moment(time: str) -> str:
    """2026-11-23T23:27:33+00:00 -> 2026-11-23 23:27:33 UTC; a text that is no such time stays as it is."""
    try:
        return f"{datetime.fromisoformat(time).astimezone(timezone.utc):%Y-%m-%d %H:%M:%S} UTC"
    except (ValueError, OverflowError):
        return time


def gibibytes(value: float) -> str:
    return f"{value / 2**30:.3g} GiB"
