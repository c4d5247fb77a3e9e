"""Runs in, files out."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from dtmega.files import atomic, optional_imports
from dtmega.report import run

MOST_NAME_BYTES = 200  # a file system's 255, less what is put before it while the page is written


def default_output(directories: Sequence[str]) -> Path:
    """report.html in the directory of a run; for several runs a page beside it, named after the others."""
    first, *others = directories
    name = "-".join(Path(other).resolve().name for other in others)
    name = f"report-with-{name}.html" if others else "report.html"
    if len(os.fsencode(name)) > MOST_NAME_BYTES:
        name = f"report-with-{len(others)}-others.html"
    return Path(first, name)


def write(directories: Sequence[str], output: Path, png: bool = False) -> list[Path]:
    """Write the page of these runs to `output`, and with `png` the picture beside it; returns what was written.

    Raises:
        ValueError: not a run directory; plotly, or with `png` matplotlib, is not installed.
        OSError: a file cannot be read or written.
    """
    optional_imports.check("plotly", "report", "the page")
    if png:
        optional_imports.check("matplotlib", "png", "a picture (--png)")
    runs = run.read(directories)
    from plotly.offline import get_plotlyjs  # pyright: ignore[reportMissingImports]  # an extra

    from dtmega.report import page, plots
    from dtmega.report.colours import colour

    figures = {"curves": plots.over_steps(runs)}
    if any(plots.has_tail(of_run) for of_run in runs):
        figures["tail"] = plots.tail(runs)
    colours = [colour(number) for number in range(len(runs))]
    with atomic.replaced(output) as file:
        file.write(page.page(runs, figures, get_plotlyjs(), colours))
    if not png:
        return [output]
    from dtmega.report import png as picture

    return [output, picture.draw(runs, output.with_suffix(".png"))]
