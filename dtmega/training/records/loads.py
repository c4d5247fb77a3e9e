"""`expert_loads.jsonl`: the number of tokens that used each expert of a mixture, over the steps.

    {"first": 203, "step": 205, "loads": {"1": [731, 802, ...], "2": [699, 815, ...]}}

A line covers the steps `first` to `step`. `loads` maps the number of each layer with experts, counted from 0, to a list
with one count per expert. Each count is the number of tokens that used the expert in these steps. As in the balance
loss, only tokens with a label count. A skipped step adds nothing.

Each of the first 100 steps has its own line. Each later line covers about a hundredth of the steps done so far, so the
file gets about 100 lines each time the number of steps grows by a factor of 2.7. The lines are thus always as fine as
the columns that `dtmega report` draws. Each save also ends a line, so that a resumed run counts each step once.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from torch import Tensor

from dtmega.models.routing import Loads
from dtmega.training.records.lines import StepLines, keep_until

NAME = "expert_loads.jsonl"
LINES = 100  # a line covers at least 1 / LINES of the steps done so far


class LoadsFile:
    """The writer of expert_loads.jsonl.

    Args:
        run_dir: run directory. Lines of steps that the run will repeat are removed from the file; a new run sets the
            old file aside.
        loads: loads of the run's experts.
        at_step: number of steps done before this start.
        say: function that prints a warning.
    """

    def __init__(self, run_dir: Path, loads: Loads, at_step: int, say: Callable[[str], object]) -> None:
        self._path, self._loads, self._say = run_dir / NAME, loads, say
        keep_until(self._path, at_step)
        self._lines: StepLines | None = None
        self._first = at_step + 1
        self._newest = at_step
        self._sum: Tensor | None = None  # loads since the last line, [L, E]

    def after_step(self, step: int) -> None:
        """Add the loads of a step that changed the weights. Write the current line if it covers enough steps."""
        loads = self._loads.last
        if loads is None:
            return
        self._sum = loads if self._sum is None else self._sum + loads
        self._newest = step
        if LINES * (step - self._first + 1) >= step:
            self._write()

    def sync(self) -> None:
        """End the line and flush the file to disk. Call this method before a save."""
        self._write()
        if self._lines is not None:
            self._lines.sync()

    def close(self) -> None:
        self._write()
        if self._lines is not None:
            self._lines.close()

    def _write(self) -> None:
        if self._sum is None:
            return
        found: dict[str, list[int]] = {}
        for layer, loads in enumerate(self._sum.long().tolist()):
            # Dense layers have no loads.
            if any(loads):
                found[str(layer)] = loads
        if not found:
            return
        try:
            self._lines = self._lines or StepLines(self._path, self._say)
        # The next line covers these steps too.
        except OSError as error:
            self._say(f"WARNING: {NAME} cannot be written: {error}")
            return
        self._lines.write({"first": self._first, "step": self._newest, "loads": found})
        self._sum = None
        self._first = self._newest + 1
