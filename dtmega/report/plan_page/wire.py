"""Add up a step's messages on each axis, and show the bytes, the time, and the exposed part of the time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from dtmega.planning.plan import Plan, totals
from dtmega.planning.prices.step_time import StepTime
from dtmega.planning.prices.streams import OTHER
from dtmega.report.colours import COVERED, EXPOSED
from dtmega.report.markup import swatch, table, text, unbroken
from dtmega.report.plan_page.owners import Places
from dtmega.report.units import binary, seconds

BETWEEN = "between stages"
NOTE = (
    "Means over the pipeline ranks. The bytes of a message are those of its largest buffer on one rank: the "
    "output of an all-gather, the input of a reduce-scatter. Sends between stages count once; a rank's wait for them "
    "belongs to the bubble."
)


class AxisWire(NamedTuple):
    """The messages that one rank sends over one axis in one step. The numbers are means over the ranks of a pipeline.

    Attributes:
        axis: name of the process group, or "AXIS, between stages" for messages from rank to rank.
        messages: number of messages.
        n_bytes: bytes of these messages.
        seconds: duration of the messages; None if it is not known.
        exposed_s: part of the duration during which the compute stream waits.
    """

    axis: str
    messages: float
    n_bytes: float
    seconds: float | None
    exposed_s: float


def by_axis(plan: Plan, time: StepTime | None) -> list[AxisWire]:
    """The messages of each axis. The axis whose messages take longest comes first."""
    messages: Counter[str] = Counter()
    sums: Counter[str] = Counter()
    for role in plan.roles.values():
        for (axis, collective, n_bytes), times in totals(role).messages.items():
            if collective == "receive":
                continue
            name = f"{axis}, {BETWEEN}" if collective == "send" else axis
            messages[name] += times
            sums[name] += times * n_bytes
    durations = {} if time is None else dict(time.communication_by_axis)
    exposed = {} if time is None else time.exposed_by_axis
    n = len(plan.roles)
    rows = []
    for axis in dict.fromkeys([*messages, *exposed]):
        known = None if axis.endswith(BETWEEN) or axis not in durations else durations[axis]
        rows.append(AxisWire(axis, messages[axis] / n, sums[axis] / n, known, exposed.get(axis, 0.0)))
    rows.sort(key=lambda row: (row.seconds or 0.0, row.exposed_s, row.n_bytes), reverse=True)
    return rows


def in_words(axis: str) -> str:
    """A readable name for an axis."""
    return "kernels on another stream" if axis == OTHER else axis


def section(plan: Plan, time: StepTime | None, places: Sequence[Places]) -> list[str]:
    """The HTML of the section about messages; [] if no rank sends anything."""
    rows = by_axis(plan, time)
    if not rows:
        return []
    longest_s = max(max(row.seconds or 0.0, row.exposed_s) for row in rows)
    cells = []
    for row in rows:
        line = [text(in_words(row.axis)), f"{row.messages:,.4g}", unbroken(binary(row.n_bytes))]
        if time is not None:
            known = "–" if row.seconds is None else unbroken(seconds(row.seconds))
            waited = unbroken(seconds(row.exposed_s)) if row.exposed_s else "–"
            line += [known, waited, _bar(row, longest_s)]
        cells.append(line)
    headings = ["axis", "messages", "bytes"]
    legend = ""
    if time is not None:
        headings += ["time", "exposed", ""]
        legend = f'<p class="note">{swatch(COVERED)}covered by kernels · {swatch(EXPOSED)}exposed: kernels wait</p>'
    out = ["<section><h2>Wire by axis</h2>", legend, table(headings, cells), f'<p class="note">{NOTE}</p>']
    for each in places:
        out.append(_details(each))
    return [*out, "</section>"]


def _bar(row: AxisWire, longest_s: float) -> str:
    """The HTML of a bar that shows an axis's exposed and covered time in two colours; '' if no axis takes time."""
    if not longest_s:
        return ""
    covered_s = max((row.seconds or 0.0) - row.exposed_s, 0.0)
    parts = ""
    for part_s, colour in ((row.exposed_s, EXPOSED), (covered_s, COVERED)):
        parts += f'<span style="width:{100 * part_s / longest_s:.3f}%;background:{colour}"></span>'
    return f'<div class="bar wire">{parts}</div>'


def _details(places: Places) -> str:
    """The HTML of a folded table with all messages of one rank; '' if there are no messages."""
    rows = []
    for (axis, collective, n_bytes), times in sorted(totals(places.role).messages.items()):
        whole = times * n_bytes
        rows.append([text(axis), text(collective), f"{times:,}", f"{n_bytes:,}", f"{whole:,}"])
    if not rows:
        return ""
    headings = ["axis", "message", "number", "bytes of one", "bytes of all"]
    return f"<details><summary>messages of {text(places.title)}</summary>{table(headings, rows)}</details>"
