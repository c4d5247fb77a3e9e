"""Random numbers for dropout in `transformers` models: one stream shared by the tp ranks, and one stream per rank.

Where every rank has the full hidden state, all ranks must drop the same elements, so they draw from the shared stream.
Where the sequence is sharded, each rank draws masks for its own tokens from its own stream. The masks are random, but
differ from those of a single-process run: `transformers` draws masks from torch's generator rather than from a key.
Without sequence parallelism, heads on different ranks get the same masks.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from dtmega.ops import host


def check_random_state(module: nn.Module, group: ProcessGroup) -> None:
    """Check that the ranks' random states are equal: ranks with the same hidden state must drop the same elements.

    Raises:
        ValueError: the ranks of `group` have different random states.
    """
    device = next(module.parameters()).device
    state = generator_of(device).get_state()
    # The ranks compare one number, a weighted sum of the state's bytes, instead of the whole state (5 kB on a CPU).
    checksum = (state.to(torch.int64) * (torch.arange(state.numel()) % 8191 + 1)).sum().to(device)
    lowest, highest = checksum.clone(), checksum.clone()
    dist.all_reduce(lowest, dist.ReduceOp.MIN, group=group)
    dist.all_reduce(highest, dist.ReduceOp.MAX, group=group)
    if not host.read(lowest == highest):
        raise ValueError(
            "dropout in training needs the same random state on all ranks of a tp group, and theirs differ: "
            "torch.manual_seed(seed + data-parallel rank) on each, or set the dropouts of the config to 0"
        )


class RandomStream:
    """A rank's own stream of random numbers, seeded from the shared stream, for dropout where the sequence is sharded.

    Attributes:
        shared: generator and saved state of the shared stream while the rank's own stream is in use; otherwise None.
    """

    def __init__(self) -> None:
        self.shared: tuple[torch.Generator, Tensor] | None = None

    def enter(self, device: torch.device, rank: int) -> None:
        """Switch to the rank's own stream. The seed is drawn from the shared stream, so it differs in each forward."""
        generator = generator_of(device)
        seed = host.read(torch.randint(2**62, (1,), generator=generator, device=device)).item()
        self.shared = (generator, generator.get_state())
        generator.manual_seed(int(seed) + rank)

    def leave(self) -> None:
        """Return to the shared stream, in the state that `enter` saved."""
        if self.shared is not None:
            generator, state = self.shared
            generator.set_state(state)
            self.shared = None


def generator_of(device: torch.device) -> torch.Generator:
    """The generator from which dropout on this device draws."""
    return torch.cuda.default_generators[device.index or 0] if device.type == "cuda" else torch.default_generator
