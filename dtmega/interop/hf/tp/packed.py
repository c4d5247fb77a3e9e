"""Fused projections: several matrices side by side in one, of which each is cut; and Conv1D, GPT-2's transposed linear.

What stands side by side is cut as `_StridedShard`, DTensor's own word for it: `full_tensor()` has the columns in the
order of transformers, on any layout (in torch 2.11 that is an error, and `shards.full_tensor` works). A checkpoint
must not take such a shard for one piece; see `docs/decisions.md`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from dtmega.plans.base import Stack, Style, local_part
from dtmega.plans.products import product
from dtmega.plans.styles import Column, Row


class PackedColumn(Column):
    """nn.Linear whose output is `parts` matrices of the same size side by side: each of them is cut.

    The bias stays whole: FSDP2 cuts dim 0 as well, and a vector cut so twice is put together in the wrong order.
    """

    of_heads = True  # the bias
    dim = 0  # of the weight, along which they stand

    def __init__(self, stack: Stack | bool = True, parts: int = 2) -> None:
        super().__init__(stack)
        self.parts = parts

    def placement(self, name: str, tp: int) -> Placement | None:
        return {"weight": _StridedShard(self.dim, split_factor=self.parts), "bias": Replicate()}.get(name)

    def check(self, module: nn.Module, tp: int) -> None:
        super().check(module, tp)
        for name, parameter in module.named_parameters(recurse=False):
            size = parameter.shape[-1] if name == "bias" else parameter.shape[self.dim]
            self.check_size(f"'{name}' of {type(module).__name__} in {self.parts} parts", size, self.parts * tp)

    def multiply(self, module: Any, x: Tensor) -> Tensor:
        return product(x, self.matrix(module), self.bias(module))

    def bias(self, module: Any) -> Any:
        if module.bias is None:
            return None
        whole = self.stack.shared(module.bias, self.group, self.of_heads)
        return whole.view(self.parts, self.group.size(), -1)[:, self.group.rank()].flatten()


class PackedRow(Row):
    """nn.Linear whose input is `parts` vectors of the same size one behind the other: each of them is cut."""

    def __init__(self, stack: Stack, parts: int) -> None:
        super().__init__(stack)
        self.parts = parts

    def placement(self, name: str, tp: int) -> Placement | None:
        return {"weight": _StridedShard(1, split_factor=self.parts), "bias": Replicate()}.get(name)

    def check(self, module: nn.Module, tp: int) -> None:
        super().check(module, tp)
        size = next(module.parameters()).shape[1]
        self.check_size(f"'weight' of {type(module).__name__} in {self.parts} parts", size, self.parts * tp)


class MultiQueryColumn(Column):
    """nn.Linear to the heads of queries and, behind them, to one head of keys and one of values, which all share.

    Each rank has the whole weight, and computes its heads of queries and the two: its gradient is summed.
    """

    of_heads = True

    def __init__(self, stack: Stack, heads: int) -> None:
        super().__init__(stack)
        self.heads = heads

    def placement(self, name: str, tp: int) -> Placement | None:
        return Replicate()

    def check(self, module: nn.Module, tp: int) -> None:
        super().check(module, tp)
        rows = next(module.parameters()).shape[0]
        if self.heads % tp or rows % (self.heads + 2):
            raise ValueError(f"tp={tp} and {self.heads} heads: {rows} rows of {type(module).__name__} are not shared")

    def multiply(self, module: Any, x: Tensor) -> Tensor:
        here = self.heads // self.group.size()
        first = self.group.rank() * here

        def mine(parameter: Any) -> Any:
            if parameter is None:
                return None
            by_head = self.stack.shared(parameter, self.group, of_heads=True).unflatten(0, (self.heads + 2, -1))
            return torch.cat([by_head[first : first + here], by_head[self.heads :]]).flatten(0, 1)

        return product(x, mine(module.weight), mine(module.bias))


class _Conv(Style):
    """Conv1D: nn.Linear with the weight [in, out]."""

    def known(self) -> tuple[type[nn.Module], ...]:
        from transformers.pytorch_utils import Conv1D

        return (Conv1D,)

    def matrix(self, module: Any) -> Tensor:
        return _Transposed.apply(local_part(module.weight))  # pyright: ignore[reportReturnType]


class _Transposed(torch.autograd.Function):
    """[in, out] -> [out, in], whose gradient has the strides of the weight.

    Else autograd copies it into a new DTensor, which torch 2.11 cannot make of a `_StridedShard`.
    """

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        return weight.t()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return gradient.t().contiguous()


class ConvColumn(_Conv, Column):
    placements: ClassVar[Mapping[str, Placement]] = {"weight": Shard(1), "bias": Shard(0)}


class ConvRow(_Conv, Row):
    placements: ClassVar[Mapping[str, Placement]] = {"weight": Shard(0), "bias": Replicate()}


class ConvPacked(_Conv, PackedColumn):
    """GPT-2's [q | k | v] side by side: a contiguous cut would give a rank q and half of k."""

    dim = 1

    def __init__(self, stack: Stack | bool = True) -> None:
        super().__init__(stack, parts=3)
