"""The sections of the report's page about runs, from top to bottom.

Names, configurations, exit reasons and samples may come from untrusted files, so `markup.text` escapes them. As a
second safeguard, the page allows no scripts except those that `document.html` inserts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path

import numpy as np

from dtmega import mesh
from dtmega.report import compare, document, layout, profile_section, scores, verdict
from dtmega.report.loads import section as loads_section
from dtmega.report.markup import breakable, cut, keys_in_toml, names, swatch, table, text, times, unbroken
from dtmega.report.run import Part, Run, layout_in_words, numbers, percentile
from dtmega.report.units import duration, moment, seconds, short

FOOTER = (
    "Written by <code>dtmega report</code>. Zoom by dragging, back by a double click; the panels over the steps move "
    "together. A curve of many steps is drawn by the smallest and the largest value of each stretch."
)
MAX_EVENTS = 50  # maximum number of events listed per run
NOTABLE = ("restart", "skipped", "failed checkpoint", "end", "refused start")
WHAT_IS_NOTABLE = "Restarts, refused starts, skipped steps, failed checkpoints, an end before the last step"
MAX_SCORES = 300  # maximum number of scores listed
# State of a run -> CSS class. States that may be good or bad, for example "stopped", get the class "unsure".
TONES = {"finished": "good", "going on": "neutral", "not begun": "neutral", "killed": "bad", "stalled": "bad"}


def page(
    runs: Sequence[Run], figures: Mapping[str, str], plotly: str, colours: Sequence[str], page_folder: Path
) -> str:
    """The HTML of the whole page.

    Args:
        runs: runs to show.
        figures: id of an HTML element -> JSON of the plotly figure to draw there. The ids are "curves", "tail" if there
            are step times, and one id for each run with expert loads.
        plotly: plotly's JavaScript.
        colours: colour of each run.
        page_folder: folder that will contain the page. Links to files are relative to this folder.
    """
    now = datetime.now(timezone.utc)
    title = runs[0].name if len(runs) == 1 else " · ".join(run.name for run in runs)
    sections = [
        *_head(runs, title, colours, now),
        document.NO_SCRIPT,
        '<section><div id="curves"></div></section>',
        *loads_section.section(runs, colours),
        *(_tail(runs, colours) if "tail" in figures else []),
        *profile_section.section(runs, colours, page_folder),
        *_layouts(runs, colours),
        *_changes(runs),
        *_notable(runs, colours),
        *_scores(runs, colours),
        *_samples(runs, colours),
        *_configurations(runs, colours),
        f"<footer>{FOOTER}</footer>",
    ]
    return document.html(title, sections, figures, plotly)


def _head(runs: Sequence[Run], title: str, colours: Sequence[str], now: datetime) -> list[str]:
    """The top of the page: the title, the verdict on each run, and the numbers.

    For a single run, the numbers are shown as cards. For several runs, a section shows the differences.
    """
    out = [f"<h1>{text(title)}</h1>"]
    for run, colour in zip(runs, colours, strict=True):
        out += _verdict(run, now, swatch(colour) + text(run.name) + ": " if len(runs) > 1 else "")
    if len(runs) > 1:
        return [*out, *_damage(runs), *compare.differences(runs, colours)]
    (run,) = runs
    cards = ""
    for label, value in numbers(run).items():
        cards += f'<div class="number"><b>{_value(value)}</b><span>{text(label)}</span></div>'
    about = " · ".join(map(breakable, _about(run)))
    return [*out, f'<p class="lead">{about}</p>', f'<div class="numbers">{cards}</div>', *_damage(runs)]


def _verdict(run: Run, now: datetime, who: str) -> list[str]:
    """The verdict on a run as one line of HTML. If the loss is diverging, a second line gives the reason.

    Args:
        run: run to judge.
        now: current time.
        who: HTML of the run's name, which precedes the verdict; '' on a page about one run.
    """
    judged = verdict.judge(run, now)
    tone = TONES.get(judged.state, "unsure")
    state = f'<strong class="{tone}">{judged.state.capitalize()}</strong>'
    if judged.diverging:
        state += ' and <strong class="bad">diverging</strong>'
    facts = "".join(f" · {unbroken(fact)}" for fact in verdict.facts(run))
    line = f'<p class="verdict">{who}{state} {times(text(judged.why))}{facts}</p>'
    return [line, f'<p class="bad">Diverging: {text(judged.diverging)}.</p>'] if judged.diverging else [line]


def _value(value: str) -> str:
    """The HTML of a value like "5.43 (ppl 228)", with the part in brackets in small print."""
    number, bracket, remark = value.partition(" (")
    # A remark with a path is too long for one line, so it may break after a slash or a dot.
    written = breakable(remark) if "/" in remark else unbroken(remark)
    return text(number) + (f" <small>({written}</small>" if bracket else "")


def _about(run: Run) -> list[str]:
    """The known facts about a run: model, parameters, precision, layout, torch version and newest checkpoint."""
    model, start = run.config.get("model", {}), run.parts[-1].start
    facts = [str(model["name"])] if "name" in model else []
    if start is not None:
        facts += [f"{short(start.parameters)} parameters"] if start.parameters else []
        facts += [f"{short(start.parameters - start.frozen)} of them trained"] if start.frozen else []
        facts += [str(run.config.get("precision", {}).get("params", ""))]
        facts += [run.layout, f"torch {start.versions.get('torch', '?')}"]
    lora = run.config.get("lora", {})
    if lora.get("rank"):
        targets = lora.get("targets", "")
        layers = targets if isinstance(targets, str) else ", ".join(map(str, targets))
        facts += [f"adapters of rank {lora['rank']}, alpha {lora.get('alpha', '?')}, on {layers}"]
    checkpoint = run.newest_checkpoint
    facts += [f"newest checkpoint {checkpoint}" if checkpoint else ""]
    return [fact for fact in facts if fact]


def _damage(runs: Sequence[Run]) -> list[str]:
    """Notes about unreadable score files, then notes about damaged lines of metrics.jsonl."""
    notes = []
    for run in runs:
        for name in run.scores.unreadable:
            notes.append(f'<p class="note">{text(run.name)}: {text(f"{scores.FOLDER}/{name}")} cannot be read.</p>')
    for run in runs:
        damaged = run.record.damaged_lines
        if damaged:
            lines = "lines" if damaged > 1 else "line"
            notes.append(
                f'<p class="note">{text(run.name)}: {damaged:,} damaged or unfinished {lines} of metrics.jsonl left '
                f"out.</p>"
            )
    return notes


def _tail(runs: Sequence[Run], colours: Sequence[str]) -> list[str]:
    """The section about slow steps: an empty element for the figure, and a table of percentiles."""
    rows: dict[str, list[str]] = {}
    timed = [(run, run.record.series["step_time_s"]) for run in runs if "step_time_s" in run.record.series]
    for _, series in timed:
        for percent, label in ((50, "median"), (90, "9 of 10 within"), (99, "99 of 100"), (99.9, "999 of 1,000")):
            rows.setdefault(label, []).append(seconds(percentile(series, percent)))
        slowest = int(np.argmax(series.values))
        rows.setdefault("slowest", []).append(f"{seconds(series.values[slowest])}, step {series.steps[slowest]:,}")
        rows.setdefault("all steps", []).append(duration(float(series.values.sum())))
    headings = names([run for run, _ in timed], colours) if len(runs) > 1 else ["step time"]
    percentiles = table(["", *headings], [[label, *map(text, values)] for label, values in rows.items()])
    return [f'<section><h2>Slow steps</h2><div class="split"><div id="tail"></div>{percentiles}</div></section>']


def _layouts(runs: Sequence[Run], colours: Sequence[str]) -> list[str]:
    """The section that shows each run's layout after each of its starts."""
    out = ["<section><h2>Layout</h2>"]
    for number, run in enumerate(runs):
        for part in run.parts:
            who = f"{swatch(colours[number])}{text(run.name)}: " if len(runs) > 1 else ""
            out += [f"<h3>{who}steps {part.first:,} to {part.last:,}</h3>", *_layout(part)]
    return [*out, "</section>"]


