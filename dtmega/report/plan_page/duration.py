"""Show the parts of the step time, and draw the schedule with the duration of each action."""

from __future__ import annotations

from dtmega.files.console import counted
from dtmega.pipelining import draw
from dtmega.planning.plan import Plan
from dtmega.planning.prices.step_time import StepTime
from dtmega.report.colours import ACTION_COLOURS, BUBBLE, EXPOSED, phase_colour
from dtmega.report.markup import swatch, table, text, unbroken
from dtmega.report.plan_page.wire import in_words
from dtmega.report.units import seconds
from dtmega.training.phases import COMPUTING

MAX_ACTIONS = 12_000  # maximum number of actions in a schedule; larger schedules are not drawn
SCHEDULE_NOTE = (
    "Each row is a pipeline rank, and begins when the rank has gathered its first weights. The work after the last "
    "action, such as the optimizer, ends where the rows end. Point at an action to see its times."
)


def parts(time: StepTime) -> dict[str, tuple[float, str]]:
    """The parts of the step time: name -> (seconds, colour). The seconds are means over the ranks of a pipeline.

    The seconds add up to the step time. The parts are the computing time of each kind of action and of each phase, the
    exposed communication of each axis ("exposed: AXIS"), and the bubble.
    """
    out: dict[str, tuple[float, str]] = {}
    for place, (kind, compute_s) in enumerate(time.compute_by_action.items()):
        if kind in ACTION_COLOURS:
            out[draw.KIND_NAMES[kind]] = compute_s, ACTION_COLOURS[kind]
        else:
            name = "between the actions" if kind == COMPUTING else kind
            out[name] = compute_s, phase_colour("other" if kind == COMPUTING else kind, place)
    for axis, exposed_s in time.exposed_by_axis.items():
        out[f"exposed: {in_words(axis)}"] = exposed_s, EXPOSED
    out["bubble"] = time.bubble_fraction * time.seconds, BUBBLE
    return {name: part for name, part in out.items() if part[0]}


def section(plan: Plan, time: StepTime | None, fabric: str) -> list[str]:
    """The HTML of the section about the step time; [] if the time is not known."""
    if time is None:
        return []
    bar, rows = "", []
    for name, (part_s, colour) in parts(time).items():
        share = part_s / time.seconds
        bar += f'<span style="width:{100 * share:.3f}%;background:{colour}"></span>'
        rows.append([swatch(colour) + text(name), f"{share:.1%}", unbroken(seconds(part_s))])
    rows.append(["step", "100.0%", unbroken(seconds(time.seconds))])
    on = f" on {text(fabric)}" if fabric else ""
    out = [
        "<section><h2>Time of a step</h2>",
        f'<p class="note">A prediction{on}. Means over the places of the pipeline.</p>',
        f'<div class="bar">{bar}</div>',
        table(["part", "share", "time"], rows),
        *_schedule(plan, time),
    ]
    return [*out, "</section>"]


def _schedule(plan: Plan, time: StepTime) -> list[str]:
    """The HTML of the schedule's drawing; [] if there is no pipeline."""
    if plan.table is None or time.timeline is None:
        return []
    n_actions = sum(map(len, plan.table))
    pipeline = plan.cfg.pipeline
    name = pipeline.csv or pipeline.schedule
    title = f"{name}: {counted(len(plan.table), 'rank')}, {counted(plan.n_microbatches, 'microbatch')}"
    out = [f"<h3>{text(title)}</h3>"]
    if n_actions > MAX_ACTIONS:
        return [*out, f'<p class="note">{n_actions:,} actions are too many to draw.</p>']
    whole = draw.svg(plan.table, "", time.timeline, time.seconds, fits_page=True)
    large = draw.svg(plan.table, "", time.timeline, time.seconds)
    out += [f'<div class="wide drawing">{whole}</div>', f'<p class="note">{SCHEDULE_NOTE}</p>']
    if large != whole:
        folded = f'<div class="wide drawing">{large}</div>'
        out.append(f"<details><summary>larger, with the microbatch in each cell</summary>{folded}</details>")
    return out
