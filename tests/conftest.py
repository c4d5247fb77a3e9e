import signal

import pytest
import torch

# By CPU seconds. A file stays in one process, and none should come last.
LONGEST = ("hf_plans", "parity", "resume", "hf_train", "pipelining", "torchrun", "job", "loader", "train", "faults")

# Two threads on two busy cores wait for each other longer than one of them computes.
torch.set_num_threads(1)

# A shell may start a job in the background with these ignored, and what the tests start would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files first; all others as they are."""
    names = [f"test_{name}.py" for name in LONGEST]
    items.sort(key=lambda item: names.index(item.path.name) if item.path.name in names else len(names))