def _layout(part: Part) -> list[str]:
    """The HTML of the layout of one part of a run: a description and, if several processes ran, drawings.

    Drawings that would be too large are left out.
    """
    start = part.start
    if start is None:
        return ['<p class="note">Not recorded: starts.jsonl is missing or damaged.</p>']
    began = f", started {moment(start.time)}" if start.time else ""
    versions = ", ".join(f"{name} {version}" for name, version in start.versions.items())
    device = f" on {start.device}" if start.device else ""
    about = f'<span class="note">{times(text(began))}; {text(versions)}</span>'
    out = [f"<p>{text(layout_in_words(start.layout))}{text(device)}{about}</p>"]
    sizes = layout.sizes_of(start.layout)
    if sizes is None or start.layout["processes"] == 1:
        return out
    if start.layout["processes"] <= layout.MAX_RANKS:
        out.append(f'<div class="wide drawing">{layout.mesh_svg(sizes)}</div>')
        groups = text(mesh.describe_groups(sizes), keep="\n")
        out.append(f"<details><summary>the ranks of every group</summary><pre>{groups}</pre></details>")
    drawing, title_or_reason = layout.schedule(start.config, sizes)
    if drawing:
        out.append(f"<h3>{text(title_or_reason)}</h3>")
        out.append(f'<div class="wide drawing">{drawing}</div>')
    elif sizes["pp"] > 1:
        out.append(f'<p class="note">{text(title_or_reason)}</p>')
    return out


