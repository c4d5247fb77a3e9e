"""Dropout in a model we did not write, over tp: one stream of random numbers that all ranks share, and one of a rank's own.

Where every rank has the whole hidden state, all must drop the same; where the sequence is cut, each drops its own. The
masks are good ones, but not those of one process: `transformers` draws them from torch's generator, not from a key.
Without sequence parallelism a rank's heads get the masks of the other ranks' heads.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup


def check_random_state(module: nn.Module, group: ProcessGroup) -> None:
    """Where every rank has the whole hidden state, all must drop the same.

    Raises:
        ValueError: the ranks of `group` have different random states.
    """
    device = next(module.parameters()).device
    state = torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()
    # A few numbers of it, the counter among them, tell states apart.
    mine = (state.to(torch.int64) * (torch.arange(state.numel()) % 8191 + 1)).sum().to(device)
    lowest, highest = mine.clone(), mine.clone()
    dist.all_reduce(lowest, dist.ReduceOp.MIN, group=group)
    dist.all_reduce(highest, dist.ReduceOp.MAX, group=group)
    if lowest != highest:
        raise ValueError(
            "dropout in training needs the same random state on all ranks of a tp group, and theirs differ: "
            "torch.manual_seed(seed + data-parallel rank) on each, or set the dropouts of the config to 0"
        )


class RandomStream:
    """Dropout where each rank has tokens of its own: a stream of its own, seeded from the one they share."""

    def __init__(self) -> None:
        self.shared: tuple[torch.device, Tensor] | None = None

    def enter(self, device: torch.device, rank: int) -> None:
        get = torch.cuda.get_rng_state if device.type == "cuda" else torch.get_rng_state
        seed = int(torch.randint(2**62, (), device=device))
        self.shared = (device, get(device) if device.type == "cuda" else get())
        _seed(device, seed + rank)

    def leave(self) -> None:
        if self.shared is not None:
            device, state = self.shared
            if device.type == "cuda":
                torch.cuda.set_rng_state(state, device)
            else:
                torch.set_rng_state(state)
            self.shared = None


def _seed(device: torch.device, seed: int) -> None:
    generator = torch.cuda.default_generators[device.index or 0] if device.type == "cuda" else torch.default_generator
    generator.manual_seed(seed)
