"""The colours of runs and phases.

A run has the same colour in every figure and table. The lines of one run differ in shade, dashes and markers.
"""

from __future__ import annotations

COLOURS = ("#2266cc", "#dd6b10", "#1a8a5a", "#a23bb0", "#c22f45", "#0e8f9e", "#7a6a1c", "#5a5f6b")
# Phase of a step -> colour of the phase.
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
# Class of a plan's memory -> colour. The classes are in the order of the stacked areas, from bottom to top.
MEMORY_COLOURS = {
    "parameters": "#2266cc",
    "frozen parameters": "#9fb4cf",
    "optimizer's moments": "#1a8a5a",
    "gradients": "#dd6b10",
    "gradients before their sum": "#f2b27c",
    "weights for compute": "#8fb6ec",
    "activations of blocks": "#a23bb0",
    "activations outside of blocks": "#d6a3dd",
    "input and tensors between stages": "#0e8f9e",
    "temporaries of backward": "#c22f45",
    "temporaries of other phases": "#7a6a1c",
    "rooms for messages": "#e3b341",
    "other": "#b9c1ca",
}
# Kind of action in a pipeline schedule -> colour in the schedule's drawing.
ACTION_COLOURS = {"F": "#3b7dc4", "B": "#3f964b", "I": "#238e86", "W": "#d08a1d"}
COVERED, EXPOSED, BUBBLE = "#8fb6ec", "#c22f45", "#dde3e9"
OTHER_COLOURS = ("#8f98a3", "#5a5f6b")


def colour(number: int) -> str:
    """The colour of the run with this number on the page; after the last colour, the colours repeat."""
    return COLOURS[number % len(COLOURS)]


def faint(hexadecimal: str) -> str:
    """A transparent shade of a colour like "#2266cc", for the curve of individual steps under a running mean."""
    red, green, blue = (int(hexadecimal[i : i + 2], 16) for i in (1, 3, 5))
    return f"rgba({red},{green},{blue},0.32)"


def darker(hexadecimal: str) -> str:
    """A darker shade of a colour like "#2266cc", for the validation losses of a run."""
    return "#" + "".join(f"{round(0.62 * int(hexadecimal[i : i + 2], 16)):02x}" for i in (1, 3, 5))


def phase_colour(name: str, place: int) -> str:
    """The colour that represents a phase of a step in every figure and bar.

    Args:
        name: name of the phase.
        place: position of the phase among the drawn phases, which selects the colour of an unknown phase.
    """
    return PHASE_COLOURS.get(name, OTHER_COLOURS[place % len(OTHER_COLOURS)])
