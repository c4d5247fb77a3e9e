"""Low-rank adapters over the tp axis. An adapter of a linear layer, A [r, in] and B [out, r], is cut as the layer is.

    the layer is cut by     A                B                what is sent
    outputs (Column)        whole            cut by outputs   nothing more: A reads the gathered input
    outputs, in parts       whole            whole            nothing more: a rank takes the rows of its outputs
    inputs (Row)            cut by inputs    whole            x A^T, r numbers for each token, is summed; then comes B
    nothing                 whole            whole            nothing

In a layer that is cut by outputs, a rank has only its own outputs' part of A's gradient, so the gradient is summed over
tp. In a layer that is cut by inputs, a rank applies B to its own tokens only if the sequence is cut, and B's gradient
is then summed over tp.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

NAMES = ("lora_a", "lora_b")


def placement(name: str, of_weight: Placement | None, output_dim: int) -> Placement | None:
    """The placement over tp of an adapter's parameter.

    Args:
        name: name of the parameter in its module, one of NAMES.
        of_weight: placement of the layer's weight.
        output_dim: dim of the weight along which the output features are.
    """
    if of_weight is None or of_weight == Replicate():
        return of_weight
    assert isinstance(of_weight, Shard | _StridedShard)
    by_output, in_parts = of_weight.dim == output_dim, isinstance(of_weight, _StridedShard)
    if by_output != (name == "lora_b"):
        return Replicate()
    if by_output:
        # If tp cuts the rows in parts, FSDP2 has to cut the other dim, which has only r entries (`shards.dim_to_cut`).
        return Replicate() if in_parts else Shard(0)
    return _StridedShard(1, split_factor=of_weight.split_factor) if in_parts else Shard(1)


def has_adapter(module: Any) -> bool:
    """True if the linear layer has an adapter."""
    return hasattr(module, "lora_a")


def add(module: Any, out: Tensor, reduced: Tensor, b: Tensor) -> Tensor:
    """Add an adapter's result to the layer's output.

    Args:
        module: the layer.
        out: output of the layer, [..., out] or this rank's part of it.
        reduced: x A^T, [..., r].
        b: the rows of B that belong to `out`.
    """
    return out + module.lora_scale * F.linear(reduced, b)
