"""The order of all computations in a pipeline: one row of actions per rank, from a named schedule or a CSV file.

A table is plain data and needs no process group, so it can be checked, simulated and drawn before anything is built.
"""

from __future__ import annotations

import csv
import itertools
import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any, Literal, NamedTuple

from dtmega import config


class Action(NamedTuple):
    """One computation of a pipeline.

    Attributes:
        stage: index of the stage.
        kind: letter F for forward, B for a whole backward, I for the part of backward that computes the gradients of
            inputs, or W for the part that computes the gradients of weights.
        microbatch: index of the microbatch.
    """

    stage: int
    kind: str
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


Table = list[list[Action]]  # the actions of each pp rank, in order
NOTHING_LATER: Mapping[Action, Action] = MappingProxyType({})


class ScheduleKind(NamedTuple):
    """The requirements of a schedule.

    Attributes:
        per_rank: number of stages per rank ("1", "2", or "2+" for at least 2).
        shape: name of the rule that assigns stages to ranks (`split.stages_of_ranks`).
        splits_backward: whether backward runs in two parts (first for input gradients, later for weight gradients).
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
    "ZBVZeroBubble": ScheduleKind("2", "v", True),  # ZB-V of arXiv:2401.10241
    "DualPipeV": ScheduleKind("2", "v", True),  # DeepSeek-V3, arXiv:2412.19437; github.com/deepseek-ai/DualPipe
}

# Actions in torch's notation: 0F0, or (0F4;3B1)OVERLAP_F_B for two actions that overlap in one step.
ACTION = re.compile(r"(\d+)([FBIW])(\d+)")
CELL = re.compile(r"\d+[FBIW]\d+|\(\d+[FBIW]\d+(;\d+[FBIW]\d+)+\)OVERLAP_F_B")
# Durations in units of one forward. A backward takes two units, one for each part (arXiv:2401.10241, section 2).
DURATION = {"F": 1, "B": 2, "I": 1, "W": 1}


def stages_per_rank(pipeline: config.Pipeline) -> int:
    """The number of stages per rank. For a CSV file, 0 means that the file alone decides the number.

    Raises:
        ValueError: the schedule cannot run with the configured number of stages per rank.
    """
    configured = pipeline.virtual_stages
    if pipeline.csv:
        return configured
    allowed = SCHEDULES[pipeline.schedule].per_rank
    default = int(allowed.rstrip("+"))
    if configured and configured != default and not (allowed == "2+" and configured > default):
        raise ValueError(
            f"virtual_stages={configured}, but schedule '{pipeline.schedule}' runs "
            f"{'at least' if '+' in allowed else 'exactly'} {default} per rank ([pipeline] virtual_stages, schedule)"
        )
    return configured or default


def make_table(pipeline: config.Pipeline, pp: int, n_microbatches: int) -> Table:
    """Make the configured table. With a CSV file, the file alone defines the number of microbatches."""
    if pipeline.csv:
        return csv_table(pipeline.csv, pp)
    return named_table(pipeline.schedule, pp, stages_per_rank(pipeline), n_microbatches)


def named_table(schedule: str, pp: int, per_rank: int, n_microbatches: int) -> Table:
    """Make the table of a schedule in SCHEDULES. Call `schedule.check_schedule` first to check the requirements."""
    if schedule == "GPipe":
        return [_all_forwards_all_backwards(rank, n_microbatches) for rank in range(pp)]
    if schedule == "1F1B":
        return [_one_forward_one_backward(rank, pp, n_microbatches) for rank in range(pp)]
    return [parse(" ".join(row)) for row in _torch_cells(schedule, pp, per_rank, n_microbatches)]


def _torch_cells(schedule: str, pp: int, per_rank: int, n_microbatches: int) -> list[list[str]]:
    """List each rank's cells, in torch's notation, for a schedule that torch's classes define."""
    from torch.distributed.pipelining.schedules import get_schedule_class

    # A stand-in stage with the attributes that torch's schedule classes read. These classes need the stages of only
    # one rank to compute the rows of all ranks.
    stage: Any = SimpleNamespace(num_stages=pp * per_rank, group_size=pp, group_rank=0, submod=None)
    order = get_schedule_class(schedule)([stage] * per_rank, n_microbatches).pipeline_order
    return [[str(action) for action in order[rank] if action] for rank in range(pp)]


