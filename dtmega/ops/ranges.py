"""Named ranges in a profile: a trace shows code inside `with named("forward", 1, 3):` as "forward s1 m3".

While no profile is recorded, a range only tests a flag: no operator runs, and no name is built.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext

from torch.autograd import profiler
from torch.profiler import record_function

_NOTHING = nullcontext()
Listener = Callable[[str, int | None, int | None], AbstractContextManager[object]]
_listeners: list[Listener] = []  # the last listener makes the context managers; the list is usually empty


def recording() -> bool:
    """True while this process is being profiled, by the trainer or by a user's own code."""
    return profiler._is_profiler_enabled


def named(what: str, stage: int | None = None, microbatch: int | None = None) -> AbstractContextManager[object]:
    """A context manager that marks the code inside as one range of the profile.

    Args:
        what: name of the work inside the range, such as "forward".
        stage: index of the pipeline stage that does the work; 0 without a pipeline, None for work outside of stages.
        microbatch: index of the microbatch within the step, from 0; None for work of the whole step.
    """
    if _listeners:
        return _listeners[-1](what, stage, microbatch)
    if not recording():
        return _NOTHING
    name = what
    if stage is not None:
        name += f" s{stage}"
    if microbatch is not None:
        name += f" m{microbatch}"
    return record_function(name)


@contextlib.contextmanager
def told_to(listener: Listener) -> Iterator[None]:
    """Make `named` return the context managers of `listener` inside the `with` block.

    The planner uses this function to learn which stage and microbatch are being computed.
    """
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.pop()
