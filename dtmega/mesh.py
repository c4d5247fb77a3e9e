"""The processes of a job and their groups: the process group, the device, the 5-axis mesh, each derived group.

Ranks are numbered as Megatron does: tp fastest, then cp, dp_shard, dp_replicate, and pp slowest. Every set of ranks
that something is summed over or copied across has one name, here:

    data       dp_replicate x dp_shard: each takes its slice of the global batch
    fsdp       dp_shard (with dp_replicate: HSDP): parameters are cut over it
    loss       pp x data x cp: token losses add up over it
    shards     pp x dp_shard x cp x tp: together they hold every parameter once
    model      pp x tp: they compute one microbatch together and must see the same one
    pp 0+2     places of a pipeline whose stages hold one parameter (`World.between`); made for a model that has such
"""

from __future__ import annotations

import gc
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import Store, distributed_c10d  # pyright: ignore[reportPrivateImportUsage]  # documented
from torch.distributed.device_mesh import DeviceMesh

from dtmega import config
from dtmega.distributed.rendezvous import LARGEST_WORLD, meet, number, place
from dtmega.files.console import counted
from dtmega.ops.cpu import features

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
DATA = ("dp_replicate", "dp_shard")
DERIVED = {
    "data": DATA,
    "loss": ("pp", *DATA, "cp"),
    "shards": ("pp", "dp_shard", "cp", "tp"),
    "model": ("pp", "tp"),
}
TIMEOUT_S = 600.0


@dataclass(frozen=True)
class World:
    """This process among the others.

    Attributes:
        rank, size: of all processes.
        device: where this process computes.
        sizes: of each axis.
        mesh: the 5-axis mesh; `tp` and `fsdp` are slices of it, made once because meshes are compared by identity.
        data_rank, data_size: this process's slice of the global batch, and how many there are.
        groups: the derived groups named above, and one per axis, that this process is in.
        timeout: of every group's collectives.
    """

    rank: int
    size: int
    device: torch.device
    sizes: dict[str, int]
    mesh: DeviceMesh
    tp: DeviceMesh
    fsdp: DeviceMesh
    data_rank: int
    data_size: int
    groups: dict[str, dist.ProcessGroup]
    timeout: timedelta
    _between: dict[tuple[int, ...], dist.ProcessGroup | None] = field(default_factory=dict)

    def coordinate(self, axis: str) -> int:
        return self.mesh.get_local_rank(axis)

    def between(self, places: Sequence[int]) -> dist.ProcessGroup | None:
        """The ranks at these places of this process's pipeline; None if it is at none of them.

        It is in `groups` from then on, as "pp 0+2". Every process calls this with the same places, in the same order.
        """
        key, name = tuple(places), f"pp {'+'.join(map(str, places))}"
        if key not in self._between:
            lists = [[pipeline[place] for place in places] for pipeline in rank_groups(self.sizes, ("pp",))]
            everywhere = len(key) == self.sizes["pp"]
            group = self.groups["pp"] if everywhere else _make_group(lists, name, self.timeout)
            self._between[key] = group if self.coordinate("pp") in key else None
        group = self._between[key]
        if group is not None:
            self.groups[name] = group
        return group


def world_size() -> int:
    """Processes of the process group, or that the launcher started; 1 without either.

    Raises:
        ValueError: what the launcher says cannot be.
    """
    return dist.get_world_size() if dist.is_initialized() else place()[1]


def rank() -> int:
    """The number of this process, from 0; errors as of `world_size`."""
    return dist.get_rank() if dist.is_initialized() else place()[0]


