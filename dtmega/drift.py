"""Copies that should be equal, are they? Nothing in torch verifies a replica, and the LayerNorms of BLOOM drifted.

A checksum of the bits of every tensor is compared over the group that holds copies of it. One collective per group.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from dtmega.shards import local


def checksums(tensors: Mapping[str, Tensor]) -> Tensor:
    """[n] int64: for each tensor's local part, the sum of its elements' bits, each weighted by its place."""
    sums = []
    for tensor in tensors.values():
        bits = local(tensor).detach().contiguous().flatten().view(torch.uint8).to(torch.int64)
        sums.append((bits * (torch.arange(bits.numel(), device=bits.device) % 8191 + 1)).sum())
    return torch.stack(sums)


def check_equal(tensors: Mapping[str, Tensor], group: dist.ProcessGroup, what: str) -> None:
    """All ranks of `group` hold the same bits under each name. The ranks must pass the same names.

    Raises:
        RuntimeError: on every rank of the group; names the first tensor that differs, and the ranks that are alone.
    """
    size = dist.get_world_size(group)
    if size == 1 or not tensors:
        return
    mine = checksums(tensors)
    gathered = [torch.empty_like(mine) for _ in range(size)]
    dist.all_gather(gathered, mine, group=group)
    everyone = torch.stack(gathered)
    differing = (everyone != everyone[0]).any(0).nonzero().flatten().tolist()
    if differing:
        name = list(tensors)[differing[0]]
        values = everyone[:, differing[0]].tolist()
        ranks = dist.get_process_group_ranks(group)
        usual = max(set(values), key=values.count)
        odd = [rank for rank, value in zip(ranks, values, strict=True) if value != usual] or ranks
        raise RuntimeError(
            f"{what}: {len(differing)} of {len(mine)} tensors differ between ranks {ranks}, first '{name}' "
            f"(rank {', '.join(map(str, odd))} is not like the others)"
        )