def _changes(runs: Sequence[Run]) -> list[str]:
    """The section about configuration keys that changed when a run was restarted; [] if no run was restarted."""
    out = []
    for run in runs:
        if len(run.parts) > 1:
            whose = f" of {text(run.name)}" if len(runs) > 1 else ""
            configs = [part.start.config if part.start else {} for part in run.parts]
            headings = [f"steps {part.first:,} to {part.last:,}" for part in run.parts]
            out += [f"<h3>Between the parts{whose}</h3>", compare.difference_table(configs, headings)]
    return ["<section><h2>Changes of configuration</h2>", *out, "</section>"] if out else []


def _notable(runs: Sequence[Run], colours: Sequence[str]) -> list[str]:
    """The section about events that may need attention: the newest MAX_EVENTS of each run."""
    rows, left_out = [], 0
    for number, run in enumerate(runs):
        events = [event for event in run.events if event.kind in NOTABLE]
        left_out += max(len(events) - MAX_EVENTS, 0)
        for event in events[-MAX_EVENTS:]:
            who = [swatch(colours[number]) + text(run.name)] if len(runs) > 1 else []
            rows.append([*who, f"{event.step:,}", text(event.kind), times(text(event.text))])
    if not rows:
        return []
    headings = [*(["run"] if len(runs) > 1 else []), "step", "event", ""]
    more = f'<p class="note">{left_out:,} earlier ones are left out here.</p>' if left_out else ""
    return [f"<section><h2>{WHAT_IS_NOTABLE}</h2>{table(headings, rows)}{more}</section>"]


def _scores(runs: Sequence[Run], colours: Sequence[str]) -> list[str]:
    """The section about scores, sorted by task and metric to make runs easy to compare; [] if there are no scores."""
    numbered: list[tuple[scores.Score, int]] = []
    for number, run in enumerate(runs):
        numbered += [(score, number) for score in run.scores.scores]
    if not numbered:
        return []
    numbered.sort(key=lambda row: (row[0].task, row[0].metric, row[0].step, row[1]))
    rows = []
    for score, number in numbered[:MAX_SCORES]:
        who = [swatch(colours[number]) + text(runs[number].name)] if len(runs) > 1 else []
        cells = [score.task, score.metric, f"{score.step:,}", scores.written(score), score.about]
        rows.append([*map(text, cells[:2]), *who, *map(text, cells[2:])])
    headings = ["task", "metric", *(["run"] if len(runs) > 1 else []), "step", "", "asked"]
    left_out = len(numbered) - len(rows)
    more = f'<p class="note">{left_out:,} more are left out here.</p>' if left_out else ""
    return [f"<section><h2>Scores of checkpoints</h2>{table(headings, rows)}{more}</section>"]


def _samples(runs: Sequence[Run], colours: Sequence[str]) -> list[str]:
    """The section with the runs' samples; [] if no run has a sample."""
    out = []
    for number, run in enumerate(runs):
        if run.sample:
            out += [f"<h3>{swatch(colours[number])}{text(run.name)}</h3>"] if len(runs) > 1 else []
            out.append(cut(run.sample, keep="\n\t"))
    return ["<section><h2>Sample</h2>", *out, "</section>"] if out else []


def _configurations(runs: Sequence[Run], colours: Sequence[str]) -> list[str]:
    """The section with configurations, folded away: first the keys that are equal in all runs, then each run's keys."""
    folded = []
    if len(runs) > 1:
        folded.append(("equal in all runs", compare.equal_keys([run.config for run in runs])))
    for run, colour in zip(runs, colours, strict=True):
        folded.append((f"every key of {swatch(colour)}{text(run.name)}" if len(runs) > 1 else "every key", run.config))
    out = []
    for summary, config in folded:
        out += keys_in_toml(summary, config)
    return ["<section><h2>Configuration</h2>", *out, "</section>"] if out else []
