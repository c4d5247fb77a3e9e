"""Draw the table of speeds as a picture, with a bar for each row's ratio to its peer and a mark at the row's reach."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

REACHED, SHORT, SHOWN = "#2a7f62", "#c46a1b", "#8a94a0"


def draw(record: dict[str, Any], path: Path) -> None:
    """Draw a record of `python -m benchmarks`. Rows of counts are left out, because their ratio is always 1."""
    found = [row for row in record["rows"] if not row["benchmark"].startswith("counts.")]
    if not found:
        return
    figure, axes = pyplot.subplots(figsize=(10, 1.2 + 0.32 * len(found)), layout="constrained")
    for i, row in enumerate(found):
        colour = SHOWN if row["reach"] is None else SHORT if row["falls_short"] else REACHED
        axes.barh(i, row["ratio"], color=colour, height=0.62)
        axes.text(row["ratio"] + 0.015, i, f"{row['ratio']:.2f}", va="center", fontsize=8)
        if row["reach"] is not None:
            axes.plot([row["reach"]] * 2, [i - 0.42, i + 0.42], color="black", linewidth=1.5)
    axes.axvline(1.0, color="#444", linewidth=0.8, linestyle=":")
    axes.set_yticks(range(len(found)), [f"{row['name']}  |  {row['peer']}" for row in found], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlim(0, max(1.6, *(row["ratio"] + 0.15 for row in found)))
    axes.set_xlabel("ours / peer, shorter is better; black mark: what is to be reached")
    machine = record["machine"]
    date = max(row["date"] for row in found).split()[0]
    axes.set_title(f"{date}, {machine['processor']}, torch {machine['versions']['torch']}", fontsize=9)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
