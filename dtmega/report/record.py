"""Read `metrics.jsonl` into arrays, even if the file is still being written, cut off or damaged.

A line is read if it is a JSON object with a whole number as its `step`. Other lines are left out and counted. If a step
appears twice, the later line wins. A million lines are read in seconds.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dtmega.files.regular import open_regular
from dtmega.training.records.lines import parse_line

MAX_LINE_BYTES = 16 * 2**20  # longer lines are read in pieces, so that a file without line ends cannot fill the memory
MAX_KEYS = 200  # maximum number of keys that are read; in a damaged file, every line could have new keys
NOT_CURVES = ("step", "checkpoint", "checkpoint_stall_s", "tokens")  # keys whose numbers are not drawn as curves


class Series(NamedTuple):
    """One metric of a run: the metric's value at each step.

    Attributes:
        steps: step numbers, ascending, int64 [n].
        values: value at each step, float64 [n], all finite.
    """

    steps: NDArray[np.int64]
    values: NDArray[np.float64]


class Event(NamedTuple):
    """An event that follows a step, such as a saved checkpoint.

    Attributes:
        step: step number.
        kind: kind of the event. The kinds in a record are "checkpoint", "failed checkpoint", "skipped" and
            "evaluation"; `run.py` and `scores.py` add more kinds.
        text: description of the event for the reader.
    """

    step: int
    kind: str
    text: str


class Record(NamedTuple):
    """The content of a metrics.jsonl file.

    Attributes:
        series: key in the file (loss, grad_norm, val_loss, ...) -> values of that key.
        tokens: total number of tokens that the run had read after each step.
        events: events in the order of the file.
        not_finite: steps that were skipped because their loss or gradient norm was not finite.
        last_step: largest step number in the file; 0 for an empty file.
        damaged_lines: number of lines that could not be read and were left out.
    """

    series: dict[str, Series]
    tokens: Series
    events: list[Event]
    not_finite: list[int]
    last_step: int
    damaged_lines: int


def read(path: Path) -> Record:
    """Read a metrics.jsonl file. The result is an empty record if the file does not exist yet."""
    columns: dict[str, tuple[array[int], array[float]]] = {}
    events: list[Event] = []
    not_finite: list[int] = []
    last_step = 0
    damaged_lines = 0
    for line in raw_lines(path):
        record = parse_line(line)
        if record is None:
            damaged_lines += 1
            continue
        step = record["step"]
        last_step = max(last_step, step)
        for key, value in record.items():
            if type(value) is not float and type(value) is not int:
                continue
            column = columns.get(key)
            if column is None:
                if len(columns) >= MAX_KEYS:
                    continue
                column = columns[key] = array("q"), array("d")
            steps, values = column
            try:
                values.append(value)
            # An integer may be too large for a float.
            except OverflowError:
                continue
            steps.append(step)
        # Most lines are ordinary steps, which have no events. To save time, this test skips ordinary steps.
        if "checkpoint" in record or "skipped" in record or "loss" not in record:
            events += _events(record)
        if _is_not_finite(record):
            not_finite.append(step)
    all_series = {key: _series(*column) for key, column in columns.items()}
    return Record(
        series={key: series for key, series in all_series.items() if key not in NOT_CURVES and series.steps.size},
        tokens=all_series.get("tokens", _series(array("q"), array("d"))),
        events=events,
        not_finite=not_finite,
        last_step=last_step,
        damaged_lines=damaged_lines,
    )


def is_validation(key: str) -> bool:
    """True for the key of a validation loss: val_loss for the split, val_NAME_loss for a set in [data] validation."""
    return key.startswith("val_") and key.endswith("_loss")


def validation_name(key: str) -> str:
    """A readable name for a validation loss: val_loss -> validation, val_code_loss -> validation code."""
    return key.removesuffix("_loss").replace("val", "validation", 1).replace("_", " ", 1)


def raw_lines(path: Path) -> Iterator[bytes]:
    """Yield the lines of a file, in pieces of at most MAX_LINE_BYTES bytes. A missing file has no lines."""
    try:
        file: BinaryIO = open_regular(path)
    except FileNotFoundError:
        return
    with file:
        while line := file.readline(MAX_LINE_BYTES):
            yield line


def _is_not_finite(record: Mapping[str, Any]) -> bool:
    """True for a step that was skipped because its loss or gradient norm was not finite (null in the file).

    With float16's loss scale, the gradients are expected to overflow now and then, so only the loss counts.
    """
    if record.get("skipped") is not True:
        return False
    keys = ("loss",) if "loss_scale" in record else ("loss", "grad_norm")
    return any(key in record and record[key] is None for key in keys)


def _events(record: Mapping[str, Any]) -> Iterator[Event]:
    """The events in one line of metrics.jsonl: a skipped step, a saved or failed checkpoint, or an evaluation."""
    step = record["step"]
    if record.get("skipped") is True:
        reason = record.get("reason") or f"a spike: loss {record.get('loss')}, grad_norm {record.get('grad_norm')}"
        samples = record.get("sample_ids")
        where = ""
        if isinstance(samples, list) and len(samples) == 2 and all(type(i) is int for i in samples):
            where = f"; samples {samples[0]} to {samples[1] - 1}"
        yield Event(step, "skipped", f"{reason}{where}")
    if "checkpoint" in record:
        if error := record.get("checkpoint_error"):
            yield Event(step, "failed checkpoint", str(error))
        else:
            stall_s = record.get("checkpoint_stall_s")
            stall = f"; training stood still for {stall_s:.2f} s" if isinstance(stall_s, float) else ""
            yield Event(step, "checkpoint", f"of step {record['checkpoint']}{stall}")
    means = {key: value for key, value in record.items() if key.startswith(("val_", "test_"))}
    if means:
        yield Event(step, "evaluation", ", ".join(f"{key} {value}" for key, value in means.items()))


def _series(steps: array[int], values: array[float]) -> Series:
    """A series of the finite values, in ascending order of steps. The last value of a repeated step wins."""
    step, value = np.array(steps, np.int64), np.array(values, np.float64)
    finite = np.isfinite(value)
    step, value = step[finite], value[finite]
    # A run that resumed from an earlier checkpoint wrote some steps twice.
    if np.any(step[1:] <= step[:-1]):
        # The sort is stable, so the values of one step stay in file order, and the last value is the newest.
        order = np.argsort(step, kind="stable")
        step, value = step[order], value[order]
        last = np.append(step[1:] != step[:-1], True)
        step, value = step[last], value[last]
    return Series(step, value)
