"""Read the evaluations of a run's checkpoints: scores from `dtmega evaluate`, and losses measured with `eval.only`.

The files may be damaged or written by a different program. Scores that lack a step or a numeric value are left out. The
names of unreadable files are returned.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

import numpy as np

from dtmega.distributed.exit_codes import MAX_STEP
from dtmega.files.untrusted_json import read_object
from dtmega.report import record
from dtmega.report.record import Event, Series

FOLDER = "evaluations"  # folder in a run directory, with one file per checkpoint and set of tasks
LOSSES = "evaluation.jsonl"  # file in a run directory, with the losses from runs that set `[eval] only`
OF_LOSSES = "[eval] only"  # task name of the scores that are read from LOSSES
MAX_BYTES = 16 * 2**20  # maximum size of a file that is read; a file with all MMLU scores takes 1 MB
MAX_FILES = 500  # maximum number of files that are read; if there are more, only those of the latest steps are read
MAX_SCORES = 5000  # maximum number of scores kept


class Score(NamedTuple):
    """The score of one checkpoint on one task, by one metric.

    Attributes:
        step: step of the checkpoint.
        task: name of the task in lm-evaluation-harness, or OF_LOSSES for a loss.
        metric: name of the metric, followed in brackets by the name of the answer filter, if any.
        value: value of the score.
        error: standard error of the score; None if unknown.
        about: conditions of the evaluation in words (number of few-shot examples, number of questions, date).
    """

    step: int
    task: str
    metric: str
    value: float
    error: float | None
    about: str


class Scores(NamedTuple):
    """All evaluations of a run.

    Attributes:
        scores: scores, ordered by task, metric and step.
        unreadable: names of the files that cannot be read.
    """

    scores: list[Score]
    unreadable: list[str]

    @property
    def events(self) -> list[Event]:
        """One event for each step and task. The text of the event lists all metrics of the task."""
        words_by_task: dict[tuple[int, str], list[str]] = {}
        for score in self.scores:
            words_by_task.setdefault((score.step, score.task), []).append(f"{score.metric} {written(score)}")
        return [Event(step, "score", f"{task}: {', '.join(words)}") for (step, task), words in words_by_task.items()]

    @property
    def series(self) -> dict[str, Series]:
        """The scores over the checkpoints' steps, as panel title -> series. Each metric of each task has a series.

        Losses, and metrics with a score for only one checkpoint, are left out.
        """
        points_by_title: dict[str, list[tuple[int, float]]] = {}
        for score in self.scores:
            if score.task != OF_LOSSES:
                title = f"Score: {score.task}, {score.metric}"
                points_by_title.setdefault(title, []).append((score.step, score.value))
        series = {}
        for title, points in points_by_title.items():
            if len(points) > 1:
                steps = np.array([step for step, _ in points], np.int64)
                values = np.array([value for _, value in points])
                series[title] = Series(steps, values)
        return series


def read(directory: Path, last_step: int) -> Scores:
    """Read the evaluations in a run directory.

    If several files have scores for the same checkpoint, task and metric, the last file by name wins.

    Args:
        directory: run directory.
        last_step: last step of the run. Scores of later steps belong to an earlier run in this directory.
    """
    newest: dict[tuple[int, str, str], Score] = {}
    unreadable = []
    for path in sorted((directory / FOLDER).glob("*.json"))[-MAX_FILES:]:
        try:
            content = read_object(path, MAX_BYTES)
        except ValueError:
            unreadable.append(path.name)
            continue
        for score in _of_harness(content):
            newest[score[:3]] = score
    for key, series in record.read(directory / LOSSES).series.items():
        for step, value in zip(series.steps.tolist(), series.values.tolist(), strict=True):
            newest[step, OF_LOSSES, key] = Score(step, OF_LOSSES, key, value, None, "")
    scores = [score for score in newest.values() if score.step <= last_step]
    scores.sort(key=lambda score: (score.task, score.metric, score.step))
    return Scores(scores[:MAX_SCORES], unreadable)


def written(score: Score) -> str:
    """The score and its standard error as text, such as 0.5123 ± 0.011."""
    return f"{score.value:.4g}" + (f" ± {score.error:.2g}" if score.error is not None else "")


def _of_harness(content: Mapping[str, Any]) -> Iterator[Score]:
    """The scores in a file from `dtmega evaluate`: {"step": 3, "results": {task: {"acc,none": 0.5, ...}}, ...}."""
    step = content.get("step")
    results = content.get("results")
    if type(step) is not int or not 0 <= step <= MAX_STEP or not isinstance(results, dict):
        return
    for task, values in results.items():
        if not isinstance(values, dict):
            continue
        about = _about(content, task)
        for name, value in values.items():
            metric, _, of_filter = name.partition(",")
            if metric.endswith("_stderr") or not _is_number(value):
                continue
            stderr = values.get(f"{metric}_stderr,{of_filter}")
            error = float(stderr) if _is_number(stderr) else None
            metric += f" ({of_filter})" if of_filter not in ("", "none") else ""
            yield Score(step, task, metric, float(value), error, about)


def _about(content: Mapping[str, Any], task: str) -> str:
    """The known conditions of a task's evaluation, in words (`Score.about`)."""
    n_shots = _inside(content, "n-shot", task)
    n_questions = _inside(content, "n-samples", task, "effective")
    words = [
        f"{n_shots} examples before each" if n_shots else "",
        f"{n_questions:,} questions" if type(n_questions) is int else "",
        str(content.get("date", "")),
    ]
    return ", ".join(word for word in words if word)


def _inside(content: Any, *keys: str) -> Any:
    """Look up a value in nested tables, with one key per level, outermost first; None if a key is missing."""
    for key in keys:
        content = content.get(key) if isinstance(content, dict) else None
    return content


def _is_number(value: Any) -> TypeGuard[float]:
    """True for a finite number whose absolute value is below 1e300, which is small enough for arithmetic."""
    if type(value) is not int and type(value) is not float:
        return False
    return abs(value) < 1e300 and math.isfinite(value)
