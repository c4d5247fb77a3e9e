"""Draw the phases panel: the share of each phase in the step time, as stacked areas with a separate legend."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import plotly.graph_objects as go  # pyright: ignore[reportMissingImports]  # an extra

from dtmega.report import curves
from dtmega.report.colours import phase_colour
from dtmega.report.record import Series

LEGEND = "legend2"  # plotly's name for the second legend of a figure


def add(figure: go.Figure, series: Mapping[str, Series], row: int, column: int) -> None:
    """Draw the phases of a run in the phases panel.

    Args:
        figure: plotly figure to draw in.
        series: key in the record -> series of the run.
        row, column: position of the panel in the figure, counted from 1.
    """
    steps, shares = curves.phase_shares(series)
    for place, (phase, of_steps) in enumerate(shares.items()):
        figure.add_scatter(
            x=steps,
            y=of_steps,
            name=phase,
            legend=LEGEND,
            # A single step has no area, so its shares are drawn as markers.
            mode="lines" if len(steps) > 1 else "markers",
            stackgroup="phases",
            line={"width": 0, "color": phase_colour(phase, place)},
            fillcolor=phase_colour(phase, place),
            hovertemplate="%{y:.1%}",
            row=row,
            col=column,
        )


def add_legend(figure: go.Figure, row: int, column: int) -> None:
    """Place the legend in the middle of the phases panel, because one large phase usually fills the middle."""
    panel: Any = figure.get_subplot(row, column)
    bottom, top = panel.yaxis.domain
    figure.update_layout(
        {
            LEGEND: {
                "orientation": "h",
                "x": panel.xaxis.domain[0],
                "xanchor": "left",
                "y": (bottom + top) / 2,
                "yanchor": "middle",
                "traceorder": "normal",
                "bgcolor": "rgba(255,255,255,0.8)",
                "font": {"size": 10},
            }
        }
    )
