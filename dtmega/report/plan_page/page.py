"""The sections of a plan's page, from top to bottom."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from dtmega.files.console import counted
from dtmega.planning.counting.role import Role
from dtmega.planning.plan import Plan, totals
from dtmega.planning.prices.budget import Budget
from dtmega.planning.prices.step_time import StepTime
from dtmega.report import document
from dtmega.report.colours import MEMORY_COLOURS
from dtmega.report.markup import breakable, keys_in_toml, swatch, table, text, unbroken
from dtmega.report.plan_page import duration, memory, wire
from dtmega.report.plan_page.owners import Places, class_of, distinct_places
from dtmega.report.run import layout_in_words
from dtmega.report.units import binary, seconds, short
from dtmega.report.units import duration as long_time

SHOWN_OWNERS = 10  # number of rows that are not folded away in a table of the memory's use
FOOTER = "Written by <code>dtmega plan --page</code>. Zoom by dragging, back by a double click."
MEMORY_NOTE = (
    "The areas show the memory at the peak of each action, so the top of all areas is the peak. The actions are in the "
    "order in which the host launches them: 0F2 is the forward of stage 0 for microbatch 2, B is a backward, I and W "
    "are its two parts."
)


PLACE_NOTE = (
    "A pipeline rank is the index of a rank in its pipeline. Ranks with the same index do the same work, and so share "
    "a plan; so do pipeline ranks with equal work."
)


class Limits(NamedTuple):
    """The memory of one device.

    Attributes:
        memory_bytes: whole memory; None if it is not known.
        reserve_bytes: part of the memory that tensors cannot use.
    """

    memory_bytes: int | None
    reserve_bytes: int

    @property
    def usable_bytes(self) -> int | None:
        """The part of the memory that tensors can use; None if the memory is not known."""
        return None if self.memory_bytes is None else self.memory_bytes - self.reserve_bytes


class Answer(NamedTuple):
    """The content of a page: the arguments of `write_plan_page`."""

    plan: Plan
    time: StepTime | None
    command: str
    limits: Limits
    fabric: str
    budget: Budget | None


def page(answer: Answer, plotly: str) -> str:
    """The HTML of the whole page.

    Args:
        answer: answer to show on the page.
        plotly: plotly's JavaScript.
    """
    plan = answer.plan
    places = distinct_places(plan)
    title = f"Plan: {plan.cfg.model.name} on {layout_in_words(_layout(plan))}"
    sections = [
        *_head(answer, title),
        document.NO_SCRIPT,
        *_memory(answer, places),
        *duration.section(plan, answer.time, answer.fabric),
        *wire.section(plan, answer.time, places),
        *_totals(answer, places),
        *_origin(answer),
        f"<footer>{FOOTER}</footer>",
    ]
    return document.html(title, sections, {"memory": memory.figure(places, answer.limits.usable_bytes)}, plotly)


def _layout(plan: Plan) -> dict[str, int]:
    """The plan's mesh sizes and number of processes, as `run.layout_in_words` reads them."""
    return {"processes": math.prod(plan.sizes.values()), **plan.sizes}


def _head(answer: Answer, title: str) -> list[str]:
    """The top of the page: the title, the verdict on whether the job fits, and the most important numbers as cards."""
    plan, time = answer.plan, answer.time
    peak_bytes = plan.fullest.peak.peak_bytes
    batch = plan.cfg.batch
    about = [
        f"{plan.device.type} in name only: nothing was allocated",
        f"{batch.global_batch_size:,} sequences a step",
        f"{counted(plan.n_microbatches, 'microbatch')} of {batch.micro_batch_size:,} on each rank",
        plan.cfg.precision.params,
    ]
    numbers = {"highest peak": binary(peak_bytes), "held between steps": binary(sum(plan.fullest.held.values()))}
    if time is not None:
        numbers["step time"] = seconds(time.seconds)
        numbers["computing"] = f"{time.compute_s / time.seconds:.1%}"
        numbers["exposed communication"] = f"{time.exposed_communication_s / time.seconds:.1%}"
        if time.timeline is not None:
            numbers["bubble"] = f"{time.bubble_fraction:.1%}"
    if answer.budget is not None:
        numbers["tokens/s"] = short(answer.budget.tokens_per_s)
        numbers["MFU"] = f"{answer.budget.mfu:.1%}"
    cards = ""
    for label, value in numbers.items():
        cards += f'<div class="number"><b>{text(value)}</b><span>{text(label)}</span></div>'
    lead = " · ".join(map(text, about))
    return [
        f"<h1>{text(title)}</h1>",
        _verdict(answer),
        f'<p class="lead">{lead}</p>',
        f'<div class="numbers">{cards}</div>',
    ]


def _verdict(answer: Answer) -> str:
    """One line of HTML that states whether the memory of the fullest rank fits into one device."""
    peak = answer.plan.fullest.peak
    at = f"the fullest rank, {answer.plan.fullest.rank}, holds {binary(peak.peak_bytes)} at {peak.action}"
    usable = answer.limits.usable_bytes
    if usable is None or answer.limits.memory_bytes is None:
        return f'<p class="verdict"><strong class="neutral">Memory</strong> {text(at)}</p>'
    fits = peak.peak_bytes <= usable
    state, tone = ("Fits", "good") if fits else ("Does not fit", "bad")
    memory_words = f"{binary(usable)}: {binary(answer.limits.memory_bytes)} minus a reserve of "
    memory_words += binary(answer.limits.reserve_bytes)
    return f'<p class="verdict"><strong class="{tone}">{state}</strong> {text(at)}, of {text(memory_words)}</p>'


