"""planning/prices/step_time.py: steps whose time can be written down, with and without a pipeline."""

from __future__ import annotations

import pytest
import torch

from dtmega import config
from dtmega.mesh import group_lists
from dtmega.pipelining.table import SCHEDULES, Action, named_table, sent_after, simulate
from dtmega.planning.counting.ledger import Span
from dtmega.planning.counting.role import Role
from dtmega.planning.plan import Plan, time_step
from dtmega.planning.prices import fabric as fabrics
from dtmega.planning.prices.rank_time import groups_of
from dtmega.planning.prices.step_time import step_time
from dtmega.planning.work import COMPUTE, Message, Work

SECOND = 10**9  # moved bytes that take one second
TOY = fabrics.parse(
    {
        "gpu": {"name": "toy", "memory_bytes": 1, "memory_bytes_per_s": 1.0 * SECOND, "peak_flops": {"bfloat16": 1.0}},
        "node": {"ranks": 2, "bytes_per_s": 1000.0},
        "network": {"bytes_per_s": 100.0},
    },
    "toy.toml",
)
ONE = {"pp": 1, "dp_replicate": 1, "dp_shard": 2, "cp": 1, "tp": 1}


def mesh(pp: int, dp_shard: int = 1, tp: int = 1) -> dict[str, int]:
    return {"pp": pp, "dp_replicate": 1, "dp_shard": dp_shard, "cp": 1, "tp": tp}


def busy(action: str, seconds: float, waits: tuple[int, ...] = ()) -> Work:
    return Work(action, COMPUTE, "aten.copy_", moved_bytes=round(seconds * SECOND), waits=waits)


def collective(action: str, axis: str, n: int, n_bytes: int, waits: tuple[int, ...] = ()) -> Work:
    return Work(action, f"nccl {axis}", "c10d", message=Message("all-gather", axis, n, n_bytes), waits=waits)


def stage_works(place: int, n: int, forward_s: float, backward_s: float, sent_bytes: int, last: int) -> list[Work]:
    """1F1B's works of one place in the pipeline, in any order of actions: durations do not depend on it."""
    works = [busy("counts", 0.5)]
    for m in range(n):
        works.append(busy(f"{place}F{m}", forward_s))
        if place < last:
            works.append(Work(f"{place}F{m}", "pp", "send", message=Message("send", "pp", 2, sent_bytes, peer=1)))
        works.append(busy(f"{place}B{m}", backward_s))
        if place > 0:
            works.append(Work(f"{place}B{m}", "pp", "send", message=Message("send", "pp", 2, sent_bytes, peer=0)))
    return [*works, busy("optimizer", 0.25)]


