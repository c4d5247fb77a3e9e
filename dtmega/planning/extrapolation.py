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

import torch

from dtmega import config
from dtmega.pipelining import schedule
from dtmega.pipelining.table import ACTION, Action, Table, make_table
from dtmega.planning.counting.ledger import Span
from dtmega.planning.counting.role import Role
from dtmega.planning.work import Work

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


def enough_microbatches(pipeline: config.Pipeline, pp: int, n: int, device: torch.device) -> Runs:
    """Find the two shortest steps from which a step with n microbatches can be extrapolated exactly.

    Args:
        pipeline: [pipeline] section of the configuration.
        pp: number of ranks in the pipeline.
        n: number of microbatches.
        device: device of every rank.
    """
    everything = Runs(n, n, [{}] * pp)
    # A message over gloo holds its tensor. torch's 1F1B keeps the last message of its first forwards, of microbatch
    # pp - 2 or an earlier one, until the last forward, which must therefore follow the backward of this microbatch.
    least = max(LEAST, 2 * pp - 1) if device.type == "cpu" and pipeline.schedule == "1F1B" else LEAST
    if pipeline.csv or n <= least:
        return everything
    whole = _table(pipeline, pp, n)
    tables: dict[int, Table] = {}
    for longer in range(least, n):
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
    items of the result are the longer step's; `repeats` returns how often each occurs in the whole step.

    Args:
        role: plan of the longer step, with the plan of the shorter step.
        n: number of microbatches in the whole step.
        pairs: entry of the rank in `Runs.pairs`.
    """
    shorter = role.shorter
    if shorter is None:
        return role
    times = (n - role.n_microbatches) // (role.n_microbatches - shorter.n_microbatches)
    earlier = dict(zip(_keys(shorter.spans), shorter.spans, strict=True))
    spans = []
    for (name, previous, number), span in zip(_keys(role.spans), role.spans, strict=True):
        before = earlier[pairs.get(name, name), pairs.get(previous, previous), number]
        at_peak = _grown(before.at_peak, span.at_peak, times)
        held_bytes = span.held_bytes + times * (span.held_bytes - before.held_bytes)
        spans.append(Span(span.action, sum(at_peak.values()), at_peak, held_bytes))
    held = _grown(shorter.held, role.held, times)
    return role._replace(n_microbatches=n, held=held, spans=spans, repeated=n - role.n_microbatches)


def repeats(role: Role) -> list[float]:
    """The number of times that each work item of `role.works` occurs in the whole step.

    The numbers of all work items that are alike add up to their number in the whole step, which grows linearly with the
    number of microbatches. The work items of the middle microbatch stand for those of the microbatches that were not
    run; if the middle microbatch has no work item of this kind, all work items of the kind stand for them.
    """
    if not role.repeated or role.shorter is None:
        return [1.0] * len(role.works)
    n_run = role.n_microbatches - role.repeated
    times = role.repeated // (n_run - role.shorter.n_microbatches)
    before, now = Counter(map(_alike, role.shorter.works)), Counter(map(_alike, role.works))
    in_middle = Counter(_alike(work) for work in role.works if _microbatch(work) == n_run // 2)
    found = []
    for work in role.works:
        key = _alike(work)
        added = times * (now[key] - before[key])
        stands_for_others = not in_middle[key] or _microbatch(work) == n_run // 2
        found.append(1 + added / (in_middle[key] or now[key]) if stands_for_others else 1.0)
    return found


def _alike(work: Work) -> Work:
    """A work item without its place in the step: equal for the same kernel or message of all microbatches."""
    action = ACTION.sub(r"\1\2", work.action)
    return work._replace(action=action, stream="", waits=())


def _microbatch(work: Work) -> int:
    """The index of the microbatch in whose action a work item is launched; -1 for an action of the whole step."""
    matched = ACTION.fullmatch(work.action)
    return int(matched[3]) if matched else -1


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


def _grown(before: dict[str, int], after: dict[str, int], times: int) -> dict[str, int]:
    """The extrapolated bytes by owner: `after` plus `times` times the increase from `before` to `after`."""
    grown = {}
    for owner in itertools.chain(after, before.keys() - after.keys()):
        grown[owner] = after.get(owner, 0) + times * (after.get(owner, 0) - before.get(owner, 0))
    return {owner: n_bytes for owner, n_bytes in grown.items() if n_bytes}
