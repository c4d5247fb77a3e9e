"""The rows of the table of speed, a file per theme: which benchmarks there are, by name.

A benchmark is a function of `quick` (fewer rounds, for trying it) that returns one or more rows. It runs in a process
of its own, with one thread (see `benchmarks/__main__.py`).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable

from benchmarks.rows.measure import Row

Benchmark = Callable[[bool], list[Row]]

THEMES = ("step", "attention", "head", "tensor_parallel", "data_parallel", "pipeline", "process", "text", "counts")


def benchmarks() -> dict[str, Benchmark]:
    """Each benchmark by "theme.name", in the order of the table."""
    found: dict[str, Benchmark] = {}
    for theme in THEMES:
        module = importlib.import_module(f"benchmarks.rows.{theme}")
        found |= {f"{theme}.{name}": benchmark for name, benchmark in module.BENCHMARKS.items()}
    return found
