"""The page: one HTML file with everything in it, that asks nobody for anything.

Names, configurations, reasons and samples are other people's text, so each goes through `text`. The content security
policy lets two scripts run, known by their digests, plotly and `page.js`: whatever else got into the page would not.
"""

from __future__ import annotations

import base64
import hashlib
import html
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import tomli_w

from dtmega import job, mesh
from dtmega.report import layout, scores
from dtmega.report.markup import json_in_html, names, swatch, table, text
from dtmega.report.run import Config, Part, Run, layout_in_words, numbers, percentile, seconds, short

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
    title = runs[0].name if len(runs) == 1 else " · ".join(run.name for run in runs)
    parts = [
        "<!DOCTYPE html>",
        '<html lang="en"><head><meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{html.escape(policy)}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{text(title)}</title>",
        f"<style>\n{(HERE / 'page.css').read_text(encoding='utf-8')}</style>",
        "</head><body><main>",
        *_head(runs, title, colours),
        "<noscript><section>The figures need JavaScript, which is in this file.</section></noscript>",
        '<section><div id="curves"></div></section>',
        *(_tail(runs, colours) if "tail" in figures else []),
        *_layouts(runs, colours),
        *_differences(runs, colours),
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


def _head(runs: Sequence[Run], title: str, colours: Sequence[str]) -> list[str]:
    if len(runs) > 1:
        every = [numbers(run) for run in runs]
        labels = list(dict.fromkeys(chain.from_iterable(every)))
        rows = [[text(label), *(text(of_run.get(label, "–")) for of_run in every)] for label in labels]
        rows.append(["layout", *(text(_layout(run)) for run in runs)])
        rows.append(["state", *(text(_state(run)) for run in runs)])
        rows.append(["newest checkpoint", *(text(_newest_checkpoint(run) or "–") for run in runs)])
        compared = table(["", *names(runs, colours)], rows)
        return [f"<h1>{text(title)}</h1>", f"<section>{compared}</section>", *_damage(runs)]
    (run,) = runs
    cards = "".join(f'<div class="number"><b>{_value(value)}</b><span>{text(label)}</span></div>'
                    for label, value in numbers(run).items())  # fmt: skip
    return [
        f"<h1>{text(title)}</h1>",
        f'<p class="lead">{text(" · ".join(_about(run)))}</p>',
        f'<div class="numbers">{cards}</div>',
        *_damage(runs),
    ]


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
        found += [_layout(run), f"torch {start.versions.get('torch', '?')}"]
    checkpoint = _newest_checkpoint(run)
    found += [_state(run), f"newest checkpoint {checkpoint}" if checkpoint else ""]
    return [part for part in found if part]


def _layout(run: Run) -> str:
    start = run.parts[-1].start
    if start is None:
        return "layout not recorded"
    return layout_in_words(start.layout) + (f" on {start.device}" if start.device else "")


def _state(run: Run) -> str:
    """The words for how far a run is: exit.json tells, which one that is going on or was killed does not have."""
    ended = run.ended
    if run.refused and ended is not None:
        so_far = "finished" if run.is_done else f"stopped after step {ended.step:,}"
        return f"{so_far}; {run.refused}"
    if run.is_done and (ended is None or ended.code == job.DONE):
        return "finished"
    if ended is not None:
        return f"ended after step {ended.step:,} with exit code {ended.code}: {ended.reason}"
    if run.written is None:
        return "nothing written yet"
    return f"going on or killed, last line written {run.written:%Y-%m-%d %H:%M:%S} UTC"


def _newest_checkpoint(run: Run) -> str:
    """The path of the one that exit.json names, else the step of the newest that the record tells of; or ''."""
    if run.ended is not None:
        return run.ended.checkpoint
    saved = [event.text for event in run.record.events if event.kind == "checkpoint"]
    return saved[-1].partition(";")[0].removeprefix("of ") if saved else ""


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
        rows.setdefault("all steps", []).append(_hours(float(series.values.sum())))
    headings = names([run for run, _ in timed], colours) if len(runs) > 1 else ["step time"]
    percentiles = table(["", *headings], [[label, *map(text, values)] for label, values in rows.items()])
    return [f'<section><h2>Slow steps</h2><div class="split"><div id="tail"></div>{percentiles}</div></section>']


def _hours(value: float) -> str:
    return f"{value / 3600:.3g} h" if value >= 3600 else f"{value / 60:.3g} min" if value >= 60 else seconds(value)


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
    began = f", started {start.time}" if start.time else ""
    versions = ", ".join(f"{name} {version}" for name, version in start.versions.items())
    device = f" on {start.device}" if start.device else ""
    about = f'<span class="note">{text(began)}; {text(versions)}</span>'
    out = [f"<p>{text(layout_in_words(start.layout))}{text(device)}{about}</p>"]
    sizes = layout.sizes_of(start.layout)
    if sizes is None or start.layout["processes"] == 1:
        return out
    if start.layout["processes"] <= layout.MOST_RANKS:
        out.append(f'<div class="wide">{layout.mesh_svg(sizes)}</div>')
        groups = text(mesh.describe_groups(sizes), keep="\n")
        out.append(f"<details><summary>the ranks of every group</summary><pre>{groups}</pre></details>")
    drawing, why_not = layout.schedule(start.config, sizes)
    if drawing:
        out.append(f'<div class="wide">{drawing}</div>')
    elif sizes["pp"] > 1:
        out.append(f'<p class="note">{text(why_not)}</p>')
    return out


def _differences(runs: Sequence[Run], colours: Sequence[str]) -> list[str]:
    out = []
    if len(runs) > 1:
        out += ["<h3>Between the runs</h3>"]
        out += [_difference_table([run.config for run in runs], names(runs, colours))]
    for run in runs:
        if len(run.parts) > 1:
            whose = f" of {text(run.name)}" if len(runs) > 1 else ""
            configs = [part.start.config if part.start else {} for part in run.parts]
            headings = [f"steps {part.first:,} to {part.last:,}" for part in run.parts]
            out += [f"<h3>Between the parts{whose}</h3>", _difference_table(configs, headings)]
    return ["<section><h2>Differences in configuration</h2>", *out, "</section>"] if out else []


def _difference_table(configs: Sequence[Config], headings: Sequence[str]) -> str:
    rows = [
        [f'<span class="key">{text(key)}</span>', *(text(_toml(value)) for value in values)]
        for key, values in differences(configs)
    ]
    return table(["key", *headings], rows) if rows else '<p class="note">None.</p>'


def differences(configs: Sequence[Config]) -> list[tuple[str, list[Any]]]:
    """The keys whose values are not the same everywhere, and these; None where one has no such key.

    Where a run writes, `run.dir`, is left out: it names the run.
    """
    keys = dict.fromkeys((section, key) for config in configs for section in config for key in config[section])
    found = [
        (f"{s}.{k}", [config.get(s, {}).get(k) for config in configs]) for s, k in keys if (s, k) != ("run", "dir")
    ]
    return [(key, values) for key, values in found if any(value != values[0] for value in values)]


def _toml(value: Any) -> str:
    if value is None:
        return "–"
    return tomli_w.dumps({"x": value}).removeprefix("x = ").strip()


def _notable(runs: Sequence[Run], colours: Sequence[str]) -> list[str]:
    rows, left_out = [], 0
    for number, run in enumerate(runs):
        events = [event for event in run.events if event.kind in NOTABLE]
        left_out += max(len(events) - MOST_EVENTS, 0)
        for event in events[-MOST_EVENTS:]:
            who = [swatch(colours[number]) + text(run.name)] if len(runs) > 1 else []
            rows.append([*who, f"{event.step:,}", text(event.kind), text(event.text)])
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
            out += [f'<pre class="sample">{text(run.sample, keep=chr(10) + chr(9))}</pre>']
    return ["<section><h2>Sample</h2>", *out, "</section>"] if out else []


def _configurations(runs: Sequence[Run], colours: Sequence[str]) -> list[str]:
    out = []
    for number, run in enumerate(runs):
        if run.config:
            toml = tomli_w.dumps({section: _known(keys) for section, keys in run.config.items()})
            who = swatch(colours[number]) + text(run.name) if len(runs) > 1 else "every key"
            out.append(f"<details><summary>{who}</summary><pre>{text(toml, keep=chr(10))}</pre></details>")
    return ["<section><h2>Configuration</h2>", *out, "</section>"] if out else []


def _known(keys: Mapping[str, Any]) -> dict[str, Any]:
    """Without what TOML does not have: None."""
    return {key: value for key, value in keys.items() if value is not None}
