"""Format numbers and times for readers, with three significant digits and a unit."""

from __future__ import annotations

from datetime import datetime, timezone


def short(value: float) -> str:
    """Format a number with three significant digits and a letter for the magnitude: 1,234 -> 1.23 K."""
    for factor, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "K")):
        if abs(value) >= factor:
            return f"{value / factor:.3g} {letter}"
    return f"{value:.3g}"


def seconds(value: float) -> str:
    """Format a short time, given in seconds: 0.05 -> 50 ms, 1.5 -> 1.5 s."""
    return f"{value:.3g} s" if value >= 1 else f"{1000 * value:.3g} ms"


def duration(value: float) -> str:
    """Format a time in seconds as hours, minutes, seconds or milliseconds: 7,260 -> 2.02 h."""
    if value >= 3600:
        return f"{value / 3600:.3g} h"
    return f"{value / 60:.3g} min" if value >= 60 else seconds(value)


def moment(time: str) -> str:
    """Format an ISO 8601 time in UTC: 2026-11-23T23:27:33+00:00 -> 2026-11-23 23:27:33 UTC.

    If the text is not a time, the function returns it unchanged.
    """
    try:
        return f"{datetime.fromisoformat(time).astimezone(timezone.utc):%Y-%m-%d %H:%M:%S} UTC"
    except (ValueError, OverflowError):
        return time


def gibibytes(value: float) -> str:
    """Format a number of bytes in GiB."""
    return f"{value / 2**30:.3g} GiB"


def binary(value: float) -> str:
    """Format a number of bytes with three significant digits in KiB, MiB or GiB: 45,001,163 -> 42.9 MiB."""
    for factor, unit in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if abs(value) >= factor:
            return f"{_three_digits(value / factor)} {unit}"
    return f"{_three_digits(value)} B"


def _three_digits(value: float) -> str:
    """Format a number with three significant digits; numbers of 1,000 or more become whole numbers."""
    return f"{value:.0f}" if value >= 999.5 else f"{value:.3g}"


def file_size(n_bytes: int) -> str:
    """Format the size of a file in decimal units (1 KB = 1,000 B), as most programs do: 12,345 -> 12.3 KB."""
    return f"{short(n_bytes)}B" if n_bytes >= 1000 else f"{n_bytes} B"
