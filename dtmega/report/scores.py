"""Evaluations of a run's checkpoints: scores of `dtmega evaluate` in `evaluations/`, losses of `eval.only` beside them.

Both may be damaged, or somebody else's: what is no number of a checkpoint is left out, and files that cannot be read
are named.
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

FOLDER = "evaluations"  # of a run directory; one file for a checkpoint and its tasks
LOSSES = "evaluation.jsonl"  # of a run directory; what a start with [eval] only has measured
OF_LOSSES = "[eval] only"
MAX_BYTES = 16 * 2**20  # of a file of scores; those of all of MMLU are 1 MB
MOST_FILES = 500  # the newest by name, which begins with the step
MOST_SCORES = 5000


class Score(NamedTuple):
    """A number that a checkpoint was given.

    Attributes:
        task: of lm-evaluation-harness, or `OF_LOSSES`.
        metric: its name there, with the filter of the answers where there is one.
        error: its standard error; None where none is known.
        about: what it was asked with, in words.
    """

    step: int
    task: str
    metric: str
    value: float
    error: float | None
    about: str


class Scores(NamedTuple):
    """All evaluations of a run: by task, metric and step, and the names of files that could not be read."""

    found: list[Score]
    unreadable: list[str]

    @property
    def events(self) -> list[Event]:
        """One for each step and task."""
        said: dict[tuple[int, str], list[str]] = {}
        for score in self.found:
            said.setdefault((score.step, score.task), []).append(f"{score.metric} {written(score)}")
        return [Event(step, "score", f"{task}: {', '.join(words)}") for (step, task), words in said.items()]

    @property
    def series(self) -> dict[str, Series]:
        """The scores of several checkpoints over their steps, by a title."""
        points: dict[str, list[tuple[int, float]]] = {}
        for score in self.found:
            if score.task != OF_LOSSES:
                points.setdefault(f"Score: {score.task}, {score.metric}", []).append((score.step, score.value))
        return {
            title: Series(np.array([step for step, _ in found], np.int64), np.array([value for _, value in found]))
            for title, found in points.items()
            if len(found) > 1
        }


def read(directory: Path, last_step: int) -> Scores:
    """The evaluations in a run directory, up to a step: later ones are of a run that was there before."""
    newest: dict[tuple[int, str, str], Score] = {}
    unreadable = []
    for path in sorted((directory / FOLDER).glob("*.json"))[-MOST_FILES:]:
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
    found = [score for score in newest.values() if score.step <= last_step]
    found.sort(key=lambda score: (score.task, score.metric, score.step))
    return Scores(found[:MOST_SCORES], unreadable)


def written(score: Score) -> str:
    """0.5123 ± 0.011"""
    return f"{score.value:.4g}" + (f" ± {score.error:.2g}" if score.error is not None else "")


def _of_harness(content: Mapping[str, Any]) -> Iterator[Score]:
    """The scores in a file of `dtmega evaluate`: {"step": 3, "results": {task: {"acc,none": 0.5, ...}}, ...}."""
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
            told = values.get(f"{metric}_stderr,{of_filter}")
            error = float(told) if _is_number(told) else None
            metric += f" ({of_filter})" if of_filter not in ("", "none") else ""
            yield Score(step, task, metric, float(value), error, about)


def _about(content: Mapping[str, Any], task: str) -> str:
    n_shots = _inside(content, "n-shot", task)
    n_questions = _inside(content, "n-samples", task, "effective")
    words = [
        f"{n_shots} examples before each" if n_shots else "",
        f"{n_questions:,} questions" if type(n_questions) is int else "",
        str(content.get("date", "")),
    ]
    return ", ".join(word for word in words if word)


def _inside(content: Any, *keys: str) -> Any:
    for key in keys:
        content = content.get(key) if isinstance(content, dict) else None
    return content


def _is_number(value: Any) -> TypeGuard[float]:
    if type(value) is not int and type(value) is not float:
        return False
    return abs(value) < 1e300 and math.isfinite(value)
