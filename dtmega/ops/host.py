"""Values that the host reads from tensors. The planner has no values, so it answers these questions itself.

A plan (`dtmega/planning`) runs the real step on tensors without values. Wherever the trainer needs a value on the host,
it calls one of these functions, and `answering` replaces them for the time of the plan.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import Tensor


class Host:
    """The host of a real run, which waits for the device and reads its values."""

    def read(self, tensor: Tensor) -> Tensor:
        """The tensor's values, on the host."""
        return tensor.cpu()

    def must_skip(self, check: str) -> bool:
        """False: a real host makes every check. A plan takes note of the check instead, which needs values."""
        return False

    def true_indices(self, mask: Tensor) -> Tensor:
        """The indices of the true elements of `mask` [N], as int64 [number of true elements] on the mask's device."""
        return mask.nonzero().squeeze(1)


_hosts = [Host()]  # the last one answers


def read(tensor: Tensor) -> Tensor:
    """The values of a tensor, on the host. On a GPU the host waits for them."""
    return _hosts[-1].read(tensor)


def true_indices(mask: Tensor) -> Tensor:
    """The indices of the true elements of `mask` [N]. On a GPU the host waits, because the result's size is a value."""
    return _hosts[-1].true_indices(mask)


def must_skip(check: str) -> bool:
    """True in a plan, which cannot compare values.

    Args:
        check: what is not checked, as a sentence for the user.
    """
    return _hosts[-1].must_skip(check)


@contextlib.contextmanager
def answering(other: Host) -> Iterator[None]:
    """Let another host answer, inside the `with` block only."""
    _hosts.append(other)
    try:
        yield
    finally:
        _hosts.pop()
