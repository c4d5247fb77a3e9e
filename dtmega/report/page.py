"""The page: one HTML file with everything in it, that asks nobody for anything.

Names, configurations, reasons and samples are other people's text, so each goes through `text`. The content security
policy lets two scripts run, known by their digests, plotly and `page.js`: whatever else got into the page would not.
"""

from __future__ import annotations

import base64
import hashlib
import html
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np
import tomli_w

from dtmega import mesh
from dtmega.report import compare, layout, scores, verdict
from dtmega.report.markup import breakable, cut, json_in_html, names, swatch, table, text, times, whole
from dtmega.report.run import Part, Run, duration, layout_in_words, moment, numbers, percentile, seconds, short

HERE = Path(__file__).parent
POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; img-src data: blob:; script-src {scripts}; "
    "base-uri 'none'; form-action 'none'"
)
FOOTER = (
    "Written by <code>dtmega report</code>. Zoom by dragging, back by a double click; the panels over the steps move "
    "together. A curve of many steps is drawn by the smallest and the largest value of each stretch."
)
MOST_EVENTS = 50  # of a run that are listed
NOTABLE = ("restart", "skipped", "failed checkpoint", "end", "refused start")
WHAT_IS_NOTABLE = "Restarts, refused starts, skipped steps, failed checkpoints, an end before the last step"
MOST_SCORES = 300  # that are listed
# How a state is coloured; the others are a person's to look at.
TONES = {"finished": "good", "going on": "neutral", "not begun": "neutral", "killed": "bad", "stalled": "bad"}


def page(runs: Sequence[Run], figures: Mapping[str, str], plotly: str, colours: Sequence[str]) -> str:
    """The HTML.

    Args:
        figures: id -> JSON of a plotly figure: "curves", and "tail" where there are step times.
        plotly: its JavaScript.
        colours: of each run.
    """
    scripts = [plotly, (HERE / "page.js").read_text(encoding="utf-8")]
    digests = (base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts)
    policy = POLICY.format(scripts=" ".join(f"'sha256-{digest}'" for digest in digests))
    now = datetime.now(timezone.utc)
    title = runs[0].name if len(runs) == 1 else " · ".join(run.name for run in runs)
    parts = [
        "<!DOCTYPE html>",
        '<html lang="en"><head><meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{html.escape(policy)}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{text(title)}</title>",
        f"<style>\n{(HERE / 'page.css').read_text(encoding='utf-8')}</style>",
        "</head><body><main>",
        *_head(runs, title, colours, now),
        "<noscript><section>The figures need JavaScript, which is in this file.</section></noscript>",
        '<section><div id="curves"></div></section>',
        *(_tail(runs, colours) if "tail" in figures else []),
        *_layouts(runs, colours),
        *_changes(runs),
        *_notable(runs, colours),
        *_scores(runs, colours),
        *_samples(runs, colours),
        *_configurations(runs, colours),
        f"<footer>{FOOTER}</footer>",
        *(
            f'<script type="application/json" data-place="{place}">{json_in_html(figure)}</script>'
            for place, figure in figures.items()
        ),
        *(f"<script>{script}</script>" for script in scripts),
        "</main></body></html>",
    ]
    return "\n".join(parts) + "\n"


def _head(runs: Sequence[Run], title: str, colours: Sequence[str], now: datetime) -> list[str]:
    """The name, the verdict on each run, and the numbers: cards of one run, differences of several."""
    out = [f"<h1>{text(title)}</h1>"]
    for run, colour in zip(runs, colours, strict=True):
        out += _verdict(run, now, swatch(colour) + text(run.name) + ": " if len(runs) > 1 else "")
    if len(runs) > 1:
        return [*out, *_damage(runs), *compare.differences(runs, colours)]
    (run,) = runs
    cards = "".join(f'<div class="number"><b>{_value(value)}</b><span>{text(label)}</span></div>'
                    for label, value in numbers(run).items())  # fmt: skip
    about = " · ".join(map(breakable, _about(run)))
    return [*out, f'<p class="lead">{about}</p>', f'<div class="numbers">{cards}</div>', *_damage(runs)]


