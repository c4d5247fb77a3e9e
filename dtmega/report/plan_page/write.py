"""Write the page about a plan: `dtmega plan --page FILE.html`."""

from __future__ import annotations

import os
from pathlib import Path

from dtmega.files import atomic, optional_imports
from dtmega.planning.plan import Plan
from dtmega.planning.prices.budget import Budget
from dtmega.planning.prices.step_time import StepTime


def check_page(path: str | Path) -> None:
    """Check that the page can be written. Call this function before making the plan, which takes a long time.

    Args:
        path: path of the page.

    Raises:
        ValueError: the folder does not exist or cannot be written to, the path is a folder, or plotly is not installed.
    """
    path = Path(path)
    optional_imports.check("plotly", "report", "--page")
    folder = path.parent
    reason = ""
    if not folder.is_dir():
        reason = f"{folder} is not a folder"
    elif path.is_dir():
        reason = "it is a folder"
    elif not os.access(folder, os.W_OK | os.X_OK):
        reason = f"{folder} cannot be written to"
    if reason:
        raise ValueError(f"cannot write the page to {path}: {reason}, expected a file in an existing folder (--page)")


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
        ValueError: the page cannot be written, or plotly is not installed.
    """
    check_page(path)
    # Optional libraries, and the modules that need these libraries, are imported only after the check above.
    from plotly.offline import get_plotlyjs  # pyright: ignore[reportMissingImports]  # an extra

    from dtmega.report.plan_page import page

    limits = page.Limits(memory_bytes, reserve_bytes)
    try:
        with atomic.replaced(Path(path)) as file:
            file.write(page.page(page.Answer(plan, time, command, limits, fabric, budget), get_plotlyjs()))
    except OSError as error:
        raise ValueError(f"cannot write the page to {path}: {error.strerror} (--page)") from None
