"""One colour per run, the same in every figure and table. Within a run, lines differ in shade, dashes and markers."""

from __future__ import annotations

COLOURS = ("#2266cc", "#dd6b10", "#1a8a5a", "#a23bb0", "#c22f45", "#0e8f9e", "#7a6a1c", "#5a5f6b")
# Phase of a step -> its colour.
PHASE_COLOURS = {
    "data": "#dd6b10",
    "counts": "#e3b341",
    "forward+backward": "#2266cc",
    "reduce": "#a23bb0",
    "optimizer": "#1a8a5a",
    "report": "#7a6a1c",
    "evaluation": "#0e8f9e",
    "checkpoint": "#c22f45",
    "sample": "#e58fa5",
    "other": "#b9c1ca",
}
OTHER_COLOURS = ("#8f98a3", "#5a5f6b")


def colour(number: int) -> str:
    """The colour of run number `number`."""
    return COLOURS[number % len(COLOURS)]


def faint(hexadecimal: str) -> str:
    """A transparent shade in CSS notation, for the curve of single steps under their running mean."""
    red, green, blue = (int(hexadecimal[i : i + 2], 16) for i in (1, 3, 5))
    return f"rgba({red},{green},{blue},0.32)"


def darker(hexadecimal: str) -> str:
    """A darker shade for a run's validation losses."""
    return "#" + "".join(f"{round(0.62 * int(hexadecimal[i : i + 2], 16)):02x}" for i in (1, 3, 5))


def phase_colour(name: str, place: int) -> str:
    """The colour of a phase of a step, the same in every figure and bar.

    Args:
        name: name of the phase.
        place: place of the phase among those that are drawn, which gives the colour of an unknown phase.
    """
    return PHASE_COLOURS.get(name, OTHER_COLOURS[place % len(OTHER_COLOURS)])
