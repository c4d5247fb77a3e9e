"""Draw a schedule as an SVG picture with one row per rank and one cell per action. Gaps in a row are bubbles."""

from __future__ import annotations

import itertools
from pathlib import Path
from xml.sax.saxutils import escape

from dtmega import config
from dtmega.pipelining.table import Table, TimedAction, make_table, microbatches_in, simulate, stages_in

# Sizes in pixels.
UNIT = 26  # width of one forward
ROW = 40  # height of a rank's row
GAP = 8  # space between rows
LEFT = 74  # width of the rows' labels
TOP = 76  # height of title and legend
LEGEND_TOP = 36  # height of the title alone
MIDDLE = 0.35  # share of the darker fill colour, for a rank with a single stage and for the legend
KIND_NAMES = {"F": "forward", "B": "backward", "I": "backward, input part", "W": "backward, weight part"}
# Fill colours of a rank's first and last stage. The stages in between get a mix of the two colours. The text is dark or
# white, for contrast with the fill.
COLOURS = {
    "F": ((0xCF, 0xE3, 0xFA), (0x3B, 0x7D, 0xC4)),
    "B": ((0xCD, 0xEB, 0xCB), (0x3F, 0x96, 0x4B)),
    "I": ((0xC4, 0xEC, 0xE6), (0x23, 0x8E, 0x86)),
    "W": ((0xFD, 0xE6, 0xB8), (0xD0, 0x8A, 0x1D)),
}


def draw_schedule(cfg: config.Config, pp: int, data_size: int) -> None:
    """Draw the configured schedule for the full global batch, and write the picture to the file in [pipeline] draw.

    Raises:
        ValueError: the file cannot be written.
    """
    n_microbatches = cfg.batch.global_batch_size // (data_size * cfg.batch.micro_batch_size)
    table = make_table(cfg.pipeline, pp, n_microbatches)
    draw(table, cfg.pipeline.draw, cfg.pipeline.csv or cfg.pipeline.schedule)


def draw(table: Table, path: str, name: str) -> None:
    """Write a table as an SVG file, with the schedule's name and sizes as the title.

    Raises:
        ValueError: the file cannot be written.
    """
    try:
        Path(path).write_text(svg(table, describe(table, name)), encoding="utf-8")
    except OSError as error:
        raise ValueError(f"cannot write the schedule to {path}: {error.strerror} ([pipeline] draw)") from None


def describe(table: Table, name: str) -> str:
    """One line of text with the schedule's name, its sizes and the percentage of time lost in bubbles."""
    n_stages = sum(map(len, stages_in(table)))
    bubble = 100 * simulate(table).bubble
    sizes = f"{len(table)} ranks, {n_stages} stages · {microbatches_in(table)} microbatches"
    return f"{name} · {sizes} · bubble {bubble:.1f} %"


def svg(table: Table, title: str) -> str:
    """The table's timeline as an SVG element.

    The width of a cell shows how long its action takes (F = I = W = 1, B = 2; transfers take no time). Each cell shows
    the index of the microbatch and, below the index, the stage. Darker cells belong to later stages of the rank.

    Args:
        table: a complete table.
        title: text above the picture; '' to leave out both the title and the space for a title.
    """
    timeline = simulate(table)
    stages_of_ranks = stages_in(table)
    end = round(max(row[-1].end for row in timeline.rows))
    width = max(LEFT + end * UNIT + 20, 880)  # 880: the width of the legend
    bottom = TOP + len(table) * (ROW + GAP)
    top = 0 if title else LEGEND_TOP
    height = bottom + 34 - top
    svg_lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 {top} {width} {height}" width="{width}" '
        f'height="{height}" font-family="Helvetica, Arial, sans-serif">',
        f'<rect width="{width}" height="{bottom + 34}" fill="#ffffff"/>',
        f'<text x="16" y="28" font-size="17" font-weight="bold" fill="#1d2733">{escape(title)}</text>',
        *_legend({action.kind for action in itertools.chain.from_iterable(table)}),
    ]
    for rank, (row, stages) in enumerate(zip(timeline.rows, stages_of_ranks, strict=True)):
        y = TOP + rank * (ROW + GAP)
        # Stage number -> 0 for the rank's first stage, 1 for the rank's last stage.
        depth = {stage: i / max(1, len(stages) - 1) for i, stage in enumerate(stages)}
        if len(stages) == 1:
            depth[stages[0]] = MIDDLE
        svg_lines += [
            f'<text x="{LEFT - 12}" y="{y + 25}" font-size="13" text-anchor="end" fill="#1d2733">rank {rank}</text>',
            f'<rect class="row" x="{LEFT}" y="{y}" width="{end * UNIT}" height="{ROW}" fill="#eef0f2"/>',
            *(_cell(step, y, depth[step.action.stage]) for step in row),
        ]
    return "\n".join([*svg_lines, *_axis(end, bottom), "</svg>"])


