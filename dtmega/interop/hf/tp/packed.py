"""Styles for fused projections and for Conv1D, GPT-2's linear layer with a transposed weight.

The weight of a fused projection consists of several matrices side by side. Each matrix is sharded over tp, so a rank's
rows are not contiguous. DTensor has the placement `_StridedShard` for such shards. With this placement, `full_tensor()`
returns the columns in transformers' order on any layout, but fails in torch 2.11; use `shards.full_tensor` instead.
A checkpoint must not treat a strided shard as one box; see `archive/2026-11.md`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from dtmega.plans.base import ADAPTER, Stack, Style, local_part
from dtmega.plans.products import product
from dtmega.plans.styles import Column, Row


class PackedColumn(Column):
    """Style of an nn.Linear whose weight consists of `parts` equally sized matrices, side by side along the output.

    Each matrix is sharded over tp.

    The bias is replicated over tp, because FSDP2 also shards dim 0. If tp sharded each of the `parts` of the bias, and
    FSDP2 then sharded the result, the bias would be gathered in the wrong order.
    """

    of_heads = True  # each rank uses only some rows of the replicated bias, so the gradient has to be summed over tp
    dim = 0  # dim of the weight along which the matrices are concatenated

    def __init__(self, stack: Stack | bool = True, parts: int = 2) -> None:
        super().__init__(stack)
        self.parts = parts

    def placement(self, name: str, tp: int) -> Placement | None:
        return {"weight": _StridedShard(self.dim, split_factor=self.parts), "bias": Replicate()}.get(name)

    def check(self, module: nn.Module, tp: int) -> None:
        super().check(module, tp)
        own = {name: p for name, p in module.named_parameters(recurse=False) if name not in ADAPTER}
        for name, parameter in own.items():
            size = parameter.shape[-1] if name == "bias" else parameter.shape[self.dim]
            self.check_size(f"'{name}' of {type(module).__name__} in {self.parts} parts", size, self.parts * tp)

    def multiply(self, module: Any, x: Tensor) -> Tensor:
        return product(x, self.matrix(module), self.rows(module.bias))

    def rows(self, parameter: Any) -> Any:
        if parameter is None:
            return None
        whole = self.stack.shared(parameter, self.group, self.of_heads)
        return whole.unflatten(0, (self.parts, self.group.size(), -1))[:, self.group.rank()].flatten(0, 1)


class PackedRow(Row):
    """A `Row` style for a linear layer whose input concatenates `parts` equally sized vectors, each sharded over tp."""

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
    """Style of an nn.Linear whose output holds all query heads, then one shared key head and one shared value head.

    The weight is replicated over tp. Each rank computes its own query heads, and the shared keys and values. The
    weight's gradient is summed over tp.

    Args:
        heads: number of query heads.
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
            raise ValueError(f"tp={tp} and {self.heads} heads: {rows} rows of {type(module).__name__} cannot be shared")

    def multiply(self, module: Any, x: Tensor) -> Tensor:
        return product(x, self.rows(module.weight), self.rows(module.bias))

    def rows(self, parameter: Any) -> Any:
        if parameter is None:
            return None
        n_local = self.heads // self.group.size()
        first = self.group.rank() * n_local
        by_head = self.stack.shared(parameter, self.group, of_heads=True).unflatten(0, (self.heads + 2, -1))
        return torch.cat([by_head[first : first + n_local], by_head[self.heads :]]).flatten(0, 1)


class _Conv(Style):
    """Mixin for styles of Conv1D, a linear layer that stores its weight as [in, out]."""

    output_dim = 1

    def known(self) -> tuple[type[nn.Module], ...]:
        from transformers.pytorch_utils import Conv1D

        return (Conv1D,)

    def matrix(self, module: Any) -> Tensor:
        return _Transposed.apply(local_part(module.weight))  # pyright: ignore[reportReturnType]


class _Transposed(torch.autograd.Function):
    """Transposes a weight [in, out] to [out, in]. The gradient has the weight's strides.

    Autograd would copy a gradient with other strides into a new DTensor, but torch 2.11 cannot make a DTensor with a
    `_StridedShard`.
    """

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        return weight.t()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return gradient.t().contiguous()


class ConvColumn(_Conv, Column):
    """A `Column` style for Conv1D."""

    placements: ClassVar[Mapping[str, Placement]] = {"weight": Shard(1), "bias": Shard(0)}


class ConvRow(_Conv, Row):
    """A `Row` style for Conv1D."""

    placements: ClassVar[Mapping[str, Placement]] = {"weight": Shard(0), "bias": Replicate()}


class ConvPacked(_Conv, PackedColumn):
    """A `PackedColumn` style for GPT-2's Conv1D with output [q | k | v].

    With tp=2, a plain `Column` would put all of q on rank 0.
    """

    dim = 1

    def __init__(self, stack: Stack | bool = True) -> None:
        super().__init__(stack, parts=3)
