"""The time of one kernel or message on a fabric.

A kernel takes as long as its FLOPs or its memory traffic, whichever takes longer. A collective takes as long as its
steps on a ring (the alpha-beta model of Thakur et al. 2005, "Optimization of Collective Communication Operations in
MPICH"): each step has a latency, and the ring's slowest link limits the bandwidth.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

from dtmega.planning.prices.fabric import Fabric, Gpu
from dtmega.planning.work import Message, Work

Groups = Callable[[str], Sequence[int]]  # name of one rank's process group -> ranks in the group


def seconds(work: Work, fabric: Fabric, rank: int, groups: Groups) -> float:
    """The time that a work item takes if nothing else runs.

    Args:
        work: kernel or message.
        fabric: fabric of the cluster.
        rank: rank that runs the work.
        groups: function that returns the ranks in one of this rank's process groups, given the group's name.

    Raises:
        ValueError: the fabric has no peak FLOP/s for the dtype of a matrix product.
    """
    if work.message is None:
        return kernel_seconds(work, fabric.gpu)
    message = work.message
    if message.collective in ("send", "receive"):
        return send_seconds(message.n_bytes, fabric, rank, message.peer)
    return collective_seconds(message, fabric, groups(message.axis))


def kernel_seconds(work: Work, gpu: Gpu) -> float:
    """The time of a kernel. The products overlap perfectly with the memory traffic; the launch overlaps with nothing.

    Raises:
        ValueError: the fabric has no peak FLOP/s for the dtype of a matrix product.
    """
    of_products_s = 0.0
    if work.flops:
        of_products_s = work.flops / reached_flops(gpu, work.dtype, work.product)
    return gpu.launch_s + max(of_products_s, work.moved_bytes / gpu.memory_bytes_per_s)


def reached_flops(gpu: Gpu, dtype: str, product: tuple[int, int, int] | None) -> float:
    """The FLOP/s that a product of this shape reaches.

    Measured points are interpolated over the logarithm of the smallest side. Without measured points, a product whose
    smallest side is s reaches peak x efficiency x s / (s + half_side).

    Args:
        gpu: GPU that computes the product.
        dtype: torch's name for the dtype of the inputs.
        product: shape (m, k, n) of the product; None for fused attention, which has products of many shapes.

    Raises:
        ValueError: the fabric has no peak FLOP/s for the dtype.
    """
    if dtype not in gpu.peak_flops:
        known = ", ".join(gpu.peak_flops)
        raise ValueError(
            f"the fabric has no FLOP/s of {gpu.name} for {dtype}, expected one of {known} "
            f"(fabric's [gpu] peak_flops, or [precision] params)"
        )
    peak = gpu.peak_flops[dtype]
    if product is None:
        return peak * gpu.attention_efficiency
    side = max(1, min(product))
    points = gpu.measured.get(dtype)
    if points:
        return _interpolated(points, side)
    return peak * gpu.efficiency * side / (side + gpu.half_side)


def _interpolated(points: Sequence[tuple[int, float]], side: int) -> float:
    """Interpolate FLOP/s between measured points. A side outside the measured range gets the nearest point's value."""
    if side <= points[0][0]:
        return points[0][1]
    for (left, slower), (right, faster) in itertools.pairwise(points):
        if side <= right:
            share = math.log(side / left) / math.log(right / left)
            return slower + share * (faster - slower)
    return points[-1][1]


class Ring(NamedTuple):
    """A ring through the ranks of a group.

    Attributes:
        n_ranks: number of ranks.
        bytes_per_s: bandwidth of the slowest link in the ring, per rank.
        round_s: total latency of the n - 1 steps in which a piece of data visits all ranks.
    """

    n_ranks: int
    bytes_per_s: float
    round_s: float


def ring(fabric: Fabric, ranks: Sequence[int]) -> Ring:
    """The ring through a group's ranks.

    A group with k ranks in each of its nodes has k network cards in each node, and NCCL makes one ring through each
    card (docs.nvidia.com, NCCL_CROSS_NIC). The group's data therefore crosses nodes k times as fast as through one
    card. The number of steps that cross nodes is the number of nodes minus 1 (`ncclTopoTuneModel` in nccl's
    src/graph/tuning.cc).
    """
    per_node = Counter(rank // fabric.node.ranks for rank in ranks)
    rate = fabric.node.bytes_per_s
    n, crossings = len(ranks), len(per_node) - 1
    if crossings:
        cards = min(per_node.values())
        rate = min(fabric.node.bytes_per_s, cards * fabric.network.bytes_per_s)
    inside = n - 1 - crossings
    return Ring(n, rate, inside * fabric.node.latency_s + crossings * fabric.network.latency_s)


def collective_seconds(message: Message, fabric: Fabric, ranks: Sequence[int]) -> float:
    """The time of a collective.

    For n ranks and a largest buffer of S bytes, each rank of the ring sends (n - 1) / n x S bytes in an all-gather or a
    reduce-scatter, twice as many in an all-reduce, and S in a broadcast. In an all-to-all, each rank sends S / n bytes
    to each of the n - 1 remaining ranks, over the link between the two ranks.
    """
    n = len(ranks)
    assert n == message.n_ranks, (message, n)
    if n == 1:
        return 0.0
    around = ring(fabric, ranks)
    share = (n - 1) / n
    if message.collective == "all-to-all":
        transfer_s = _all_to_all_s(message.n_bytes, fabric, ranks)
        return fabric.gpu.launch_s + around.round_s + transfer_s
    passes = {"all-gather": share, "reduce-scatter": share, "all-reduce": 2 * share, "broadcast": 1.0}
    rounds = 2 if message.collective == "all-reduce" else 1
    transfer_s = passes[message.collective] * message.n_bytes / around.bytes_per_s
    return fabric.gpu.launch_s + rounds * around.round_s + transfer_s


def _all_to_all_s(n_bytes: int, fabric: Fabric, ranks: Sequence[int]) -> float:
    """The transfer time of an all-to-all for the busiest rank. Transfers inside and between nodes run concurrently."""
    per_node = Counter(rank // fabric.node.ranks for rank in ranks)
    n = len(ranks)
    inside = n_bytes * (max(per_node.values()) - 1) / n
    outside = n_bytes * (n - min(per_node.values())) / n
    return max(inside / fabric.node.bytes_per_s, outside / fabric.network.bytes_per_s)


def send_seconds(n_bytes: int, fabric: Fabric, sender: int, receiver: int) -> float:
    """The time of a message from one rank to another."""
    same_node = sender // fabric.node.ranks == receiver // fabric.node.ranks
    link = fabric.node if same_node else fabric.network
    return fabric.gpu.launch_s + link.latency_s + n_bytes / link.bytes_per_s
