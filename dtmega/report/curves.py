"""Compute the report's curves, each with few enough points for a browser.

Thinned curves have fewer points but keep the extremes. The other curves are running means, the shares of the phases and
the distribution of step times.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import reduce
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dtmega.files import console
from dtmega.report.record import Event, Series, is_validation
from dtmega.report.run import Run

BUCKETS = 2000  # number of buckets, each with two points, in a thinned curve; screens have fewer pixel columns
MEAN_POINTS = 1000  # maximum number of points of a running mean
MAX_SHARES = 500  # maximum number of points in the curve of a phase's share
MEANS = 50  # a running mean's window spans 1 / MEANS of all steps
CIRCLES = 100  # a curve of validation losses has markers if it has at most this many points
MAX_LINES = 30  # maximum number of restart lines per run
MAX_CHARACTERS = 40  # maximum length of a drawn name
MARKS = 1000  # maximum number of events drawn per kind


def thinned(series: Series, marked: Iterable[int] = (), buckets: int = BUCKETS) -> Series:
    """Reduce a series to fewer points without changing how its curve looks.

    The steps are divided into buckets of about equal length. The function keeps the smallest and the largest value of
    each bucket, the first step, the last step and the marked steps. A series of at most 2 · buckets points is
    returned unchanged.

    Args:
        series: series to thin, in ascending order of steps.
        marked: steps that must be kept.
        buckets: number of buckets.
    """
    steps, values = series
    if steps.size <= 2 * buckets:
        return series
    edges = np.linspace(0, steps.size, buckets + 1).astype(np.int64)[:-1]
    extremes = [_places_of_extremes(ufunc, values, edges) for ufunc in (np.minimum, np.maximum)]
    marked_places = np.flatnonzero(np.isin(steps, np.fromiter(marked, np.int64)))
    places = np.unique(np.concatenate([*extremes, marked_places, [0, steps.size - 1]]))
    return Series(steps[places], values[places])


def _places_of_extremes(ufunc: np.ufunc, values: NDArray[np.float64], edges: NDArray[np.int64]) -> NDArray[np.int64]:
    """The index in `values` of the first occurrence of each bucket's extreme.

    Args:
        ufunc: function that finds an extreme: np.minimum for the smallest value, np.maximum for the largest.
        values: values of all buckets, one bucket after the other.
        edges: indices in `values` at which the buckets begin.
    """
    sizes = np.diff(np.append(edges, values.size))
    extreme_of_bucket = np.repeat(ufunc.reduceat(values, edges), sizes)
    # The extreme may occur several times in a bucket. Keep only the first index in each bucket.
    places = np.flatnonzero(values == extreme_of_bucket)
    bucket = np.searchsorted(edges, places, side="right")
    return places[np.append(True, bucket[1:] != bucket[:-1])]


def running_mean(series: Series) -> tuple[Series, int]:
    """The running mean of a series, and the number of steps in the window of each mean.

    The mean at a step covers the window that ends at this step. At most MEAN_POINTS means are returned, evenly spaced
    over the steps. If the window would have fewer than two steps, the returned series is empty.
    """
    steps, values = series
    window = steps.size // MEANS
    if window < 2:
        return Series(steps[:0], values[:0]), window
    sums = np.cumsum(np.append(0.0, values))
    ends = np.unique(np.linspace(window, steps.size, min(MEAN_POINTS, steps.size - window + 1)).astype(np.int64))
    return Series(steps[ends - 1], (sums[ends] - sums[ends - window]) / window), window


def tail(series: Series) -> Series:
    """The distribution of step times, with more points towards the slowest steps.

    Args:
        series: step times of a run.

    Returns:
        A series whose `values` are step times in ascending order. Instead of step numbers, `steps` holds counts: for
        each step time, the number of steps that took at least as long. The counts fall from the total number of steps
        to 1, evenly spaced on a logarithmic scale.
    """
    ordered = np.sort(series.values)[::-1]
    if not ordered.size:
        return Series(series.steps[:0], ordered)
    ranks = np.unique(np.geomspace(1, ordered.size, 200).astype(np.int64))[::-1]
    return Series(ranks, ordered[ranks - 1])


def phase_shares(series: Mapping[str, Series], most: int = MAX_SHARES) -> tuple[list[int], dict[str, list[float]]]:
    """The fraction of the step time that each phase takes.

    Args:
        series: key in the record -> series of a run. Steps that lack one of the recorded phases are left out.
        most: maximum number of points. If there are more steps, each point covers several consecutive steps.

    Returns:
        The last step that each point covers, and a mapping from each phase to its shares, one per point. A share is the
        time of the phase divided by the time of all phases, summed over the steps that the point covers.
    """
    recorded = {phase: series[key] for key, phase in STEP_PHASES.items() if key in series}
    if not recorded:
        return [], {}
    steps = reduce(np.intersect1d, [each.steps for each in recorded.values()])
    # A damaged record may contain any number, so clip the times. No time is then negative, and all sums are finite.
    times_s = np.stack([each.values[np.isin(each.steps, steps)] for each in recorded.values()]).clip(0, 1e9)
    steps, times_s = steps[times_s.sum(0) > 0], times_s[:, times_s.sum(0) > 0]
    if not steps.size:
        return [], {}
    edges = np.linspace(0, steps.size, min(steps.size, most) + 1).astype(np.int64)
    sums_s = np.add.reduceat(times_s, edges[:-1], axis=1)
    shares = sums_s / sums_s.sum(0)
    return steps[edges[1:] - 1].tolist(), dict(zip(recorded, shares.tolist(), strict=True))


def few(events: list[Event], most: int = MARKS) -> list[Event]:
    """Keep all events if there are at most `most` events; otherwise keep `most` events, evenly spaced."""
    if len(events) <= most:
        return events
    return [events[i] for i in np.linspace(0, len(events) - 1, most).astype(int)]


COUNT, PERCENT, BYTES = "count", "%", "B"  # units whose tick labels have a special format


class Panel(NamedTuple):
    """A panel that shows one metric over the steps.

    Attributes:
        key: name of the series in the record.
        title: heading of the panel.
        unit: COUNT, PERCENT, BYTES, or '' for a plain number.
        log: whether the vertical axis is logarithmic.
        mean: whether to draw a running mean on top of the individual steps, whose noise hides the trend.
    """

    key: str
    title: str
    unit: str = ""
    log: bool = False
    mean: bool = True


LOSS = Panel("loss", "Loss: faint each step, solid the running mean, circles validation")
# Key of metrics.jsonl -> phase of a step. The times of the phases add up to step_time_s. One panel shows all phases.
STEP_PHASES = {
    "data_s": "data",
    "forward_backward_s": "forward+backward",
    "reduce_s": "reduce",
    "optimizer_s": "optimizer",
    "other_s": "other",
}
PHASES = Panel("step_time_s by phase", "Step time by phase", PERCENT)
PANELS = (
    Panel("grad_norm", "Gradient norm", log=True),
    Panel("lr", "Learning rate", mean=False),
    Panel("tokens_per_s", "Tokens per second", COUNT),
    Panel("mfu", "Model FLOPs utilisation (MFU)", PERCENT),
    Panel("step_time_s", "Step time (s)", log=True),
    PHASES,
    Panel("peak_memory_bytes", "Peak memory of rank 0", BYTES, mean=False),
)
MAX_OTHERS = 8  # maximum number of panels for metrics outside PANELS, for example loss parts or [log] params_norm


def panels(series: Iterable[str], *, alone: bool) -> list[Panel]:
    """The panels below the loss: first the panels of PANELS that have data, then one panel for each remaining metric.

    Args:
        series: keys of the series of all runs.
        alone: whether there is only one run. With several runs, the phases panel is left out.
    """
    recorded = set(series) - {PHASES.key}
    if alone and recorded & STEP_PHASES.keys():
        recorded.add(PHASES.key)
    recorded -= STEP_PHASES.keys()
    known = {panel.key for panel in PANELS}
    # The loss panel shows validation and test losses too.
    others = sorted(key for key in recorded - known if key != "loss" and not is_validation(key) and key != "test_loss")
    return [
        *(panel for panel in PANELS if panel.key in recorded),
        *(Panel(key, key, mean=False) for key in others[:MAX_OTHERS]),
    ]


def marked_steps(run: Run) -> list[int]:
    """The steps at which events are drawn. Thinned curves keep these steps."""
    steps = []
    for kind in {event.kind for event in run.events}:
        drawn = few([event for event in run.events if event.kind == kind])
        steps += [event.step for event in drawn]
    return steps


def restarted_after(run: Run) -> list[int]:
    """The steps after which the run was restarted. At most the last MAX_LINES steps are returned."""
    return sorted({start.step for start in run.starts[1:]})[-MAX_LINES:]


def plain(text: str, most: int = MAX_CHARACTERS) -> str:
    """Make text fit on one line: escape control and invisible characters, then truncate to `most` characters."""
    text = console.printable(text)
    return text if len(text) <= most else f"{text[: most - 1]}…"
