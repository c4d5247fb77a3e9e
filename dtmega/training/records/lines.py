"""Write files with one JSON object per line, each with a `step`: metrics.jsonl, digests.jsonl, expert_loads.jsonl.

keep_until(path, step)              # a resumed run first removes damaged lines, and lines of later steps
lines = StepLines(path, say=print)
lines.write({"step": 12, "loss": 2.5})
lines.sync()                        # before a save: a resumed run keeps the lines of earlier steps
lines.close()
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from dtmega.distributed.exit_codes import MAX_STEP
from dtmega.files import atomic
from dtmega.files.untrusted_json import parse_object

EXPERT_LOADS = "expert_loads.jsonl"  # what `loads.py` writes; a run without experts sets that of an earlier run aside


class StepLines:
    """A writer that appends lines to a file. If a line cannot be written, the writer warns and the run continues.

    Args:
        path: path of the file, in an existing folder.
        say: function that prints a warning.

    Raises:
        OSError: the file cannot be opened.
    """

    def __init__(self, path: Path, say: Callable[[str], object]) -> None:
        self._path = path
        self._say = say
        # The file is line-buffered, so that a killed run loses no line.
        self._file = path.open("a", encoding="utf-8", buffering=1)

    @property
    def closed(self) -> bool:
        return self._file.closed

    def write(self, record: Mapping[str, Any]) -> None:
        """Append one line."""
        try:
            self._file.write(json.dumps(record, allow_nan=False) + "\n")
        # If the disk is full, this line stays in the buffer and is written together with the next line.
        except OSError as error:
            self._say(f"WARNING: {self._path.name} cannot be written: {error}")

    def sync(self) -> None:
        """Flush the file and its name to disk."""
        try:
            self._file.flush()
            os.fsync(self._file.fileno())
            atomic.sync_folder(self._path.parent)
        except OSError as error:
            self._say(f"WARNING: {self._path.name} may not survive a power cut: {error}")

    def close(self) -> None:
        """Flush the file to disk and close it."""
        self.sync()
        with contextlib.suppress(OSError):  # the disk may be full
            self._file.close()


def keep_until(path: Path, step: int, evaluates: bool = False) -> None:
    """Remove damaged lines, and lines that a resumed run will write again, from a file such as metrics.jsonl.

    The file is replaced atomically, by a rename. If the run starts from step 0, the old file is kept under the first
    free name of metrics.1.jsonl, metrics.2.jsonl, ...

    Args:
        path: path of the file, which need not exist.
        step: number of steps done before this start.
        evaluates: whether the run will evaluate before it does another step. The lines of earlier evaluations after
            `step` are then removed.
    """
    if not path.exists():
        return
    if step == 0:
        path.rename(next(p for n in itertools.count(1) if not (p := path.with_suffix(f".{n}.jsonl")).exists()))
        atomic.sync_folder(path.parent)
        return
    with path.open("rb") as old, atomic.replaced(path) as new:
        for line in old:
            record = parse_line(line)
            if record is None:
                continue
            is_evaluation = any(key.startswith(("val_", "test_")) for key in record)
            again = evaluates and record["step"] == step and is_evaluation
            if line.endswith(b"\n") and record["step"] <= step and not again:
                new.write(line.decode("utf-8"))


def parse_line(line: bytes) -> dict[str, Any] | None:
    """The record in a line of metrics.jsonl; None if the line is not a JSON object with a valid step."""
    try:
        record = parse_object(line, "a line")
    except ValueError:
        return None
    step = record.get("step")
    return record if type(step) is int and 0 <= step <= MAX_STEP else None
