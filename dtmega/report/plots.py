"""The figures of the page, drawn by plotly: the curves and events over the steps, and the distribution of step times.

plotly interprets some HTML tags in its labels, so `written` escapes every name from a file or a user.
"""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np
import plotly.graph_objects as go  # pyright: ignore[reportMissingImports]  # an extra
from plotly.io.json import to_json_plotly  # pyright: ignore[reportMissingImports]  # an extra
from plotly.subplots import make_subplots  # pyright: ignore[reportMissingImports]  # an extra

from dtmega.report import curves, phase_plot
from dtmega.report.colours import colour, darker, faint
from dtmega.report.curves import BYTES, COUNT, LOSS, PERCENT, PHASES, Panel
from dtmega.report.record import Event, Series, is_validation, validation_name
from dtmega.report.run import Run

INK, FAINT, GRID = "#1d2733", "#5b6673", "#e6eaee"
FONT = "system-ui, -apple-system, 'Segoe UI', Helvetica, Arial, sans-serif"
COLUMN_GAP = 0.085  # space between the two columns, as a fraction of the whole width
LOSS_HEIGHT, LANE_HEIGHT, ROW_HEIGHT, GAP, EDGE = 330, 26, 200, 58, 60  # pixels
SYMBOLS = {
    "restart": "diamond",
    "skipped": "x",
    "failed checkpoint": "triangle-down",
    "checkpoint": "triangle-up",
    "evaluation": "circle",
    "score": "star",
    "end": "square-x",
}
PLAIN = "~g"  # number format of d3: 0.05, 0.5, 5000, 1e-7
FEW_STEPS = 8  # below this number of steps, every step gets a tick; plotly's own ticks would lie between steps
NARROW_CHARACTERS = 29  # maximum length of a panel title in a window 390 pixels wide, next to the longest lane name
LANES = {"skipped": "skipped steps"}  # kind of event -> lane name, for kinds whose plural does not simply end in "s"


def over_steps(runs: Sequence[Run]) -> str:
    """Draw a figure with panels for the loss, the events and the remaining metrics. All panels share one step axis.

    Returns:
        JSON of the plotly figure. The key "narrow" holds a second layout, for phones, with all panels in one column.
    """
    panels = curves.panels(chain.from_iterable(run.record.series for run in runs), alone=len(runs) == 1)
    recorded_kinds = set()
    for run in runs:
        recorded_kinds.update(event.kind for event in run.events)
    kinds = [kind for kind in SYMBOLS if kind in recorded_kinds]
    figure = _empty(runs, panels, kinds, columns=2)
    for number, run in enumerate(runs):
        _add_losses(figure, run, number, alone=len(runs) == 1)
        _add_events(figure, run, number, len(runs), kinds)
        for place, panel in enumerate(panels):
            row, column = 3 + place // 2, 1 + place % 2
            if panel is PHASES:
                phase_plot.add(figure, run.record.series, row, column)
            else:
                _add_curve(figure, run, number, panel, row=row, column=column)
    # plotly numbers panels row by row. A panel's axes therefore have the same names in both layouts, and each trace
    # fits both layouts.
    narrow = _empty(runs, panels, kinds, columns=1).layout.to_plotly_json()
    return str(to_json_plotly(figure.to_dict() | {"narrow": narrow}))


