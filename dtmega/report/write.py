"""Write the page of `dtmega report`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from dtmega.files import atomic, optional_imports
from dtmega.report import run

MAX_NAME_BYTES = 200  # file names may have 255 bytes, and the temporary file has a longer name than the page


def default_output(directories: Sequence[str]) -> Path:
    """The default path of the page.

    For one run, the page is report.html in the run directory. For several runs, the page is report-with-OTHERS.html in
    the directory of the first run.
    """
    first, *others = directories
    name = "-".join(Path(other).resolve().name for other in others)
    name = f"report-with-{name}.html" if others else "report.html"
    if len(os.fsencode(name)) > MAX_NAME_BYTES:
        name = f"report-with-{len(others)}-others.html"
    return Path(first, name)


def write(directories: Sequence[str], output: Path) -> None:
    """Write the page about the given runs.

    Args:
        directories: run directories.
        output: path of the page.

    Raises:
        ValueError: a directory is not a run directory, or plotly is not installed.
        OSError: a file cannot be read or written.
    """
    optional_imports.check("plotly", "report", "the page")
    runs = run.read(directories)
    # plotly, and the modules that need it, are imported only after the check above.
    from plotly.offline import get_plotlyjs  # pyright: ignore[reportMissingImports]  # an extra

    from dtmega.report import page, plots
    from dtmega.report.colours import colour
    from dtmega.report.loads import plot, section

    figures = {"curves": plots.over_steps(runs)}
    if any(plots.has_tail(each) for each in runs):
        figures["tail"] = plots.tail(runs)
    mixtures = {number: each.loads for number, each in enumerate(runs) if each.loads is not None}
    for number, found in mixtures.items():
        figures[section.place_of(number)] = plot.heat_map(found, plot.MAX_CELLS // len(mixtures))
    colours = [colour(number) for number in range(len(runs))]
    with atomic.replaced(output) as file:
        file.write(page.page(runs, figures, get_plotlyjs(), colours, output.parent))