def sent_after(pipeline: config.Pipeline, pp: int, n_microbatches: int) -> dict[Action, Action]:
    """Map each action with a delayed output to the later action after which torch sends the output.

    torch runs the actions of one cell, such as (0F4;3B1)OVERLAP_F_B, one after the other, and sends all their outputs
    after the last action (`_add_send_recv` in torch.distributed.pipelining.schedules).
    """
    if pipeline.csv:
        lines = Path(pipeline.csv).read_text(encoding="utf-8").splitlines()
        rows = list(csv.reader(lines))
    elif pipeline.schedule in ("GPipe", "1F1B"):
        rows = []
    else:
        rows = _torch_cells(pipeline.schedule, pp, stages_per_rank(pipeline), n_microbatches)
    later = {}
    for cell in itertools.chain.from_iterable(rows):
        *first, last = parse(cell) or [None]
        later.update(dict.fromkeys(first, last))
    return later


def _all_forwards_all_backwards(rank: int, n_microbatches: int) -> list[Action]:
    """GPipe's row: the forward passes of all microbatches, then the backward passes."""
    forwards = [Action(rank, "F", m) for m in range(n_microbatches)]
    backwards = [Action(rank, "B", m) for m in range(n_microbatches)]
    return forwards + backwards


def _one_forward_one_backward(rank: int, pp: int, n_microbatches: int) -> list[Action]:
    """1F1B's row: pp - rank forward passes, then alternating backward and forward passes, then only backward passes."""
    ahead = min(pp - rank, n_microbatches)
    row = [Action(rank, "F", m) for m in range(ahead)]
    for m in range(n_microbatches):
        row.append(Action(rank, "B", m))
        if m + ahead < n_microbatches:
            row.append(Action(rank, "F", m + ahead))
    return row


def parse(text: str) -> list[Action]:
    """Parse the actions in a string such as '0F0 0B0'."""
    return [Action(int(stage), kind, int(microbatch)) for stage, kind, microbatch in ACTION.findall(text)]


def csv_table(path: str, pp: int) -> Table:
    """Read a table from a CSV file in torch's format: one row of cells per rank (0F0, 1B0; empty cells are idle).

    In a valid schedule, each of the stages 0, 1, ... is on exactly one rank. The first stage is on the first rank. The
    last stage is on the last rank or, in a V-shaped schedule, on the first rank. Each stage runs one forward and one
    backward of every microbatch.

    Raises:
        ValueError: the file cannot be read; a cell is not an action; the number of rows differs from pp; the schedule
            breaks one of the rules above, or cannot run in the given order.
    """
    where = f"{path} ([pipeline] csv)"
    try:
        rows = list(csv.reader(Path(path).read_text(encoding="utf-8").splitlines()))
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read the schedule {where}: {error}") from None
    for number, row in enumerate(rows, start=1):
        for cell in row:
            if cell.strip() and not CELL.fullmatch(cell.strip()):
                raise ValueError(
                    f"{where}, row {number}: '{cell.strip()}' is not an action; expected one such as 0F3 or 1B0"
                )
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
    """Check that a table holds every action of a pipeline once, on the right ranks.

    Raises:
        ValueError: the table breaks a rule of `csv_table`, or the forwards of the last stage are out of order.
    """
    stages_of_ranks = stages_in(table)
    stages = sorted(itertools.chain.from_iterable(stages_of_ranks))
    last = stages[-1]
    if stages != list(range(len(stages))):
        raise ValueError(f"{where}: stages 0, 1, ... must each be on one rank; the ranks have {stages_of_ranks}")
    if 0 not in stages_of_ranks[0] or last not in [*stages_of_ranks[0], *stages_of_ranks[-1]]:
        raise ValueError(
            f"{where}: stage 0 must be on the first rank and stage {last}, the last, on the last or on the first "
            f"(they share the embedding); the ranks have {stages_of_ranks}"
        )

    kinds_of: dict[tuple[int, int], list[str]] = defaultdict(list)
    forwards_of_last = []
    for stage, kind, microbatch in itertools.chain.from_iterable(table):
        kinds_of[stage, microbatch].append(kind)
        if stage == last and kind == "F":
            forwards_of_last.append(microbatch)
    for stage, microbatch in itertools.product(stages, range(microbatches_in(table))):
        kinds = "".join(sorted(kinds_of[stage, microbatch]))
        if kinds not in ("BF", "FIW"):
            raise ValueError(
                f"{where}: stage {stage} must run microbatch {microbatch} forward (F) and backward (B, or I and W) "
                f"once; it has '{kinds}'"
            )
    # torch appends losses to a list and looks for the loss of microbatch m at index m (`_maybe_get_loss`).
    if forwards_of_last != sorted(forwards_of_last):
        raise ValueError(
            f"{where}: the last stage must run forwards in the order of the microbatches, it has {forwards_of_last}"
        )


