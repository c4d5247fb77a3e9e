"""The beginning of a program: telling of faults, and the imports, which are a third of the time to the first step."""

from __future__ import annotations

import faulthandler
import gc
import sys
from typing import NoReturn


def tell_of_faults() -> None:
    """Have a process that a library's fault ends (SIGSEGV, SIGABRT) say where its threads were."""
    if sys.stderr is not None:  # whoever starts a program may close it
        faulthandler.enable()


def train(argv: list[str]) -> NoReturn:
    """Train as dtmega/train.py tells, and end this process with the exit code."""
    tell_of_faults()
    # The imports make half a million objects that stay: to look through them for garbage takes a sixth of their time.
    gc.disable()
    from dtmega.train import run_and_leave

    gc.freeze()
    gc.enable()
    run_and_leave(argv)
