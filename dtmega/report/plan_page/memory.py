"""Draw the memory over a step as stacked areas. Pipeline ranks that do the same work share a panel."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import plotly.graph_objects as go  # pyright: ignore[reportMissingImports]  # an extra
from plotly.io.json import to_json_plotly  # pyright: ignore[reportMissingImports]  # an extra
from plotly.subplots import make_subplots  # pyright: ignore[reportMissingImports]  # an extra

from dtmega.pipelining.table import ACTION
from dtmega.planning.counting.ledger import Span
from dtmega.planning.counting.role import Role
from dtmega.report.colours import MEMORY_COLOURS
from dtmega.report.plan_page.owners import Places, by_class
from dtmega.report.plots import INK, style, written

PANEL, GAP, EDGE = 300, 104, 90  # pixels
NARROW_LEGEND = 160  # additional height of the legend in a narrow window, in pixels
MAX_TICKS = 36  # maximum number of actions that are named below a panel
FAR = 3  # the line of the memory limit is left out if the limit exceeds this multiple of the highest peak
HEADROOM = 1.06  # ratio of a panel's height to the highest value in the panel
UNITS = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"), (1, "B"))
LIMIT, HELD = "the device's memory, minus the reserve", "held when the action ends"


def figure(places: Sequence[Places], limit_bytes: int | None) -> str:
    """Draw the memory during each action of the step. The actions are in the order in which the host issues them.

    Args:
        places: groups of pipeline ranks that do the same work. Each group gets a panel.
        limit_bytes: memory of one device minus the reserve; None if it is not known.

    Returns:
        JSON of the plotly figure. The key "narrow" holds a second layout, for phones.
    """
    highest = max(each.role.peak.peak_bytes for each in places)
    is_near = limit_bytes is not None and limit_bytes <= FAR * highest
    limit = limit_bytes if is_near else None
    unit_bytes, unit = next((size, name) for size, name in UNITS if highest >= size or size == 1)
    inner = PANEL * len(places) + GAP * (len(places) - 1)
    picture = make_subplots(
        rows=len(places),
        cols=1,
        vertical_spacing=GAP / inner,
        subplot_titles=[written(f"{each.title}: {each.pieces}", most=200) for each in places],
    )
    style(picture, inner + 2 * EDGE)
    picture.update_layout(margin={"t": EDGE, "b": EDGE}, legend={"y": 1 + 26 / inner, "traceorder": "normal"})
    title_font = {"size": 13.5, "color": INK, "weight": 600}
    picture.update_annotations(x=0, xanchor="left", yshift=4, font=title_font)
    shown: set[str] = set()
    for row, each in enumerate(places, start=1):
        _add_panel(picture, each.role, row, unit_bytes, limit, shown)
    top = max(highest, limit or 0) * HEADROOM / unit_bytes
    picture.update_yaxes(range=[0, top], ticksuffix=f" {unit}", tickformat="~g")
    layout = picture.layout.to_plotly_json()
    # In a narrow window the legend has more rows.
    margin = layout["margin"] | {"t": EDGE + NARROW_LEGEND}
    narrow = layout | {"margin": margin, "height": layout["height"] + NARROW_LEGEND}
    return str(to_json_plotly(picture.to_dict() | {"narrow": narrow}))


def names_of_spans(spans: Sequence[Span]) -> list[str]:
    """A unique name for each span: its action, or "after ACTION" for the time between ACTION and the next action."""
    names: list[str] = []
    seen: Counter[str] = Counter()
    last_action = ""
    phases = Counter(span.action for span in spans)
    for span in spans:
        is_action = ACTION.fullmatch(span.action) is not None
        name = span.action
        if not is_action and last_action and phases[span.action] > 1:
            name = f"after {last_action}"
        last_action = span.action if is_action else last_action
        seen[name] += 1
        names.append(name if seen[name] == 1 else f"{name} ({seen[name]})")
    return names


def _add_panel(
    picture: go.Figure, role: Role, row: int, unit_bytes: int, limit_bytes: int | None, shown: set[str]
) -> None:
    """Draw the memory of one rank.

    Args:
        picture: plotly figure to draw in.
        role: plan of the rank.
        row: number of the panel, from 1.
        unit_bytes: number of bytes in one unit of the vertical axis.
        limit_bytes: height of the line that shows the device's memory; None for no line.
        shown: names that the legend already contains; the function adds the names that it draws.
    """
    spans = role.spans
    names = names_of_spans(spans)
    parts = [by_class(span.at_peak) for span in spans]
    for name, colour in MEMORY_COLOURS.items():
        values = [part.get(name, 0) / unit_bytes for part in parts]
        if not any(values):
            continue
        _add_line(picture, names, values, name, row, shown, stackgroup="memory", colour=colour)
    held = [span.held_bytes / unit_bytes for span in spans]
    _add_line(picture, names, held, HELD, row, shown, colour=INK, dash="dot")
    if limit_bytes is not None:
        limit = [limit_bytes / unit_bytes] * len(spans)
        _add_line(picture, names, limit, LIMIT, row, shown, colour="#c22f45", dash="dash")
    ticks = [name for name in names if not name.startswith("after ")]
    every = -(-len(ticks) // MAX_TICKS)
    picture.update_xaxes(
        type="category", tickvals=ticks[::every], range=[0, len(spans) - 1], showgrid=False, row=row, col=1
    )


def _add_line(
    picture: go.Figure,
    names: list[str],
    values: list[float],
    name: str,
    row: int,
    shown: set[str],
    *,
    colour: str,
    dash: str = "",
    stackgroup: str | None = None,
) -> None:
    """Add an area, or a line if `stackgroup` is None. The value is constant during each action.

    Args:
        picture: plotly figure to draw in.
        names: name of each action, for the horizontal axis.
        values: value of each action.
        name: name in the legend.
        row: number of the panel, from 1.
        shown: names that the legend already contains; the function adds `name`.
        colour: colour of the area or line.
        dash: plotly's name for the line's dash pattern; '' for none.
        stackgroup: name that stacked areas share; None for a line.
    """
    picture.add_scatter(
        x=names,
        y=values,
        name=name,
        legendgroup=name,
        showlegend=name not in shown,
        mode="lines",
        stackgroup=stackgroup,
        fillcolor=colour if stackgroup else None,
        line={"shape": "hvh", "width": 1.6 if dash else 0, "color": colour, **({"dash": dash} if dash else {})},
        hovertemplate="%{y:.4~g}%{yaxis.ticksuffix}",
        row=row,
        col=1,
    )
    shown.add(name)
