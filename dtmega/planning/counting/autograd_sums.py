"""Recognize gradient sums that the autograd engine computes in place in a real step but not in a plan.

If several operators use a tensor, the engine adds up the gradients from these operators. The engine writes the sum
into the first gradient if that gradient is dense and only the engine holds it. A plan's tensors belong to a Python
class, and for such tensors the engine makes a new tensor instead (torch/csrc/autograd/input_buffer.cpp). The plan must
not count the new tensor.
"""

from __future__ import annotations

import sys
from typing import Any, cast

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd.graph import _engine_run_backward
from torch.utils._python_dispatch import TorchDispatchMode

ADD = torch.ops.aten.add.Tensor
OF_MODES = ("dtmega.planning", "torch._compile", "torch._dynamo")  # modules whose stack frames are skipped


class EngineSums:
    """Recognizes the autograd engine's gradient additions, if a real step would do them in place.

    Args:
        fake: `FakeTensorMode` that creates the plan's tensors.
    """

    def __init__(self, fake: FakeTensorMode) -> None:
        self._uses_of_own = _uses_of_own(fake)

    def in_place(self, operator: Any, args: tuple[Any, ...]) -> bool:
        """True if a real step would add `args[1]` to `args[0]` in place."""
        if operator is not ADD or not _from_engine():
            return False
        first, second = args
        # The engine also makes a new tensor for the sum of two DTensors.
        if type(first) is not FakeTensor or type(second) is not FakeTensor:
            return False
        return _is_dense(first) and _uses(first) == self._uses_of_own


def _from_engine() -> bool:
    """True if the engine itself or a C++ node calls the current operator; False if a Python backward function does."""
    frame = sys._getframe()
    while frame is not None and frame.f_globals["__name__"].startswith(OF_MODES):
        frame = frame.f_back
    return frame is not None and frame.f_code is _engine_run_backward.__code__


def _uses(tensor: Tensor) -> tuple[int, int]:
    """The C++ reference counts of a tensor and of its storage."""
    n_of_tensor = cast("Any", tensor)._use_count()
    return n_of_tensor, torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)


def _is_dense(tensor: Tensor) -> bool:
    """True if the elements are contiguous in memory, with the dims in any order."""
    step = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != step:
            return False
        step *= size
    return True


class _Counts(TorchDispatchMode):
    """Records the reference counts (`_uses`) of the first tensor in each of the engine's sums."""

    def __init__(self) -> None:
        super().__init__()
        self.uses: list[tuple[int, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is ADD and _from_engine():
            self.uses.append(_uses(args[0]))
        return func(*args, **(kwargs or {}))


def _uses_of_own(fake: FakeTensorMode) -> tuple[int, int]:
    """The reference counts that a dispatch mode sees for a gradient that only the engine holds."""
    with _Counts() as counts, torch.enable_grad():
        with fake:
            x = torch.ones(1, device="cpu", requires_grad=True)
        y = x * 1
        (y * 2 + y * 3).sum().backward()
    (uses,) = counts.uses
    return uses
