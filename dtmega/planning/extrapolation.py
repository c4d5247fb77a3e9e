"""Extrapolate a step with all its microbatches from two shorter steps that differ by a few microbatches.

The memory that a rank holds at an action grows linearly with the number of microbatches. Each microbatch adds buffers,
samples of the batch, and messages that the schedule frees only at the end; in some schedules, it also adds activations.
The memory at each action of the whole step is therefore extrapolated linearly from the two shorter steps.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from dtmega import config
from dtmega.pipelining import schedule
from dtmega.pipelining.table import ACTION, Action, Table, make_table
from dtmega.planning.counting.ledger import Span
from dtmega.planning.counting.role import ROWS, Role
from dtmega.training.phases import COMPUTING

LEAST = 3  # minimum number of microbatches in the shorter step: a first, a middle and a last microbatch
State = Counter[tuple[int, str]]  # (stage, name of a count or flag, as listed in `_states`) -> value


class Runs(NamedTuple):
    """Two steps from which a longer step can be extrapolated.

    Attributes:
        shorter: number of microbatches in the first step.
        longer: number of microbatches in the second step; equal to `shorter` if nothing is extrapolated.
        pairs: one dict per pp rank. Each dict maps an action of the second step to the matching action of the first
            step.
    """

    shorter: int
    longer: int
    pairs: list[dict[str, str]]


def in_flight(table: Table, between_parts: float = 0) -> list[float]:
    """The peak number of microbatches in flight on each rank, that is, between forward and the end of backward.

    Args:
        table: actions of the pipeline.
        between_parts: share of a microbatch to add between the two parts of the microbatch's backward, for the
            gradients that wait for the second part.

    Returns:
        One number per rank, summed over the rank's stages.
    """
    counted = {"F": 1, "I": between_parts, "B": -1, "W": -1 - between_parts}
    most = []
    for row in table:
        now = highest = 0
        for action in row:
            now += counted[action.kind]
            highest = max(highest, now)
        most.append(highest)
    return most


def enough_microbatches(pipeline: config.Pipeline, pp: int, n: int) -> Runs:
    """Find the two shortest steps from which a step with n microbatches can be extrapolated exactly.

    Args:
        pipeline: [pipeline] section of the configuration.
        pp: number of ranks in the pipeline.
        n: number of microbatches.
    """
    everything = Runs(n, n, [{}] * pp)
    if pipeline.csv or n <= LEAST:
        return everything
    whole = _table(pipeline, pp, n)
    tables: dict[int, Table] = {}
    for longer in range(LEAST, n):
        if pp > 1 and schedule.broken_rule(pipeline, pp, longer):
            continue
        tables[longer] = _table(pipeline, pp, longer)
        for shorter in reversed(tables):
            added = longer - shorter
            if 0 < added <= 2 * pp and (n - longer) % added == 0:
                steps = (tables[shorter], tables[longer], whole)
                pairs = [_pairs(rows, added, n - longer) for rows in zip(*steps, strict=True)]
                if all(pairs):
                    return Runs(shorter, longer, pairs)
    return everything


def _table(pipeline: config.Pipeline, pp: int, n: int) -> Table:
    """The actions of each pp rank; without a pipeline, one forward and one backward for each microbatch."""
    if pp > 1:
        return make_table(pipeline, pp, n)
    return [[Action(0, kind, microbatch) for microbatch in range(n) for kind in "FB"]]


def _pairs(rows: Sequence[Sequence[Action]], added: int, missing: int) -> dict[str, str]:
    """Pair the actions of a rank's shorter and longer steps, if the rank's memory grows linearly between the steps.

    An action of the longer step represents an action of the whole step if the two actions' microbatches are equally far
    from the start or from the end of the step.

    Args:
        rows: actions of the rank in the shorter, the longer and the whole step.
        added: number of additional microbatches in the longer step, compared with the shorter step.
        missing: number of additional microbatches in the whole step, compared with the longer step.

    Returns:
        Name of an action in the longer step -> name of an action in the shorter step; {} if the growth is not linear,
        or if the rank may hold more at an unrepresented action of the whole step than at any represented action.
    """
    shorter, longer, whole = (_states(row) for row in rows)
    pairs = {}
    highest: State = Counter()
    for action in rows[1]:
        state = longer[action]
        for from_end in (False, True):
            before = action._replace(microbatch=action.microbatch - added * from_end)
            after = action._replace(microbatch=action.microbatch + missing * from_end)
            if (
                before in shorter
                and after in whole
                and _is_even(shorter[before], state, whole[after], missing // added)
            ):
                pairs[str(action)] = str(before)
                highest |= whole[after]
                break
        else:
            return {}
    is_highest = all(not (state - highest) for state in whole.values())
    return pairs if is_highest else {}


def _is_even(before: State, state: State, after: State, times: int) -> bool:
    """True if `after` is `state` plus `times` times the increase from `before` to `state`."""
    return all(after[key] == state[key] + times * (state[key] - before[key]) for key in {*before, *state, *after})


def _states(row: Sequence[Action]) -> dict[Action, State]:
    """The state of a rank at each action.

    For each stage, a state counts the microbatches that wait for backward ("F") or for the second part of backward
    ("W"). The state also records whether the stage has gradients ("some"), whether the gradients are complete ("all"),
    and whether the action is the stage's last action of its kind ("last"), in which gradients are reduced over the data
    ranks.
    """
    left = Counter((action.stage, action.kind) for action in row)
    now: State = Counter()
    found: dict[Action, State] = {}
    for action in row:
        stage, kind, _ = action
        left[stage, kind] -= 1
        if kind == "F":
            now[stage, "F"] += 1
        found[action] = now.copy()
        found[action][stage, "last"] = int(not left[stage, kind])
        if kind in "BI":
            now[stage, "F"] -= 1
            now[stage, "some"] = 1
        if kind in "IW":
            now[stage, "W"] += 1 if kind == "I" else -1
        now[stage, "all"] = int(not (left[stage, "B"] or left[stage, "W"]))
    return found


def extrapolated(role: Role, n: int, pairs: Mapping[str, str]) -> Role:
    """Extrapolate a rank's plan from two shorter steps to a step with n microbatches.

    The result has one span for each span of the longer step; the bytes are extrapolated to the whole step. The work
    items of the result are the longer step's; `plan.times_repeated` returns how often each occurs in the whole step.

    Args:
        role: plan of the longer step, with the memory of the shorter step.
        n: number of microbatches in the whole step.
        pairs: entry of the rank in `Runs.pairs`.
    """
    if n == role.n_microbatches:
        return role
    n_longer, n_shorter = role.n_microbatches, role.n_shorter
    times = (n - n_longer) // (n_longer - n_shorter)
    earlier = dict(zip(_keys(role.shorter), role.shorter, strict=True))
    spans = []
    for key, span in zip(_keys(role.spans), role.spans, strict=True):
        name, previous, number = key
        before = earlier.get((pairs.get(name, name), pairs.get(previous, previous), number))
        if not previous and span.action != COMPUTING:
            span = _after_a_whole_step(role, span, times)
        elif before is not None:
            span = _line(before, span, times)
        spans.append(span)
    held = _grown(role.held_shorter, role.held, times)
    return role._replace(n_microbatches=n, held=held, spans=spans, repeated=n - n_longer)


def _keys(spans: Sequence[Span]) -> list[tuple[str, str, int]]:
    """Unique keys of spans: the span's action, the latest pipeline action, and a count among spans equal in both."""
    keys = []
    seen: Counter[tuple[str, str]] = Counter()
    previous = ""
    for span in spans:
        if ACTION.fullmatch(span.action):
            previous = span.action
        names = span.action, previous
        keys.append((*names, seen[names]))
        seen[names] += 1
    return keys


