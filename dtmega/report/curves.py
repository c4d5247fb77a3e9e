"""Curves that a browser can draw: fewer points with every extreme kept, means of noisy steps, the slow tail."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dtmega.files import console
from dtmega.report.record import Event, Series, is_validation
from dtmega.report.run import Run

BUCKETS = 2000  # of a curve, two points each: a screen has fewer columns
MEAN_POINTS = 1000
MEANS = 50  # a curve of means has this many independent ones
CIRCLES = 100  # validations that are told from each other
MOST_LINES = 30  # restarts of a run
MOST_LETTERS = 40  # of a name
MARKS = 1000  # of one kind that are drawn


def thinned(series: Series, marked: Iterable[int] = (), buckets: int = BUCKETS) -> Series:
    """The smallest and the largest value of each of `buckets` stretches of steps, both ends, and the marked steps.

    A series of no more than two points a bucket stays as it is.
    """
    steps, values = series
    if steps.size <= 2 * buckets:
        return series
    edges = np.linspace(0, steps.size, buckets + 1).astype(np.int64)[:-1]
    extremes = [_first_that_is(ufunc, values, edges) for ufunc in (np.minimum, np.maximum)]
    of_marks = np.flatnonzero(np.isin(steps, np.fromiter(marked, np.int64)))
    kept = np.unique(np.concatenate([*extremes, of_marks, [0, steps.size - 1]]))
    return Series(steps[kept], values[kept])


def _first_that_is(ufunc: np.ufunc, values: NDArray[np.float64], edges: NDArray[np.int64]) -> NDArray[np.int64]:
    """The place in `values` of the extreme of each bucket, the first of equal ones."""
    sizes = np.diff(np.append(edges, values.size))
    found = np.flatnonzero(values == np.repeat(ufunc.reduceat(values, edges), sizes))
    bucket = np.searchsorted(edges, found, side="right")
    return found[np.append(True, bucket[1:] != bucket[:-1])]


def running_mean(series: Series, points: int = MEAN_POINTS) -> tuple[Series, int]:
    """Means over the last w steps, at most `points` of them, and w; nothing where there are too few steps for it."""
    steps, values = series
    window = steps.size // MEANS
    if window < 2:
        return Series(steps[:0], values[:0]), window
    sums = np.cumsum(np.append(0.0, values))
    ends = np.unique(np.linspace(window, steps.size, min(points, steps.size - window + 1)).astype(np.int64))
    return Series(steps[ends - 1], (sums[ends] - sums[ends - window]) / window), window


def tail(series: Series) -> Series:
    """How slow the slowest steps are: percentiles as `steps` of another kind, from the median to the slowest step.

    Returns:
        `values` ascending, at ranks that lie evenly on the scale 1 in 2, 1 in 10, 1 in 100, ...; `steps` has how many
        steps are at least as slow.
    """
    ordered = np.sort(series.values)[::-1]
    if not ordered.size:
        return Series(series.steps[:0], ordered)
    ranks = np.unique(np.geomspace(1, ordered.size, 200).astype(np.int64))[::-1]
    return Series(ranks, ordered[ranks - 1])


def few(events: list[Event], most: int = MARKS) -> list[Event]:
    """The events, or evenly spaced ones where there are more than a picture can show."""
    if len(events) <= most:
        return events
    return [events[i] for i in np.linspace(0, len(events) - 1, most).astype(int)]


COUNT, PERCENT, BYTES = "count", "%", "B"  # kinds of numbers that have ticks of their own


class Panel(NamedTuple):
    """A picture of one number.

    Attributes:
        key: of the series.
        unit: COUNT, PERCENT, BYTES, or '' for a plain number.
        log: its axis is logarithmic.
        mean: the noise of single steps hides the course, which a running mean shows.
    """

    key: str
    title: str
    unit: str = ""
    log: bool = False
    mean: bool = True


LOSS = Panel("loss", "Loss: faint each step, solid the running mean, circles validation")
PANELS = (
    Panel("grad_norm", "Gradient norm", log=True),
    Panel("lr", "Learning rate", mean=False),
    Panel("tokens_per_s", "Tokens per second", COUNT),
    Panel("mfu", "Model FLOPs utilisation (MFU)", PERCENT),
    Panel("step_time_s", "Step time (s)", log=True),
    Panel("peak_memory_bytes", "Peak memory of rank 0", BYTES, mean=False),
)
MOST_OTHERS = 8  # numbers that some runs have: a loss that is a part of the whole, [log] params_norm, ...


def panels(series: Iterable[str]) -> list[Panel]:
    """The panels below the loss, for runs that have these series between them: the known ones, then the others."""
    there = set(series)
    known = {panel.key for panel in PANELS}
    others = sorted(key for key in there - known if key != "loss" and not is_validation(key) and key != "test_loss")
    return [
        *(panel for panel in PANELS if panel.key in there),
        *(Panel(key, key, mean=False) for key in others[:MOST_OTHERS]),
    ]


def marked_steps(run: Run) -> list[int]:
    """The steps at which something happened, which no curve leaves out."""
    kinds = {event.kind for event in run.events}
    return [event.step for kind in kinds for event in few([e for e in run.events if e.kind == kind])]


def restarted_after(run: Run) -> list[int]:
    """The steps after which the run was started again, the newest ones: lines through every picture."""
    return sorted({start.step for start in run.starts[1:]})[-MOST_LINES:]


def plain(text: str, most: int = MOST_LETTERS) -> str:
    """A name on one line, cut where it is long, with nothing in it that hides or steers."""
    text = console.printable(text)
    return text if len(text) <= most else f"{text[: most - 1]}…"
