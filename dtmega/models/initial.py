"""Initial values as a function of (seed, parameter name, global index): the same bits on every layout."""

from __future__ import annotations

import torch

from dtmega import keyed
from dtmega.models.stage import Stage
from dtmega.shards import boxes


@torch.no_grad()
def init_weights(model: Stage, seed: int) -> None:
    """Fill the parameters held here: N(0, std) where `Stage.init_std` gives one, else weights 1 and biases 0."""
    for name, parameter in model.named_parameters():
        name = model.full_name(name)
        std = model.init_std(name)
        for offsets, part in boxes(parameter):
            if std is None:
                part.fill_(1.0 if name.endswith("weight") else 0.0)
                continue
            columns = torch.arange(part.shape[1], device=part.device) + offsets[1]
            # Some rows at a time: the fp64 temporaries of `normal` take ten times the memory of its result.
            step = max(1, 2**20 // part.shape[1])
            for start in range(0, part.shape[0], step):
                piece = part[start : start + step]
                rows = torch.arange(piece.shape[0], device=part.device) + (offsets[0] + start)
                piece.copy_(keyed.normal(seed, name, rows[:, None] * parameter.shape[1] + columns) * std)