def _verdict(run: Run, now: datetime, who: str) -> list[str]:
    """The verdict as a line, and the reason in a second one if the loss is taken to diverge.

    Args:
        who: the name of the run as HTML, or ''.
    """
    found = verdict.judge(run, now)
    tone = TONES.get(found.state, "unsure")
    state = f'<strong class="{tone}">{found.state.capitalize()}</strong>'
    if found.diverging:
        state += ' and <strong class="bad">diverging</strong>'
    facts = "".join(f" · {whole(fact)}" for fact in verdict.facts(run))
    line = f'<p class="verdict">{who}{state} {times(text(found.why))}{facts}</p>'
    return [line, f'<p class="bad">Diverging: {text(found.diverging)}.</p>'] if found.diverging else [line]


def _value(value: str) -> str:
    """5.43 (ppl 228) -> the number large, what stands behind it small."""
    number, bracket, rest = value.partition(" (")
    return text(number) + (f" <small>({text(rest)}</small>" if bracket else "")


def _about(run: Run) -> list[str]:
    model, start = run.config.get("model", {}), run.parts[-1].start
    found = [str(model["name"])] if "name" in model else []
    if start is not None:
        found += [f"{short(start.parameters)} parameters"] if start.parameters else []
        found += [str(run.config.get("precision", {}).get("params", ""))]
        found += [run.layout, f"torch {start.versions.get('torch', '?')}"]
    checkpoint = run.newest_checkpoint
    found += [f"newest checkpoint {checkpoint}" if checkpoint else ""]
    return [part for part in found if part]


def _damage(runs: Sequence[Run]) -> list[str]:
    unreadable = [
        f'<p class="note">{text(run.name)}: {text(f"{scores.FOLDER}/{name}")} cannot be read.</p>'
        for run in runs
        for name in run.scores.unreadable
    ]
    return unreadable + [
        f'<p class="note">{text(run.name)}: {run.record.damaged_lines:,} damaged or unfinished '
        f"line{'s' if run.record.damaged_lines > 1 else ''} of metrics.jsonl left out.</p>"
        for run in runs
        if run.record.damaged_lines
    ]


def _tail(runs: Sequence[Run], colours: Sequence[str]) -> list[str]:
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
    out = ["<section><h2>Layout</h2>"]
    for number, run in enumerate(runs):
        for part in run.parts:
            who = f"{swatch(colours[number])}{text(run.name)}: " if len(runs) > 1 else ""
            out += [f"<h3>{who}steps {part.first:,} to {part.last:,}</h3>", *_drawn(part)]
    return [*out, "</section>"]


def _drawn(part: Part) -> list[str]:
    start = part.start
    if start is None:
        return ['<p class="note">Not recorded: the run is of an earlier version and has no checkpoint.</p>']
    began = f", started {moment(start.time)}" if start.time else ""
    versions = ", ".join(f"{name} {version}" for name, version in start.versions.items())
    device = f" on {start.device}" if start.device else ""
    about = f'<span class="note">{times(text(began))}; {text(versions)}</span>'
    out = [f"<p>{text(layout_in_words(start.layout))}{text(device)}{about}</p>"]
    sizes = layout.sizes_of(start.layout)
    if sizes is None or start.layout["processes"] == 1:
        return out
    if start.layout["processes"] <= layout.MOST_RANKS:
        out.append(f'<div class="wide drawing">{layout.mesh_svg(sizes)}</div>')
        groups = text(mesh.describe_groups(sizes), keep="\n")
        out.append(f"<details><summary>the ranks of every group</summary><pre>{groups}</pre></details>")
    drawing, about_it = layout.schedule(start.config, sizes)
    if drawing:
        out.append(f"<h3>{text(about_it)}</h3>")
        out.append(f'<div class="wide drawing">{drawing}</div>')
    elif sizes["pp"] > 1:
        out.append(f'<p class="note">{text(about_it)}</p>')
    return out