def resolve(mesh: config.Mesh, world: int) -> dict[str, int]:
    """The size of each axis, -1 replaced by what is left.

    Raises:
        ValueError: the sizes do not multiply to the number of processes.
    """
    sizes = {axis: getattr(mesh, axis) for axis in AXES}
    equation = " x ".join(f"{axis}={size}" for axis, size in sizes.items())
    free = [axis for axis, size in sizes.items() if size == -1]
    known = math.prod(size for size in sizes.values() if size != -1)
    if len(free) > 1 or known < 1:
        raise ValueError(
            f"{equation}: each axis of [mesh] is a positive size, and one of them (dp_shard, unless it is set) may be "
            f"-1, what is left"
        )
    if free and world % known == 0:
        sizes[free[0]] = world // known
    if math.prod(sizes.values()) != world:
        raise ValueError(
            f"{equation} does not make {counted(world, 'process')}, all there are ([mesh]; --nproc-per-node): "
            + (f"{world} % {known} = {world % known}, expected 0" if free else f"{known} != {world}")
        )
    return sizes


def rank_groups(sizes: dict[str, int], axes: Iterable[str]) -> list[list[int]]:
    """Ranks that differ only in these axes, as Megatron lists them (`mpu/initialize.py`)."""
    axes = tuple(axes)
    grid = np.arange(math.prod(sizes.values())).reshape([sizes[axis] for axis in AXES])
    others = [axis for axis in AXES if axis not in axes]
    order = [AXES.index(axis) for axis in (*others, *axes)]
    return grid.transpose(order).reshape(-1, math.prod(sizes[axis] for axis in axes)).tolist()


def group_lists(sizes: dict[str, int]) -> dict[str, list[list[int]]]:
    """The ranks of every group, by name: each axis, and what is derived from them."""
    named = {axis: (axis,) for axis in AXES} | DERIVED
    return {name: rank_groups(sizes, axes) for name, axes in named.items()}


def describe_groups(sizes: dict[str, int]) -> str:
    """Every group of the mesh with its ranks, one name a line."""
    lists = group_lists(sizes)
    return "\n".join(f"{name:<12} " + " ".join(str(ranks).replace(" ", "") for ranks in g) for name, g in lists.items())


def data_coordinate(sizes: dict[str, int], rank: int) -> tuple[int, int]:
    """(data_rank, data_size) of a rank."""
    (column,) = (ranks for ranks in rank_groups(sizes, DATA) if rank in ranks)
    return column.index(rank), len(column)


def pick_device(wanted: str) -> torch.device:
    """cuda:LOCAL_RANK where there is a GPU (or where `wanted` insists), else cpu.

    Raises:
        ValueError: fewer GPUs on this machine than local processes.
    """
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    local_rank, here = number("LOCAL_RANK", 0, 0, LARGEST_WORLD), torch.cuda.device_count()
    if local_rank >= here:
        raise ValueError(
            f"local rank {local_rank} needs GPU number {local_rank}, but this machine has {here} "
            f"(--nproc-per-node, or [run] device = 'cpu')"
        )
    return torch.device("cuda", local_rank)


