"""Write the page of `dtmega report`. This module needs plotly."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from plotly.offline import get_plotlyjs  # pyright: ignore[reportMissingImports]  # an extra

from dtmega.files import atomic
from dtmega.report import page, plots, run
from dtmega.report.colours import colour
from dtmega.report.loads import plot, section


def write(directories: Sequence[str], output: Path) -> None:
    """Write the page about the given runs.

    Args:
        directories: run directories.
        output: path of the page.

    Raises:
        ValueError: a directory is not a run directory.
        OSError: a file cannot be read or written.
    """
    runs = run.read(directories)
    figures = {"curves": plots.over_steps(runs)}
    if any(plots.has_tail(each) for each in runs):
        figures["tail"] = plots.tail(runs)
    mixtures = {number: each.loads for number, each in enumerate(runs) if each.loads is not None}
    for number, found in mixtures.items():
        figures[section.place_of(number)] = plot.heat_map(found, plot.MAX_CELLS // len(mixtures))
    colours = [colour(number) for number in range(len(runs))]
    with atomic.replaced(output) as file:
        file.write(page.page(runs, figures, get_plotlyjs(), colours, output.parent))
