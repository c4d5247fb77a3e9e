"""Initial values as a function of (seed, parameter name, global index), so that all layouts get identical bits."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dtmega.models.model import Model
from dtmega.ops import keyed
from dtmega.ops.shards import boxes


@torch.no_grad()
def init_weights(model: Model, seed: int) -> None:
    """Set the initial values of all parameters, or of this rank's shards of them.

    The values are drawn from N(0, `Model.init_std`). If `init_std` is None, all values are `Model.init_constant`.
    """
    for name, parameter in model.named_parameters():
        name = model.full_name(name)
        std = model.init_std(name)
        draw(parameter, name, seed, std, model.init_constant(name) if std is None else 0.0)


def draw(parameter: Tensor, name: str, seed: int, std: float | None, constant: float) -> None:
    """Set the initial values of a parameter, or of this rank's shard of it.

    Args:
        parameter: parameter to fill, which may be sharded.
        name: name of the parameter in the whole model.
        seed: seed of the values.
        std: standard deviation of the values; None to set all values to `constant`.
        constant: value of all elements if `std` is None.
    """
    for offsets, part in boxes(parameter):
        if std is None:
            part.fill_(constant)
            continue
        # Draw a few rows at a time, because the fp64 temporaries take ten times the memory of the result.
        n_rows = max(1, _values_per_draw(part.device) // part[0].numel())
        for start in range(0, part.shape[0], n_rows):
            rows = part[start : start + n_rows]
            indices = _global_indices(rows, (offsets[0] + start, *offsets[1:]), parameter.shape)
            rows.copy_(keyed.normal(seed, name, indices) * std)


def _values_per_draw(device: torch.device) -> int:
    """The number of values to draw at a time: few on a CPU, to fit into the caches; many on a GPU, to save launches."""
    return 2**16 * torch.get_num_threads() if device.type == "cpu" else 2**22


def _global_indices(part: Tensor, offsets: Sequence[int], whole: Sequence[int]) -> Tensor:
    """The row-major index of each element in the whole tensor, int64 in the shape of `part`.

    Args:
        part: part of the whole tensor.
        offsets: start of `part` in the whole tensor, one index for each dim.
        whole: shape of the whole tensor.
    """
    indices = torch.zeros((), dtype=torch.int64, device=part.device)
    for size, offset, length in zip(part.shape, offsets, whole, strict=True):
        indices = (indices * length).unsqueeze(-1) + torch.arange(offset, offset + size, device=part.device)
    return indices
