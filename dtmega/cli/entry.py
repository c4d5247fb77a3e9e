"""The start of a program: reports of crashes, and the imports, which take a third of the time to the first step."""

from __future__ import annotations

import faulthandler
import gc
import sys
from typing import NoReturn


def tell_of_faults() -> None:
    """Make a process that crashes in a library (SIGSEGV, SIGABRT) print where its threads were."""
    if sys.stderr is not None:  # None if whoever started the program closed stderr
        faulthandler.enable()


def train(argv: list[str]) -> NoReturn:
    """Train with dtmega/train.py, and end this process with the exit code."""
    tell_of_faults()
    # The imports create half a million objects that stay alive. Searching these for garbage would take a sixth of the
    # time of the imports.
    gc.disable()
    from dtmega.train import run_and_leave

    gc.freeze()
    gc.enable()
    run_and_leave(argv)