def _after_a_whole_step(role: Role, span: Span, times: int) -> Span:
    """Extrapolate a span at the start of a step, when a rank still holds memory from the previous step.

    In the plan, the previous step is the shorter step; in a run, the previous step is a whole step.
    """
    left = _grown(role.held_shorter, role.held, times)
    added = {owner: n_bytes - role.held_shorter.get(owner, 0) for owner, n_bytes in left.items()}
    n_rows_bytes = span.at_peak.get(ROWS, 0) // role.n_microbatches
    added[ROWS] = n_rows_bytes * times * (role.n_microbatches - role.n_shorter)
    at_peak = Counter(span.at_peak)
    at_peak.update(added)
    return Span(span.action, at_peak.total(), {**+at_peak}, span.held_bytes + sum(added.values()))


def _line(before: Span, span: Span, times: int) -> Span:
    """The span of the whole step, extrapolated linearly from the spans of the two shorter steps."""
    at_peak = _grown(before.at_peak, span.at_peak, times)
    held_bytes = span.held_bytes + times * (span.held_bytes - before.held_bytes)
    return Span(span.action, sum(at_peak.values()), at_peak, held_bytes)


def _grown(before: dict[str, int], after: dict[str, int], times: int) -> dict[str, int]:
    """The extrapolated bytes by owner: `after` plus `times` times the increase from `before` to `after`."""
    grown = {}
    for owner in itertools.chain(after, before.keys() - after.keys()):
        grown[owner] = after.get(owner, 0) + times * (after.get(owner, 0) - before.get(owner, 0))
    return {owner: n_bytes for owner, n_bytes in grown.items() if n_bytes}
