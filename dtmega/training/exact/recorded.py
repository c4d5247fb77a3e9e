"""Read the digests of a run with [run] exact (`record.py`), and find the first difference in a replay of the run.

recorded = read(run_dir)
recorded.difference(step, found)     # "step 4, microbatch 6 of 8: ..., computed by rank 2 on node-2"
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

from dtmega import mesh
from dtmega.files import console
from dtmega.files.console import counted
from dtmega.fsdp.digests import StepDigests
from dtmega.training.exact.record import NAME, Record
from dtmega.training.records.lines import parse_line

Hexadecimal = Annotated[str, Field(pattern="^[0-9a-f]{16}$")]


class Start(BaseModel):
    """A line in digests.jsonl that describes a start of the run.

    Attributes:
        step: first step after the start.
        layout: size of each mesh axis.
        hosts: host of each rank.
    """

    model_config = ConfigDict(extra="ignore", strict=True)  # a later version may write more keys
    step: int
    layout: dict[str, Annotated[int, Field(ge=1)]]
    hosts: list[str]

    def ranks_of(self, microbatch: int, n_microbatches: int) -> list[int]:
        """The ranks that computed a microbatch together.

        Args:
            microbatch: number of the microbatch in the global batch, from 0.
            n_microbatches: number of microbatches in the global batch.
        """
        others = [axis for axis in mesh.AXES if axis not in mesh.DATA]
        of_data_ranks = mesh.rank_groups(self.layout, others)
        return sorted(of_data_ranks[microbatch * len(of_data_ranks) // n_microbatches])


class Step(BaseModel):
    """A line in digests.jsonl that describes a step.

    Attributes:
        step: number of the step.
        update, microbatches: digests from `StepDigests`, in hexadecimal.
    """

    model_config = ConfigDict(extra="ignore", strict=True)
    step: int
    update: Hexadecimal
    microbatches: list[Hexadecimal]


class Recorded(NamedTuple):
    """The digests of a run.

    Attributes:
        steps: step number -> digests of the step.
        starts: starts of the run, oldest first.
    """

    steps: dict[int, StepDigests]
    starts: list[Start]

    def difference(self, step: int, found: StepDigests) -> str:
        """Compare the digests of a replayed step with the recorded digests of the run.

        Returns:
            A description of the first difference; '' if all bits are equal.
        """
        was = self.steps[step]
        n = len(was.microbatches)
        if n != len(found.microbatches):
            return f"step {step}: the run had {n} microbatches, this replay has {len(found.microbatches)}"
        differing: list[int] = []
        for i, digest in enumerate(found.microbatches):
            if was.microbatches[i] != digest:
                differing.append(i)
        if differing:
            first = f"step {step}, microbatch {differing[0] + 1} of {n}: its gradients differ from the run's, which "
            more = f"; {len(differing)} of the step's microbatches differ" if len(differing) > 1 else ""
            return f"{first}{self._who(step, differing[0], n)} computed{more}"
        if was.update != found.update:
            return f"step {step}: all microbatches' gradients are equal, and the weights after the update differ"
        return ""

    def _who(self, step: int, microbatch: int, n_microbatches: int) -> str:
        """The ranks that computed a microbatch in the run, with their hosts: "rank 2 on a, rank 6 on b"."""
        starts = [start for start in self.starts if start.step <= step]
        if not starts:
            return "a rank that is not written down"
        ranks_of_host: dict[str, list[int]] = {}
        for rank in starts[-1].ranks_of(microbatch, n_microbatches):
            ranks_of_host.setdefault(starts[-1].hosts[rank], []).append(rank)
        return ", ".join(f"{console.name_ranks(ranks)} on {name}" for name, ranks in ranks_of_host.items())


class Comparison(Record):
    """A `Record` that writes nothing, and compares each step of a replay with the recorded run.

    Args:
        recorded: digests of the run; None on ranks that do not compare.

    Attributes:
        difference: description of the first difference; '' while all bits are equal.
    """

    def __init__(self, recorded: Recorded | None) -> None:
        self._recorded = recorded
        self._compared: list[int] = []
        self.difference = ""

    def write(self, step: int, found: StepDigests) -> None:
        """Compare a replayed step with the recorded step."""
        if self._recorded is None or step not in self._recorded.steps:
            return
        self._compared.append(step)
        self.difference = self.difference or self._recorded.difference(step, found)

    def sync(self) -> None:
        """Do nothing, because a replay writes no file."""

    def close(self) -> None:
        """Do nothing, because a replay opens no file."""

    def summary(self) -> str:
        """A line that tells the user which steps are bit-identical."""
        if not self._compared:
            return "no step was compared"
        first, last = self._compared[0], self._compared[-1]
        missing = last - first + 1 - len(self._compared)
        steps = f"steps {first} to {last}" if first < last else f"step {first}"
        rest = f"; no digests of {counted(missing, 'step')} between them" if missing else ""
        return f"equal in every bit: {steps}{rest}"


def read(run_dir: Path) -> Recorded:
    """Read a run's digests. Damaged lines are skipped.

    Raises:
        ValueError: the run directory has no digests.jsonl, or the file contains no step.
    """
    path = run_dir / NAME
    lines = path.read_bytes().splitlines() if path.is_file() else []
    recorded = Recorded({}, [])
    for line in lines:
        content = parse_line(line)
        if content is not None:
            _add(recorded, content)
    if not recorded.steps:
        raise ValueError(f"the bits of {run_dir} are not written down: expected the digests of its steps in {path}")
    return recorded


def _add(recorded: Recorded, content: Mapping[str, object]) -> None:
    """Add the content of a line to the digests, unless the line is damaged."""
    try:
        if "hosts" in content:
            start = Start.model_validate(content)
            if start.layout.keys() == {*mesh.AXES} and len(start.hosts) == math.prod(start.layout.values()):
                recorded.starts.append(start)
        else:
            step = Step.model_validate(content)
            digests = [_number(digest) for digest in step.microbatches]
            recorded.steps[step.step] = StepDigests(_number(step.update), tuple(digests))
    except ValueError:  # pydantic's ValidationError is a ValueError too
        return


def _number(text: str) -> int:
    """Convert a 64-bit value from hexadecimal to an int64 with an identical bit pattern."""
    bits = int(text, 16)
    return bits - 2**64 if bits >= 2**63 else bits
