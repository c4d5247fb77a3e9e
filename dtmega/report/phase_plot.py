"""The panel of the phases of a step, with its own legend: the share of each in the step time, stacked on each other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import plotly.graph_objects as go  # pyright: ignore[reportMissingImports]  # an extra

from dtmega.report import curves
from dtmega.report.colours import phase_colour
from dtmega.report.record import Series

LEGEND = "legend2"  # plotly's name of the second legend of a figure


def add(figure: go.Figure, series: Mapping[str, Series], row: int, column: int) -> None:
    """Add the phases of a run to their panel.

    Args:
        figure: the figure.
        series: series of the run.
        row, column: place of the panel, counted from 1.
    """
    steps, shares = curves.phase_shares(series)
    for place, (phase, of_steps) in enumerate(shares.items()):
        figure.add_scatter(
            x=steps,
            y=of_steps,
            name=phase,
            legend=LEGEND,
            # One step makes no area, so it is drawn as markers.
            mode="lines" if len(steps) > 1 else "markers",
            stackgroup="phases",
            line={"width": 0, "color": phase_colour(phase, place)},
            fillcolor=phase_colour(phase, place),
            hovertemplate="%{y:.1%}",
            row=row,
            col=column,
        )


def add_legend(figure: go.Figure, row: int, column: int) -> None:
    """Put the legend of the phases into the middle of their panel. As a rule one large phase fills that place."""
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
