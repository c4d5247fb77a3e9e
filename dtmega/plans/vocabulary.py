"""Both ends of a model over the tp axis: embeddings, a head cut over the vocabulary, and heads that are not cut.

Any number of rows V is shared as DTensor shares it, ceil(V / tp) a rank and fewer on the last one.
"""

from __future__ import annotations

import types
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ParallelStyle
from torch.distributed.tensor.placement_types import Placement

from dtmega.loss import linear_cross_entropy
from dtmega.plans import mappings
from dtmega.plans.base import Stack, Style, as_function, computing_on, local_part
from dtmega.plans.products import product


class VocabStyle(Style):
    """A weight [V, D] cut by rows, and a bias [V] with it."""

    placements: ClassVar[Mapping[str, Placement]] = {"weight": Shard(0), "bias": Shard(0)}

    def check_size(self, what: str, size: int, tp: int) -> None:
        if size <= (tp - 1) * -(-size // tp):
            raise ValueError(
                f"tp={tp} ranks x {-(-size // tp)} rows leave a rank without any of {size}: {what} "
                f"([mesh] tp, [model] vocab_size)"
            )

    def first_row(self, weight: DTensor) -> int:
        return weight.device_mesh.get_local_rank() * -(-weight.shape[0] // weight.device_mesh.size())


class VocabEmbedding(VocabStyle):
    """nn.Embedding cut by rows: tokens [B, S] -> [B, S/tp, D], or [B, S, D]; its gradient is of the rank's rows only.

    A subclass that does something to each row (scales it) does so to the rank's rows, by its own forward. A token
    outside [0, V) fails as on one device: an IndexError on CPU, a device assert on CUDA.

    Raises:
        ValueError: in forward, S that tp does not divide.
    """

    cost = ("all-reduce", "reduce-scatter, backward all-gather")

    def check_class(self, module: nn.Module) -> None:
        if not isinstance(module, nn.Embedding) or module.max_norm is not None or module.scale_grad_by_freq:
            raise ValueError(
                f"VocabEmbedding is for nn.Embedding without max_norm and scale_grad_by_freq, not {module}"
            )

    def forward(self, module: Any, x: Tensor) -> Tensor:
        tp = module.weight.device_mesh.size()
        if self.stack.cut and x.shape[1] % tp:
            raise ValueError(
                f"tp={tp} does not divide a sequence of {x.shape[1]} tokens "
                f"([mesh] tp, [data] seq_len, or [mesh] sequence_parallel = false)"
            )
        n_rows, start = module.weight.to_local().shape[0], self.first_row(module.weight)
        in_range = (x >= 0) & (x < module.weight.shape[0])
        elsewhere = in_range & ((x < start) | (x >= start + n_rows))
        rows = self.rows(module, (x - start).masked_fill(elsewhere, 0), start, n_rows)
        return self.stack.leave(rows.masked_fill(elsewhere.unsqueeze(-1), 0), self.group)

    def rows(self, module: Any, x: Tensor, start: int, n_rows: int) -> Tensor:
        """The output of the module for numbers of rows of this rank."""
        padding: int | None = module.padding_idx
        with computing_on(module, local_part):
            # The row of padding has no gradient, on the rank that has it.
            if padding is not None:
                module.padding_idx = padding - start if start <= padding < start + n_rows else None
            try:
                return type(module).forward(module, x)
            finally:
                module.padding_idx = padding


class WholeEmbedding(Style):
    """nn.Embedding of few rows (positions, token types), whole on every rank: [B, S] -> [B, S/tp, D] of its part.

    Without sequence parallelism [B, S, D].
    """

    placements: ClassVar[Mapping[str, Placement]] = {"weight": Replicate()}

    def known(self) -> tuple[type[nn.Module], ...]:
        return (nn.Embedding,)

    def forward(self, module: Any, x: Tensor) -> Tensor:
        if self.stack.cut:
            x = x.chunk(self.group.size(), 1)[self.group.rank()]
        return F.embedding(x, local_part(module.weight))


class HeadColumns(Style):
    """nn.Embedding [buckets, H] of T5's relative positions, cut by heads: numbers of buckets [N] -> [N, H/tp]."""

    placements: ClassVar[Mapping[str, Placement]] = {"weight": Shard(1)}

    def known(self) -> tuple[type[nn.Module], ...]:
        return (nn.Embedding,)

    def forward(self, module: Any, x: Tensor) -> Tensor:
        return F.embedding(x, local_part(module.weight))


class Rejoin(ParallelStyle):
    """A module that is not cut at all, and does the same work on every rank: its input is made whole.

    [B, S/tp, D] -> [B, S, D]. The gradient of that is whole on every rank too, so each takes its part, and nothing is
    summed. Without sequence parallelism there is nothing to do. Inside of it parameters are whole (`Whole(False)`), and
    what is cut takes its input in by itself, without a sequence that is cut (`VocabHead(False)`).

    Args:
        stack: as for a Style.
        first_only: the module reads x[:, 0] alone: only the first of each rank's places travel, [B, tp, D].
    """

    def __init__(self, stack: Stack | bool = True, first_only: bool = False) -> None:
        self.stack = stack if isinstance(stack, Stack) else Stack(stack)
        self.first_only = first_only
        self._function = as_function(self.forward)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        self.group = device_mesh.get_group()
        module.forward = types.MethodType(self._function, module)
        return module

    def forward(self, module: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        if self.stack.cut:
            mine = x[:, :1] if self.first_only else x
            x = mappings.whole(mine, self.group, 1, mine.shape[1] * self.group.size())
        return type(module).forward(module, x, *args, **kwargs)


class VocabHead(VocabStyle):
    """A head like `models.layers.LMHead` cut by rows: [B, S/tp, D] or [B, S, D] -> the loss, or logits [B, S, V].

    The module has `vocab_size` (V without padding rows), `loss_terms()` (keywords of `linear_cross_entropy`), and may
    have a bias. Each rank computes the same loss, from its own columns and one exchange of a few numbers a token.
    Where it is given some tokens only, [N, D], each rank has all of them, and the sequence is not cut there.
    """

    def check_class(self, module: nn.Module) -> None:
        if not hasattr(module, "vocab_size") or not hasattr(module, "loss_terms"):
            raise ValueError(f"VocabHead is for a head with vocab_size and loss_terms(), not {type(module).__name__}")

    def forward(
        self, module: Any, x: Tensor, labels: Tensor | None = None, label_weights: Tensor | None = None
    ) -> Tensor:
        weight = local_part(module.weight)
        bias = local_part(module.bias)
        h = self.stack.enter(x, self.group)
        if labels is None:
            return self._whole_logits(module, product(h, weight, bias))
        return linear_cross_entropy(
            h.flatten(0, -2),
            weight,
            labels.flatten(),
            bias=bias,
            vocab_start=self.first_row(module.weight),
            group=self.group,
            **module.loss_terms(label_weights),
        )

    def _whole_logits(self, module: Any, mine: Tensor) -> Tensor:
        """[B, S, V] without padding rows, from this rank's columns [B, S, V_local], which may be fewer on the last."""
        n_columns = module.weight.shape[0]
        shape = torch.Size((*mine.shape[:2], n_columns))
        stride = (shape[1] * n_columns, n_columns, 1)
        cut = DTensor.from_local(
            mine, module.weight.device_mesh, [Shard(2)], run_check=False, shape=shape, stride=stride
        )
        return cut.full_tensor()[..., : module.vocab_size]
