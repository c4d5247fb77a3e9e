"""Functions that read tensor values on the host. The planner replaces these functions, because a plan has no values.

The planner (`dtmega/planning`) runs the real step on tensors without values. Wherever the trainer needs a value on the
host, it calls a function of this module; the planner uses `answering` to supply a value instead.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence

from torch import Tensor


class Host:
    """The host in a real run, which waits for the device and then reads values from the device's memory."""

    def read(self, tensor: Tensor) -> Tensor:
        """The tensor's values, as a tensor on the host."""
        return tensor.cpu()

    def read_sizes(self, sizes: Tensor, total: int) -> Tensor:
        """The numbers of rows that this rank sends to other ranks' experts and receives, as a tensor on the host."""
        return sizes.cpu()

    def must_skip(self, check: str) -> bool:
        """Return False, because a real host makes every check. A plan's host records the check and returns True."""
        return False

    def true_indices(self, mask: Tensor) -> Tensor:
        """The indices of the true elements of `mask` [N], as int64 [number of true elements] on the mask's device."""
        return mask.nonzero().squeeze(1)

    def each(self, parts: Sequence[slice]) -> Iterable[slice]:
        """Return all slices, in order, because a real host runs the work for each slice."""
        return parts


_hosts = [Host()]  # the functions below use the last host in the list


def read(tensor: Tensor) -> Tensor:
    """The values of a tensor, as a tensor on the host. If the tensor is on a GPU, the host waits for the values."""
    return _hosts[-1].read(tensor)


def read_sizes(sizes: Tensor, total: int) -> Tensor:
    """The numbers of rows (a token for one of its experts) that this rank exchanges with each of n ep ranks.

    The numbers depend on the data. A plan assumes that each rank receives as many rows as it sends, or that this rank
    receives more, by a factor for uneven loads.

    Args:
        sizes: numbers of rows to send and to receive, [2, n]; the result is a copy on the host.
        total: total number of rows that this rank sends.
    """
    return _hosts[-1].read_sizes(sizes, total)


def true_indices(mask: Tensor) -> Tensor:
    """The indices of the true elements of `mask` [N]. On a GPU, the host waits for the size of the result."""
    return _hosts[-1].true_indices(mask)


def must_skip(check: str) -> bool:
    """Return True in a plan, because a plan cannot compare values.

    Args:
        check: sentence that describes the check to the user.
    """
    return _hosts[-1].must_skip(check)


def each(parts: Sequence[slice]) -> Iterable[slice]:
    """The slices over which a caller's loop iterates. The loop does the same work for all slices of equal length.

    A plan runs the loop only once for each length, and counts the work for all slices of this length.
    """
    return _hosts[-1].each(parts)


@contextlib.contextmanager
def answering(other: Host) -> Iterator[None]:
    """Make the functions of this module use the host `other` inside the `with` block."""
    _hosts.append(other)
    try:
        yield
    finally:
        _hosts.pop()
