"""The order of all computations of a pipeline: one row of actions per rank, from torch's schedules or a CSV file.

A table is pure data and needs no process group, so it is checked, simulated and drawn before anything is built.
"""

from __future__ import annotations

import csv
import re
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple

from dtmega import config


class Action(NamedTuple):
    """One stage's forward (F), whole backward (B), or backward's input (I) or weight (W) part, on one microbatch."""

    stage: int
    kind: str
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


Table = list[list[Action]]  # of each pp rank


class ScheduleKind(NamedTuple):
    """The demands of a schedule.

    Attributes:
        per_rank: stages per rank: exactly 1, exactly 2, or at least 2.
        shape: which ones they are (`split.stages_of_ranks`).
        splits_backward: runs the weights' part of backward later than the inputs'.
    """

    per_rank: Literal["1", "2", "2+"]
    shape: Literal["loop", "v"]
    splits_backward: bool


SCHEDULES = {
    "GPipe": ScheduleKind("1", "loop", False),  # arXiv:1811.06965
    "1F1B": ScheduleKind("1", "loop", False),  # PipeDream-flush, arXiv:2006.09503
    "Interleaved1F1B": ScheduleKind("2+", "loop", False),  # Narayanan et al. 2021, arXiv:2104.04473
    "LoopedBFS": ScheduleKind("2+", "loop", False),  # arXiv:2211.05953
    "InterleavedZeroBubble": ScheduleKind("2+", "loop", True),  # ZB1P of arXiv:2401.10241
    "ZBVZeroBubble": ScheduleKind("2", "v", True),  # ZB-V of the same
    "DualPipeV": ScheduleKind("2", "v", True),  # DeepSeek-V3, arXiv:2412.19437; github.com/deepseek-ai/DualPipe
}

# As torch prints them: 0F0, or two that share a step, (0F4;3B1)OVERLAP_F_B.
ACTION = re.compile(r"(\d+)([FBIW])(\d+)")
CELL = re.compile(r"\d+[FBIW]\d+|\(\d+[FBIW]\d+(;\d+[FBIW]\d+)+\)OVERLAP_F_B")
# A whole backward takes twice a forward, its two parts as long as one each (arXiv:2401.10241, section 2).
DURATION = {"F": 1, "B": 2, "I": 1, "W": 1}


def stages_per_rank(pipeline: config.Pipeline) -> int:
    """The number of stages that each rank holds; with a CSV file, 0 if the file decides.

    Raises:
        ValueError: a number that the schedule cannot run.
    """
    wanted = pipeline.virtual_stages
    if pipeline.csv:
        return wanted
    allowed = SCHEDULES[pipeline.schedule].per_rank
    default = int(allowed.rstrip("+"))
    if wanted and wanted != default and not (allowed == "2+" and wanted > default):
        raise ValueError(
            f"virtual_stages={wanted}, but schedule '{pipeline.schedule}' runs "
            f"{'at least' if '+' in allowed else 'exactly'} {default} per rank ([pipeline] virtual_stages, schedule)"
        )
    return wanted or default


def make_table(pipeline: config.Pipeline, pp: int, n_microbatches: int) -> Table:
    """The configured table; a CSV file has its own number of microbatches."""
    if pipeline.csv:
        return csv_table(pipeline.csv, pp)
    return named_table(pipeline.schedule, pp, stages_per_rank(pipeline), n_microbatches)


def named_table(schedule: str, pp: int, per_rank: int, n_microbatches: int) -> Table:
    """The table of one of SCHEDULES; its own requirements must hold (`schedule.check_schedule`)."""
    if schedule == "GPipe":
        return [[Action(r, kind, m) for kind in "FB" for m in range(n_microbatches)] for r in range(pp)]
    if schedule == "1F1B":
        return [_one_forward_one_backward(rank, pp, n_microbatches) for rank in range(pp)]
    from torch.distributed.pipelining.schedules import get_schedule_class

    # All that these classes read of a stage before they run; the ranks' tables do not depend on whose stage it is.
    stage: Any = SimpleNamespace(num_stages=pp * per_rank, group_size=pp, group_rank=0, submod=None)
    order = get_schedule_class(schedule)([stage] * per_rank, n_microbatches).pipeline_order
    return [parse(" ".join(str(action) for action in order[rank] if action)) for rank in range(pp)]


def _one_forward_one_backward(rank: int, pp: int, n_microbatches: int) -> list[Action]:
    """A forward for each stage from here to the last, then backward and forward in turn, then what is left."""
    ahead = min(pp - rank, n_microbatches)
    row = [Action(rank, "F", m) for m in range(ahead)]
    for m in range(n_microbatches):
        row.append(Action(rank, "B", m))
        if m + ahead < n_microbatches:
            row.append(Action(rank, "F", m + ahead))
    return row


def parse(text: str) -> list[Action]:
    return [Action(int(stage), kind, int(microbatch)) for stage, kind, microbatch in ACTION.findall(text)]


