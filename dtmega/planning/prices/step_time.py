"""The predicted time of one training step: the works of each pipeline rank on a fabric, and the pipeline's schedule.

    time = step_time({0: first, 1: middle, 11: last}, table, fabric, sizes)
    time.seconds, time.exposed_communication_s, time.bubble_fraction

Each rank's streams are simulated first, with messages between pipeline ranks that take no time. This gives the duration
of each action of the schedule, waits for the rank's own collectives included. Then `pipelining.table.simulate` runs the
schedule with these durations and with the transfers between ranks. What comes before the first action and after the
last one is added: a collective that joins several pipeline ranks begins when the last of them is there.

The model leaves out that a collective may also use the bubbles of the pipeline, so it rather overstates the time.
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

    All times but `seconds` are means over the ranks of one pipeline, so the parts add up:
    seconds = compute_s + exposed_communication_s + bubble_fraction x seconds.

    Attributes:
        seconds: time of the step.
        compute_s: time in which the compute stream runs kernels.
        exposed_communication_s: time in which the compute stream waits for messages within the rank's own part of the
            model: tensor parallelism, gathered weights, reduced gradients.
        bubble_fraction: fraction of the step in which a rank waits for other ranks of its pipeline, transfers included.
        exposed_by_axis: exposed communication by the axis of the message.
        communication_by_axis: duration of all messages by axis, exposed or not.
        compute_by_action: computing time by kind of action: "F", "B", "I", "W" or the name of a phase.
        exposed_by_action: exposed communication by the kind of action that launches the message.
        timeline: the simulated schedule, in seconds from the start of the step; None without a pipeline.
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

    Microbatches that a role has not run take the median time of those that it has run.

    Args:
        roles: place in the pipeline -> works of that rank. Places may share one list: stages are matched in order. A
            place that is left out shares that of the nearest place before it; place 0 must be there.
        table: the pipeline's schedule, with all microbatches; None without a pipeline.
        fabric: the fabric.
        sizes: size of each axis of the mesh.
        n_microbatches: number of microbatches without a pipeline, if the role has run fewer; None: as many as it has.
        later: actions whose output is sent only after another action, from `pipelining.table.sent_after`.
        ep: number of ranks that a layer's experts are divided over.

    Raises:
        ValueError: a role lacks a kind of action that its row of the table has, or the fabric lacks a dtype.
    """
    pipeline = rank_groups(dict(sizes), ("pp",))[0]
    times: dict[int, RankTimes] = {}
    place_of: dict[int, int] = {}  # identity of a list of works -> the first place that has it
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

    # Ranks wait for their first weights at the same time as for each other.
    begins = [rank.before_s for rank in ranks]
    timeline = simulate(table, duration=durations.__getitem__, transfer=transfer_s, begins=begins, later=later)
    joined_s = max(row[-1].end + rank.until_joined_s for row, rank in zip(timeline.rows, ranks, strict=True))
    seconds = joined_s + max(rank.after_s for rank in ranks)
    scales = []
    for rank, row in zip(ranks, table, strict=True):
        scales.append(sum(durations[action] for action in row) / sum(rank.actions.values()))
    return _mean(seconds, ranks, scales, timeline)


def _durations(rank: RankTimes, row: Sequence[Action]) -> dict[Action, float]:
    """The duration of each action in a row of the table.

    Args:
        rank: times of this place, or of another place with as many stages, whose stages stand for those of the row.
        row: actions of this place, in order.

    Raises:
        ValueError: the rank has not run a kind of action that the row has.
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
        if (stage, action.kind) not in medians:
            raise ValueError(
                f"the schedule has {action}, but the works of this rank have only {sorted(map(str, rank.actions))}"
            )
        own = action._replace(stage=stage)
        durations[action] = rank.actions.get(own, medians[stage, action.kind])
    return durations


def _n_outputs(actions: Iterable[Action], table: Table) -> int:
    """The number of these actions whose output another rank needs."""
    rank_of = {action.stage: rank for rank, row in enumerate(table) for action in row}
    n_outputs = 0
    for stage, kind, _ in actions:
        next_stage = stage + 1 if kind == "F" else stage - 1
        if kind != "W" and next_stage in rank_of and rank_of[next_stage] != rank_of[stage]:
            n_outputs += 1
    return n_outputs


def _without_pipeline(rank: RankTimes, n_microbatches: int | None) -> StepTime:
    """The step of a rank without a pipeline; microbatches that it has not run take the median times."""
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
    """Scale the parts of a step without a pipeline so that they add up to its time.

    Medians of further microbatches and sums over those that have run do not add up exactly.
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
        ranks: times of each place.
        scales: one factor per place: time of all its actions in the schedule / time of the actions that were run.
        timeline: the simulated schedule.
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
    """The kind of a schedule's action, such as "F"; the name of the phase outside of the schedule."""
    matched = ACTION.fullmatch(action)
    return matched[2] if matched else action


def _scale(action: str, scale: float) -> float:
    """The factor for an action's time: 1 outside of the schedule."""
    return scale if ACTION.fullmatch(action) else 1.0
