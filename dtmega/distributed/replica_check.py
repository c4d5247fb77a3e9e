"""A check that copies are equal. Nothing in torch verifies a replica, and the LayerNorms of BLOOM drifted apart.

A checksum of the bits of every tensor is compared over the group that holds copies of it. One collective per group.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from dtmega.ops.shards import local

# Words that are summed at a time; as int64, and with their places, 4 MiB.
CHUNK = 2**18


def checksums(tensors: Mapping[str, Tensor]) -> Tensor:
    """[n] int64: for each tensor's local part, the sum of its words' bits, each weighted by its place.

    One flipped bit, and two swapped words that differ, change the sum for certain: a word has at most 32 bits, so in a
    tensor of up to 2^31 words either moves the sum by less than 2^63, and never by 0. 8 bytes are two words.
    """
    return torch.stack([_checksum(local(tensor).detach()) for tensor in tensors.values()])


def _checksum(tensor: Tensor) -> Tensor:
    """int64 scalar, in pieces: the memory this takes does not grow with the tensor, if that is contiguous."""
    words = tensor.flatten().view({1: torch.int8, 2: torch.int16}.get(tensor.itemsize, torch.int32))
    places = torch.arange(1, min(CHUNK, words.numel()) + 1, device=words.device)
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    for start in range(0, words.numel(), CHUNK):
        chunk = words[start : start + CHUNK].to(torch.int64)
        total += start * chunk.sum()
        total += chunk.mul_(places[: chunk.numel()]).sum()
    return total


def check_equal(tensors: Mapping[str, Tensor], group: dist.ProcessGroup, what: str) -> None:
    """Check that all ranks of `group` hold the same bits under each name. The ranks must pass the same names.

    Raises:
        RuntimeError: on every rank of the group; names the first tensor that differs, and the ranks that are alone.
    """
    if dist.get_world_size(group) == 1 or not tensors:
        return
    everyone = gather_checksums(tensors, group)
    differing = (everyone != everyone[0]).any(0).nonzero().flatten().tolist()
    if differing:
        name = list(tensors)[differing[0]]
        values = everyone[:, differing[0]].tolist()
        ranks = dist.get_process_group_ranks(group)
        ((usual, copies),) = Counter(values).most_common(1)
        odd = ", ".join(str(rank) for rank, value in zip(ranks, values, strict=True) if value != usual)
        most = 2 * copies > len(values)
        who = f"rank {odd} is not like the others" if most else "which of them is right cannot be told"
        raise RuntimeError(
            f"{what}: {len(differing)} of {len(tensors)} tensors differ between ranks {ranks}, first '{name}' ({who})"
        )


def gather_checksums(tensors: Mapping[str, Tensor], group: dist.ProcessGroup) -> Tensor:
    """[ranks, n] int64: the checksums of every rank of `group`."""
    return gather_vectors(checksums(tensors), group)


def gather_vectors(mine: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[ranks, n]: a vector of as many numbers from each rank of `group`."""
    if dist.get_backend(group) == "nccl":
        mine = mine.to("cuda")  # offloaded parameters are in host memory, where nccl cannot gather
    gathered = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(gathered, mine, group=group)
    return torch.stack(gathered)