def csv_table(path: str, pp: int) -> Table:
    """A table from a file with one row of cells (0F0, 1B0, empty = idle) per rank, as torch's schedules write it.

    Raises:
        ValueError: no such file, a cell that is no action, another number of rows than ranks, or not a schedule: stages
            0, 1, ... each on one rank, each with one forward and one backward of every microbatch, in an order that
            can run. The first stage is on the first rank, the last on the last or, V-shaped, on the first.
    """
    where = f"{path} ([pipeline] csv)"
    try:
        rows = list(csv.reader(Path(path).read_text(encoding="utf-8").splitlines()))
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read the schedule {where}: {error}") from None
    for number, row in enumerate(rows, start=1):
        for cell in row:
            if cell.strip() and not CELL.fullmatch(cell.strip()):
                raise ValueError(f"{where}, row {number}: '{cell.strip()}' is no action; expected such as 0F3, 1B0")
    table = [parse(" ".join(row)) for row in rows]
    if len(table) != pp or not all(table):
        raise ValueError(
            f"{where} has {len(table)} rows, {sum(map(bool, table))} of them with actions; expected {pp}, one per rank "
            f"([mesh] pp={pp})"
        )
    _check_complete(table, where)
    simulate(table, where)
    return table


def _check_complete(table: Table, where: str) -> None:
    placed = stages_in(table)
    stages = sorted(stage for row in placed for stage in row)
    if stages != list(range(len(stages))):
        raise ValueError(f"{where}: stages 0, 1, ... must each be on one rank; the ranks have {placed}")
    if 0 not in placed[0] or not {stages[-1]} & {*placed[0], *placed[-1]}:
        raise ValueError(
            f"{where}: stage 0 must be on the first rank and stage {stages[-1]}, the last, on the last or on the first "
            f"(they share the embedding); the ranks have {placed}"
        )
    done: dict[tuple[int, int], list[str]] = defaultdict(list)
    for row in table:
        for stage, kind, microbatch in row:
            done[stage, microbatch].append(kind)
    everything = [(stage, microbatch) for stage in stages for microbatch in range(microbatches_in(table))]
    for stage, microbatch in everything:
        kinds = "".join(sorted(done[stage, microbatch]))
        if kinds not in ("BF", "FIW"):
            raise ValueError(
                f"{where}: stage {stage} must run microbatch {microbatch} forward (F) and backward (B, or I and W) "
                f"once; it has '{kinds}'"
            )
    # torch finds the loss of microbatch m at place m of a list that it appends to (`_maybe_get_loss`).
    last = [microbatch for row in table for stage, kind, microbatch in row if (stage, kind) == (stages[-1], "F")]
    if last != sorted(last):
        raise ValueError(f"{where}: the last stage must run forwards in the order of the microbatches, it has {last}")


def stages_in(table: Table) -> list[list[int]]:
    """The stage numbers of each rank, ascending."""
    return [sorted({action.stage for action in row}) for row in table]


def microbatches_in(table: Table) -> int:
    return 1 + max(action.microbatch for row in table for action in row)


class TimedAction(NamedTuple):
    start: int
    action: Action

    @property
    def end(self) -> int:
        return self.start + DURATION[self.action.kind]


class Timeline(NamedTuple):
    """The actions of each rank with their times, in units of one forward, and the fraction of time spent waiting."""

    rows: list[list[TimedAction]]
    bubble: float


def simulate(table: Table, where: str = "schedule") -> Timeline:
    """Run every action as early as its rank and its inputs allow; transfers take no time.

    A forward needs the one of the stage before; a backward (B or I) the own forward and the backward of the stage
    after; W its I.

    Raises:
        ValueError: an action whose input never comes; `where` names the table.
    """
    last = max(action.stage for row in table for action in row)
    ends: dict[Action, int] = {}
    rows: list[list[TimedAction]] = [[] for _ in table]

    def ready_at(action: Action) -> int | None:
        """The time at which an action can begin; None as long as an input is missing."""
        stage, kind, m = action
        needs: list[int | None] = []
        if kind == "F":
            needs += [ends.get(Action(stage - 1, "F", m))] if stage > 0 else []
        elif kind == "W":
            needs += [ends.get(Action(stage, "I", m))]
        else:
            needs += [ends.get(Action(stage, "F", m))]
            after = [ends.get(Action(stage + 1, whole_or_input, m)) for whole_or_input in "BI"]
            needs += [next((end for end in after if end is not None), None)] if stage < last else []
        known = [end for end in needs if end is not None]
        return max(known, default=0) if len(known) == len(needs) else None

    while waiting := [rank for rank, row in enumerate(table) if len(rows[rank]) < len(row)]:
        moved = False
        for rank in waiting:
            for action in table[rank][len(rows[rank]) :]:
                ready = ready_at(action)
                if ready is None:
                    break
                step = TimedAction(max(ready, rows[rank][-1].end if rows[rank] else 0), action)
                rows[rank].append(step)
                ends[action] = step.end
                moved = True
        if not moved:
            stuck = ", ".join(f"rank {rank} before {table[rank][len(rows[rank])]}" for rank in waiting)
            raise ValueError(f"{where} cannot run: {stuck}, waiting for what comes later or never")
    makespan = max(row[-1].end for row in rows)
    busy = sum(DURATION[action.kind] for row in table for action in row)
    return Timeline(rows, 1 - busy / (makespan * len(table)))
