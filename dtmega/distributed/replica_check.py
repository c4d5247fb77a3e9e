"""Check that the copies of a tensor on several ranks are equal.

torch does not check that copies stay equal. In BLOOM's training, the copies of LayerNorm parameters drifted apart.

The ranks that hold copies compare checksums of the tensors' bits, with one collective per group.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from dtmega.ops.shards import local

# Number of words summed at a time. The words and their positions, both int64, take 4 MiB.
CHUNK = 2**18


def checksums(tensors: Mapping[str, Tensor]) -> Tensor:
    """Checksums of the tensors' local parts, [n] int64.

    The checksum of a tensor is the sum of its words, each multiplied by its position.

    A word has at most 32 bits, so an element of 8 bytes counts as two words. In a tensor of up to 2^31 words, one
    flipped bit or two swapped words always change the checksum: the sum changes by less than 2^63, and never by 0.
    """
    return torch.stack([_checksum(local(tensor).detach()) for tensor in tensors.values()])


def _checksum(tensor: Tensor) -> Tensor:
    """Checksum of one tensor, int64 scalar.

    The words are summed in chunks, so the extra memory does not grow with the tensor. The tensor itself is copied
    only if it is not contiguous.
    """
    words = tensor.flatten().view({1: torch.int8, 2: torch.int16}.get(tensor.itemsize, torch.int32))
    positions = torch.arange(1, min(CHUNK, words.numel()) + 1, device=words.device)
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    for start in range(0, words.numel(), CHUNK):
        chunk = words[start : start + CHUNK].to(torch.int64)
        # The position of a word is `start` plus its position in the chunk.
        total += start * chunk.sum()
        total += chunk.mul_(positions[: chunk.numel()]).sum()
    return total


def check_equal(tensors: Mapping[str, Tensor], group: dist.ProcessGroup, what: str) -> None:
    """Check that the tensors are equal, bit by bit, on all ranks of a group.

    Args:
        tensors: tensors to compare, keyed by name; the names must be equal on all ranks.
        group: group of the ranks that hold copies.
        what: description of the tensors, for the error message.

    Raises:
        RuntimeError: copies of a tensor differ. The error is raised on every rank of the group. The message names the
            first tensor that differs, and the ranks that differ from the majority.
    """
    if dist.get_world_size(group) == 1 or not tensors:
        return
    all_checksums = gather_checksums(tensors, group)
    differing = (all_checksums != all_checksums[0]).any(0).nonzero().flatten().tolist()
    if differing:
        name = list(tensors)[differing[0]]
        values = all_checksums[:, differing[0]].tolist()
        ranks = dist.get_process_group_ranks(group)
        ((usual, copies),) = Counter(values).most_common(1)
        odd = ", ".join(str(rank) for rank, value in zip(ranks, values, strict=True) if value != usual)
        has_majority = 2 * copies > len(values)
        who = f"rank {odd} is not like the others" if has_majority else "which of them is right cannot be told"
        raise RuntimeError(
            f"{what}: {len(differing)} of {len(tensors)} tensors differ between ranks {ranks}, first '{name}' ({who})"
        )


def gather_checksums(tensors: Mapping[str, Tensor], group: dist.ProcessGroup) -> Tensor:
    """Checksums of the tensors on every rank of a group, [ranks, n] int64."""
    return gather_vectors(checksums(tensors), group)


def gather_vectors(mine: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Gather a vector of n numbers from each rank of a group; return them as [ranks, n].

    Args:
        mine: vector of this rank, [n]; n is the same on all ranks.
        group: group of the ranks to gather from.
    """
    # nccl cannot gather from host memory, and the checksums of offloaded parameters are in host memory.
    if dist.get_backend(group) == "nccl":
        mine = mine.to("cuda")
    gathered = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(gathered, mine, group=group)
    return torch.stack(gathered)
