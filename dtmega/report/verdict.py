"""Judge a run in one line: the run's state, the last completed step, and a warning if the loss diverges.

docs/report.md explains the rules.
"""

from __future__ import annotations

from datetime import datetime
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dtmega.distributed import exit_codes
from dtmega.report.curves import plain
from dtmega.report.record import Record, validation_name
from dtmega.report.run import Run, best_validation, loss_in_words, percentile
from dtmega.report.units import duration, short

# The loss is diverging if its newest mean exceeds its lowest mean by more than each of three tolerances: a share of the
# fall from the first mean to the lowest mean, a share of the lowest mean, and a multiple of the standard error of the
# lowest mean.
SHARE_OF_FALL = 0.1
SHARE_OF_BEST = 0.02
STANDARD_ERRORS = 5
MIN_WINDOW = 10  # minimum number of steps in the window of a mean
NEWEST_STEPS = 10  # number of newest steps that are checked for non-finite losses
MAX_NOT_FINITE = 4  # with more non-finite steps, the loss is diverging; float16 needs fewer to find its loss scale
SILENT_STEPS = 20  # a run has stalled if its silence exceeds both its timeout and this many median step times
TIMEOUT_S = 600.0  # timeout of a run whose configuration has no [run] timeout_s
MAX_CHARACTERS = 300  # maximum length of a quoted reason


class Verdict(NamedTuple):
    """The verdict on a run.

    Attributes:
        state: "finished", "stopped", "killed", "stalled", "going on" or "not begun".
        why: words that follow the state in a sentence, with the step that the run has reached and the reason for its
            end.
        diverging: reason why the loss counts as diverging; '' if the loss is not diverging.
    """

    state: str
    why: str
    diverging: str


def judge(run: Run, now: datetime) -> Verdict:
    """Judge a run.

    Args:
        run: run to judge.
        now: current time, with a time zone, used to find out whether the run has stalled.
    """
    state, why = _state(run, now)
    return Verdict(state, why, diverging(run.record))


def facts(run: Run) -> list[str]:
    """Facts about a run: best validation loss, time, tokens and speed. Facts that are not recorded are left out."""
    words = []
    best = best_validation(run)
    if best is not None:
        words.append(f"best {validation_name(best.key)} loss {loss_in_words(run, best.loss)} at step {best.step:,}")
    series = run.record.series
    if "step_time_s" in series:
        words.append(f"{duration(float(series['step_time_s'].values.sum()))} of steps")
    if run.record.tokens.values.size:
        words.append(f"{short(run.record.tokens.values[-1])} tokens")
    if "tokens_per_s" in series:
        words.append(f"{short(percentile(series['tokens_per_s'], 50))} tokens/s")
    return words


def _state(run: Run, now: datetime) -> tuple[str, str]:
    """The state of a run (`Verdict.state`), and the words that follow it (`Verdict.why`)."""
    last_step, ended = run.record.last_step, run.ended
    progress = f"step {last_step:,} of {run.end:,}" if run.end else f"step {last_step:,}"
    if run.refused:
        # A refused attempt changes nothing, so the run is still finished or stopped, as it was before.
        refused = plain(run.refused, MAX_CHARACTERS)
        return "finished" if run.is_done else "stopped", f"after {progress}; {refused}"
    if ended is not None:
        if run.is_done and ended.code == exit_codes.DONE:
            return "finished", f"after {progress}"
        return "stopped", f"after {progress}: {plain(ended.reason, MAX_CHARACTERS)} (exit code {ended.code})"
    if run.is_done and not run.is_claimed:
        return "finished", f"after {progress}"
    if run.written is None:
        return "not begun", "yet: nothing is written"
    if run.is_claimed is False:
        return "killed", f"after {progress}: its process is gone and has left no exit.json"

    silent_s = max((now - run.written).total_seconds(), 0.0)
    if silent_s > patience_s(run):
        alive = "; its process is still there" if run.is_claimed else ""
        return "stalled", f"after {progress}: nothing written for {duration(silent_s)}{alive}"
    return "going on", f"at {progress}, last written {duration(silent_s)} before this page"


def patience_s(run: Run) -> float:
    """The time in seconds for which a run without exit.json may be silent before it counts as stalled."""
    timeout_s = run.config.get("run", {}).get("timeout_s")
    if not isinstance(timeout_s, int | float) or not 0 < timeout_s < 1e9:
        timeout_s = TIMEOUT_S
    times = run.record.series.get("step_time_s")
    steps_s = SILENT_STEPS * percentile(times, 50) if times is not None else 0.0
    return max(float(timeout_s), steps_s)


def diverging(record: Record) -> str:
    """The reason why the loss in a record counts as diverging; '' if the loss is not diverging."""
    newest = [step for step in record.not_finite if step > record.last_step - NEWEST_STEPS]
    if len(newest) > MAX_NOT_FINITE:
        return f"of the last {NEWEST_STEPS} steps {len(newest)} had a loss or gradient norm that is not finite"

    losses = record.series.get("loss")
    if losses is None:
        return ""
    window = max(losses.values.size // 10, MIN_WINDOW)
    if losses.values.size < 2 * window:
        return ""
    # Means are computed from differences of running sums. Clip huge losses, because adding a huge loss to
    # a sum would erase the digits of the other losses.
    values = np.clip(losses.values, -1e6, 1e6)
    means = _means(values, window)
    last = float(means[-1])
    # Compare only with means whose windows do not overlap the window of the last mean.
    earlier = means[: values.size - 2 * window + 1]
    place = int(np.argmin(earlier))
    best, first = float(earlier[place]), float(earlier[0])
    standard_error = float(np.std(values[place : place + window])) / window**0.5
    tolerance = max(SHARE_OF_FALL * (first - best), SHARE_OF_BEST * abs(best), STANDARD_ERRORS * standard_error)
    if last - best <= tolerance:
        return ""
    best_step = losses.steps[place + window - 1]
    return f"the mean loss of the last {window} steps is {last:.4g}, up from {best:.4g} at step {best_step:,}"


def _means(values: NDArray[np.float64], window: int) -> NDArray[np.float64]:
    """The means over all windows of `window` consecutive values, float64 [n - window + 1] for n values."""
    sums = np.cumsum(np.append(0.0, values))
    return (sums[window:] - sums[:-window]) / window
