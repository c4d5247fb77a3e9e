"""A schedule as a picture, so that a person can look at it: one row per rank, one cell per action, gaps are bubbles."""

from __future__ import annotations

from pathlib import Path
from xml.sax.saxutils import escape

from dtmega import config
from dtmega.pipelining.table import Table, TimedAction, make_table, microbatches_in, simulate, stages_in

UNIT, ROW, GAP, LEFT, TOP = 26, 40, 8, 74, 76  # pixels: one forward, a rank's row, between rows, labels, title
LEGEND_TOP = 36  # pixels above the legend, which the title takes
MIDDLE = 0.35  # between the two fills: a rank's only stage, and the legend
KIND_NAMES = {"F": "forward", "B": "backward", "I": "backward, input part", "W": "backward, weight part"}
# Fill of a rank's first stage and of its last one; stages between are mixed. Text is black or white by what it is on.
COLOURS = {
    "F": ((0xCF, 0xE3, 0xFA), (0x3B, 0x7D, 0xC4)),
    "B": ((0xCD, 0xEB, 0xCB), (0x3F, 0x96, 0x4B)),
    "I": ((0xC4, 0xEC, 0xE6), (0x23, 0x8E, 0x86)),
    "W": ((0xFD, 0xE6, 0xB8), (0xD0, 0x8A, 0x1D)),
}


def draw_schedule(cfg: config.Config, pp: int, data_size: int) -> None:
    """Draw the configured schedule at the full global batch, to `[pipeline] draw`; errors as `draw`."""
    n_microbatches = cfg.batch.global_batch_size // (data_size * cfg.batch.micro_batch_size)
    table = make_table(cfg.pipeline, pp, n_microbatches)
    draw(table, cfg.pipeline.draw, cfg.pipeline.csv or cfg.pipeline.schedule)


def draw(table: Table, path: str, name: str) -> None:
    """Write `svg` to a file.

    Raises:
        ValueError: the file cannot be written.
    """
    try:
        Path(path).write_text(svg(table, described(table, name)), encoding="utf-8")
    except OSError as error:
        raise ValueError(f"cannot write the schedule to {path}: {error.strerror} ([pipeline] draw)") from None


def described(table: Table, name: str) -> str:
    """Name and sizes of the schedule, and the fraction of time that is bubble, as a title."""
    n_stages = sum(map(len, stages_in(table)))
    bubble = 100 * simulate(table).bubble
    sizes = f"{len(table)} ranks, {n_stages} stages · {microbatches_in(table)} microbatches"
    return f"{name} · {sizes} · bubble {bubble:.1f} %"


def svg(table: Table, title: str) -> str:
    """The table's timeline as an SVG element, under its title, or none if that is ''.

    A cell is as long as its action takes (F = I = W = 1, B = 2; transfers take none) and shows the microbatch, below it
    the stage. The darker its colour, the later its stage among those of the rank.
    """
    timeline, held = simulate(table), stages_in(table)
    end = max(step.end for row in timeline.rows for step in row)
    # At least as wide as the legend and the title.
    width, bottom = max(LEFT + end * UNIT + 20, 880), TOP + len(table) * (ROW + GAP)
    top = 0 if title else LEGEND_TOP
    height = bottom + 34 - top
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 {top} {width} {height}" width="{width}" '
        f'height="{height}" font-family="Helvetica, Arial, sans-serif">',
        f'<rect width="{width}" height="{bottom + 34}" fill="#ffffff"/>',
        f'<text x="16" y="28" font-size="17" font-weight="bold" fill="#1d2733">{escape(title)}</text>',
        *_legend({action.kind for row in table for action in row}),
    ]
    for rank, (row, stages) in enumerate(zip(timeline.rows, held, strict=True)):
        y = TOP + rank * (ROW + GAP)
        depth = {stage: i / (len(stages) - 1) if len(stages) > 1 else MIDDLE for i, stage in enumerate(stages)}
        out += [
            f'<text x="{LEFT - 12}" y="{y + 25}" font-size="13" text-anchor="end" fill="#1d2733">rank {rank}</text>',
            f'<rect class="row" x="{LEFT}" y="{y}" width="{end * UNIT}" height="{ROW}" fill="#eef0f2"/>',
            *(_cell(step, y, depth[step.action.stage]) for step in row),
        ]
    return "\n".join([*out, *_axis(end, bottom), "</svg>"])


def _cell(step: TimedAction, y: int, depth: float) -> str:
    x, width = LEFT + step.start * UNIT, (step.end - step.start) * UNIT
    stage, kind, microbatch = step.action
    fill, ink = _colours(kind, depth)
    return (
        f'<g class="{kind}"><rect x="{x + 0.5}" y="{y + 0.5}" width="{width - 1}" height="{ROW - 1}" rx="3" '
        f'fill="{fill}"/><text x="{x + width / 2:g}" y="{y + 19}" font-size="14" text-anchor="middle" '
        f'fill="{ink}">{microbatch}</text><text x="{x + width / 2:g}" y="{y + 34}" font-size="9" '
        f'text-anchor="middle" fill="{ink}" fill-opacity="0.75">s{stage}</text></g>'
    )


def _colours(kind: str, depth: float) -> tuple[str, str]:
    """Fill and text colour, for a stage between the first (depth 0) and the last (1) of its rank."""
    red, green, blue = (round(a + (b - a) * depth) for a, b in zip(*COLOURS[kind], strict=True))
    dark = 0.299 * red + 0.587 * green + 0.114 * blue < 128  # luma, ITU-R BT.601
    return f"#{red:02x}{green:02x}{blue:02x}", "#ffffff" if dark else "#1d2733"


def _legend(kinds: set[str]) -> list[str]:
    out, x = [], 16
    for kind in (kind for kind in KIND_NAMES if kind in kinds):
        out += [
            f'<rect class="legend" x="{x}" y="44" width="14" height="14" rx="2" fill="{_colours(kind, MIDDLE)[0]}"/>',
            f'<text x="{x + 20}" y="56" font-size="12" fill="#46515e">{KIND_NAMES[kind]}</text>',
        ]
        x += 38 + 7 * len(KIND_NAMES[kind])
    note = "number: microbatch · s: stage · darker: later stage of the rank"
    return [*out, f'<text x="{x}" y="56" font-size="12" fill="#46515e">{note}</text>']


def _axis(end: int, y: int) -> list[str]:
    """Ticks in units of one forward."""
    every = next(step for step in (5, 10, 20, 50, 100, 200, 500, 1000, end) if end <= 12 * step or step == end)
    ticks = [
        f'<text x="{LEFT + t * UNIT}" y="{y + 10}" font-size="11" text-anchor="middle" fill="#7a8591">{t}</text>'
        for t in range(0, end + 1, every)
    ]
    return [
        *ticks,
        f'<text x="{LEFT}" y="{y + 26}" font-size="11" fill="#7a8591">time, in forwards of one stage</text>',
    ]
