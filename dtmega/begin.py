"""The beginning of a training program: its imports, which are a third of the time to the first step."""

from __future__ import annotations

import faulthandler
import gc
import sys
from typing import NoReturn


def train(argv: list[str]) -> NoReturn:
    """Train as dtmega/train.py tells, and end this process with the exit code."""
    if sys.stderr is not None:  # whoever starts a program may close it
        faulthandler.enable()  # ended by a fault in a library (SIGSEGV, SIGABRT), it says where its threads were
    # The imports make half a million objects that stay: to look through them for garbage takes a sixth of their time.
    gc.disable()
    from dtmega.train import run_and_leave

    gc.freeze()
    gc.enable()
    run_and_leave(argv)
