"""Draw a schedule as an SVG picture with one row per rank and one cell per action. Gaps in a row are bubbles."""

from __future__ import annotations

import itertools
import math
import statistics
from pathlib import Path
from typing import NamedTuple
from xml.sax.saxutils import escape

from dtmega import config
from dtmega.pipelining.table import Table, TimedAction, Timeline, make_table, microbatches_in, simulate, stages_in

# Sizes in pixels.
UNIT = 26  # width of one forward
ROW = 40  # height of a rank's row
GAP = 8  # space between rows
LEFT = 74  # width of the rows' labels
TOP = 76  # height of title and legend
LEGEND_TOP = 36  # height of the title alone
LEAST_WIDTH = 880  # minimum width of a picture; equals the width of the legend
PAGE_WIDTH = 1230  # minimum width of a picture with an axis in seconds; equals the width of a report's page
DIGIT = 8  # width of a digit of a microbatch's number
TICKS = 100  # minimum distance between two ticks, on an axis in seconds
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


class Clock(NamedTuple):
    """The time axis of a drawing.

    Attributes:
        end: end of the axis, in the timeline's unit.
        pixels: width of one unit of the timeline, in pixels.
        every: distance between two ticks, in the timeline's unit.
        factor: factor from the timeline's unit to the labels' unit, such as 1000 for a timeline in seconds with labels
            in milliseconds.
        unit: unit of the labels; '' if the unit is one forward of a stage.
    """

    end: float
    pixels: float
    every: float
    factor: int
    unit: str


def draw_schedule(cfg: config.Config, pp: int, data_size: int) -> None:
    """Draw the configured schedule for the full global batch. Write the picture to the file that [pipeline] draw names.

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


def svg(
    table: Table, title: str, timeline: Timeline | None = None, until_s: float = 0, *, fits_page: bool = False
) -> str:
    """Draw the table's timeline as an SVG element.

    The width of a cell shows how long its action takes. Each cell shows the number of the microbatch and, below that
    number, the stage. Darker cells belong to later stages of the rank.

    Args:
        table: complete table to draw.
        title: text above the picture; '' to leave out both the title and the space for a title.
        timeline: the table's timeline in seconds; None to simulate F = I = W = 1 and B = 2 without transfer times.
        until_s: minimum end of the time axis, in seconds, for work after the last action.
        fits_page: whether to draw a timeline in seconds as wide as a page, no matter how narrow the cells become; if
            False, the median action is drawn at least UNIT pixels wide.
    """
    if timeline is None:
        timeline = simulate(table)
        clock = _in_forwards(timeline)
    else:
        clock = _in_seconds(timeline, until_s, fits_page=fits_page)
    stages_of_ranks = stages_in(table)
    width = max(math.ceil(LEFT + clock.end * clock.pixels + 20), LEAST_WIDTH)
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
        row_width = _number(clock.end * clock.pixels)
        svg_lines += [
            f'<text x="{LEFT - 12}" y="{y + 25}" font-size="13" text-anchor="end" fill="#1d2733">rank {rank}</text>',
            f'<rect class="row" x="{LEFT}" y="{y}" width="{row_width}" height="{ROW}" fill="#eef0f2"/>',
            *(_cell(step, y, depth[step.action.stage], clock) for step in row),
        ]
    return "\n".join([*svg_lines, *_axis(clock, bottom), "</svg>"])


def _in_forwards(timeline: Timeline) -> Clock:
    """The axis of a timeline in units of one forward, with at most about twelve ticks at round numbers."""
    end = round(_last_end(timeline))
    every = next(step for step in (5, 10, 20, 50, 100, 200, 500, 1000, end) if end <= 12 * step or step == end)
    return Clock(end, UNIT, every, 1, "")


def _in_seconds(timeline: Timeline, until_s: float, *, fits_page: bool) -> Clock:
    """The axis of a timeline in seconds. `svg` describes the arguments."""
    end_s = max(_last_end(timeline), until_s)
    durations_s = []
    for step in itertools.chain.from_iterable(timeline.rows):
        durations_s.append(step.end - step.start)
    pixels = (PAGE_WIDTH - LEFT - 20) / end_s
    if not fits_page:
        pixels = max(pixels, UNIT / statistics.median(durations_s))
    power = 10.0 ** math.floor(math.log10(TICKS / pixels))
    every_s = next(step * power for step in (1, 2, 5, 10) if step * power * pixels >= TICKS)
    return Clock(end_s, pixels, every_s, *((1, "s") if every_s >= 1 else (1000, "ms")))


def _last_end(timeline: Timeline) -> float:
    """The time at which the last action ends."""
    return max(row[-1].end for row in timeline.rows)


def _number(pixels: float) -> str:
    """Format a coordinate with at most two decimals."""
    return f"{pixels:.2f}".rstrip("0").rstrip(".")


def _cell(step: TimedAction, y: int, depth: float, clock: Clock) -> str:
    """The SVG of one action's cell: a rectangle with its top at `y`, labelled with the microbatch and the stage.

    A cell that is too narrow for the numbers has no label. With an axis in seconds, the cell has a tooltip with the
    times of the action.
    """
    x, width = LEFT + step.start * clock.pixels, (step.end - step.start) * clock.pixels
    stage, kind, microbatch = step.action
    fill, ink = _colours(kind, depth)
    cell = (
        f'<g class="{kind}"><rect x="{_number(x + 0.5)}" y="{y + 0.5}" width="{_number(max(width - 1, 0.5))}" '
        f'height="{ROW - 1}" rx="3" fill="{fill}"/>'
    )
    if width > DIGIT * max(len(str(microbatch)), 2):
        middle = _number(x + width / 2)
        cell += (
            f'<text x="{middle}" y="{y + 19}" font-size="14" text-anchor="middle" fill="{ink}">{microbatch}</text>'
            f'<text x="{middle}" y="{y + 34}" font-size="9" text-anchor="middle" fill="{ink}" fill-opacity="0.75">'
            f"s{stage}</text>"
        )
    if clock.unit:
        start, end = step.start * clock.factor, step.end * clock.factor
        cell += f"<title>{step.action}: {start:.4g} to {end:.4g} {clock.unit}</title>"
    return f"{cell}</g>"


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


def _axis(clock: Clock, y: int) -> list[str]:
    """The time axis below the rows."""
    ticks = []
    for number in range(math.floor(clock.end / clock.every) + 1):
        x = _number(LEFT + number * clock.every * clock.pixels)
        label = f"{number * clock.every * clock.factor:g}"
        ticks.append(f'<text x="{x}" y="{y + 10}" font-size="11" text-anchor="middle" fill="#7a8591">{label}</text>')
    unit = f"in {clock.unit}" if clock.unit else "in forwards of one stage"
    return [*ticks, f'<text x="{LEFT}" y="{y + 26}" font-size="11" fill="#7a8591">time, {unit}</text>']
