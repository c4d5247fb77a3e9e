"""Predict the time of one training step from each pipeline rank's work items, a fabric, and the pipeline's schedule.

    time = step_time({0: first, 1: middle, 11: last}, table, fabric, sizes)
    time.seconds, time.exposed_communication_s, time.bubble_fraction

First, each rank's streams are simulated as if messages between pipeline ranks took no time. The result is the duration
of each action of the schedule, including waits for the rank's own collectives. Then `pipelining.table.simulate` runs
the schedule with these durations and with the transfers between ranks. Finally, the times before the first action and
after the last action are added. A collective over several pipeline ranks begins when the last of these ranks is ready.

The prediction assumes that no collective runs during the pipeline's bubbles, so it tends to overestimate the time.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from dtmega.mesh import rank_groups
from dtmega.pipelining.table import ACTION, NOTHING_LATER, Action, Table, Timeline, simulate
from dtmega.planning.prices import pricing
from dtmega.planning.prices.fabric import Fabric
from dtmega.planning.prices.rank_time import RankTimes, groups_of, time_rank
from dtmega.planning.work import Work


class StepTime(NamedTuple):
    """The predicted time of one step.

    All times except `seconds` are means over the ranks of one pipeline. The means add up to the step time:
    seconds = compute_s + exposed_communication_s + bubble_fraction x seconds.

    Attributes:
        seconds: time of the step.
        compute_s: time during which the compute stream runs kernels.
        exposed_communication_s: time during which the compute stream waits for messages within the rank's own part of
            the model: tensor parallelism, gathered weights, reduced gradients.
        bubble_fraction: fraction of the step during which a rank waits for other pipeline ranks, including transfers.
        exposed_by_axis: axis of the messages -> exposed communication time.
        communication_by_axis: axis -> duration of all messages, exposed or not.
        compute_by_action: kind of action ("F", "B", "I", "W" or the name of a phase) -> computing time.
        exposed_by_action: kind of the action that launches the messages -> exposed communication time.
        timeline: simulated schedule, in seconds from the start of the step; None without a pipeline.
    """

    seconds: float
    compute_s: float
    exposed_communication_s: float
    bubble_fraction: float
    exposed_by_axis: dict[str, float]
    communication_by_axis: dict[str, float]
    compute_by_action: dict[str, float]
    exposed_by_action: dict[str, float]
    timeline: Timeline | None


def step_time(
    roles: Mapping[int, Sequence[Work]],
    table: Table | None,
    fabric: Fabric,
    sizes: Mapping[str, int],
    n_microbatches: int | None = None,
    later: Mapping[Action, Action] = NOTHING_LATER,
    *,
    ep: int = 1,
) -> StepTime:
    """Predict the time of one step.

    The work items may cover only some of the schedule's microbatches. Any other microbatch is assumed to take the
    median time of the covered microbatches on the same rank.

    Args:
        roles: pipeline rank -> work items of this rank. Several pipeline ranks may share one list; their stages are
            matched in order. A missing rank shares the list of the nearest earlier rank; rank 0 is required.
        table: schedule of the pipeline, with all microbatches; None without a pipeline.
        fabric: fabric of the cluster.
        sizes: size of each axis of the mesh.
        n_microbatches: number of microbatches if there is no pipeline; None for the number that `roles` covers.
        later: action with delayed output -> later action after which the output is sent
            (`pipelining.table.sent_after`).
        ep: number of ranks over which a layer's experts are divided.

    Raises:
        ValueError: a rank's work items lack the forward or the whole backward of a stage that the schedule contains for
            this rank, or the fabric has no peak FLOP/s for a dtype.
    """
    pipeline = rank_groups(dict(sizes), ("pp",))[0]
    times: dict[int, RankTimes] = {}
    place_of: dict[int, int] = {}  # identity of a list of work items -> first pipeline rank with this list
    for place, works in roles.items():
        first = place_of.setdefault(id(works), place)
        if first == place:
            rank = pipeline[place]
            times[place] = time_rank(works, fabric, rank, groups_of(sizes, rank, ep))
        else:
            times[place] = times[first]
    if table is None:
        return _without_pipeline(times[0], n_microbatches)
    places = [max(known for known in roles if known <= place) for place in range(len(table))]
    ranks = [times[known] for known in places]
    durations: dict[Action, float] = {}
    for rank, row in zip(ranks, table, strict=True):
        durations |= _durations(rank, row)
    n_outputs = {known: _n_outputs(rank.actions, table) for known, rank in times.items()}

    def transfer_s(action: Action, sender: int, receiver: int) -> float:
        total_s = 0.0
        for n_bytes in ranks[sender].sends:
            total_s += pricing.send_seconds(n_bytes, fabric, pipeline[sender], pipeline[receiver])
        return total_s / max(1, n_outputs[places[sender]])

    # A rank waits for its first weights and for the previous stage at the same time.
    begins = [rank.before_s for rank in ranks]
    timeline = simulate(table, duration=durations.__getitem__, transfer=transfer_s, begins=begins, later=later)
    joined_s = max(row[-1].end + rank.until_joined_s for row, rank in zip(timeline.rows, ranks, strict=True))
    seconds = joined_s + max(rank.after_s for rank in ranks)
    scales = []
    for rank, row in zip(ranks, table, strict=True):
        scales.append(sum(durations[action] for action in row) / sum(rank.actions.values()))
    return _mean(seconds, ranks, scales, timeline)


def _durations(rank: RankTimes, row: Sequence[Action]) -> dict[Action, float]:
    """The duration of each action that the schedule contains for one pipeline rank.

    Args:
        rank: times of this rank, or of a rank with the same number of stages, whose stages are matched in order.
        row: actions of this rank in the schedule, in order.

    Raises:
        ValueError: `row` contains a forward or a whole backward of a stage for which `rank` has no time.
    """
    own_stages = sorted({action.stage for action in rank.actions})
    row_stages = sorted({action.stage for action in row})
    stands_for = dict(zip(row_stages, own_stages, strict=False))
    seen: dict[tuple[int, str], list[float]] = defaultdict(list)
    for action, seconds in rank.actions.items():
        seen[action.stage, action.kind].append(seconds)
    medians = {key: statistics.median(values) for key, values in seen.items()}
    durations = {}
    for action in row:
        stage = stands_for.get(action.stage, -1)
        # A part of a split backward may launch nothing: the first stage has no inputs that need gradients.
        if (stage, action.kind) not in medians and action.kind not in "IW":
            kinds = ", ".join(f"{stage}{kind}" for stage, kind in sorted(medians))
            raise ValueError(f"the schedule has {action}, but the works of this rank have only {kinds}")
        own = action._replace(stage=stage)
        durations[action] = rank.actions.get(own, medians.get((stage, action.kind), 0.0))
    return durations


def _n_outputs(actions: Iterable[Action], table: Table) -> int:
    """The number of actions whose output is sent to another rank."""
    rank_of = {action.stage: rank for rank, row in enumerate(table) for action in row}
    n_outputs = 0
    for stage, kind, _ in actions:
        next_stage = stage + 1 if kind == "F" else stage - 1
        if kind != "W" and next_stage in rank_of and rank_of[next_stage] != rank_of[stage]:
            n_outputs += 1
    return n_outputs


def _without_pipeline(rank: RankTimes, n_microbatches: int | None) -> StepTime:
    """The step time without a pipeline. A microbatch without work items is assumed to take the median time."""
    seen: dict[str, list[float]] = defaultdict(list)
    for action, seconds in rank.actions.items():
        seen[action.kind].append(seconds)
    n_seen = max(map(len, seen.values()), default=0)
    further = max(0, (n_microbatches or n_seen) - n_seen)
    one_more_s = sum(statistics.median(values) for values in seen.values())
    own_s = sum(rank.actions.values())
    scale = (own_s + further * one_more_s) / own_s if own_s else 1.0
    seconds = rank.streams.seconds + further * one_more_s
    return _adding_up(_mean(seconds, [rank], [scale], None))


def _adding_up(step: StepTime) -> StepTime:
    """Scale the parts of a step without a pipeline so that they add up to the step time.

    Without scaling, the sum would not be exact, because a microbatch without work items is assumed to take the median
    time.
    """
    parts_s = step.compute_s + step.exposed_communication_s
    factor = step.seconds / parts_s if parts_s else 1.0

    def scaled(seconds: Mapping[str, float]) -> dict[str, float]:
        return {name: value * factor for name, value in seconds.items()}

    return step._replace(
        compute_s=step.compute_s * factor,
        exposed_communication_s=step.exposed_communication_s * factor,
        bubble_fraction=0.0,
        exposed_by_axis=scaled(step.exposed_by_axis),
        compute_by_action=scaled(step.compute_by_action),
        exposed_by_action=scaled(step.exposed_by_action),
    )


def _mean(seconds: float, ranks: Sequence[RankTimes], scales: Sequence[float], timeline: Timeline | None) -> StepTime:
    """Average the ranks of a pipeline.

    Args:
        seconds: time of the step.
        ranks: times of each pipeline rank.
        scales: one factor per pipeline rank: the time of all its actions in the schedule, divided by the time of the
            actions that have work items.
        timeline: simulated schedule.
    """
    compute: dict[str, float] = defaultdict(float)
    exposed_by_axis: dict[str, float] = defaultdict(float)
    exposed_by_action: dict[str, float] = defaultdict(float)
    communication: dict[str, float] = defaultdict(float)
    n = len(ranks)
    for rank, scale in zip(ranks, scales, strict=True):
        for action, busy_s in rank.streams.compute.items():
            compute[_kind(action)] += busy_s * _scale(action, scale) / n
        for (action, axis), waited_s in rank.streams.exposed.items():
            exposed_by_axis[axis] += waited_s * _scale(action, scale) / n
            exposed_by_action[_kind(action)] += waited_s * _scale(action, scale) / n
        for message in rank.streams.messages:
            communication[message.axis] += message.seconds * _scale(message.action, scale) / n
    compute_s, exposed_s = sum(compute.values()), sum(exposed_by_axis.values())
    bubble = max(0.0, 1 - (compute_s + exposed_s) / seconds) if seconds else 0.0
    return StepTime(
        seconds,
        compute_s,
        exposed_s,
        bubble,
        dict(exposed_by_axis),
        dict(communication),
        dict(compute),
        dict(exposed_by_action),
        timeline,
    )


def _kind(action: str) -> str:
    """The kind of an action, such as "F"; the name of the phase if the action is outside the schedule."""
    matched = ACTION.fullmatch(action)
    return matched[2] if matched else action


def _scale(action: str, scale: float) -> float:
    """The factor for an action's time: `scale` for an action of the schedule, and 1 for a phase."""
    return scale if ACTION.fullmatch(action) else 1.0
