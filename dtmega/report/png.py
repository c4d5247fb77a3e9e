"""Draw the curves as a PNG picture with matplotlib, for a talk, a paper or an issue."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from pathlib import Path

from matplotlib.axes import Axes  # pyright: ignore[reportMissingImports]  # an extra
from matplotlib.figure import Figure  # pyright: ignore[reportMissingImports]  # an extra
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter, PercentFormatter  # pyright: ignore[reportMissingImports]  # an extra

from dtmega.report import curves
from dtmega.report.colours import colour, darker, phase_colour
from dtmega.report.curves import BYTES, LOSS, PERCENT, PHASES, Panel
from dtmega.report.record import is_validation, validation_name
from dtmega.report.run import Run
from dtmega.report.units import short

DPI = 110
WIDTH, LOSS_HEIGHT, ROW_HEIGHT = 11, 3.4, 2.1  # inches


def draw(runs: Sequence[Run], path: Path) -> Path:
    """Write a PNG file with a wide loss panel at the top and, below it, one panel for each other recorded metric.

    Args:
        runs: runs to draw.
        path: path of the file.

    Returns:
        The path of the file.

    Raises:
        OSError: the file cannot be written.
    """
    panels = curves.panels(chain.from_iterable(run.record.series for run in runs), alone=len(runs) == 1)
    rows = -(-len(panels) // 2)
    figure = Figure(figsize=(WIDTH, LOSS_HEIGHT + ROW_HEIGHT * rows), dpi=DPI, layout="constrained")
    grid = figure.add_gridspec(1 + rows, 2, height_ratios=[LOSS_HEIGHT, *[ROW_HEIGHT] * rows])
    places = [grid[0, :], *(grid[1 + place // 2, place % 2] for place in range(len(panels)))]
    for panel, place in zip([LOSS, *panels], places, strict=True):
        axes = figure.add_subplot(place)
        for number, run in enumerate(runs):
            if panel is PHASES:
                _draw_phases(axes, run)
            else:
                _draw_curve(axes, run, number, panel)
        _style(axes, panel)
        if panel is LOSS:
            axes.legend(frameon=False, fontsize=9, loc="best")
    figure.savefig(path)
    return path


def _draw_curve(axes: Axes, run: Run, number: int, panel: Panel) -> None:
    """Draw the curve of one metric into its panel, with a dashed line at each restart.

    The loss panel also shows the validation losses.

    Args:
        axes: axes of the panel.
        run: run to draw.
        number: index of the run in the picture; determines the colour.
        panel: panel of the metric.
    """
    series = run.record.series
    name = curves.plain(run.name)
    if panel.key in series:
        shown = curves.thinned(series[panel.key], curves.marked_steps(run))
        mean, _ = curves.running_mean(series[panel.key])
        has_mean = panel.mean and mean.steps.size > 0
        # If there is a running mean, draw the individual steps faintly, and give the legend entry to the mean.
        alpha, width = (0.3, 0.8) if has_mean else (1.0, 1.4)
        marker = "." if shown.steps.size == 1 else ""
        label = None if has_mean else name
        axes.plot(*shown, color=colour(number), alpha=alpha, linewidth=width, marker=marker, label=label)
        if has_mean:
            axes.plot(*mean, color=colour(number), linewidth=1.8, label=name)
    validations = filter(is_validation, series) if panel is LOSS else ()
    for key in validations:
        label = f"{name}, {curves.plain(validation_name(key))}"
        marker = "o" if series[key].steps.size <= curves.CIRCLES else ""
        form = {"marker": marker, "markersize": 5, "markerfacecolor": "white", "linestyle": ":", "linewidth": 1.2}
        axes.plot(*curves.thinned(series[key]), color=darker(colour(number)), label=label, **form)
    for step in curves.restarted_after(run):
        axes.axvline(step + 0.5, color=colour(number), linewidth=0.9, linestyle="--", alpha=0.6)


def _draw_phases(axes: Axes, run: Run) -> None:
    """Draw the share of each phase in a run's step time, as stacked areas."""
    steps, shares = curves.phase_shares(run.record.series)
    colours = [phase_colour(phase, place) for place, phase in enumerate(shares)]
    axes.stackplot(steps, *shares.values(), labels=[*shares], colors=colours, linewidth=0)
    axes.set_ylim(0, 1)
    axes.legend(fontsize=7, loc="center", ncols=len(shares))


def _style(axes: Axes, panel: Panel) -> None:
    """Set the title, scales, ticks and grid of a panel."""
    axes.set_title(panel.title.partition(":")[0], loc="left", fontsize=10, fontweight="bold")
    axes.xaxis.set_major_formatter(FuncFormatter(_tick))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    if panel.log:
        axes.set_yscale("log")
        bottom, top = axes.get_ylim()
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if top < 1000 * bottom else (1,)))
        axes.yaxis.set_minor_formatter(NullFormatter())
    unit = panel.unit if panel.unit == BYTES else ""
    if panel.unit == PERCENT:
        axes.yaxis.set_major_formatter(PercentFormatter(1))
    else:
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, place: _tick(value, place) + unit))
    axes.grid(color="#e6eaee", linewidth=0.8)
    axes.tick_params(labelsize=8, colors="#5b6673")
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_axisbelow(True)


def _tick(value: float, _: int) -> str:
    """The label of a tick: 0.5, 12 K, 450 M. Only large numbers get a letter.

    matplotlib passes the position of the tick as the second argument, which this function ignores.
    """
    return short(value) if abs(value) >= 1000 else f"{value:g}"