def _changes(runs: Sequence[Run]) -> list[str]:
    """The keys that differ between the parts of each run."""
    out = []
    for run in runs:
        if len(run.parts) > 1:
            whose = f" of {text(run.name)}" if len(runs) > 1 else ""
            configs = [part.start.config if part.start else {} for part in run.parts]
            headings = [f"steps {part.first:,} to {part.last:,}" for part in run.parts]
            out += [f"<h3>Between the parts{whose}</h3>", compare.difference_table(configs, headings)]
    return ["<section><h2>Changes of configuration</h2>", *out, "</section>"] if out else []


def _notable(runs: Sequence[Run], colours: Sequence[str]) -> list[str]:
    rows, left_out = [], 0
    for number, run in enumerate(runs):
        events = [event for event in run.events if event.kind in NOTABLE]
        left_out += max(len(events) - MOST_EVENTS, 0)
        for event in events[-MOST_EVENTS:]:
            who = [swatch(colours[number]) + text(run.name)] if len(runs) > 1 else []
            rows.append([*who, f"{event.step:,}", text(event.kind), times(text(event.text))])
    if not rows:
        return []
    headings = [*(["run"] if len(runs) > 1 else []), "step", "event", ""]
    more = f'<p class="note">{left_out:,} earlier ones are left out here.</p>' if left_out else ""
    return [f"<section><h2>{WHAT_IS_NOTABLE}</h2>{table(headings, rows)}{more}</section>"]


def _scores(runs: Sequence[Run], colours: Sequence[str]) -> list[str]:
    """A row for each score, of several runs those of one task and metric below each other."""
    found = [(score, number) for number, run in enumerate(runs) for score in run.scores.found]
    if not found:
        return []
    found.sort(key=lambda one: (one[0].task, one[0].metric, one[0].step, one[1]))
    rows = []
    for score, number in found[:MOST_SCORES]:
        who = [swatch(colours[number]) + text(runs[number].name)] if len(runs) > 1 else []
        cells = [score.task, score.metric, f"{score.step:,}", scores.written(score), score.about]
        rows.append([*map(text, cells[:2]), *who, *map(text, cells[2:])])
    headings = ["task", "metric", *(["run"] if len(runs) > 1 else []), "step", "", "asked"]
    left_out = len(found) - len(rows)
    more = f'<p class="note">{left_out:,} more are left out here.</p>' if left_out else ""
    return [f"<section><h2>Scores of checkpoints</h2>{table(headings, rows)}{more}</section>"]


def _samples(runs: Sequence[Run], colours: Sequence[str]) -> list[str]:
    out = []
    for number, run in enumerate(runs):
        if run.sample:
            out += [f"<h3>{swatch(colours[number])}{text(run.name)}</h3>"] if len(runs) > 1 else []
            out.append(cut(run.sample, keep="\n\t"))
    return ["<section><h2>Sample</h2>", *out, "</section>"] if out else []


def _configurations(runs: Sequence[Run], colours: Sequence[str]) -> list[str]:
    """Every key of each run; of several runs also what is equal in all of them."""
    folded = []
    if len(runs) > 1:
        folded.append(("equal in all runs", compare.equal_keys([run.config for run in runs])))
    for run, colour in zip(runs, colours, strict=True):
        folded.append((f"every key of {swatch(colour)}{text(run.name)}" if len(runs) > 1 else "every key", run.config))
    out = []
    for summary, config in folded:
        toml = tomli_w.dumps({section: _known(keys) for section, keys in config.items()})
        if toml:
            out.append(f"<details><summary>{summary}</summary><pre>{text(toml, keep=chr(10))}</pre></details>")
    return ["<section><h2>Configuration</h2>", *out, "</section>"] if out else []


def _known(keys: Mapping[str, Any]) -> dict[str, Any]:
    """Without what TOML does not have: None."""
    return {key: value for key, value in keys.items() if value is not None}
