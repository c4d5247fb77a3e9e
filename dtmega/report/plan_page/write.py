"""Write the page about a plan: `dtmega plan --page FILE.html`. This module needs plotly."""

from __future__ import annotations

from pathlib import Path

from plotly.offline import get_plotlyjs  # pyright: ignore[reportMissingImports]  # an extra

from dtmega.files import atomic
from dtmega.planning.plan import Plan
from dtmega.planning.prices.budget import Budget
from dtmega.planning.prices.step_time import StepTime
from dtmega.report.plan_page import page


def write_plan_page(
    plan: Plan,
    time: StepTime | None,
    path: str | Path,
    *,
    command: str = "",
    memory_bytes: int | None = None,
    reserve_bytes: int = 0,
    fabric: str = "",
    budget: Budget | None = None,
) -> None:
    """Write one HTML file that shows a plan and loads no other files.

    Args:
        plan: plan to show.
        time: predicted time of a step; None if no fabric was given.
        path: path of the page.
        command: command that made the plan; '' to leave it out.
        memory_bytes: memory of one device; None if it is not known.
        reserve_bytes: part of the device's memory that tensors cannot use.
        fabric: name of the fabric for which `time` was predicted.
        budget: predicted cost of the whole run; None if no number of tokens was given.

    Raises:
        ValueError: the page cannot be written.
    """
    limits = page.Limits(memory_bytes, reserve_bytes)
    try:
        with atomic.replaced(Path(path)) as file:
            file.write(page.page(page.Answer(plan, time, command, limits, fabric, budget), get_plotlyjs()))
    except OSError as error:
        raise ValueError(f"cannot write the page to {path}: {error.strerror} (--page)") from None