@pytest.mark.parametrize("rank", [0, 5, 11, 23])
def test_groups_are_those_of_the_mesh(rank: int):
    sizes = {"pp": 3, "dp_replicate": 2, "dp_shard": 2, "cp": 1, "tp": 2}
    groups = groups_of(sizes, rank)
    for name, lists in group_lists(sizes).items():
        assert [groups(name)] == [ranks for ranks in lists if rank in ranks]
    assert groups("world") == list(range(24))
    assert groups("place") == [*range(rank // 8 * 8, rank // 8 * 8 + 8)]
    assert groups("pp 0+2") == [rank % 8, rank % 8 + 16]


def test_without_a_pipeline_a_step_is_its_kernels_and_the_messages_they_do_not_cover():
    works = [
        collective("0F0", "fsdp", 2, 4000),  # 4,000 / 2 bytes by 1,000 bytes/s: 2 s
        busy("0F0", 3, waits=(0,)),
        busy("0B0", 6),
        collective("0B0", "fsdp", 2, 8000, waits=(2,)),  # 4 s
        busy("0B1", 1),
        busy("optimizer", 1, waits=(3,)),
    ]
    time = step_time({0: works}, None, TOY, ONE)
    assert time.seconds == pytest.approx(2 + 3 + 6 + 4 + 1)
    assert time.compute_by_action == pytest.approx({"F": 3, "B": 7, "optimizer": 1})
    assert time.exposed_by_axis == pytest.approx({"fsdp": 2 + 3})
    assert time.exposed_by_action == pytest.approx({"F": 2, "B": 3})
    assert time.communication_by_axis == pytest.approx({"fsdp": 6})
    assert time.bubble_fraction == pytest.approx(0)


def test_microbatches_that_were_not_run_take_the_median_time():
    works = [busy("counts", 1)]
    for m, seconds in enumerate((9, 2, 2)):
        works += [busy(f"0F{m}", seconds), busy(f"0B{m}", 4)]
    time = step_time({0: works}, None, TOY, ONE, n_microbatches=10)
    assert time.seconds == pytest.approx(1 + 9 + 9 * 2 + 10 * 4)


def test_the_parts_of_a_step_with_microbatches_that_were_not_run_add_up_to_it():
    works = [busy("counts", 1)]
    for m, seconds in enumerate((9, 2, 2)):
        works.append(busy(f"0F{m}", seconds))
        works.append(collective(f"0F{m}", "dp_shard", 2, 500, waits=(len(works) - 1,)))
        works.append(busy(f"0B{m}", 4, waits=(len(works) - 1,)))
    # Only the last backward sums gradients over ranks, which does not happen again in further microbatches.
    works.append(collective("0B2", "dp_shard", 2, 4000, waits=(len(works) - 1,)))
    works.append(busy("optimizer", 1, waits=(len(works) - 1,)))
    time = step_time({0: works}, None, TOY, ONE, n_microbatches=10)
    assert time.exposed_communication_s > 0
    assert time.bubble_fraction == 0
    assert time.compute_s + time.exposed_communication_s == pytest.approx(time.seconds)
    assert sum(time.compute_by_action.values()) == pytest.approx(time.compute_s)
    assert sum(time.exposed_by_axis.values()) == pytest.approx(time.exposed_communication_s)


def test_the_time_of_a_plan_knows_which_outputs_a_schedule_sends_later():
    pp, n = 2, 8
    cfg = config.validate({"train": {"steps": 1}, "mesh": {"pp": pp}, "pipeline": {"schedule": "DualPipeV"}}, "test")
    table = named_table("DualPipeV", pp, 2, n)
    held = {"parameters": 1}
    span = Span("0F0", 1, held, 1)
    roles = {}
    for place, row in enumerate(table):
        works = [busy(str(action), 1) for action in row]
        roles[place] = Role(place, n, held, [span], works)
    plan = Plan(cfg, mesh(pp), torch.device("cuda", 0), n, table, [["embed"]], roles, n)
    works_of = {place: role.works for place, role in roles.items()}
    at_once = step_time(works_of, table, TOY, mesh(pp))
    with_waits = step_time(works_of, table, TOY, mesh(pp), later=sent_after(cfg.pipeline, pp, n))
    assert time_step(plan, TOY).seconds == with_waits.seconds > at_once.seconds


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_even_stages_take_the_schedules_bubble_and_what_comes_before_and_after(schedule: str):
    pp, n, per_rank = 4, 8, int(SCHEDULES[schedule].per_rank[0])
    table = named_table(schedule, pp, per_rank, n)
    roles = {}
    for place, row in enumerate(table):
        works = [busy("counts", 0.5)]
        works += [busy(str(action), 3.0 * (2 if action.kind == "B" else 1)) for action in row]
        roles[place] = [*works, busy("optimizer", 0.25)]
    time = step_time(roles, table, TOY, mesh(pp))
    units = simulate(table)
    makespan = 3 * max(row[-1].end for row in units.rows)
    assert time.seconds == pytest.approx(0.75 + makespan)
    assert time.compute_s == pytest.approx(0.75 + (1 - units.bubble) * makespan)
    assert time.bubble_fraction == pytest.approx(units.bubble * makespan / time.seconds)


def test_1f1b_with_transfers_takes_the_closed_form():
    """n microbatches on the last of pp ranks, and the way to it and back: (pp - 1)(F + B + 2 transfers)."""
    pp, n, sent_bytes = 4, 6, 50
    table = named_table("1F1B", pp, 1, n)
    roles = {place: stage_works(place, n, 1.0, 2.0, sent_bytes, pp - 1) for place in range(pp)}
    time = step_time(roles, table, TOY, mesh(pp))
    hops_s = 2 * 2 * sent_bytes / 1000 + 2 * sent_bytes / 100  # ranks 0, 1 and 2, 3 share a node; 1 and 2 do not
    least_s = n * 3 + (pp - 1) * 3 + hops_s
    assert least_s + 0.75 <= time.seconds <= least_s + 0.75 + 2 * n * sent_bytes / 100
    assert time.seconds == pytest.approx(time.compute_s + time.bubble_fraction * time.seconds)


def test_one_microbatch_passes_through_all_ranks_and_links_and_back():
    table = named_table("GPipe", 4, 1, 1)
    roles = {place: stage_works(place, 1, 1.0, 2.0, 50, 3) for place in range(4)}
    time = step_time(roles, table, TOY, mesh(4))
    assert time.seconds == pytest.approx(0.75 + 4 * 3 + 2 * (0.05 + 0.5 + 0.05))


def test_places_that_are_left_out_or_share_works_take_the_times_of_those():
    table = named_table("1F1B", 4, 1, 6)
    seconds = {0: 3.0, 1: 2.0, 3: 4.0}
    given = {place: stage_works(place, 6, each, 2 * each, 8, 3) for place, each in seconds.items()}
    every = given | {2: stage_works(2, 6, 2.0, 4.0, 8, 3)}
    shared = given | {2: given[1]}
    expected = step_time(every, table, TOY, mesh(4))
    assert step_time(given, table, TOY, mesh(4)) == expected
    assert step_time(shared, table, TOY, mesh(4)) == expected


def test_stages_of_a_place_that_is_left_out_are_matched_in_order():
    table = named_table("ZBVZeroBubble", 4, 2, 8)
    costs = {0: 3.0, 7: 2.0, 1: 1.0, 6: 4.0}
    roles = {}
    for place in (0, 1):
        roles[place] = [busy(str(action), costs[action.stage]) for action in table[place]]
    costs |= {2: 1.0, 3: 1.0, 4: 4.0, 5: 4.0}
    expected = simulate(table, duration=lambda action: costs[action.stage])
    assert step_time(roles, table, TOY, mesh(4)).timeline == expected


@pytest.mark.parametrize("axis", ["world", "loss", "pp", "pp 0+1"])
def test_a_collective_over_all_places_begins_when_the_last_rank_is_there(axis: str):
    """Rank 0 ends last and then reduces for 1 s; rank 1 waits; then all join, and rank 1's optimizer is slower."""
    table = [[Action(0, "F", 0), Action(0, "B", 0)], [Action(1, "F", 0), Action(1, "B", 0)]]
    roles = {}
    for place, (reduce_s, optimizer_s) in enumerate([(1, 2), (3, 5)]):
        roles[place] = [
            busy(f"{place}F0", 1),
            busy(f"{place}B0", 2),
            busy("reduction", reduce_s),
            collective("norm", axis, 2, 1000, waits=(2,)),  # 500 bytes by 1,000 bytes/s
            busy("optimizer", optimizer_s, waits=(3,)),
        ]
    time = step_time(roles, table, TOY, mesh(2))
    assert time.seconds == pytest.approx(max(6 + 1, 4 + 3) + 0.5 + 5)


def test_all_places_wait_for_their_first_weights_at_the_same_time_but_for_partial_sums_in_turn():
    table = named_table("1F1B", 2, 1, 4)
    sizes = mesh(2, dp_shard=2, tp=2)
    plain, gathered, summed = ({}, {}, {})
    for place in (0, 1):
        plain[place] = [busy(str(action), 2) for action in table[place]]
        gathered[place] = [collective(f"{place}F0", "fsdp", 2, 2000)]
        gathered[place] += [work._replace(waits=(0,)) for work in plain[place]]
        summed[place] = []
        for number, work in enumerate(plain[place]):
            summed[place] += [work, collective(work.action, "tp", 2, 1000, waits=(2 * number,))]
            if number:
                summed[place][2 * number] = work._replace(waits=(2 * number - 1,))
    expected = step_time(plain, table, TOY, sizes)
    time = step_time(gathered, table, TOY, sizes)
    gather_s = 1000 / 100  # the two ranks with the same part of the weights are on two nodes
    assert time.seconds == pytest.approx(expected.seconds + gather_s)
    assert time.exposed_by_axis == pytest.approx({"fsdp": gather_s})
    time = step_time(summed, table, TOY, sizes)
    assert time.exposed_by_axis == pytest.approx({"tp": 8 * 0.5})
    # Each action but a rank's first waits for the sum of the action before; the last sum follows the last action.
    slots = simulate(table, duration=lambda action: 2.0 if action.kind == "F" and action.microbatch == 0 else 2.5)
    assert time.seconds == pytest.approx(max(row[-1].end for row in slots.rows) + 0.5)


def test_a_schedule_with_a_kind_of_action_that_no_role_has_run_is_refused():
    table = named_table("1F1B", 2, 1, 4)
    roles = {0: [busy("0F0", 1), busy("0I0", 1), busy("0W0", 1)]}
    with pytest.raises(ValueError, match=r"the schedule has 0B0, but the works of this rank have only 0F, 0I, 0W$"):
        step_time(roles, table, TOY, mesh(2))


def test_a_part_of_a_split_backward_without_work_takes_no_time():
    """The first stage has no inputs that need gradients, so its backward for inputs launches nothing."""
    table = named_table("InterleavedZeroBubble", 2, 2, 4)
    roles = {place: [busy(str(a), 1) for a in row if (a.stage, a.kind) != (0, "I")] for place, row in enumerate(table)}
    expected = simulate(table, duration=lambda action: 0.0 if (action.stage, action.kind) == (0, "I") else 1.0)
    timeline = step_time(roles, table, TOY, mesh(2)).timeline
    assert timeline is not None
    assert [[one.start for one in row] for row in timeline.rows] == [
        [one.start for one in row] for row in expected.rows
    ]


def test_outputs_that_stay_on_a_rank_need_no_message():
    """A V's turn is on the last rank: of its 2 F and 2 I a microbatch, one each is sent; 100 bytes take 0.1 s."""
    table = named_table("ZBVZeroBubble", 2, 2, 4)
    rank_of = {0: 0, 1: 1, 2: 1, 3: 0}
    roles = {}
    for place, row in enumerate(table):
        works = []
        for action in row:
            works.append(busy(str(action), 1))
            other = rank_of.get(action.stage + (1 if action.kind == "F" else -1), place)
            if action.kind != "W" and other != place:
                sent = Message("send", "pp", 2, 100, peer=other)
                works.append(Work(str(action), "pp", "send", message=sent))
        roles[place] = works
    expected = simulate(table, duration=lambda action: 1.0, transfer=lambda *_: 0.1)
    timeline = step_time(roles, table, TOY, mesh(2)).timeline
    assert timeline is not None
    found = [[step.start for step in row] for row in timeline.rows]
    assert found == [pytest.approx([step.start for step in row]) for row in expected.rows]


def test_a_rank_that_begins_late_delays_the_others():
    """Rank 0 gathers its first weights for 10 s; rank 1, whose weights are few, waits for rank 0's output."""
    table = named_table("GPipe", 2, 1, 1)
    roles = {}
    for place, n_bytes in enumerate((2000, 200)):
        gather = collective(f"{place}F0", "fsdp", 2, n_bytes)
        roles[place] = [gather, busy(f"{place}F0", 1, waits=(0,)), busy(f"{place}B0", 2)]
    time = step_time(roles, table, TOY, mesh(2, dp_shard=2, tp=2))
    assert time.seconds == pytest.approx(10 + 1 + 1 + 2 + 2)
