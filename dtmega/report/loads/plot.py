"""Draw the loads as a heat map with plotly. Each layer has a panel, and the panel has a row for each expert."""

from __future__ import annotations

import numpy as np
import plotly.graph_objects as go  # pyright: ignore[reportMissingImports]  # an extra
from plotly.io.json import to_json_plotly  # pyright: ignore[reportMissingImports]  # an extra
from plotly.subplots import make_subplots  # pyright: ignore[reportMissingImports]  # an extra

from dtmega.report.loads.columns import LoadColumns
from dtmega.report.plots import INK, style

MAX_PANELS = 64  # maximum number of layers that are drawn
MAX_CELLS = 400_000  # maximum number of cells in all maps of a page; columns are joined to meet this limit
MIN_COLUMNS = 25  # minimum number of columns that remain when columns are joined
WIDE, NARROW = 4, 2  # maximum number of panels side by side, in a wide window and in a narrow window
EXPERT_HEIGHT, MIN_HEIGHT, MAX_HEIGHT = 12, 60, 128  # pixels: height of an expert's row, limits of a panel's height
GAP, TOP, EDGE = 46, 84, 40  # pixels above each panel, above all panels, and below all panels
SIDE_GAP, NARROW_SIDE_GAP = 0.045, 0.12  # space between two panels, as a fraction of the whole width
HIGHEST = 3.0  # multiple of the mean above which the colour no longer changes
LOWEST = -0.15  # lower end of the colour bar; negative, so that the bar shows the colour of a load of 0
# Multiple of the mean -> colour. A load equal to the mean has the page's colour, and a load of 0 has the text's colour.
COLOURS = ((LOWEST, INK), (0.001, INK), (0.001, "#2266cc"), (1.0, "#ffffff"), (HIGHEST, "#c22f45"))


def drawn_layers(found: LoadColumns) -> list[int]:
    """The numbers of the layers to draw: all layers, or MAX_PANELS evenly spaced layers if there are more."""
    layers = [*found.loads]
    if len(layers) <= MAX_PANELS:
        return layers
    return [layers[i] for i in np.linspace(0, len(layers) - 1, MAX_PANELS).astype(int)]


def heat_map(found: LoadColumns, max_cells: int = MAX_CELLS) -> str:
    """Draw the loads of a run's experts.

    Args:
        found: loads of the experts.
        max_cells: maximum number of cells. To meet this limit, columns are joined, but at least MIN_COLUMNS remain.

    Returns:
        JSON of the plotly figure. The key "narrow" holds a second layout, for phones.
    """
    layers = drawn_layers(found)
    n_experts = sum(len(found.loads[layer]) for layer in layers)
    n_joined = 1
    while n_experts * found.n_columns > max_cells * n_joined and found.n_columns >= 2 * n_joined * MIN_COLUMNS:
        n_joined *= 2
    found = found.joined(n_joined)
    figure = _empty(found, layers, WIDE, SIDE_GAP)
    columns = min(WIDE, len(layers))
    for place, layer in enumerate(layers):
        multiples = found.multiples(layer)
        figure.add_heatmap(
            z=multiples.astype(np.float32),
            # x has one more element than there are columns, so plotly treats the elements as column edges.
            x=found.edges.astype(np.float64) + 0.5,
            y=np.arange(len(multiples), dtype=np.int32),
            coloraxis="coloraxis",
            hovertemplate="layer " + str(layer) + ", expert %{y}, step %{x:.0f}: %{z:.3~f} × the mean<extra></extra>",
            row=1 + place // columns,
            col=1 + place % columns,
        )
    # plotly numbers panels row by row in both layouts, so each trace fits both layouts.
    narrow = _empty(found, layers, NARROW, NARROW_SIDE_GAP).layout.to_plotly_json()
    return str(to_json_plotly(figure.to_dict() | {"narrow": narrow}))


def _empty(found: LoadColumns, layers: list[int], columns: int, side_gap: float) -> go.Figure:
    """Make a figure that has titles, axes and the colour bar, but no maps yet.

    Args:
        found: loads of the experts.
        layers: numbers of the layers to draw.
        columns: maximum number of panels side by side.
        side_gap: space between two panels, as a fraction of the whole width.
    """
    columns = min(columns, len(layers))
    rows = -(-len(layers) // columns)
    most_experts = max(len(found.loads[layer]) for layer in layers)
    panel = min(max(EXPERT_HEIGHT * most_experts, MIN_HEIGHT), MAX_HEIGHT)
    inner = rows * panel + (rows - 1) * GAP
    cells: list[list[dict[str, int] | None]] = [[{} for _ in range(columns)] for _ in range(rows)]
    for place in range(len(layers), rows * columns):
        cells[-1][place % columns] = None
    figure = make_subplots(
        rows=rows,
        cols=columns,
        specs=cells,
        vertical_spacing=GAP / inner if rows > 1 else 0,
        horizontal_spacing=side_gap,
        subplot_titles=[f"Layer {layer}" for layer in layers],
    )
    style(figure, inner + TOP + EDGE)
    figure.update_annotations(font={"size": 12, "color": INK, "weight": 600})
    figure.update_xaxes(matches="x", nticks=4, showgrid=False)
    figure.update_layout(xaxis={"matches": None})
    figure.update_yaxes(autorange="reversed", nticks=3, showgrid=False, fixedrange=True, tickformat="d")
    figure.update_layout(
        hovermode="closest",
        margin={"t": TOP, "b": EDGE, "l": 40},
        coloraxis={
            "cmin": LOWEST,
            "cmax": HIGHEST,
            "colorscale": [[(multiple - LOWEST) / (HIGHEST - LOWEST), colour] for multiple, colour in COLOURS],
            "colorbar": {
                "orientation": "h",
                "x": 0,
                "xanchor": "left",
                "y": 1 + 26 / inner,
                "yanchor": "bottom",
                "len": 260,
                "lenmode": "pixels",
                "thickness": 10,
                "outlinewidth": 0.5,
                "tickvals": [LOWEST / 2, 1, 2, HIGHEST],
                "ticktext": ["no token", "mean", "2 ×", f"{HIGHEST:g} × and more"],
            },
        },
    )
    return figure