def stages_in(table: Table) -> list[list[int]]:
    """The stage indices of each rank, in ascending order."""
    return [sorted({action.stage for action in row}) for row in table]


def microbatches_in(table: Table) -> int:
    """The number of microbatches in a table."""
    return 1 + max(action.microbatch for action in itertools.chain.from_iterable(table))


class TimedAction(NamedTuple):
    """An action with the times at which it starts and ends, in units of one forward or in seconds."""

    start: float
    action: Action
    end: float


class Timeline(NamedTuple):
    """The result of a simulation.

    Attributes:
        rows: timed actions of each rank.
        bubble: fraction of the ranks' total time that is spent waiting.
    """

    rows: list[list[TimedAction]]
    bubble: float


def in_forwards(action: Action) -> float:
    """The duration of an action in units of one forward."""
    return DURATION[action.kind]


def at_once(action: Action, sender: int, receiver: int) -> float:
    """Return a transfer duration of 0, for simulations that ignore transfer times."""
    return 0


def simulate(
    table: Table,
    where: str = "schedule",
    duration: Callable[[Action], float] = in_forwards,
    transfer: Callable[[Action, int, int], float] = at_once,
    begins: Sequence[float] | None = None,
    later: Mapping[Action, Action] = NOTHING_LATER,
) -> Timeline:
    """Simulate a table: every action starts as early as its rank and its inputs allow.

    A forward needs the forward of the previous stage. A backward (B or I) needs the forward of the same stage and the
    backward of the next stage. A W needs the I of the same stage. Ranks send and receive while they compute, and
    transfers do not slow each other down.

    Args:
        table: actions of each rank, in order.
        where: name of the table, for error messages.
        duration: function that returns the duration of an action.
        transfer: function that returns the time from the end of an action to the arrival of its output, given the
            action, the rank that sends and the rank that receives.
        begins: earliest time at which each rank can begin; None if all ranks can begin at 0.
        later: action with a delayed output -> later action of the same rank, as returned by `sent_after`.

    Raises:
        ValueError: an action waits for an input that never comes.
    """
    last = max(action.stage for action in itertools.chain.from_iterable(table))
    rank_of = {action.stage: rank for rank, row in enumerate(table) for action in row}
    ends: dict[Action, float] = {}
    rows: list[list[TimedAction]] = [[] for _ in table]
    free_at: list[float] = list(begins) if begins else [0] * len(table)

    def ready_at(action: Action, rank: int) -> float | None:
        """The earliest time at which an action can begin; None while an input is missing."""
        ready: float = 0
        for choices in _inputs(action, last):
            done = [choice for choice in choices if choice in ends]
            if not done:
                return None
            sender = rank_of[done[0].stage]
            if sender == rank:
                ready = max(ready, ends[done[0]])
                continue
            sent = later.get(done[0], done[0])
            if sent not in ends:
                return None
            ready = max(ready, ends[sent] + transfer(done[0], sender, rank))
        return ready

    while waiting := [rank for rank, row in enumerate(table) if len(rows[rank]) < len(row)]:
        moved = False
        for rank in waiting:
            for action in table[rank][len(rows[rank]) :]:
                ready = ready_at(action, rank)
                if ready is None:
                    break
                start = max(ready, free_at[rank])
                free_at[rank] = ends[action] = start + duration(action)
                rows[rank].append(TimedAction(start, action, ends[action]))
                moved = True
        if not moved:
            stuck = ", ".join(f"rank {rank} before {table[rank][len(rows[rank])]}" for rank in waiting)
            raise ValueError(f"{where} cannot run: {stuck}, which wait for an action that comes later or never")
    makespan = max(free_at)
    busy = sum(duration(action) for action in itertools.chain.from_iterable(table))
    return Timeline(rows, 1 - busy / (makespan * len(table)))


def _inputs(action: Action, last: int) -> list[tuple[Action, ...]]:
    """The inputs of an action. Each input is a tuple of alternative actions; any one of them computes the input.

    Args:
        action: action whose inputs are needed.
        last: index of the last stage.
    """
    stage, kind, m = action
    if kind == "F":
        return [(Action(stage - 1, "F", m),)] if stage > 0 else []
    if kind == "W":
        return [(Action(stage, "I", m),)]
    own_forward = (Action(stage, "F", m),)
    if stage == last:
        return [own_forward]
    # The gradient from the next stage comes from a whole backward (B) or from the input part of a backward (I).
    return [own_forward, (Action(stage + 1, "B", m), Action(stage + 1, "I", m))]
