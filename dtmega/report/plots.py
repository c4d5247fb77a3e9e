"""The figures of the page, as plotly draws them: curves over the steps, what happened below them, and the slow tail.

What a person or a file has named goes through `written`: plotly takes some of HTML for markup.
"""

from __future__ import annotations

import html
from collections.abc import Sequence

import numpy as np
import plotly.graph_objects as go  # pyright: ignore[reportMissingImports]  # an extra
from plotly.subplots import make_subplots  # pyright: ignore[reportMissingImports]  # an extra

from dtmega.report import curves
from dtmega.report.colours import colour, darker, faint
from dtmega.report.curves import LOSS, Panel
from dtmega.report.record import Event, Series
from dtmega.report.run import Run

INK, FAINT, GRID = "#1d2733", "#5b6673", "#e6eaee"
FONT = "system-ui, -apple-system, 'Segoe UI', Helvetica, Arial, sans-serif"
BETWEEN = 0.085  # the two columns, of the whole width
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
LANES = {"skipped": "skipped steps"}  # of events whose plural has no s alone


def over_steps(runs: Sequence[Run]) -> go.Figure:
    """Loss, events, and each other number in a panel of its own; all share the axis of steps."""
    panels = curves.panels(key for run in runs for key in run.record.series)
    kinds = [kind for kind in SYMBOLS if any(event.kind == kind for run in runs for event in run.events)]
    rows = -(-len(panels) // 2)
    heights = [LOSS_HEIGHT, LANE_HEIGHT * max(len(kinds), 1) + 8, *[ROW_HEIGHT] * rows]
    inner = sum(heights) + GAP * (len(heights) - 1)
    titles = [LOSS.title, "Events", *(written(panel.title) for panel in panels)]
    last_row = [{}, {} if len(panels) % 2 == 0 else None]
    figure = make_subplots(
        rows=len(heights),
        cols=2,
        specs=[[{"colspan": 2}, None]] * 2 + ([*[[{}, {}]] * (rows - 1), last_row] if rows else []),
        row_heights=heights,
        vertical_spacing=GAP / inner,
        horizontal_spacing=BETWEEN,
        subplot_titles=titles,
    )
    for number, run in enumerate(runs):
        _add_losses(figure, run, number, alone=len(runs) == 1)
        _add_events(figure, run, number, len(runs), kinds)
        for place, panel in enumerate(panels):
            _add_curve(figure, run, number, panel, row=3 + place // 2, column=1 + place % 2)
        _add_restarts(figure, run, number)
    _style(figure, inner + 2 * EDGE)
    click = "toggleitem" if len(runs) == 1 else "togglegroup"
    figure.update_layout(legend={"y": 1 + 26 / inner, "groupclick": click})  # above the title of the loss
    for place, title in enumerate(figure.select_annotations()):
        in_second_column = place >= 2 and place % 2 == 1
        x = (1 + BETWEEN) / 2 if in_second_column else 0
        title.update(x=x, xanchor="left", yshift=4, font={"size": 13.5, "color": INK, "weight": 600})
    for place, panel in enumerate(panels):
        _style_axis(figure, panel, row=3 + place // 2, column=1 + place % 2)
    figure.update_yaxes(
        row=2,
        col=1,
        tickvals=[*range(len(kinds))],
        ticktext=[LANES.get(kind, f"{kind}s") for kind in kinds],
        range=[-0.6, max(len(kinds), 1) - 0.4],
        showgrid=False,
        fixedrange=True,
    )
    figure.update_xaxes(matches="x", title={"standoff": 6})
    figure.update_layout(xaxis={"matches": None})  # the one that the others match
    figure.update_xaxes(title_text="step", row=2 + rows)
    return figure


def _add_losses(figure: go.Figure, run: Run, number: int, *, alone: bool) -> None:
    _add_curve(figure, run, number, LOSS, row=1, column=1, legend="training" if alone else written(run.name))
    validations = [key for key in run.record.series if curves.is_validation(key)]
    for place, key in enumerate([*sorted(validations), "test_loss"]):
        if key not in run.record.series:
            continue
        series = curves.thinned(run.record.series[key])
        mode = "lines+markers" if series.steps.size <= curves.CIRCLES else "lines"
        mode = "markers" if key == "test_loss" else mode
        symbol = "star" if key == "test_loss" else ("circle", "square", "diamond", "cross")[place % 4]
        label = key.removesuffix("_loss").replace("val_", "validation ").replace("val", "validation")
        name = written(label if alone else f"{run.name}, {label}")
        figure.add_scatter(
            x=_whole(series.steps),
            y=series.values,
            name=name,
            legendgroup=key if alone else str(number),  # those of one group stand below each other
            showlegend=alone,
            mode=mode,
            line={"color": darker(colour(number)), "width": 1.4, "dash": "dot" if "markers" in mode else "solid"},
            marker={
                "symbol": symbol,
                "size": 12 if key == "test_loss" else 8,
                "color": "#ffffff" if key != "test_loss" else darker(colour(number)),
                "line": {"color": darker(colour(number)), "width": 1.8},
            },
            hovertemplate="%{y:.6g}",
            row=1,
            col=1,
        )


def _add_curve(
    figure: go.Figure, run: Run, number: int, panel: Panel, *, row: int, column: int, legend: str = ""
) -> None:
    """Each step, thinned, and over it the running mean if the panel has one."""
    series = run.record.series.get(panel.key)
    if series is None:
        return
    shown = curves.thinned(series, curves.marked_steps(run))
    mean, window = curves.running_mean(series) if panel.mean else (Series(series.steps[:0], series.values[:0]), 0)
    has_mean = mean.steps.size > 0
    few = series.steps.size < 2
    common = {"legendgroup": str(number), "row": row, "col": column}
    figure.add_scatter(
        x=_whole(shown.steps),
        y=shown.values,
        name=legend or written(run.name),
        mode="markers" if few else "lines",
        line={"color": faint(colour(number)) if has_mean else colour(number), "width": 1.1 if has_mean else 1.7},
        showlegend=bool(legend) and not has_mean,
        hovertemplate="%{y:.6g}",
        **common,
    )
    if has_mean:
        figure.add_scatter(
            x=_whole(mean.steps),
            y=mean.values,
            name=legend or written(run.name),
            mode="lines",
            line={"color": colour(number), "width": 2.2},
            showlegend=bool(legend),
            hovertemplate=f"%{{y:.6g}} (mean of {window} steps)",
            **common,
        )


def _add_events(figure: go.Figure, run: Run, number: int, runs: int, kinds: Sequence[str]) -> None:
    offset = (number - (runs - 1) / 2) * 0.6 / max(runs, 2)
    for place, kind in enumerate(kinds):
        events = curves.few([event for event in run.events if event.kind == kind])
        figure.add_scatter(
            x=_whole(np.array([event.step for event in events], np.int64)),
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
    for step in curves.restarted_after(run):
        figure.add_vline(
            x=step + 0.5,
            line={"color": colour(number), "width": 1.2, "dash": "dash"},
            opacity=0.7,
            row="all",
            col="all",
        )


def tail(runs: Sequence[Run]) -> go.Figure:
    """Which share of the steps takes at least how long."""
    figure = go.Figure()
    for number, run in enumerate(runs):
        series = run.record.series.get("step_time_s")
        if series is None:
            continue
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
    _style(figure, 300)
    figure.update_layout(hovermode="closest", margin={"t": 30, "b": 48})
    figure.update_xaxes(type="log", title_text="step time", tickformat="~s", ticksuffix="s", dtick="D2")
    figure.update_yaxes(type="log", title_text="share of steps at least as slow", tickformat="~%", dtick=1)
    return figure


def _style(figure: go.Figure, height: int) -> None:
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


def _style_axis(figure: go.Figure, panel: Panel, *, row: int, column: int) -> None:
    tickformat, suffix = panel.tick
    figure.update_yaxes(
        tickformat=tickformat,
        ticksuffix=suffix,
        type="log" if panel.log else "linear",
        rangemode="tozero",
        row=row,
        col=column,
    )
    if panel.log:
        figure.update_yaxes(dtick="D2", row=row, col=column)  # 1, 2, 5: others would stand on each other


def written(text: str) -> str:
    """Other people's text as plotly shows it letter by letter: it takes <b>, <a href> and entities for markup."""
    return html.escape(curves.plain(text), quote=False)


def _lines(event: Event) -> str:
    text = curves.plain(event.text, most=400)
    rows = (text[i : i + 90] for i in range(0, len(text), 90))
    return f"after step {event.step}: " + "<br>".join(html.escape(row, quote=False) for row in rows)


def _whole(steps: np.ndarray) -> np.ndarray:
    """Steps in the smallest type that plotly packs; of 64 bits it packs floats only."""
    return steps.astype(np.int32 if not steps.size or steps[-1] < 2**31 else np.float64)
