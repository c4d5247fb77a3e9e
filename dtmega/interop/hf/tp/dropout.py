"""Dropout in a model we did not write: a stream of random numbers that tp ranks share, and one of each rank's own.

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
    """Check that the ranks have one random state: with the whole hidden state on each, all must drop the same.

    Raises:
        ValueError: the ranks of `group` have different random states.
    """
    device = next(module.parameters()).device
    state = generator_of(device).get_state()
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
        self.shared: tuple[torch.Generator, Tensor] | None = None

    def enter(self, device: torch.device, rank: int) -> None:
        generator = generator_of(device)
        seed = torch.randint(2**62, (1,), generator=generator, device=device).item()
        self.shared = (generator, generator.get_state())
        generator.manual_seed(int(seed) + rank)

    def leave(self) -> None:
        if self.shared is not None:
            generator, state = self.shared
            generator.set_state(state)
            self.shared = None


def generator_of(device: torch.device) -> torch.Generator:
    """The generator that dropout on this device draws from."""
    return torch.cuda.default_generators[device.index or 0] if device.type == "cuda" else torch.default_generator