def _memory(answer: Answer, places: Sequence[Places]) -> list[str]:
    """The section about memory: the figure and, for each panel of the figure, a table of what fills the peak."""
    plan = answer.plan
    notes = [MEMORY_NOTE]
    if plan.table is not None:
        notes.append(PLACE_NOTE)
    if plan.run_microbatches < plan.n_microbatches:
        notes.append(
            f"{plan.run_microbatches:,} of {plan.n_microbatches:,} microbatches were run. The others do like one in "
            "the middle: their actions are not drawn, and the bytes are those of all microbatches."
        )
    notes += plan.assumptions
    usable = answer.limits.usable_bytes
    if usable is not None and usable > memory.FAR * plan.fullest.peak.peak_bytes:
        notes.append(f"The device's memory minus the reserve, {binary(usable)}, is far above the picture.")
    out = ["<section><h2>Memory over the step</h2>", '<div id="memory"></div>']
    out += [f'<p class="note">{text(note)}</p>' for note in notes]
    for each in places:
        peak = each.role.peak
        summary = f"{each.title}: {binary(peak.peak_bytes)} at {peak.action}, by owner"
        out.append(f"<details><summary>{text(summary)}</summary>{_owners(each.role)}</details>")
    return [*out, "</section>"]


def _owners(role: Role) -> str:
    """The HTML of a table of the memory's use at a rank's peak, largest first.

    Each row is an owner, such as "gradients". Rows after the first SHOWN_OWNERS are folded away.
    """
    peak = role.peak
    rows = []
    for owner, n_bytes in sorted(peak.at_peak.items(), key=lambda pair: pair[1], reverse=True):
        name = swatch(MEMORY_COLOURS[class_of(owner)]) + text(owner)
        rows.append([name, unbroken(binary(n_bytes)), f"{n_bytes:,}", f"{n_bytes / peak.peak_bytes:.1%}"])
    headings = ["owner", "at the peak", "bytes", "share"]
    shown, more = table(headings, rows[:SHOWN_OWNERS]), rows[SHOWN_OWNERS:]
    if not more:
        return shown
    return f"{shown}<details><summary>{len(more)} more owners</summary>{table(headings, more)}</details>"


def _totals(answer: Answer, places: Sequence[Places]) -> list[str]:
    """The section with a table of totals, one row for each group in `places`, and the cost of the run, if known."""
    rows = []
    for each in places:
        role = each.role
        sums = totals(role)
        sent = 0
        for (_, collective, n_bytes), times in sums.messages.items():
            sent += 0 if collective == "receive" else times * n_bytes
        rows.append(
            [
                text(each.title),
                text(each.pieces),
                unbroken(binary(role.peak.peak_bytes)),
                text(role.peak.action),
                unbroken(binary(sum(role.held.values()))),
                unbroken(f"{short(sum(sums.flops.values()))}FLOP"),
                f"{sum(sums.messages.values()):,}",
                unbroken(binary(sent)),
            ]
        )
    headings = ["", "pieces", "peak", "at", "held between steps", "products", "messages", "bytes in messages"]
    out = ["<section><h2>Totals of one rank and one step</h2>", table(headings, rows)]
    if answer.budget is not None:
        out += ["<h3>The whole run</h3>", table(["", ""], _cost(answer.budget))]
    return [*out, "</section>"]


def _cost(budget: Budget) -> list[list[str]]:
    """The rows of a table with the predicted cost of the run."""
    values = {
        "tokens/s": short(budget.tokens_per_s),
        "tokens/s of one GPU": short(budget.tokens_per_s_per_gpu),
        "MFU": f"{budget.mfu:.1%}",
        "time": f"{long_time(86400 * budget.days)} ({budget.days:.3g} days)",
        "GPU-hours": short(budget.gpu_hours),
        "energy of the GPUs": f"{short(budget.energy_kwh)} kWh",
        "price": f"{short(budget.cost)} {budget.currency}",
    }
    if budget.relative_error:
        values["mean error of such predictions"] = f"{budget.relative_error:.1%}"
    return [[text(label), text(value)] for label, value in values.items()]


def _origin(answer: Answer) -> list[str]:
    """The section with the command that made the plan, and with its configuration."""
    out = ["<section><h2>Command and configuration</h2>"]
    if answer.command:
        out.append(f'<pre class="sample">{text(answer.command)}</pre>')
    config = answer.plan.cfg.model_dump()
    out += keys_in_toml("every key", config)
    sizes = {**answer.plan.sizes, "ep": answer.plan.cfg.mesh.ep}
    layout = " · ".join(f"{axis} {size}" for axis, size in sizes.items())
    return [*out, f'<p class="note">{breakable(layout)}</p>', "</section>"]
