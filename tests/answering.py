"""What a confined child of tests/files/test_confined.py runs; imports nothing that takes time."""

from __future__ import annotations

import os
import resource
import sys
import time
from collections.abc import Callable
from typing import Any

from dtmega.files import confined


def answering(kind: str) -> Callable[[Any], Any]:
    """The function that children of these tests run."""

    def answer(request: Any) -> Any:
        if request == "limits":
            return [resource.getrlimit(resource.RLIMIT_DATA)[0], resource.getrlimit(resource.RLIMIT_CORE)[0]]
        if request == "torch":
            return [name for name in sys.modules if name.startswith("torch.")]
        if request == "memory":
            return len(bytes(2 * confined.MEMORY_BYTES))
        if request == "abort":
            os.abort()
        if request == "hang":
            time.sleep(1000)
        if request == "long":
            return "x" * 1000
        if request == "loud":
            print("not an answer", flush=True)
        if request == "wrong":
            raise KeyError("first\nsecond")
        return [kind, request, os.getpid()]

    if kind == "refused":
        raise ValueError("not this one")
    return answer
