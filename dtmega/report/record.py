"""`metrics.jsonl` as arrays, whatever is wrong with it: a run may be writing or killed, a disk may be damaged.

A line counts if it is a JSON object with a whole number as its `step`; others are counted and left out. Of a step that
stands twice the later line counts. A million lines take seconds.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dtmega.training.metrics import parse_line

MAX_LINE_BYTES = 16 * 2**20  # a file without line ends is not read into memory whole
MAX_KEYS = 200  # of numbers; a damaged file could have a name for each line
NOT_MEASURED = ("step", "checkpoint", "checkpoint_stall_s", "tokens")  # numbers of a line that are no curve


class Series(NamedTuple):
    """One number of a run over its steps, which ascend. `steps` [n] int64, `values` [n] float64, all finite."""

    steps: NDArray[np.int64]
    values: NDArray[np.float64]


class Event(NamedTuple):
    """Something that happened after a step.

    Attributes:
        kind: "checkpoint", "failed checkpoint", "skipped" or "evaluation".
        text: what a person wants to know of it.
    """

    step: int
    kind: str
    text: str


class Record(NamedTuple):
    """What stands in a metrics.jsonl.

    Attributes:
        series: by key, as in the file: loss, grad_norm, val_loss, ...
        tokens: that the run had read after each step.
        events: in the order of the file.
        not_finite: steps that were skipped since their loss or gradient norm is no finite number.
        last_step: the largest step of any line; 0 in an empty file.
        damaged_lines: how many were left out.
    """

    series: dict[str, Series]
    tokens: Series
    events: list[Event]
    not_finite: list[int]
    last_step: int
    damaged_lines: int


def read(path: Path) -> Record:
    """The record in this file; an empty one if the file is not there yet."""
    columns: dict[str, tuple[array[int], array[float]]] = {}
    events: list[Event] = []
    not_finite: list[int] = []
    last_step = 0
    damaged_lines = 0
    for line in _lines(path):
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
            try:
                column[1].append(value)
            except OverflowError:  # a whole number beyond all floats
                continue
            column[0].append(step)
        if "checkpoint" in record or "skipped" in record or "loss" not in record:
            events += _events(record)
        if _is_not_finite(record):
            not_finite.append(step)
    every = {key: _series(*column) for key, column in columns.items()}
    return Record(
        series={key: series for key, series in every.items() if key not in NOT_MEASURED and series.steps.size},
        tokens=every.get("tokens", _series(array("q"), array("d"))),
        events=events,
        not_finite=not_finite,
        last_step=last_step,
        damaged_lines=damaged_lines,
    )


def is_validation(key: str) -> bool:
    """True for the loss on the validation split (val_loss), or on a set of [data] validation (val_NAME_loss)."""
    return key.startswith("val_") and key.endswith("_loss")


def validation_name(key: str) -> str:
    """val_loss -> validation, val_code_loss -> validation code"""
    return key.removesuffix("_loss").replace("val", "validation", 1).replace("_", " ", 1)


def _lines(path: Path) -> Iterator[bytes]:
    try:
        file: BinaryIO = path.open("rb")
    except FileNotFoundError:
        return
    with file:
        while line := file.readline(MAX_LINE_BYTES):
            yield line


def _is_not_finite(record: Mapping[str, Any]) -> bool:
    """True for a step that was skipped since a number of it is not finite, which JSON cannot hold: it is null there.

    float16's scale is meant to overflow the gradients now and then: only its losses count.
    """
    if record.get("skipped") is not True:
        return False
    keys = ("loss",) if "loss_scale" in record else ("loss", "grad_norm")
    return any(key in record and record[key] is None for key in keys)


def _events(record: Mapping[str, Any]) -> Iterator[Event]:
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
            still = f"; training stood still for {stall_s:.2f} s" if isinstance(stall_s, float) else ""
            yield Event(step, "checkpoint", f"of step {record['checkpoint']}{still}")
    means = {key: value for key, value in record.items() if key.startswith(("val_", "test_"))}
    if means:
        yield Event(step, "evaluation", ", ".join(f"{key} {value}" for key, value in means.items()))


def _series(steps: array[int], values: array[float]) -> Series:
    """Finite values by ascending steps, the last value of each step."""
    step, value = np.array(steps, np.int64), np.array(values, np.float64)
    finite = np.isfinite(value)
    step, value = step[finite], value[finite]
    if np.any(step[1:] <= step[:-1]):
        order = np.argsort(step, kind="stable")
        step, value = step[order], value[order]
        last = np.append(step[1:] != step[:-1], True)
        step, value = step[last], value[last]
    return Series(step, value)
