"""Simulate the streams of one rank: the start and end of each work item, and the causes of the compute stream's waits.

Work items on one stream run in order. A work item also waits for the work items listed in its `waits`. Streams do not
slow each other down, although a real message takes memory bandwidth and processors away from concurrent kernels.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from dtmega.planning.work import COMPUTE, Work

OTHER = "other"  # axis name for waits on a kernel of a different stream (not on a message)


class Span(NamedTuple):
    """The time of one work item, in seconds from the start of the step."""

    start_s: float
    end_s: float


class MessageTime(NamedTuple):
    """The time of one message.

    Attributes:
        number: index of the message in the list of work items.
        action: action that launches the message.
        axis: name of the message's process group.
        seconds: duration of the message.
        exposed_s: part of the duration during which the compute stream waits for this message; 0 if kernels cover the
            whole message.
    """

    number: int
    action: str
    axis: str
    seconds: float
    exposed_s: float


class StreamTimes(NamedTuple):
    """The result of a simulation of one rank.

    The compute stream is either busy or waiting, so seconds = compute_s + exposed_s.

    Attributes:
        spans: start and end of each work item.
        seconds: time at which the last work item ends.
        compute: action -> time during which the compute stream runs kernels.
        exposed: (action, axis) -> time during which the compute stream waits for messages that this action launched on
            this axis. The axis is "other" for waits for kernels on a different stream.
        messages: messages, in the order of the list of work items.
    """

    spans: list[Span]
    seconds: float
    compute: dict[str, float]
    exposed: dict[tuple[str, str], float]
    messages: list[MessageTime]

    @property
    def compute_s(self) -> float:
        """The time during which the compute stream runs kernels."""
        return sum(self.compute.values())

    @property
    def communication_s(self) -> float:
        """The sum of the durations of all messages, exposed or not."""
        return sum(message.seconds for message in self.messages)

    @property
    def exposed_s(self) -> float:
        """The time during which the compute stream waits."""
        return sum(self.exposed.values())


def run(works: Sequence[Work], durations_s: Sequence[float]) -> StreamTimes:
    """Simulate the streams of one rank.

    Args:
        works: kernels and messages, in the order in which the host launches them.
        durations_s: duration of each work item.

    Raises:
        ValueError: a work item waits for itself or for a later work item.
    """
    spans, causes = _spans(works, durations_s)
    seconds = max((span.end_s for span in spans), default=0.0)
    compute: dict[str, float] = defaultdict(float)
    waits: list[tuple[int, float]] = []  # (index of the work that the compute stream waits for, seconds)
    idle_from_s = 0.0
    for number, work in enumerate(works):
        if work.stream != COMPUTE:
            continue
        waits += _waits(causes[number], idle_from_s, spans[number].start_s, spans, causes)
        if work.message is None:
            compute[work.action] += durations_s[number]
        else:  # a message on the compute stream, during which no kernel can run on this stream
            waits.append((number, durations_s[number]))
        idle_from_s = spans[number].end_s
    if seconds > idle_from_s:
        last = max(range(len(works)), key=lambda i: spans[i].end_s)
        waits += _waits(last, idle_from_s, seconds, spans, causes)

    exposed: dict[tuple[str, str], float] = defaultdict(float)
    exposed_of = [0.0] * len(works)
    for cause, waited_s in waits:
        message = works[cause].message
        exposed[works[cause].action, message.axis if message else OTHER] += waited_s
        exposed_of[cause] += waited_s
    messages = []
    for number, work in enumerate(works):
        if work.message:
            axis = work.message.axis
            messages.append(MessageTime(number, work.action, axis, durations_s[number], exposed_of[number]))
    return StreamTimes(spans, seconds, dict(compute), dict(exposed), messages)


def _spans(works: Sequence[Work], durations_s: Sequence[float]) -> tuple[list[Span], list[int]]:
    """The span and the cause of each work item.

    The cause is the index of the earlier item whose end allows the item to start; -1 if there is no such item.

    Raises:
        ValueError: a work item waits for itself or for a later work item.
    """
    spans: list[Span] = []
    causes: list[int] = []
    newest: dict[str, int] = {}  # stream -> index of the latest work on the stream
    for number, work in enumerate(works):
        if any(wait >= number for wait in work.waits):
            raise ValueError(f"work {number} ({work.operator}) waits for {list(work.waits)}, expected earlier works")
        before = [*work.waits]
        if work.stream in newest:
            before.append(newest[work.stream])
        cause = max(before, key=lambda i: spans[i].end_s, default=-1)
        start_s = spans[cause].end_s if cause >= 0 else 0.0
        spans.append(Span(start_s, start_s + durations_s[number]))
        causes.append(cause)
        newest[work.stream] = number
    return spans, causes


def _waits(
    cause: int, from_s: float, until_s: float, spans: Sequence[Span], causes: Sequence[int]
) -> list[tuple[int, float]]:
    """Divide a wait of the compute stream among the work items that caused it.

    The wait is traced backwards from its end. The work item that ended the wait accounts for the time since that item
    began. If an earlier item delayed that beginning, the earlier item accounts for the time before, and so on back to
    the start of the wait.

    Args:
        cause: index of the work item whose end finished the wait; -1 if there was no such work item.
        from_s: start of the wait.
        until_s: end of the wait.
        spans: times of all work items.
        causes: cause of each work item, as returned by `_spans`.

    Returns:
        One tuple (index of a work item, seconds) for each part of the wait.
    """
    parts = []
    while cause >= 0 and until_s > from_s:
        since_s = max(from_s, spans[cause].start_s)
        parts.append((cause, until_s - since_s))
        until_s = since_s
        cause = causes[cause]
    return parts
