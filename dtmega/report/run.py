"""Read a run directory for `dtmega report`: the record, the starts, the configuration and the summary numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dtmega.checkpoint import manifest, resume
from dtmega.config.reading import read_toml
from dtmega.distributed import exit_codes, process
from dtmega.distributed.exit_codes import MAX_STEP, ExitRecord
from dtmega.files.untrusted_json import read_object
from dtmega.files.urls import is_object_store
from dtmega.report import profiles, record, scores
from dtmega.report.loads import columns
from dtmega.report.loads.columns import LoadColumns
from dtmega.report.profiles import Profiles
from dtmega.report.record import Event, Record, Series, is_validation
from dtmega.report.scores import Scores
from dtmega.report.units import duration, gibibytes, moment, seconds, short
from dtmega.training import history
from dtmega.training.history import Start
from dtmega.training.metrics import perplexity

# A recorded configuration: section -> key -> value. The report does not validate it, so it can show an incomplete
# configuration, or a configuration from a different version of dtmega.
Config = Mapping[str, Mapping[str, Any]]


class Part(NamedTuple):
    """A part of a run: the steps from one start of the run to the next.

    Attributes:
        first, last: first and last step of the part.
        start: record of the start that began the part; None if `starts.jsonl` lacks this record.
    """

    first: int
    last: int
    start: Start | None


class Best(NamedTuple):
    """The smallest validation loss of a run.

    Attributes:
        key: key of the validation loss in the record.
        loss: smallest value of the loss.
        step: first step at which the smallest value was measured.
    """

    key: str
    loss: float
    step: int


class Run(NamedTuple):
    """The content of a run directory.

    Attributes:
        directory: run directory.
        name: name of the run, unique on the page.
        record: content of metrics.jsonl, plus the series of the scores.
        config: configuration of the newest start.
        starts: starts of the run, oldest first, beginning with the most recent start at step 0.
        parts: the run's steps, divided where a new attempt resumed the run; at least one part.
        end: last planned step; 0 if this step is not known.
        ended: exit record of the newest attempt, even if it was refused; None if the attempt is running or was killed.
        sample: text that the finished model generated; '' if there is no sample.
        scores: evaluations of the run's checkpoints.
        profiles: profiles of the run.
        loads: expert loads over the steps; None if no loads are recorded.
        written: time of the last write to metrics.jsonl, starts.jsonl or the lock; None if all three files are missing.
        is_claimed: whether a running process holds the claim on the directory; None if unknown (`process.is_claimed`).
    """

    directory: Path
    name: str
    record: Record
    config: Config
    starts: list[Start]
    parts: list[Part]
    end: int
    ended: ExitRecord | None
    sample: str
    scores: Scores
    profiles: Profiles
    loads: LoadColumns | None
    written: datetime | None
    is_claimed: bool | None

    @property
    def is_done(self) -> bool:
        """True if the record has reached the last step of the run."""
        return 0 < self.end <= self.record.last_step

    @property
    def refused(self) -> str:
        """A sentence that explains why the newest attempt was refused; '' if that attempt was not refused.

        A refused attempt leaves the run unchanged.
        """
        ended = self.ended
        if ended is None or ended.code not in exit_codes.NOT_STARTED:
            return ""
        at = f" at {moment(ended.time)}" if ended.time else ""
        return f"the last start was refused{at} with exit code {ended.code}: {ended.reason}"

    @property
    def layout(self) -> str:
        """The layout since the newest start, in words."""
        start = self.parts[-1].start
        if start is None:
            return "layout not recorded"
        return layout_in_words(start.layout) + (f" on {start.device}" if start.device else "")

    @property
    def newest_checkpoint(self) -> str:
        """The newest checkpoint; '' if there is no checkpoint.

        The result is the path in exit.json. If exit.json is missing, the result is the step in the record, for example
        "step 100".
        """
        if self.ended is not None:
            return self.ended.checkpoint
        saved = [event.text for event in self.record.events if event.kind == "checkpoint"]
        # The text looks like "of step 100; training stood still for 0.05 s".
        return saved[-1].partition(";")[0].removeprefix("of ") if saved else ""

    @property
    def events(self) -> list[Event]:
        """All events of the run, in ascending order of steps.

        The events come from the record, the scores, the restarts and the newest exit record. A normal exit after the
        last planned step adds no event.
        """
        events = [*self.record.events, *self.scores.events]
        events += [Event(start.step, "restart", _restarted(start)) for start in self.starts[1:]]
        ended = self.ended
        if self.refused and ended is not None:
            events.append(Event(ended.step, "refused start", self.refused))
        elif ended is not None and (ended.code != exit_codes.DONE or ended.step < self.end):
            events.append(Event(ended.step, "end", f"exit code {ended.code}: {ended.reason}"))
        return sorted(events, key=lambda event: event.step)


def read(directories: Sequence[str]) -> list[Run]:
    """Read the runs in the given directories.

    Raises:
        ValueError: one of the directories is not a run directory.
    """
    return [_read(Path(directory), name) for directory, name in zip(directories, names(directories), strict=True)]


def names(directories: Sequence[str]) -> list[str]:
    """The names of the runs: the last components of the paths if all of them differ, otherwise the whole paths."""
    folder_names = [Path(directory).resolve().name for directory in directories]
    return folder_names if len(set(folder_names)) == len(folder_names) else list(directories)


def _read(directory: Path, name: str) -> Run:
    # Read the claim before exit.json, because a run writes exit.json before giving up its claim. If exit.json were read
    # first, a run that ends between the two reads would seem to have neither a claim nor exit.json, like a killed run.
    is_claimed = process.is_claimed(directory)
    path = directory / "metrics.jsonl"
    if not path.exists() and not (directory / "config.toml").exists():
        raise ValueError(f"{directory} is not a run directory: it has no metrics.jsonl and no config.toml")
    run_record = record.read(path)
    run_scores = scores.read(directory, run_record.last_step)
    run_record = run_record._replace(series=run_record.series | run_scores.series)
    all_starts = history.read(directory)
    # Starts before the newest start at step 0 belong to an earlier run in this directory.
    first = max((i for i, start in enumerate(all_starts) if start.step == 0), default=0)
    config = _config(directory) or (all_starts[-1].config if all_starts else {})
    planned_steps = config.get("train", {}).get("steps", 0)
    if type(planned_steps) is not int or not 0 <= planned_steps <= MAX_STEP:
        planned_steps = 0
    return Run(
        directory=directory,
        name=name,
        record=run_record,
        config=config,
        starts=all_starts[first:],
        parts=_parts(all_starts, run_record.last_step),
        end=all_starts[-1].steps if all_starts else planned_steps,
        ended=ExitRecord.read(directory),
        sample=_sample(directory, run_record.last_step),
        scores=run_scores,
        profiles=profiles.read(directory),
        loads=columns.read(directory),
        written=_written(path, directory / history.NAME, directory / process.LOCK),
        is_claimed=is_claimed,
    )


def _written(*paths: Path) -> datetime | None:
    """The time of the last write to any of the given files; None if all the files are missing."""
    times = [path.stat().st_mtime for path in paths if path.exists()]
    return datetime.fromtimestamp(max(times), timezone.utc) if times else None


def _config(directory: Path) -> Config:
    """The configuration in config.toml, as section -> key -> value; {} if the file is missing or damaged."""
    try:
        table = read_toml(directory / "config.toml")
    except ValueError:
        return {}
    return {section: keys for section, keys in table.items() if isinstance(keys, dict)}


def _sample(directory: Path, last_step: int) -> str:
    """The text in sample.json; '' if there is no sample, or if the sample's step is after the run's last step."""
    try:
        sample = read_object(directory / "sample.json")
    except ValueError:
        return ""
    step, text = sample.get("step"), sample.get("text")
    return text if isinstance(text, str) and isinstance(step, int) and step <= last_step else ""


def _parts(all_starts: Sequence[Start], last_step: int) -> list[Part]:
    """Divide a run at its restarts. Each part except the last ends at the step from which the next start resumed.

    The last part ends at `last_step`. If no start is recorded, the result is one part whose start is None.
    """
    recorded = history.parts(all_starts)
    # Keep only starts after which the run completed a step. If there are no such starts, keep the last start.
    recorded = [start for start in recorded if start.step < last_step] or recorded[-1:]
    if not recorded:
        return [Part(1, last_step, None)]
    ends = [*(start.step for start in recorded[1:]), max(last_step, recorded[-1].step)]
    return [Part(start.step + 1, end, start) for start, end in zip(recorded, ends, strict=True)]


def _restarted(start: Start) -> str:
    """The description of a restart in the list of events."""
    return f"started again after step {start.step} on {layout_in_words(start.layout)}, {moment(start.time)}"


def layout_in_words(layout: Mapping[str, int]) -> str:
    """A layout in words: the number of processes and the axes larger than 1 ("4 processes: dp_shard 2 × tp 2")."""
    n = layout.get("processes", 1)
    axes = " × ".join(f"{axis} {size}" for axis, size in layout.items() if axis != "processes" and size > 1)
    return f"{n} process{'es' if n != 1 else ''}" + (f": {axes}" if axes else "")


def numbers(run: Run) -> dict[str, str]:
    """The most important numbers of a run, as label -> formatted number. Numbers that are not recorded are left out."""
    series = run.record.series
    in_words: dict[str, str] = {}
    last_step = run.record.last_step
    in_words["steps"] = f"{last_step:,} of {run.end:,}" if run.end else f"{last_step:,}"
    if run.record.tokens.values.size:
        in_words["tokens"] = short(run.record.tokens.values[-1])
    for key, label in (("loss", "training loss"), ("val_loss", "validation loss"), ("test_loss", "test loss")):
        if key in series:
            last = series[key].values[-1]
            in_words[label] = loss_in_words(run, last) if key != "loss" else f"{last:.4g}"
    best = best_validation(run)
    if best is not None:
        kept = kept_checkpoint(run, best.step)
        in_words["best validation loss"] = f"{best.loss:.4g} (step {best.step:,}{', ' if kept else ''}{kept})"
    for key, label, write in (
        ("tokens_per_s", "tokens/s, median", short),
        ("mfu", "MFU, median", lambda value: f"{value:.1%}"),
        ("step_time_s", "step time, median", seconds),
    ):
        if key in series:
            in_words[label] = write(percentile(series[key], 50))
    if "step_time_s" in series:
        in_words["99th percentile"] = seconds(percentile(series["step_time_s"], 99))
        in_words["time in steps"] = duration(float(series["step_time_s"].values.sum()))
    if "peak_memory_bytes" in series:
        in_words["peak memory, rank 0"] = gibibytes(series["peak_memory_bytes"].values.max())
    kinds = [event.kind for event in run.events]
    in_words["restarts"] = str(kinds.count("restart"))
    in_words["skipped steps"] = str(kinds.count("skipped"))
    return in_words


def best_validation(run: Run) -> Best | None:
    """The smallest loss on the validation split, or on the first set of [data] validation if the split has no losses.

    The result is None if the run has no validation losses at all.
    """
    keys = sorted(filter(is_validation, run.record.series))
    if not keys:
        return None
    key = "val_loss" if "val_loss" in keys else keys[0]
    steps, losses = run.record.series[key]
    place = int(np.argmin(losses))
    return Best(key, float(losses[place]), int(steps[place]))


def kept_checkpoint(run: Run, step: int) -> str:
    """The path of a step's checkpoint; '' if there is no complete checkpoint or its location cannot be reached.

    A path inside the run directory is returned relative to that directory. URLs are opened only if they belong to an
    object store. Without a network, the result is '' for such a URL, and the page is still written.
    """
    directory = str(run.config.get("checkpoint", {}).get("dir"))
    if "://" in directory and not is_object_store(directory):
        return ""
    _, newest = resume.newest_of_run(run.directory)
    if not newest:
        return ""
    folder = resume.name(step)
    try:
        files, _ = resume.split_path(newest)
        is_complete = manifest.NAME in files.sizes(folder)
    except (ValueError, OSError):
        # The checkpoint's folder does not exist or cannot be reached.
        return ""
    if not is_complete:
        return ""
    path = files.path(folder)
    is_inside = "://" not in path and Path(path).is_relative_to(run.directory)
    return str(Path(path).relative_to(run.directory)) if is_inside else path


def loss_in_words(run: Run, loss: float) -> str:
    """A loss with its perplexity: 4.23 (ppl 68.72). The weighted sum of several losses has no perplexity."""
    # If the loss is a sum, the record also contains the terms of the sum, under keys like val_mlm.
    is_sum = any(key.startswith("val_") and not is_validation(key) for key in run.record.series)
    return f"{loss:.4g}" + ("" if is_sum else f" (ppl {perplexity(loss):.4g})")


def percentile(series: Series, percent: float) -> float:
    """A percentile of a series: the smallest value that at least `percent` % of the values do not exceed."""
    return float(np.percentile(series.values, percent, method="inverted_cdf"))
