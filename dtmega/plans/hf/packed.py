"""Fused projections: several matrices side by side in one, of which each is cut; and Conv1D, GPT-2's transposed linear.

What stands side by side is cut as `_StridedShard`, DTensor's own word for it: `full_tensor()` has the columns in the
order of transformers, on any layout. A checkpoint must not take such a shard for one piece; see `docs/decisions.md`.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from dtmega.plans import mappings
from dtmega.plans.hf.styles import Row, Stack, Word, as_it_is
from dtmega.plans.styles import group_of, local


class PackedColumn(Word):
    """nn.Linear whose output is `parts` matrices of the same size side by side: each of them is cut.

    The bias stays whole: FSDP2 cuts dim 0 as well, and a vector cut so twice is put together in the wrong order.
    """

    parts: ClassVar[int] = 2
    placements: ClassVar[dict[str, Placement]] = {"weight": _StridedShard(0, split_factor=2), "bias": Replicate()}

    def __init__(self, stack: Stack | None = None) -> None:
        super().__init__(stack)
        self.cost = ("backward all-reduce", "all-gather, backward reduce-scatter")

    def check(self, module: nn.Module, tp: int) -> None:
        super().check(module, tp)
        for name, parameter in module.named_parameters(recurse=False):
            size = parameter.shape[-1] if name == "bias" else parameter.shape[self.placements["weight"].dim]  # pyright: ignore[reportAttributeAccessIssue]
            self.check_size(f"'{name}' of {type(module).__name__} in {self.parts} parts", size, self.parts * tp)

    def bias(self, module: Any) -> Any:
        if module.bias is None:
            return None
        group = group_of(module)
        return mappings.copy(local(module.bias), group).view(self.parts, group.size(), -1)[:, group.rank()].flatten()

    def forward(self, module: Any, x: Tensor) -> Tensor:
        return F.linear(self.enter(x, group_of(module)), local(module.weight), self.bias(module))


class _Conv(Word):
    """Conv1D: nn.Linear with the weight [in, out]."""

    @property
    def exact(self) -> type[nn.Module]:  # pyright: ignore[reportIncompatibleVariableOverride]
        from transformers.pytorch_utils import Conv1D

        return Conv1D


class ConvColumn(_Conv):
    placements: ClassVar[dict[str, Placement]] = {"weight": Shard(1), "bias": Shard(0)}

    def __init__(self, stack: Stack | None = None, enters: bool = False) -> None:
        super().__init__(stack)
        self.enter = self.stack.enter if enters else as_it_is

    def forward(self, module: Any, x: Tensor) -> Tensor:
        return self.enter(x, group_of(module)) @ local(module.weight) + local(module.bias)


class ConvRow(_Conv):
    placements: ClassVar[dict[str, Placement]] = {"weight": Shard(0), "bias": Replicate()}
    cost = Row.cost

    def forward(self, module: Any, x: Tensor) -> Tensor:
        group = group_of(module)
        return self.leave(x @ local(module.weight), group) + self.stack.shared(module.bias, group)


class ConvPacked(_Conv):
    """GPT-2's [q | k | v] side by side: a contiguous cut would give a rank q and half of k."""

    parts: ClassVar[int] = 3
    placements: ClassVar[dict[str, Placement]] = {"weight": _StridedShard(1, split_factor=3), "bias": Replicate()}

    def check(self, module: nn.Module, tp: int) -> None:
        super().check(module, tp)
        columns = module.get_parameter("weight").shape[1]
        self.check_size(f"columns of {type(module).__name__} in {self.parts} parts", columns, self.parts * tp)

    def forward(self, module: Any, x: Tensor) -> Tensor:
        return x @ local(module.weight) + PackedColumn.bias(self, module)  # pyright: ignore[reportArgumentType]