def has_fast_bfloat16(device: torch.device) -> bool:
    """Whether this device multiplies bfloat16 faster than float32, by instructions or units that are made for it."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return features.HAS_FAST_BFLOAT16


def start(
    device: torch.device, sizes: dict[str, int], timeout_s: float = TIMEOUT_S, store: Store | None = None
) -> World:
    """Join the process group (nccl or gloo by device) and make the mesh. Works with and without torchrun.

    Args:
        timeout_s: of the rendezvous and of every collective; a process group that is there already keeps its own.
        store: what `rendezvous` gave, if it was called before.

    Raises:
        ValueError: as `rendezvous.meet`; or the caller has made other groups before, not on every rank as many.
    """
    on_gpu, timeout = device.type == "cuda", timedelta(seconds=timeout_s)
    if on_gpu:
        torch.cuda.set_device(device)
    if not dist.is_initialized():  # by whoever calls the trainer as a library
        dist.init_process_group(
            "nccl" if on_gpu else "gloo",
            store=rendezvous(timeout_s) if store is None else store,
            rank=rank(),
            world_size=world_size(),
            timeout=timeout,
            device_id=device if on_gpu else None,
        )
    me = dist.get_rank()
    groups = make_groups(sizes, device, timeout)
    grid = torch.arange(dist.get_world_size()).view([sizes[axis] for axis in AXES])
    mesh = DeviceMesh.from_group([groups[axis] for axis in AXES], device.type, grid, mesh_dim_names=AXES)
    data_rank, data_size = data_coordinate(sizes, me)
    fsdp = mesh["dp_replicate", "dp_shard"] if sizes["dp_replicate"] > 1 else mesh["dp_shard"]
    return World(
        rank=me,
        size=dist.get_world_size(),
        device=device,
        sizes=sizes,
        mesh=mesh,
        tp=mesh["tp"],
        fsdp=fsdp,
        data_rank=data_rank,
        data_size=data_size,
        groups=groups,
        timeout=timeout,
    )


def make_groups(sizes: dict[str, int], device: torch.device, timeout: timedelta) -> dict[str, dist.ProcessGroup]:
    """Each group that this process is in, by name; names of which all groups have the same ranks share them.

    A process makes no group that it is not in, and as many as there are kinds, whatever the number of processes. All
    make the same kinds in the same order: groups that overlap cannot wait for each other in a circle, and the names of
    groups, into which torch puts how many a process has made, are equal on all members.
    """
    made = len(distributed_c10d._world.pg_names)
    most_least = torch.tensor([made, -made], device=device)
    dist.all_reduce(most_least, dist.ReduceOp.MAX)
    if most_least.sum() != 0:
        raise ValueError(
            f"ranks are in {-int(most_least[1])} to {int(most_least[0])} process groups, expected equally many on all: "
            f"start the mesh before you make groups of some ranks"
        )
    kinds: dict[tuple[tuple[int, ...], ...], list[str]] = {}
    for name, lists in group_lists(sizes).items():
        kinds.setdefault(tuple(map(tuple, lists)), []).append(name)
    groups: dict[str, dist.ProcessGroup] = {}
    for lists, names in kinds.items():
        groups |= dict.fromkeys(names, _make_group(lists, " ".join(names), timeout))
    return groups


def _make_group(lists: Sequence[Sequence[int]], names: str, timeout: timedelta) -> dist.ProcessGroup:
    """This process's group of those that `lists` makes; alone if it is in none. Every process calls it."""
    everyone = dist.group.WORLD
    assert everyone is not None
    members = {rank for ranks in lists for rank in ranks}
    # A process that is in none of them must make a group as all do.
    lists = [*lists, *((rank,) for rank in range(dist.get_world_size()) if rank not in members)]
    if len(lists) == 1:
        return everyone
    if everyone.bound_device_id is not None:
        # nccl splits a communicator, and all of its processes take part in that: one call makes all groups of a kind.
        group = dist.split_group(split_ranks=[list(ranks) for ranks in lists], timeout=timeout, group_desc=names)
    else:
        (mine,) = (ranks for ranks in lists if dist.get_rank() in ranks)
        group = dist.new_group(list(mine), timeout=timeout, use_local_synchronization=True, group_desc=names)
    assert isinstance(group, dist.ProcessGroup)
    return group


def rendezvous(timeout_s: float) -> Store:
    """A store that only the processes of this attempt of the job use; that of the process group if there is one.

    Raises:
        ValueError: as `rendezvous.meet`.
    """
    return store() if dist.is_initialized() else meet(rank(), world_size(), timedelta(seconds=timeout_s))


def synchronize(device: torch.device) -> None:
    """Wait until the device has done all that it was given; a CPU has."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def store() -> Store:
    """A connection of its own to the store of the process group, for another thread or another timeout."""
    return distributed_c10d._get_default_store().clone()  # pyright: ignore[reportAttributeAccessIssue]  # missing in the stub


def stop() -> None:
    """Leave the process group. Tensors with pending work are collected first: gloo aborts at exit otherwise."""
    gc.collect()
    dist.barrier()
    dist.destroy_process_group()
