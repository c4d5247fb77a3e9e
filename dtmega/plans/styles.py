"""How one module is cut over the tp axis: torch's `ParallelStyle`s whose modules compute on local tensors.

Between modules the hidden state is a plain tensor: [B, S/tp, D] with sequence parallelism (arXiv:2205.05198), else
[B, S, D] on every rank. Each parameter becomes a DTensor on the 1-D tp mesh, which is what FSDP2, gradient clipping
and checkpoints read. The module's forward takes the local part of it (FSDP2 hands it the same kind of DTensor, gathered
over FSDP2's own axes), so that DTensor dispatches no operation of the hot path.

The gradient of a replicated parameter that sees S/tp of the tokens is this rank's part {U_tp}. It stays so through
backward; a style names such parameters in `partial_gradients`, to be summed once a step (`plans.sum_partial_gradients`;
Megatron's `allreduce_layernorm_grads`).
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle
from torch.distributed.tensor.placement_types import Placement

from dtmega.loss import linear_cross_entropy
from dtmega.plans import mappings


class Style(ParallelStyle):
    """Parameters as DTensors, and `forward` in place of the module's own.

    Args:
        sequence_parallel: the hidden state between modules is cut along S.
        sizes: what tp must divide, by its key in [model].
    """

    placements: ClassVar[dict[str, Placement]]

    def __init__(self, sequence_parallel: bool = True, **sizes: int) -> None:
        self.sequence_parallel = sequence_parallel
        self.sizes = sizes
        self.enter = mappings.gather if sequence_parallel else mappings.copy
        self.leave = mappings.scatter if sequence_parallel else mappings.add_up
        # One function for all modules of a style: with one for each, torch.compile would compile each block anew.
        self._function = as_function(self.forward)

    @property
    def partial_gradients(self) -> set[str]:
        """Parameters whose gradient on each rank is that of its own tokens."""
        return {n for n, p in self.placements.items() if p == Replicate()} if self.sequence_parallel else set()

    def forward(self, module: Any, x: Tensor) -> Tensor:
        raise NotImplementedError

    def check(self, module: nn.Module, tp: int) -> None:
        """Raises ValueError where tp ranks cannot share the module, or the style is not for it."""
        kind, owner = type(self).__name__, type(module).__name__
        for key, size in self.sizes.items():
            if size % tp:
                raise ValueError(f"tp={tp} does not divide {key}={size} ([mesh] tp, [model] {key})")
        for name, parameter in module.named_parameters(recurse=False):
            placement, shape = self.placements.get(name), list(parameter.shape)
            if placement is None:
                raise ValueError(f"{kind} is for modules with {list(self.placements)}, but {owner} has '{name}'")
            if isinstance(parameter, DTensor):
                raise ValueError(f"{kind} cannot cut '{name}' of {owner}: another style did ({parameter.placements})")
            if isinstance(placement, Shard):
                self.check_size(f"dim {placement.dim} of '{name}' {shape} of {owner}", shape[placement.dim], tp)

    def check_size(self, what: str, size: int, tp: int) -> None:
        if size % tp:
            raise ValueError(f"tp={tp} does not divide {size}: {what} ([mesh] tp)")

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        self.check(module, device_mesh.size())
        for name, parameter in list(module.named_parameters(recurse=False)):
            module.register_parameter(name, distribute(parameter, device_mesh, self.placements[name]))
        module.forward = types.MethodType(self._function, module)
        return module


class Column(Style):
    """nn.Linear cut by output features: [B, S/tp, D] -> [B, S, F/tp]; without sequence parallelism from [B, S, D].

    Fused projections stay one product: rows ordered [head, (q, k, v), K] are cut between heads.
    """

    placements: ClassVar[dict[str, Placement]] = {"weight": Shard(0), "bias": Shard(0)}

    def forward(self, module: Any, x: Tensor) -> Tensor:
        return F.linear(self.enter(x, group_of(module)), local(module.weight), local(module.bias))


class KVColumn(Column):
    """nn.Linear to keys or values of `kv_heads` heads: a Column, or where tp is a multiple of kv_heads, copied.

    Each of tp / kv_heads ranks then has the whole weight and computes the one head that its heads of queries need; the
    weight's gradient is the sum of the ranks' parts.
    """

    def __init__(self, kv_heads: int, sequence_parallel: bool = True) -> None:
        super().__init__(sequence_parallel)
        self.kv_heads = kv_heads
        self.copied = False

    @property
    def partial_gradients(self) -> set[str]:
        return {"weight", "bias"} if self.copied else set()

    def check(self, module: nn.Module, tp: int) -> None:
        if self.kv_heads % tp and tp % self.kv_heads:
            raise ValueError(
                f"tp={tp} and n_kv_heads={self.kv_heads}: neither divides the other, so heads of keys can neither be "
                f"cut nor copied evenly ([mesh] tp, [model] n_kv_heads)"
            )
        if self.kv_heads % tp == 0:
            super().check(module, tp)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        self.check(module, device_mesh.size())
        self.copied = self.kv_heads % device_mesh.size() > 0
        placement = Replicate() if self.copied else Shard(0)
        for name, parameter in list(module.named_parameters(recurse=False)):
            module.register_parameter(name, distribute(parameter, device_mesh, placement))
        module.forward = types.MethodType(self._function, module)
        return module

    def forward(self, module: Any, x: Tensor) -> Tensor:
        if not self.copied:
            return super().forward(module, x)
        group = group_of(module)
        head = group.rank() * self.kv_heads // group.size()

        def mine(parameter: Any) -> Any:
            return None if parameter is None else local(parameter).unflatten(0, (self.kv_heads, -1))[head]

        return F.linear(self.enter(x, group), mine(module.weight), mine(module.bias))


class Row(Style):
    """nn.Linear cut by input features: [B, S, F/tp] -> [B, S/tp, D]; without sequence parallelism to [B, S, D].

    The ranks' products are summed, and the bias is added once, to the sum.
    """

    placements: ClassVar[dict[str, Placement]] = {"weight": Shard(1), "bias": Replicate()}

    def forward(self, module: Any, x: Tensor) -> Tensor:
        out = self.leave(F.linear(x, local(module.weight)), group_of(module))
        return out if module.bias is None else out + local(module.bias)


class Norm(Style):
    """nn.LayerNorm or nn.RMSNorm with the same weights on every rank, on its tokens: [B, S/tp, D] or [B, S, D]."""

    placements: ClassVar[dict[str, Placement]] = {"weight": Replicate(), "bias": Replicate()}

    def forward(self, module: Any, x: Tensor) -> Tensor:
        if isinstance(module, nn.RMSNorm):
            return F.rms_norm(x, module.normalized_shape, local(module.weight), module.eps)
        return F.layer_norm(x, module.normalized_shape, local(module.weight), local(module.bias), module.eps)


class _Vocabulary(Style):
    """A weight [V, D] cut by rows as DTensor cuts: ceil(V / tp) a rank, the last one may have fewer."""

    placements: ClassVar[dict[str, Placement]] = {"weight": Shard(0)}

    def check_size(self, what: str, size: int, tp: int) -> None:
        if size <= (tp - 1) * -(-size // tp):
            raise ValueError(
                f"tp={tp} ranks x {-(-size // tp)} rows leave a rank without any of {size}: {what} "
                f"([mesh] tp, [model] vocab_size)"
            )

    def first_row(self, weight: DTensor) -> int:
        return weight.device_mesh.get_local_rank() * -(-weight.shape[0] // weight.device_mesh.size())


class VocabEmbedding(_Vocabulary):
    """nn.Embedding cut by rows: tokens [B, S] -> [B, S/tp, D], or [B, S, D]; its gradient is of the rank's rows only.

    A token outside [0, V) fails as on one device: an IndexError on CPU, a device assert on CUDA.

    Raises:
        ValueError: in forward, S that tp does not divide.
    """

    def forward(self, module: Any, x: Tensor) -> Tensor:
        tp = module.weight.device_mesh.size()
        if self.sequence_parallel and x.shape[1] % tp:
            raise ValueError(
                f"tp={tp} does not divide a sequence of {x.shape[1]} tokens "
                f"([mesh] tp, [data] seq_len, or [mesh] sequence_parallel = false)"
            )
        weight, start = local(module.weight), self.first_row(module.weight)
        in_range = (x >= 0) & (x < module.weight.shape[0])
        elsewhere = in_range & ((x < start) | (x >= start + weight.shape[0]))
        rows = F.embedding((x - start).masked_fill(elsewhere, 0), weight)
        return self.leave(rows.masked_fill(elsewhere.unsqueeze(-1), 0), group_of(module))


class PositionEmbedding(Style):
    """nn.Embedding of learned positions, whole on every rank: [B, S] -> [B, S/tp, D] of its part, or [B, S, D]."""

    placements: ClassVar[dict[str, Placement]] = {"weight": Replicate()}

    def forward(self, module: Any, x: Tensor) -> Tensor:
        if self.sequence_parallel:
            group = group_of(module)
            x = x.chunk(group.size(), 1)[group.rank()]
        return F.embedding(x, local(module.weight))


class VocabHead(_Vocabulary):
    """A head like `models.layers.LMHead` cut by rows: [B, S/tp, D] or [B, S, D] -> the loss, or logits [B, S, V].

    The module has `vocab_size` (V without padding rows) and `loss_terms()` (keywords of `linear_cross_entropy`).
    Each rank computes the same loss, from its own columns and one exchange of a few numbers a token.
    """

    def forward(self, module: Any, x: Tensor, labels: Tensor | None = None) -> Tensor:
        group, mesh, weight = group_of(module), module.weight.device_mesh, local(module.weight)
        h = self.enter(x, group)
        if labels is None:
            logits, shape = F.linear(h, weight), torch.Size((*h.shape[:2], module.weight.shape[0]))
            stride = (shape[1] * shape[2], shape[2], 1)
            cut = DTensor.from_local(logits, mesh, [Shard(2)], run_check=False, shape=shape, stride=stride)
            return cut.full_tensor()[..., : module.vocab_size]
        start, terms = self.first_row(module.weight), module.loss_terms()
        return linear_cross_entropy(h.flatten(0, 1), weight, labels.flatten(), vocab_start=start, group=group, **terms)


class SequenceShard(ParallelStyle):
    """A dropout site that sees this rank's part of the sequence: of the places, which are whole, it takes that part.

    For modules called as (x [B, S/tp, D], sample_ids, places [B, S]), in plans with sequence parallelism.
    """

    def __init__(self) -> None:
        self.rank = 0
        self._function = as_function(self.forward)

    def forward(self, module: Any, x: Tensor, sample_ids: Tensor | None, places: Tensor) -> Tensor:
        first = self.rank * x.shape[1]
        return type(module).forward(module, x, sample_ids, places[:, first : first + x.shape[1]])

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if "places" not in inspect.signature(type(module).forward).parameters:
            raise ValueError(f"SequenceShard is for modules that are given places, {type(module).__name__} is not")
        self.rank = device_mesh.get_local_rank()
        module.forward = types.MethodType(self._function, module)
        return module


@dataclass(frozen=True)
class ShardBuffer:
    """A buffer with `size` entries along `dim`, cut there; its pattern names the buffer. Applied by `shard_buffers`."""

    size: int
    dim: int = 0


Plan = Mapping[str, ParallelStyle | ShardBuffer]


def distribute(parameter: nn.Parameter, tp: DeviceMesh, placement: Placement) -> nn.Parameter:
    """The DTensor of a parameter that every rank holds whole, or of one on meta; nothing is communicated."""
    cut = distribute_tensor(parameter, tp, [placement], src_data_rank=None)
    return nn.Parameter(cut, requires_grad=parameter.requires_grad)


def as_function(method: Callable[..., Any]) -> Callable[..., Any]:
    """A plain function that calls a method of a style, to be bound to a module.

    The method itself is bound already, to the style. Bound once more to a module it is a call that Dynamo of torch 2.11
    does not follow: a graph break in every block.
    """

    def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return method(module, *args, **kwargs)

    return forward


def group_of(module: Any) -> ProcessGroup:
    return module.weight.device_mesh.get_group()


def local(parameter: Any) -> Any:
    """This rank's part. The gradient comes back with the parameter's placement, and for a replicated one unsummed."""
    return None if parameter is None else parameter.to_local()
