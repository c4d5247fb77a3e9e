"""Initial values as a function of (seed, parameter name, global index): the same bits on every layout."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dtmega import keyed
from dtmega.models.model import Model
from dtmega.shards import boxes


@torch.no_grad()
def init_weights(model: Model, seed: int) -> None:
    """Fill the parameters held here: N(0, std) where `Model.init_std` gives one, else `init_constant`."""
    for name, parameter in model.named_parameters():
        name = model.full_name(name)
        std = model.init_std(name)
        for offsets, part in boxes(parameter):
            if std is None:
                part.fill_(model.init_constant(name))
                continue
            # Some rows at a time, whose fp64 temporaries take ten times the memory of what is drawn.
            step = max(1, _at_a_time(part.device) // part[0].numel())
            for start in range(0, part.shape[0], step):
                piece = part[start : start + step]
                where = _numbers(piece, (offsets[0] + start, *offsets[1:]), parameter.shape)
                piece.copy_(keyed.normal(seed, name, where) * std)


def _at_a_time(device: torch.device) -> int:
    """How many values: on a CPU as many as leave their temporaries in the cache of each core, else a few launches."""
    return 2**16 * torch.get_num_threads() if device.type == "cpu" else 2**22


def _numbers(part: Tensor, offsets: Sequence[int], whole: Sequence[int]) -> Tensor:
    """The number of each element of the box at `offsets` among those of the whole tensor, row by row."""
    found = torch.zeros((), dtype=torch.int64, device=part.device)
    for size, offset, length in zip(part.shape, offsets, whole, strict=True):
        found = (found * length).unsqueeze(-1) + torch.arange(offset, offset + size, device=part.device)
    return found