def _empty(runs: Sequence[Run], panels: Sequence[Panel], kinds: Sequence[str], columns: int) -> go.Figure:
    """Make a figure that has titles, axes and restart lines, but no curves yet.

    Args:
        runs: runs to draw.
        panels: panels below the loss and the events.
        kinds: kinds of events. Each kind has a lane.
        columns: number of columns for `panels`. The loss and the events span all columns.
    """
    rows = -(-len(panels) // columns)
    heights = [LOSS_HEIGHT, LANE_HEIGHT * max(len(kinds), 1) + 8, *[ROW_HEIGHT] * rows]
    inner = sum(heights) + GAP * (len(heights) - 1)
    whole_width = [{"colspan": columns}, *[None] * (columns - 1)]
    cells: list[list[dict[str, int] | None]] = []
    for _ in range(rows):
        cells.append([{} for _ in range(columns)])
    if len(panels) < rows * columns:
        cells[-1][-1] = None
    loss_title = LOSS.title if columns > 1 else LOSS.title.partition(":")[0]
    max_characters = curves.MAX_CHARACTERS if columns > 1 else NARROW_CHARACTERS
    figure = make_subplots(
        rows=len(heights),
        cols=columns,
        specs=[whole_width, whole_width, *cells],
        row_heights=heights,
        vertical_spacing=GAP / inner,
        horizontal_spacing=COLUMN_GAP if columns > 1 else 0,
        subplot_titles=[loss_title, "Events", *(written(panel.title, max_characters) for panel in panels)],
    )
    style(figure, inner + 2 * EDGE)
    click = "toggleitem" if len(runs) == 1 else "togglegroup"
    # Put the legend above the title of the loss panel.
    figure.update_layout(legend={"y": 1 + 26 / inner, "groupclick": click})
    _place_titles(figure, columns)
    figure.update_yaxes(row=1, col=1, tickformat=PLAIN)
    for place, panel in enumerate(panels):
        _style_axis(figure, runs, panel, row=3 + place // columns, column=1 + place % columns)
    figure.update_yaxes(
        row=2,
        col=1,
        tickvals=[*range(len(kinds))],
        ticktext=[LANES.get(kind, f"{kind}s") for kind in kinds],
        range=[-0.6, max(len(kinds), 1) - 0.4],
        showgrid=False,
        fixedrange=True,
    )
    # Match all step axes to the first step axis, so that all panels zoom together. The first axis itself must not match
    # any axis.
    figure.update_xaxes(matches="x", title={"standoff": 6})
    figure.update_layout(xaxis={"matches": None})
    last_step = max(run.record.last_step for run in runs)
    if last_step < FEW_STEPS:
        figure.update_xaxes(dtick=1)
    figure.update_xaxes(title_text="step", row=2 + rows)
    for number, run in enumerate(runs):
        _add_restarts(figure, run, number)
    return figure


def _place_titles(figure: go.Figure, columns: int) -> None:
    """Move the title of each panel from the centre, where plotly puts it, to the left edge of the panel.

    Titles 0 and 1 belong to the loss and the events, which span all columns. The other titles are ordered row by row.
    """
    titles: Any = figure.select_annotations()
    for place, title in enumerate(titles):
        in_second_column = columns > 1 and place >= 2 and place % 2 == 1
        x = (1 + COLUMN_GAP) / 2 if in_second_column else 0
        title.update(x=x, xanchor="left", yshift=4, font={"size": 13.5, "color": INK, "weight": 600})


def _add_losses(figure: go.Figure, run: Run, number: int, *, alone: bool) -> None:
    """Add the training, validation and test losses of a run to the first panel.

    Args:
        figure: plotly figure to draw in.
        run: run to draw.
        number: index of the run on the page; determines the colour.
        alone: whether the page has only this run. With a single run, the legend has one entry per curve; with
            several runs, it has one entry per run.
    """
    _add_curve(figure, run, number, LOSS, row=1, column=1, legend="training" if alone else written(run.name))
    validations = sorted(key for key in run.record.series if is_validation(key))
    for place, key in enumerate(validations):
        series = curves.thinned(run.record.series[key])
        few = series.steps.size <= curves.CIRCLES
        label = validation_name(key)
        figure.add_scatter(
            x=_packable(series.steps),
            y=series.values,
            name=written(label if alone else f"{run.name}, {label}"),
            # The legend stacks the entries of one group. With a single run, each curve has its own group, so that the
            # entries appear side by side.
            legendgroup=key if alone else str(number),
            showlegend=alone,
            mode="lines+markers" if few else "lines",
            line={"color": darker(colour(number)), "width": 1.4, "dash": "dot" if few else "solid"},
            marker={
                "symbol": ("circle", "square", "diamond", "cross")[place % 4],
                "size": 8,
                "color": "#ffffff",
                "line": {"color": darker(colour(number)), "width": 1.8},
            },
            hovertemplate="%{y:.6g}",
            row=1,
            col=1,
        )
    if "test_loss" in run.record.series:
        _add_test_loss(figure, run, number, alone=alone)


def _add_test_loss(figure: go.Figure, run: Run, number: int, *, alone: bool) -> None:
    """Add the test loss of a run to the first panel, as a star. The arguments are the same as in `_add_losses`."""
    series = curves.thinned(run.record.series["test_loss"])
    figure.add_scatter(
        x=_packable(series.steps),
        y=series.values,
        name=written("test" if alone else f"{run.name}, test"),
        legendgroup="test_loss" if alone else str(number),
        showlegend=alone,
        mode="markers",
        line={"color": darker(colour(number)), "width": 1.4, "dash": "dot"},
        marker={
            "symbol": "star",
            "size": 12,
            "color": darker(colour(number)),
            "line": {"color": darker(colour(number)), "width": 1.8},
        },
        hovertemplate="%{y:.6g}",
        row=1,
        col=1,
    )


def _add_curve(
    figure: go.Figure, run: Run, number: int, panel: Panel, *, row: int, column: int, legend: str = ""
) -> None:
    """Add the curve of one metric to its panel: the thinned individual steps and, if `panel.mean`, their running mean.

    Args:
        figure: plotly figure to draw in.
        run: run to draw.
        number: index of the run on the page; determines the colour.
        panel: panel of the metric.
        row, column: position of the panel in the figure, counted from 1.
        legend: name of the curve in the legend; '' for no entry.
    """
    series = run.record.series.get(panel.key)
    if series is None:
        return
    shown = curves.thinned(series, curves.marked_steps(run))
    mean, window = Series(series.steps[:0], series.values[:0]), 0
    if panel.mean:
        mean, window = curves.running_mean(series)
    has_mean = mean.steps.size > 0
    # A single step has no line, so it is drawn as a marker.
    one_step = series.steps.size < 2
    common = {"legendgroup": str(number), "row": row, "col": column}
    figure.add_scatter(
        x=_packable(shown.steps),
        y=shown.values,
        name=legend or written(run.name),
        mode="markers" if one_step else "lines",
        line={"color": faint(colour(number)) if has_mean else colour(number), "width": 1.1 if has_mean else 1.7},
        showlegend=bool(legend) and not has_mean,
        hovertemplate="%{y:.6g}",
        **common,
    )
    if has_mean:
        figure.add_scatter(
            x=_packable(mean.steps),
            y=mean.values,
            name=legend or written(run.name),
            mode="lines",
            line={"color": colour(number), "width": 2.2},
            showlegend=bool(legend),
            hovertemplate=f"%{{y:.6g}} (mean of {window} steps)",
            **common,
        )


def _add_events(figure: go.Figure, run: Run, number: int, n_runs: int, kinds: Sequence[str]) -> None:
    """Add a run's events to the second panel. Each kind of event has a lane, and each run has a row in every lane."""
    offset = (number - (n_runs - 1) / 2) * 0.6 / max(n_runs, 2)
    for place, kind in enumerate(kinds):
        events = curves.few([event for event in run.events if event.kind == kind])
        figure.add_scatter(
            x=_packable(np.array([event.step for event in events], np.int64)),
            y=np.full(len(events), place - offset),
            customdata=[_lines(event) for event in events],
            name=written(run.name),
            legendgroup=str(number),
            showlegend=False,
            mode="markers",
            marker={"symbol": SYMBOLS[kind], "size": 9, "color": colour(number), "opacity": 0.85},
            hovertemplate=f"{kind} %{{customdata}}",
            row=2,
            col=1,
        )


def _add_restarts(figure: go.Figure, run: Run, number: int) -> None:
    """Draw a dashed vertical line through all panels at each restart, halfway between two steps."""
    for step in curves.restarted_after(run):
        figure.add_vline(
            x=step + 0.5,
            line={"color": colour(number), "width": 1.2, "dash": "dash"},
            opacity=0.7,
            row="all",
            col="all",
            exclude_empty_subplots=False,
        )


def has_tail(run: Run) -> bool:
    """True if at least two steps of this run have a step time, so that their distribution can be drawn."""
    return "step_time_s" in run.record.series and run.record.series["step_time_s"].steps.size > 1


def tail(runs: Sequence[Run]) -> str:
    """Draw the distribution of step times: for each time, the share of the steps that took at least as long.

    Returns:
        JSON of the plotly figure.
    """
    figure = go.Figure()
    timed = [(number, run) for number, run in enumerate(runs) if has_tail(run)]
    for number, run in timed:
        series = run.record.series["step_time_s"]
        slow = curves.tail(series)
        figure.add_scatter(
            x=slow.values,
            y=slow.steps / series.steps.size,
            name=written(run.name),
            mode="lines",
            line={"color": colour(number), "width": 2.2, "shape": "vh"},
            hovertemplate="%{y:.3~%} of the steps take %{x:.4~s}s or longer",
            showlegend=len(runs) > 1,
        )
    style(figure, 300)
    figure.update_layout(hovermode="closest", margin={"t": 30, "b": 48})
    dtick = _log_ticks([run.record.series["step_time_s"].values for _, run in timed], most_decades=1.5)
    figure.update_xaxes(type="log", title_text="step time (s)", dtick=dtick, nticks=8, tickformat=PLAIN)
    figure.update_yaxes(type="log", title_text="share of steps at least as slow", tickformat="~%", dtick=1)
    return str(figure.to_json())


def style(figure: go.Figure, height: int) -> None:
    """Set a figure's colours, fonts, margins, legend and height (in pixels)."""
    axis = {
        "gridcolor": GRID,
        "linecolor": "#c3cbd3",
        "showline": True,
        "ticks": "outside",
        "tickcolor": "#c3cbd3",
        "ticklen": 4,
        "zeroline": False,
        "tickfont": {"size": 11, "color": FAINT},
        "title": {"font": {"size": 12, "color": FAINT}},
        "automargin": True,
    }
    figure.update_layout(
        template="none",
        height=height,
        font={"family": FONT, "size": 12, "color": INK},
        margin={"l": 62, "r": 18, "t": EDGE, "b": EDGE},
        paper_bgcolor="#ffffff",
        plot_bgcolor="#ffffff",
        hovermode="x unified",
        hoverlabel={"bgcolor": "#ffffff", "bordercolor": "#c3cbd3", "font": {"size": 12, "color": INK}},
        legend={
            "orientation": "h",
            "x": 0,
            "xanchor": "left",
            "y": 1,
            "yanchor": "bottom",
        },
        dragmode="zoom",
    )
    figure.update_xaxes(**axis)
    figure.update_yaxes(**axis)


def _style_axis(figure: go.Figure, runs: Sequence[Run], panel: Panel, *, row: int, column: int) -> None:
    """Set the scale and the ticks of a panel's vertical axis."""
    axis = {"type": "log" if panel.log else "linear", "rangemode": "tozero"}
    figure.update_yaxes(axis | _ticks(panel.unit), row=row, col=column)
    if panel is PHASES:
        figure.update_yaxes(range=[0, 1], row=row, col=column)
        phase_plot.add_legend(figure, row, column)
    if panel.log:
        values = [run.record.series[panel.key].values for run in runs if panel.key in run.record.series]
        figure.update_yaxes(dtick=_log_ticks(values, most_decades=3), row=row, col=column)


def _ticks(unit: str) -> dict[str, Any]:
    """plotly's options for tick labels in a unit: 12.5% (PERCENT), 400MB (BYTES), 12k (COUNT), 0.05 or 5000 ('')."""
    if unit == PERCENT:
        return {"tickformat": "~%"}
    if unit in (COUNT, BYTES):
        # Give SI prefixes only to large numbers. Otherwise plotly would write 0.5 as 500m.
        small = {"dtickrange": [None, 0.999], "value": PLAIN}
        return {"tickformat": "~s", "tickformatstops": [small], "ticksuffix": unit if unit == BYTES else ""}
    return {"tickformat": PLAIN}


def _log_ticks(values: Sequence[np.ndarray], most_decades: float) -> int | str | None:
    """plotly's `dtick` for a logarithmic axis.

    Args:
        values: values of each curve on the axis.
        most_decades: maximum number of decades at which three ticks per decade still fit on the axis.

    Returns:
        The tick distance in decades if the values span more than `most_decades`; "D2" (ticks at 1, 2 and 5 in each
        decade) if the values span more than 0.6 decades; otherwise None, so that plotly chooses.
    """
    positive = np.concatenate([each[each > 0] for each in values])
    decades = float(np.log10(positive.max()) - np.log10(positive.min())) if positive.size else 0.0
    if decades > most_decades:
        return math.ceil(decades / 5)
    return "D2" if decades > 0.6 else None


def written(text: str, most: int = curves.MAX_CHARACTERS) -> str:
    """Escape a name from a file or a user, because plotly interprets <b>, <a href> and entities in labels."""
    return html.escape(curves.plain(text, most), quote=False)


def _lines(event: Event) -> str:
    """The escaped text of an event's hover box, with a line break after every 90 characters."""
    text = curves.plain(event.text, most=400)
    rows = (text[i : i + 90] for i in range(0, len(text), 90))
    return f"after step {event.step}: " + "<br>".join(html.escape(row, quote=False) for row in rows)


def _packable(steps: np.ndarray) -> np.ndarray:
    """Convert int64 step numbers to a dtype that plotly can write in binary: int32, or float64 for large numbers."""
    return steps.astype(np.int32 if not steps.size or steps[-1] < 2**31 else np.float64)
