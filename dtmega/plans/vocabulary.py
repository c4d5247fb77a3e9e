"""Styles for both ends of a model: embeddings, a head sharded over the vocabulary, and heads that are not sharded.

The V rows of a vocabulary are sharded as in DTensor: ceil(V / tp) rows on each rank, perhaps fewer on the last rank.
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

from dtmega.ops.cross_entropy import linear_cross_entropy
from dtmega.plans import mappings
from dtmega.plans.base import Stack, Style, as_function, computing_on, local_part
from dtmega.plans.products import product


class VocabStyle(Style):
    """The base class of styles that shard a weight [V, D], and perhaps a bias [V], by rows."""

    placements: ClassVar[Mapping[str, Placement]] = {"weight": Shard(0), "bias": Shard(0)}

    def check_size(self, what: str, size: int, tp: int) -> None:
        if size <= (tp - 1) * -(-size // tp):
            raise ValueError(
                f"tp={tp} ranks x {-(-size // tp)} rows leave a rank without any of {size}: {what} "
                f"([mesh] tp, [model] vocab_size)"
            )

    def first_row(self, weight: DTensor) -> int:
        """The index of this rank's first row in the unsharded weight."""
        return weight.device_mesh.get_local_rank() * -(-weight.shape[0] // weight.device_mesh.size())


class VocabEmbedding(VocabStyle):
    """nn.Embedding sharded by rows: tokens [B, S] -> [B, S/tp, D], or [B, S, D] without sequence parallelism.

    Each rank looks up the tokens whose rows it holds, and contributes zeros for all other tokens to the sum over the
    ranks. Each rank therefore gets the gradient of its own rows. A subclass of nn.Embedding that changes rows, for
    example by scaling, applies its own forward to the rank's rows. A token outside [0, V) fails as on a single device:
    with an IndexError on a CPU, and with a device assert on CUDA.

    Raises:
        ValueError: `forward` must shard the sequence, but tp does not divide the sequence's length.
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
        # If another rank has a token's row, look up row 0 instead. Set the result to 0 before the sum over the ranks.
        # Invalid tokens are not changed, so that the lookup fails.
        in_range = (x >= 0) & (x < module.weight.shape[0])
        elsewhere = in_range & ((x < start) | (x >= start + n_rows))
        rows = self.rows(module, (x - start).masked_fill(elsewhere, 0), start, n_rows)
        return self.stack.leave(rows.masked_fill(elsewhere.unsqueeze(-1), 0), self.group)

    def rows(self, module: Any, x: Tensor, start: int, n_rows: int) -> Tensor:
        """Look up x, which indexes this rank's rows. These are rows [start, start + n_rows) of the unsharded weight."""
        padding: int | None = module.padding_idx
        with computing_on(module, local_part):
            # `padding_idx` is the row that gets no gradient. Only the rank that has this row may set `padding_idx`.
            if padding is not None:
                module.padding_idx = padding - start if start <= padding < start + n_rows else None
            try:
                return type(module).forward(module, x)
            finally:
                module.padding_idx = padding


class WholeEmbedding(Style):
    """nn.Embedding with few rows (positions, token types), replicated on every rank.

    The output for indices [B, S] is this rank's slice of the sequence, [B, S/tp, D], or [B, S, D] without sequence
    parallelism.
    """

    placements: ClassVar[Mapping[str, Placement]] = {"weight": Replicate()}

    def known(self) -> tuple[type[nn.Module], ...]:
        return (nn.Embedding,)

    def forward(self, module: Any, x: Tensor) -> Tensor:
        if self.stack.cut:
            x = x.chunk(self.group.size(), 1)[self.group.rank()]
        return F.embedding(x, local_part(module.weight))


class HeadColumns(Style):
    """nn.Embedding [buckets, H] for T5's relative positions, sharded by heads: bucket numbers [N] -> [N, H/tp]."""

    placements: ClassVar[Mapping[str, Placement]] = {"weight": Shard(1)}

    def known(self) -> tuple[type[nn.Module], ...]:
        return (nn.Embedding,)

    def forward(self, module: Any, x: Tensor) -> Tensor:
        return F.embedding(x, local_part(module.weight))


class Rejoin(ParallelStyle):
    """An unsharded module: every rank gathers the input, [B, S/tp, D] -> [B, S, D], and computes the whole module.

    The gradient of the gathered input is complete on every rank. In backward, each rank therefore takes its slice of
    that gradient, and nothing is reduced. Without sequence parallelism, the style does nothing. Inner modules get the
    whole sequence. Each either has replicated parameters (`Whole(False)`) or is a separate region (`VocabHead(False)`).

    Args:
        stack: stack that contains the module, as in `Style`.
        first_only: whether the module reads only x[:, 0]. If True, only the first position of each rank's slice is
            gathered, [B, tp, D].
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
            x = mappings.join(mine, self.group, 1, mine.shape[1] * self.group.size())
        return type(module).forward(module, x, *args, **kwargs)


class VocabHead(VocabStyle):
    """A head like `models.layers.LMHead`, sharded by rows: [B, S/tp, D] or [B, S, D] -> the loss, or logits [B, S, V].

    The module has `vocab_size` (V without padding rows) and `loss_terms()` (keyword arguments for
    `linear_cross_entropy`), and may have a bias. The ranks exchange a few numbers per token, and then each rank
    computes the whole loss from its own columns. If the sequence is not sharded before the head, the input may also be
    a selection of tokens, [N, D], which is the same on every rank.
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
            return self._gather_logits(module, product(h, weight, bias))
        return linear_cross_entropy(
            h.flatten(0, -2),
            weight,
            labels.flatten(),
            bias=bias,
            vocab_start=self.first_row(module.weight),
            group=self.group,
            **module.loss_terms(label_weights),
        )

    def _gather_logits(self, module: Any, local_logits: Tensor) -> Tensor:
        """Gather the columns [B, S, V_local] of all ranks into the logits [B, S, V], without padding columns.

        The function passes the shape and stride of the full tensor to `from_local`, because the last rank may have
        fewer columns than the other ranks.
        """
        n_columns = module.weight.shape[0]
        shape = torch.Size((*local_logits.shape[:2], n_columns))
        stride = (shape[1] * n_columns, n_columns, 1)
        cut = DTensor.from_local(
            local_logits, module.weight.device_mesh, [Shard(2)], run_check=False, shape=shape, stride=stride
        )
        return cut.full_tensor()[..., : module.vocab_size]
