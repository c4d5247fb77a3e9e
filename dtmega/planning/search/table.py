"""Write the result of a search as a table, as JSON, or as a configuration."""

from __future__ import annotations

import textwrap
from typing import Any

from dtmega import config
from dtmega.planning.search.layout import describe, with_layout
from dtmega.planning.search.ranking import Found, Result

GIB = 2**30
COLUMNS = 120


def text(found: Found) -> str:
    """The table of the planned layouts, and the reasons why the remaining layouts were rejected."""
    room = f"{found.memory_bytes / GIB:.1f} GiB less {found.reserve_bytes / GIB:.1f} GiB in reserve"
    lines = [
        f"{found.n_layouts:,} layouts of {found.world:,} ranks, of which training accepts {found.n_legal:,}; "
        f"{len(found.ranked)} planned in {found.seconds:.0f} s; a rank has {room}"
    ]
    if found.fixed:
        lines.append("not varied: " + ", ".join(f"{name} = {_toml(value)}" for name, value in found.fixed.items()))
    if found.interrupted:
        lines.append("interrupted: this is what is known so far")
    if found.ranked:
        lines += [
            "",
            f"{'tokens/s':>12} {'step s':>8} {'slower':>7} {'bubble':>7} {'exposed':>8} {'peak GiB':>9}  layout",
        ]
        lines += [_row(result, found) for result in found.ranked]
    if any(result.layout.ep > 1 for result in found.ranked):
        loads = "even loads" if found.imbalance == 1 else f"a largest load of {found.imbalance:g} times the mean"
        lines += ["", f"assumed with ep: {loads}; the loads of a run depend on the data (--imbalance)"]
    if found.ranked and found.best is None:
        lines += ["", "none of the planned layouts fits"]
    if found.estimated:
        lines += ["", f"{'step s':>8} {'peak GiB':>9}  by estimate, not planned"]
        for entry in found.estimated:
            peak = entry.estimate.peak_bytes / GIB
            lines.append(f"{entry.estimate.seconds:>8.3g} {peak:>9.1f}  {describe(entry.layout)}")
    if found.fallen:
        lines += ["", f"{'layouts':>12}  why they were dropped (messages that differ only in numbers count together)"]
        for reason in found.fallen:
            wrapped = textwrap.wrap(reason.message, COLUMNS - 14)
            lines.append(f"{reason.n:>12,}  {wrapped[0]}")
            lines += [" " * 14 + line for line in wrapped[1:]]
    return "\n".join(lines)


def _row(result: Result, found: Found) -> str:
    time, peak = result.time, result.summary.peak_bytes / GIB
    slower = "-"
    if found.best is not None:
        slower = f"{time.seconds / found.best.time.seconds:.2f}x" if result.fits else "no room"
    exposed = time.exposed_communication_s / time.seconds
    return (
        f"{result.tokens_per_s:>12,.0f} {time.seconds:>8.3g} {slower:>7} {time.bubble_fraction:>7.1%} {exposed:>8.1%} "
        f"{peak:>9.1f}  {describe(result.layout)}"
    )


def _toml(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else f'"{value}"' if isinstance(value, str) else str(value)


def as_dict(found: Found) -> dict[str, Any]:
    """Convert a search result to types that JSON can express."""
    ranked = []
    for result in found.ranked:
        time = result.time
        ranked.append(
            {
                "keys": result.overrides,
                "fits": result.fits,
                "tokens_per_s": result.tokens_per_s,
                "step_time_s": time.seconds,
                "compute_s": time.compute_s,
                "exposed_communication_s": time.exposed_communication_s,
                "bubble_fraction": time.bubble_fraction,
                "exposed_by_axis_s": time.exposed_by_axis,
                "peak_bytes": result.summary.peak_bytes,
                "peak_place": result.summary.place,
                "peak_action": result.summary.action,
                "at_peak_bytes": result.summary.at_peak,
                "estimate": result.estimate._asdict(),
            }
        )
    estimated = []
    for entry in found.estimated:
        estimated.append({"layout": entry.layout._asdict(), "estimate": entry.estimate._asdict()})
    return {
        "world": found.world,
        "memory_bytes": found.memory_bytes,
        "reserve_bytes": found.reserve_bytes,
        "fixed": found.fixed,
        "layouts": found.n_layouts,
        "legal": found.n_legal,
        "ranked": ranked,
        "estimated": estimated,
        "fallen": [reason._asdict() for reason in found.fallen],
        "seconds": found.seconds,
        "interrupted": found.interrupted,
        "imbalance": found.imbalance,
    }


def best_toml(cfg: config.Config, found: Found) -> str:
    """The complete configuration with the best layout, as TOML that `train` accepts.

    Args:
        cfg: configuration that was searched.
        found: result of the search.

    Raises:
        ValueError: none of the planned layouts fits.
    """
    if found.best is None:
        raise ValueError(
            f"there is no layout to write: none that was planned fits into {found.memory_bytes / GIB:.1f} - "
            f"{found.reserve_bytes / GIB:.1f} GiB (--write, --memory, --reserve)"
        )
    heading = (
        f"# The fastest layout of {found.world} ranks by `dtmega plan --search`: {describe(found.best.layout)}.\n\n"
    )
    return heading + with_layout(cfg, found.best.layout).to_toml()
