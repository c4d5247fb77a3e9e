"""Start a program: enable crash reports and speed up the imports.

The imports take a third of the time before the first step.
"""

from __future__ import annotations

import faulthandler
import gc
import sys
from typing import NoReturn


def tell_of_faults() -> None:
    """Enable stack dumps: a process that crashes in a library (SIGSEGV, SIGABRT) prints the stacks of its threads."""
    if sys.stderr is not None:  # None if the program was started with stderr closed
        faulthandler.enable()


def train(argv: list[str]) -> NoReturn:
    """Import and run dtmega/train.py, then exit with its exit code."""
    tell_of_faults()
    # The imports create half a million objects that stay alive. Searching these objects for garbage would take a sixth
    # of the import time.
    gc.disable()
    from dtmega.train import run_and_leave

    gc.freeze()
    gc.enable()
    run_and_leave(argv)
