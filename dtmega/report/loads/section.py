"""Write the section "Loads of the experts": the heat map, how to read it, and the experts that no token uses."""

from __future__ import annotations

from collections.abc import Sequence

from dtmega.files.console import counted
from dtmega.report.loads.columns import LoadColumns
from dtmega.report.markup import swatch, table, text
from dtmega.report.run import Run
from dtmega.training.records.lines import EXPERT_LOADS

MAX_LISTED = 30  # maximum number of experts that are listed for a layer
SHOWN_LAYERS = 12  # number of layers that are not folded away
HOW_TO_READ = (
    "A panel for each layer with experts, a row for each expert from 0 on, a column for some steps. The colour is the "
    "number of tokens that used the expert, as a multiple of the mean over its layer: the mean has the colour of the "
    "page, blue is less, red is more. Where a row has the colour of the text, no token used the expert. If all is "
    "pale, the loads are even. Rows that stay blue learn little; a layer with a few red rows has collapsed to these "
    "experts (<code>router_bias</code> and <code>balance_loss</code> help)."
)


def place_of(number: int) -> str:
    """The id of the HTML element that holds a run's heat map. `number` is the run's number on the page."""
    return f"loads-{number}"


def section(runs: Sequence[Run], colours: Sequence[str]) -> list[str]:
    """The HTML of the section, which shows every run with recorded loads; [] if no run has recorded loads."""
    out = []
    for number, (run, colour) in enumerate(zip(runs, colours, strict=True)):
        if run.loads is None:
            continue
        out += [f"<h3>{swatch(colour)}{text(run.name)}</h3>"] if len(runs) > 1 else []
        out.append(f'<div class="drawing" id="{place_of(number)}"></div>')
        out += _unused(run.loads)
        damaged = run.loads.damaged_lines
        if damaged:
            lines = counted(damaged, "damaged or unfinished line")
            out.append(f'<p class="note">{lines} of {EXPERT_LOADS} left out.</p>')
    if not out:
        return []
    return ["<section><h2>Loads of the experts</h2>", f'<p class="note">{HOW_TO_READ}</p>', *out, "</section>"]


def _unused(found: LoadColumns) -> list[str]:
    """The HTML of a table of the experts that no token used recently, or of a sentence if there are no such experts."""
    first, last = found.first_recent, found.last_step
    steps = f"steps {first:,} to {last:,}" if first < last else f"step {last:,}"
    rows = []
    for layer, experts in found.unused().items():
        last_used = found.last_used[layer]
        listed = [f"{expert} {_since(int(last_used[expert]))}" for expert in experts[:MAX_LISTED]]
        if len(experts) > MAX_LISTED:
            listed.append(f"{len(experts) - MAX_LISTED:,} more")
        rows.append([f"{layer:,}", f"{len(experts):,} of {len(last_used):,}", ", ".join(listed)])
    if not rows:
        return [f'<p class="note">Tokens of {steps} used every expert.</p>']
    headings = ["layer", "experts", "which, and the last step with a token"]
    out = [f"<h3>Experts that no token used in {steps}</h3>", table(headings, rows[:SHOWN_LAYERS])]
    more = rows[SHOWN_LAYERS:]
    if more:
        layers = counted(len(more), "more layer")
        out.append(f"<details><summary>{layers}</summary>{table(headings, more)}</details>")
    return out


def _since(last_used: int) -> str:
    return f"(step {last_used:,})" if last_used else "(never)"
