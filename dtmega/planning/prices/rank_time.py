"""The time of one pipeline rank's work items: the actions, and the work before and after the actions.

The rank's streams are simulated as if no other pipeline rank made this rank wait. Messages to and from other stages
take no time here, because `step_time.py` adds their time between ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from dtmega.mesh import AXES, DERIVED, ON_DEMAND, expert_groups, rank_groups
from dtmega.pipelining.table import ACTION, Action, parse
from dtmega.planning.prices import pricing, streams
from dtmega.planning.prices.fabric import Fabric
from dtmega.planning.prices.streams import Span, StreamTimes
from dtmega.planning.work import COMPUTE, Message, Work

POINT_TO_POINT = ("send", "receive")
JOINED = ("world", *(name for name, axes in DERIVED.items() if "pp" in axes))  # groups that span pipeline ranks


class RankTimes(NamedTuple):
    """The times of one pipeline rank, as if no other rank made it wait.

    Attributes:
        actions: seconds of each action of the schedule, including waits for the rank's own collectives.
        before_s: time before the first action, plus the first action's waits for collectives that need no other stage.
        until_joined_s: time from the last action to the end of the last collective over several pipeline ranks; 0
            without such a collective.
        after_s: remaining time until the end of the step.
        sends: sizes in bytes of the messages that the rank sends to other pipeline ranks.
        streams: simulated streams of the rank.
    """

    actions: dict[Action, float]
    before_s: float
    until_joined_s: float
    after_s: float
    sends: list[int]
    streams: StreamTimes


def groups_of(sizes: Mapping[str, int], rank: int, ep: int = 1) -> pricing.Groups:
    """Make a function that returns the ranks in a process group, given the group's name (`mesh.World.groups`).

    The function also accepts "world", and names such as "pp 0+2" for the group of pipeline ranks 0 and 2.

    Args:
        sizes: size of each axis of the mesh.
        rank: number of the rank.
        ep: number of ranks over which a layer's experts are divided.
    """
    of_experts = expert_groups(dict(sizes), ep)
    known: dict[str, Sequence[int]] = {}

    def ranks_of(name: str) -> Sequence[int]:
        if name not in known:
            axis, _, places = name.partition(" ")
            axes = {"world": AXES, **DERIVED, **ON_DEMAND}.get(axis, (axis,))
            lists = of_experts[axis] if axis in of_experts else rank_groups(dict(sizes), axes)
            (mine,) = (ranks for ranks in lists if rank in ranks)
            known[name] = [mine[int(place)] for place in places.split("+")] if places else mine
        return known[name]

    return ranks_of


def time_rank(works: Sequence[Work], fabric: Fabric, rank: int, groups: pricing.Groups) -> RankTimes:
    """The times of one pipeline rank, assuming that messages between pipeline ranks take no time.

    Args:
        works: kernels and messages of the rank.
        fabric: fabric of the cluster.
        rank: number of the rank in the world.
        groups: function that returns the ranks in one of this rank's process groups.

    Raises:
        ValueError: the fabric has no peak FLOP/s for a dtype.
    """
    durations_s = []
    sends = []
    for work in works:
        between_stages = work.message is not None and work.message.collective in POINT_TO_POINT
        durations_s.append(0.0 if between_stages else pricing.seconds(work, fabric, rank, groups))
        if work.message and work.message.collective == "send":
            sends.append(work.message.n_bytes)
    result = streams.run(works, durations_s)
    scheduled = [number for number, work in enumerate(works) if ACTION.fullmatch(work.action)]
    first, after = (scheduled[0], scheduled[-1] + 1) if scheduled else (0, 0)

    # Simulate again with the first kernel delayed until all messages that need no kernel are done. The difference
    # between the two simulations is the time spent waiting for these messages.
    delay_s = result.communication_s
    late_works = [*works[:first], Work("", COMPUTE, "delay"), *_shifted(works[first:], first)]
    late = streams.run(late_works, [*durations_s[:first], delay_s, *durations_s[first:]])
    begun_late_s = _frontier_s(late_works, late.spans, first + 1)
    actions = _advances(late_works[first + 1 : after + 1], late.spans[first + 1 : after + 1], begun_late_s)
    ended_s = _frontier_s(works, result.spans, after)
    before_s = ended_s - sum(actions.values())
    joined_s = ended_s
    for work, span in zip(works[after:], result.spans[after:], strict=True):
        if work.message and _joins_places(work.message):
            joined_s = max(joined_s, span.end_s)
    return RankTimes(actions, before_s, joined_s - ended_s, result.seconds - joined_s, sends, result)


def _shifted(works: Sequence[Work], first: int) -> list[Work]:
    """Copy work items, with waits renumbered for a list in which a new work item is inserted at index `first`."""
    shifted = []
    for work in works:
        waits = tuple(number + (number >= first) for number in work.waits)
        shifted.append(work._replace(waits=waits))
    return shifted


def _frontier_s(works: Sequence[Work], spans: Sequence[Span], stop: int) -> float:
    """The time at which the compute stream has completed its last work item before index `stop`."""
    ends = [span.end_s for work, span in zip(works[:stop], spans[:stop], strict=True) if work.stream == COMPUTE]
    return ends[-1] if ends else 0.0


def _advances(works: Sequence[Work], spans: Sequence[Span], begun_s: float) -> dict[Action, float]:
    """The time that the compute stream takes for each action, including waits.

    Args:
        works: work items from the first action to the last action. A work item between two actions belongs to the
            earlier action.
        spans: times of the work items.
        begun_s: time at which the compute stream is ready for the first action.
    """
    advances: dict[Action, float] = {}
    current: Action | None = None
    now_s = begun_s
    for work, span in zip(works, spans, strict=True):
        if ACTION.fullmatch(work.action):
            (current,) = parse(work.action)
            advances.setdefault(current, 0.0)
        if work.stream == COMPUTE and current is not None:
            advances[current] += span.end_s - now_s
            now_s = span.end_s
    return advances


def _joins_places(message: Message) -> bool:
    """True for a collective over several pipeline ranks."""
    if message.collective in POINT_TO_POINT:
        return False
    return message.axis in JOINED or message.axis.startswith("pp")
