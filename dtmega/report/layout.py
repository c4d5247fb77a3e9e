"""Draw the layout of a run between two starts: the position of each rank in the mesh, and the pipeline's schedule."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from dtmega import config, mesh
from dtmega.pipelining import draw
from dtmega.pipelining.table import make_table, simulate
from dtmega.training.choices import with_micro_batch_size

MAX_RANKS = 256  # maximum number of ranks in a mesh; larger meshes are not drawn
MAX_ACTIONS = 3000  # maximum number of actions in a schedule; larger schedules are not drawn
MAX_SIMULATED = 100_000  # maximum product of stages and microbatches; the bubble of a larger schedule is not computed
CELL, GAP, PAD, LEFT, TOP = 34, 10, 5, 92, 34  # pixels
FILLS = ("#dbe8fb", "#d9f0dc", "#fdebc8", "#f3dcf1", "#d5efee", "#fbdcd6")
INK, FAINT = "#1d2733", "#5b6673"


def sizes_of(layout: Mapping[str, int]) -> dict[str, int] | None:
    """The sizes of the mesh axes in a recorded layout; None if their product is not the number of processes."""
    sizes = {axis: layout.get(axis, 1) for axis in mesh.AXES}
    n = layout.get("processes", 0)
    return sizes if n > 0 and min(sizes.values()) > 0 and math.prod(sizes.values()) == n else None


def mesh_svg(sizes: dict[str, int]) -> str:
    """An SVG drawing of the ranks in a mesh.

    Each box contains the tp and cp ranks that work on the same samples. Each row of boxes is one pipeline rank, and
    each column is one data rank. Wider gaps separate the replicas of dp_replicate.

    Args:
        sizes: size of each axis of the mesh.
    """
    grid = np.arange(np.prod([*sizes.values()])).reshape([sizes[axis] for axis in mesh.AXES])
    pp, replicate, shard, cp, tp = (sizes[axis] for axis in mesh.AXES)
    box_width, box_height = 2 * PAD + tp * CELL, 2 * PAD + cp * CELL
    width = LEFT + replicate * shard * (box_width + GAP) + (replicate - 1) * GAP
    height = TOP + pp * (box_height + GAP)
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'font-family="Helvetica, Arial, sans-serif" role="img" aria-label="ranks of the mesh">'
    ]
    for column in range(replicate * shard):
        x = LEFT + column * (box_width + GAP) + column // shard * GAP
        out.append(_text(x + box_width / 2, TOP - 12, f"data {column}", 11, FAINT))
    for stage in range(pp):
        y = TOP + stage * (box_height + GAP)
        out.append(_text(LEFT - 14, y + box_height / 2 + 4, f"pipeline {stage}" if pp > 1 else "ranks", 12, INK, "end"))
        for column in range(replicate * shard):
            x = LEFT + column * (box_width + GAP) + column // shard * GAP
            fill = FILLS[stage % len(FILLS)]
            out.append(f'<rect x="{x}" y="{y}" width="{box_width}" height="{box_height}" rx="6" fill="{fill}"/>')
            out += _rank_cells(grid[stage, column // shard, column % shard], x + PAD, y + PAD)
    return "\n".join([*out, "</svg>"])


def _rank_cells(ranks: NDArray[np.int64], left: int, top: int) -> list[str]:
    """The SVG elements for the ranks in one box.

    Args:
        ranks: ranks in the box, [cp, tp].
        left, top: coordinates of the upper left corner of the first cell, in pixels.
    """
    out = []
    for (row, column), rank in np.ndenumerate(ranks):
        x, y = left + column * CELL, top + row * CELL
        out.append(
            f'<rect x="{x + 2}" y="{y + 2}" width="{CELL - 4}" height="{CELL - 4}" rx="4" '
            f'fill="#ffffff" stroke="#9aa7b5"/>'
        )
        out.append(_text(x + CELL / 2, y + CELL / 2 + 5, str(rank), 13, INK))
    return out


def _text(x: float, y: float, text: str, size: int, ink: str, anchor: str = "middle") -> str:
    """An SVG element that shows `text` at (x, y), in a font of `size` pixels and the colour `ink`."""
    return f'<text x="{x:g}" y="{y:g}" font-size="{size}" text-anchor="{anchor}" fill="{ink}">{text}</text>'


def schedule(values: Mapping[str, Mapping[str, object]], sizes: Mapping[str, int]) -> tuple[str, str]:
    """An SVG drawing of the pipeline's schedule, and the title of the drawing.

    Args:
        values: recorded configuration, as section -> key -> value. Another version of dtmega may have written it.
        sizes: size of each axis of the mesh.

    Returns:
        The SVG and its title. If nothing can be drawn, the SVG is '' and the title gives the reason: there is no
        pipeline, the schedule has too many actions, or the configuration cannot be read.
    """
    if sizes["pp"] == 1:
        return "", "no pipeline"
    try:
        cfg = with_micro_batch_size(config.validate(values, "config.toml"), sizes)
        data_size = sizes["dp_replicate"] * sizes["dp_shard"]
        n_microbatches = cfg.batch.global_batch_size // (data_size * cfg.batch.micro_batch_size)
        name = cfg.pipeline.csv or cfg.pipeline.schedule
        if n_microbatches * sizes["pp"] > MAX_SIMULATED:
            return "", f"{name}: {sizes['pp']:,} stages and {n_microbatches:,} microbatches are too many to draw"
        table = make_table(cfg.pipeline, sizes["pp"], n_microbatches)
        n_actions = sum(map(len, table))
        if n_actions > MAX_ACTIONS:
            bubble = simulate(table).bubble
            return "", f"{name}: {n_actions:,} actions are too many to draw; {bubble:.1%} of the time is bubble"
        return draw.svg(table, ""), draw.describe(table, name)
    except ValueError as error:
        return "", f"the schedule cannot be drawn: {error}"