def _cell(step: TimedAction, y: int, depth: float) -> str:
    """The SVG of one action's cell: a rectangle with its top at `y`, labelled with the microbatch and the stage."""
    x, width = LEFT + round(step.start) * UNIT, round(step.end - step.start) * UNIT
    stage, kind, microbatch = step.action
    fill, ink = _colours(kind, depth)
    return (
        f'<g class="{kind}"><rect x="{x + 0.5}" y="{y + 0.5}" width="{width - 1}" height="{ROW - 1}" rx="3" '
        f'fill="{fill}"/><text x="{x + width / 2:g}" y="{y + 19}" font-size="14" text-anchor="middle" '
        f'fill="{ink}">{microbatch}</text><text x="{x + width / 2:g}" y="{y + 34}" font-size="9" '
        f'text-anchor="middle" fill="{ink}" fill-opacity="0.75">s{stage}</text></g>'
    )


def _colours(kind: str, depth: float) -> tuple[str, str]:
    """The fill and text colours of an action. `depth` is 0 for the first stage of a rank and 1 for the last stage."""
    red, green, blue = (round(a + (b - a) * depth) for a, b in zip(*COLOURS[kind], strict=True))
    dark = 0.299 * red + 0.587 * green + 0.114 * blue < 128  # luma, ITU-R BT.601
    return f"#{red:02x}{green:02x}{blue:02x}", "#ffffff" if dark else "#1d2733"


def _legend(kinds: set[str]) -> list[str]:
    """The legend: colour and name of each kind of action, and a note that explains the numbers and shades."""
    svg_lines = []
    x = 16
    for kind in KIND_NAMES:
        if kind not in kinds:
            continue
        svg_lines += [
            f'<rect class="legend" x="{x}" y="44" width="14" height="14" rx="2" fill="{_colours(kind, MIDDLE)[0]}"/>',
            f'<text x="{x + 20}" y="56" font-size="12" fill="#46515e">{KIND_NAMES[kind]}</text>',
        ]
        x += 38 + 7 * len(KIND_NAMES[kind])
    note = "number: microbatch · s: stage · darker: later stage of the rank"
    return [*svg_lines, f'<text x="{x}" y="56" font-size="12" fill="#46515e">{note}</text>']


def _axis(end: int, y: int) -> list[str]:
    """The time axis, in units of one forward, with at most about twelve ticks at round numbers."""
    every = next(step for step in (5, 10, 20, 50, 100, 200, 500, 1000, end) if end <= 12 * step or step == end)
    ticks = [
        f'<text x="{LEFT + t * UNIT}" y="{y + 10}" font-size="11" text-anchor="middle" fill="#7a8591">{t}</text>'
        for t in range(0, end + 1, every)
    ]
    return [
        *ticks,
        f'<text x="{LEFT}" y="{y + 26}" font-size="11" fill="#7a8591">time, in forwards of one stage</text>',
    ]
