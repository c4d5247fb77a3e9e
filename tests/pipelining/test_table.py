"""pipelining/table.py: the simulator against a clock that ticks, for all schedules, uneven stages and transfers."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from dtmega import config
from dtmega.pipelining.table import (
    SCHEDULES,
    Action,
    Table,
    make_table,
    named_table,
    sent_after,
    simulate,
    stages_in,
)


def needs(action: Action, last: int) -> list[Action]:
    """What must be done before an action; of a B and an I of one stage, only one is in a table."""
    stage, kind, m = action
    if kind == "F":
        return [Action(stage - 1, "F", m)] * (stage > 0)
    if kind == "W":
        return [Action(stage, "I", m)]
    return [Action(stage, "F", m)] + [Action(stage + 1, k, m) for k in "BI" if stage < last]


def ticking(table: Table, durations: dict[tuple[int, str], int], transfer: int) -> dict[Action, int]:
    """The start of each action, found by looking at every rank at every tick of a clock."""
    everything = {action for row in table for action in row}
    last = max(action.stage for action in everything)
    rank_of = {stage: rank for rank, stages in enumerate(stages_in(table)) for stage in stages}
    starts: dict[Action, int] = {}
    free_at = [0] * len(table)
    queues = [list(row) for row in table]
    now = 0
    while any(queues):
        for rank, queue in enumerate(queues):
            if not queue or free_at[rank] > now:
                continue
            action = queue[0]
            ready = True
            for other in needs(action, last):
                if other not in everything:  # a table has either the B or the I
                    continue
                hop = 0 if rank_of[other.stage] == rank else transfer
                done = other in starts and starts[other] + durations[other.stage, other.kind] + hop <= now
                ready = ready and done
            if ready:
                starts[queue.pop(0)] = now
                free_at[rank] = now + durations[action.stage, action.kind]
        now += 1
    return starts


@pytest.mark.parametrize(("pp", "n", "transfer"), [(2, 4, 0), (4, 8, 2), (3, 6, 1)])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_action_starts_when_a_ticking_clock_starts_it(schedule: str, pp: int, n: int, transfer: int):
    draw = random.Random(schedule)
    table = named_table(schedule, pp, int(SCHEDULES[schedule].per_rank[0]), n)
    durations = {(action.stage, action.kind): draw.randint(1, 5) for row in table for action in row}
    expected = ticking(table, durations, transfer)
    timeline = simulate(table, duration=lambda a: durations[a.stage, a.kind], transfer=lambda *_: transfer)
    assert {timed.action: timed.start for row in timeline.rows for timed in row} == expected
    ends = [start + durations[a.stage, a.kind] for a, start in expected.items()]
    busy = sum(durations[a.stage, a.kind] for a in expected)
    assert timeline.bubble == pytest.approx(1 - busy / (pp * max(ends)))


def test_without_durations_and_transfers_a_ticking_clock_leaves_the_same_slots_idle():
    for schedule, kind in SCHEDULES.items():
        table = named_table(schedule, 4, int(kind.per_rank[0]), 8)
        units = {(action.stage, action.kind): 2 if action.kind == "B" else 1 for row in table for action in row}
        expected = ticking(table, units, 0)
        assert {timed.action: timed.start for row in simulate(table).rows for timed in row} == expected


def test_a_transfer_is_asked_for_by_what_is_sent_and_only_between_ranks():
    asked = []
    table = named_table("ZBVZeroBubble", 2, 2, 4)
    simulate(table, transfer=lambda action, sender, receiver: asked.append((action, sender, receiver)) or 0)
    rank_of = {0: 0, 1: 1, 2: 1, 3: 0}
    for action, sender, receiver in asked:
        assert sender == rank_of[action.stage]
        assert receiver == rank_of[action.stage + (1 if action.kind == "F" else -1)] != sender


def test_outputs_of_actions_in_one_cell_are_sent_after_the_last_of_them(tmp_path: Path):
    """0B0 waits for 1B0, which is sent with 1F1 behind it, in the same cell."""
    path = tmp_path / "cells.csv"
    path.write_text("0F0,0F1,0B0,0B1\n1F0,(1B0;1F1)OVERLAP_F_B,1B1\n")
    pipeline = config.Pipeline.model_validate({"csv": str(path)})
    later = sent_after(pipeline, 2, 2)
    assert later == {Action(1, "B", 0): Action(1, "F", 1)}
    starts = {}
    for with_cells in (False, True):
        timeline = simulate(make_table(pipeline, 2, 2), later=later if with_cells else {})
        starts[with_cells] = [step.start for step in timeline.rows[0]]
    assert starts == {False: [0, 1, 4, 7], True: [0, 1, 5, 7]}


def test_only_dualpipe_has_cells_of_several_actions():
    for schedule, kind in SCHEDULES.items():
        pipeline = config.Pipeline.model_validate({"schedule": schedule})
        later = sent_after(pipeline, 2, 8)
        assert bool(later) == (schedule == "DualPipeV")
        for first, last in later.items():
            table = named_table(schedule, 2, int(kind.per_rank[0]), 8)
            (row,) = (row for row in table if first in row)
            assert row.index(last) == row.index(first) + 1
