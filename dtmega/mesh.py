"""The processes of a job: their ranks, their devices, the 5-axis mesh, and all process groups.

Ranks are numbered as in Megatron: tp varies fastest, followed by cp, dp_shard, dp_replicate and pp. So tp, which
communicates most, connects neighbours on one machine. Each set of ranks that sums or copies tensors has a name:

    data       dp_replicate x dp_shard: each rank takes its slice of the global batch
    fsdp       dp_shard x cp (with dp_replicate: HSDP): parameters are sharded over these ranks
    loss       pp x data x cp: token losses add up over these ranks
    shards     pp x dp_shard x cp x tp: together these ranks hold every parameter once
    model      pp x cp x tp: these ranks compute one microbatch together, so each of them must read that microbatch
    ep         ep neighbours in fsdp: these ranks divide the experts of a layer, and exchange the experts' tokens
    efsdp      fsdp / ep: each expert's parameters are sharded over these ranks
    pp 0+2     ranks with pp coordinates 0 and 2 in one pipeline, if their stages share a parameter (`World.between`)
    place      dp_replicate x dp_shard x cp x tp: these ranks hold the same stages (`World.at_place`); only for Muon
"""

from __future__ import annotations

import gc
import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import Store, distributed_c10d  # pyright: ignore[reportPrivateImportUsage]  # documented
from torch.distributed.device_mesh import DeviceMesh

from dtmega import config
from dtmega.distributed.rendezvous import LARGEST_WORLD, launcher_number, meet, rank_and_size
from dtmega.files.console import counted
from dtmega.ops import host
from dtmega.ops.cpu import features

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
DATA = ("dp_replicate", "dp_shard")
DERIVED = {
    "data": DATA,
    "fsdp": ("dp_shard", "cp"),
    "loss": ("pp", *DATA, "cp"),
    "shards": ("pp", "dp_shard", "cp", "tp"),
    "model": ("pp", "cp", "tp"),
}
# Groups that only some runs make (`World.at_place`).
ON_DEMAND = {"place": (*DATA, "cp", "tp")}
# The dims of the parameters' mesh. fsdp includes cp, so cp ranks hold different shards too.
LAID_OUT = ("pp", "dp_replicate", "fsdp", "tp")
# The dims of the experts' mesh, if ep > 1: efsdp and ep replace fsdp.
EXPERTS_LAID_OUT = ("pp", "dp_replicate", "efsdp", "ep", "tp")
TIMEOUT_S = 600.0


class ExpertMesh(NamedTuple):
    """Two submeshes of the experts' mesh, which has the dims EXPERTS_LAID_OUT.

    Attributes:
        held: submesh over which a layer's experts are divided: (ep, tp), or (ep,) if tp is 1.
        sharded: submesh over which each rank's experts are sharded: (efsdp,), or (dp_replicate, efsdp) for HSDP.
    """

    held: DeviceMesh
    sharded: DeviceMesh


@dataclass(frozen=True)
class World:
    """This process's place in the job: rank, device, mesh and process groups.

    Attributes:
        rank, size: index of this process, from 0, and number of processes.
        device: device on which this process computes.
        sizes: size of each axis.
        mesh: the parameters' mesh, with the dims LAID_OUT.
        tp, fsdp: submeshes of `mesh`, made once, because torch compares meshes by identity.
        experts: submeshes of the experts' mesh; None if ep is 1.
        data_rank, data_size: index of this process's slice of the global batch, and number of slices.
        groups: process groups of this process, keyed by the name of an axis or of a set of ranks, such as "fsdp".
        timeout: timeout of every group's collectives.
    """

    rank: int
    size: int
    device: torch.device
    sizes: dict[str, int]
    mesh: DeviceMesh
    tp: DeviceMesh
    fsdp: DeviceMesh
    experts: ExpertMesh | None
    data_rank: int
    data_size: int
    groups: dict[str, dist.ProcessGroup]
    timeout: timedelta
    _between: dict[tuple[int, ...], dist.ProcessGroup | None] = field(default_factory=dict)

    def coordinate(self, axis: str) -> int:
        """This process's coordinate along an axis, counted from 0."""
        return self.groups[axis].rank()

    def between(self, places: Sequence[int]) -> dist.ProcessGroup | None:
        """The group of this pipeline's ranks at these pp coordinates; None if this process is at another coordinate.

        The first call for a set of coordinates makes the group and adds it to `groups`, under a name like "pp 0+2". All
        processes must call this method for the same sets of coordinates, in the same order.
        """
        key, name = tuple(places), f"pp {'+'.join(map(str, places))}"
        if key not in self._between:
            lists = []
            for pipeline in rank_groups(self.sizes, ("pp",)):
                lists.append([pipeline[place] for place in places])
            everywhere = len(key) == self.sizes["pp"]
            group = self.groups["pp"] if everywhere else _make_group(lists, name, self.timeout)
            self._between[key] = group if self.coordinate("pp") in key else None
        group = self._between[key]
        if group is not None:
            self.groups[name] = group
        return group

    def at_place(self) -> dist.ProcessGroup:
        """The group of all ranks with this process's pp coordinate. The ranks are in the order of AXES.

        If no existing group has exactly these ranks, the method makes the group and adds it to `groups`. All processes
        must call this method together.
        """
        lists = rank_groups(self.sizes, ON_DEMAND["place"])
        (mine,) = (ranks for ranks in lists if self.rank in ranks)
        for group in self.groups.values():
            if dist.get_process_group_ranks(group) == mine:
                return group
        self.groups["place"] = _make_group(lists, "place", self.timeout)
        return self.groups["place"]


def world_size() -> int:
    """The number of processes: the size of the process group if it exists, otherwise WORLD_SIZE (1 if not set).

    Raises:
        ValueError: the launcher's RANK or WORLD_SIZE is not a number or is out of range.
    """
    return dist.get_world_size() if dist.is_initialized() else rank_and_size()[1]


def rank() -> int:
    """The rank of this process, counted from 0. Raises the same errors as `world_size`."""
    return dist.get_rank() if dist.is_initialized() else rank_and_size()[0]


def resolve(mesh: config.Mesh, world: int, option: str = "--nproc-per-node") -> dict[str, int]:
    """The size of each axis. An axis of size -1 gets the number of processes divided by the product of the other sizes.

    `option` sets the number of processes, for the message.

    Raises:
        ValueError: the product of the sizes is not the number of processes, or ep is not a divisor of dp_shard x cp.
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
            f"{equation} does not make {counted(world, 'process')}, all there are ([mesh]; {option}): "
            + (f"{world} % {known} = {world % known}, expected 0" if free else f"{known} != {world}")
        )
    n_sharded = sizes["dp_shard"] * sizes["cp"]
    if mesh.ep < 1:
        raise ValueError(f"ep={mesh.ep}: expected a positive number of ranks ([mesh] ep)")
    if n_sharded % mesh.ep:
        raise ValueError(
            f"ep={mesh.ep} does not divide dp_shard={sizes['dp_shard']} x cp={sizes['cp']}: {n_sharded} % {mesh.ep} = "
            f"{n_sharded % mesh.ep}, expected 0 ([mesh] ep, dp_shard, cp)"
        )
    return sizes


def rank_groups(sizes: dict[str, int], axes: Iterable[str]) -> list[list[int]]:
    """Group the ranks that differ only along these axes, in Megatron's order (`mpu/initialize.py`)."""
    axes = tuple(axes)
    # Lay out all ranks as a grid with the given axes last, so that each row of the flattened grid is one group.
    grid = np.arange(math.prod(sizes.values())).reshape([sizes[axis] for axis in AXES])
    others = [axis for axis in AXES if axis not in axes]
    order = [AXES.index(axis) for axis in (*others, *axes)]
    return grid.transpose(order).reshape(-1, math.prod(sizes[axis] for axis in axes)).tolist()


def expert_groups(sizes: dict[str, int], ep: int) -> dict[str, list[list[int]]]:
    """Divide each fsdp group into "ep" groups of neighbours, and into "efsdp" groups with one rank per "ep" group."""
    groups: dict[str, list[list[int]]] = {"efsdp": [], "ep": []}
    for ranks in rank_groups(sizes, DERIVED["fsdp"]):
        groups["ep"] += [ranks[first : first + ep] for first in range(0, len(ranks), ep)]
        groups["efsdp"] += [ranks[place::ep] for place in range(ep)]
    return groups


def group_lists(sizes: dict[str, int], ep: int = 1) -> dict[str, list[list[int]]]:
    """Map the name of each axis and each derived set to its groups, as lists of ranks."""
    named = {axis: (axis,) for axis in AXES} | DERIVED
    lists = {name: rank_groups(sizes, axes) for name, axes in named.items()}
    return lists if ep == 1 else lists | expert_groups(sizes, ep)


def describe_groups(sizes: dict[str, int], ep: int = 1) -> str:
    """Format every group of the mesh with its ranks, one line per name."""
    lines = []
    for name, lists in group_lists(sizes, ep).items():
        lines.append(f"{name:<12} " + " ".join(str(ranks).replace(" ", "") for ranks in lists))
    return "\n".join(lines)


def data_coordinate(sizes: dict[str, int], rank: int) -> tuple[int, int]:
    """The pair (data_rank, data_size) of a rank, as in `World`."""
    (column,) = (ranks for ranks in rank_groups(sizes, DATA) if rank in ranks)
    return column.index(rank), len(column)


def pick_device(configured: str) -> torch.device:
    """The device that [run] device selects. 'auto' selects cuda:LOCAL_RANK if there is a GPU, otherwise the CPU.

    Raises:
        ValueError: this machine has fewer GPUs than local processes.
    """
    if configured == "cpu" or (configured == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    local_rank = launcher_number("LOCAL_RANK", 0, 0, LARGEST_WORLD)
    n_gpus = torch.cuda.device_count()
    if local_rank >= n_gpus:
        raise ValueError(
            f"local rank {local_rank} needs GPU number {local_rank}, but this machine has {n_gpus} "
            f"(--nproc-per-node, or [run] device = 'cpu')"
        )
    return torch.device("cuda", local_rank)


def has_fast_bfloat16(device: torch.device) -> bool:
    """True if this device has instructions or units that multiply bfloat16 matrices faster than float32 matrices."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return features.HAS_FAST_BFLOAT16


def memory_bytes(device: torch.device) -> int | None:
    """Memory of a GPU; None for a CPU, because several ranks and other programs share the CPU's memory."""
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None


def start(
    device: torch.device,
    sizes: dict[str, int],
    timeout_s: float = TIMEOUT_S,
    store: Store | None = None,
    *,
    ep: int = 1,
) -> World:
    """Join the process group (nccl on GPUs, gloo on CPUs) and make the mesh, with or without torchrun.

    Args:
        ep: number of ranks over which a layer's experts are divided, a divisor of dp_shard x cp.
        timeout_s: timeout of the rendezvous and of every collective. An existing process group keeps its own timeout.
        store: store that an earlier call to `rendezvous` returned; None if there was no such call.

    Raises:
        ValueError: `rendezvous.meet` failed, or the ranks made different numbers of groups before this call.
    """
    on_gpu, timeout = device.type == "cuda", timedelta(seconds=timeout_s)
    if on_gpu:
        torch.cuda.set_device(device)
    # A program that uses the trainer as a library may have made the process group already.
    if not dist.is_initialized():
        dist.init_process_group(
            "nccl" if on_gpu else "gloo",
            store=rendezvous(timeout_s) if store is None else store,
            rank=rank(),
            world_size=world_size(),
            timeout=timeout,
            device_id=device if on_gpu else None,
        )
    me = dist.get_rank()
    groups = make_groups(sizes, device, timeout, ep)
    n_sharded = sizes["dp_shard"] * sizes["cp"]
    lengths = {**sizes, "fsdp": n_sharded, "efsdp": n_sharded // ep, "ep": ep}
    mesh = _lay_out(LAID_OUT, lengths, groups, device)
    data_rank, data_size = data_coordinate(sizes, me)
    # Only HSDP gets a 2-D mesh: over a 1-D mesh, FSDP skips the second reduction.
    fsdp = mesh["dp_replicate", "fsdp"] if sizes["dp_replicate"] > 1 else mesh["fsdp"]
    experts = None
    if ep > 1:
        of_experts = _lay_out(EXPERTS_LAID_OUT, lengths, groups, device)
        held = of_experts["ep", "tp"] if sizes["tp"] > 1 else of_experts["ep"]
        sharded = of_experts["dp_replicate", "efsdp"] if sizes["dp_replicate"] > 1 else of_experts["efsdp"]
        experts = ExpertMesh(held, sharded)
    return World(
        rank=me,
        size=dist.get_world_size(),
        device=device,
        sizes=sizes,
        mesh=mesh,
        tp=mesh["tp"],
        fsdp=fsdp,
        experts=experts,
        data_rank=data_rank,
        data_size=data_size,
        groups=groups,
        timeout=timeout,
    )


def _lay_out(
    dims: tuple[str, ...], lengths: dict[str, int], groups: dict[str, dist.ProcessGroup], device: torch.device
) -> DeviceMesh:
    """Make a mesh of all ranks with the given dims and lengths. The last dim varies fastest."""
    grid = torch.arange(dist.get_world_size()).view([lengths[dim] for dim in dims])
    return DeviceMesh.from_group([groups[dim] for dim in dims], device.type, grid, mesh_dim_names=dims)


def make_groups(
    sizes: dict[str, int], device: torch.device, timeout: timedelta, ep: int = 1
) -> dict[str, dist.ProcessGroup]:
    """Make the groups that contain this process, keyed by name. Names for identical sets of ranks share one group.

    Each process makes only its own groups, one of each kind. All processes make the kinds in the same order, so
    overlapping groups cannot wait for each other in a cycle. torch derives a group's name from the number of groups
    that the process has made, so all members give a group the same name.

    Raises:
        ValueError: the ranks made different numbers of groups before this call.
    """
    # One all-reduce finds the largest and, by negation, the smallest number of groups that any rank has made.
    made = len(distributed_c10d._world.pg_names)
    most_least = torch.tensor([made, -made], device=device)
    dist.all_reduce(most_least, dist.ReduceOp.MAX)
    if not host.read(most_least.sum() == 0):
        raise ValueError(
            f"ranks are in {-int(most_least[1])} to {int(most_least[0])} process groups, expected equally many on all: "
            f"start the mesh before you make groups of some ranks"
        )
    kinds: dict[tuple[tuple[int, ...], ...], list[str]] = {}
    for name, lists in group_lists(sizes, ep).items():
        kinds.setdefault(tuple(map(tuple, lists)), []).append(name)
    groups: dict[str, dist.ProcessGroup] = {}
    for lists, names in kinds.items():
        groups |= dict.fromkeys(names, _make_group(lists, " ".join(names), timeout))
    return groups


def _make_group(lists: Sequence[Sequence[int]], names: str, timeout: timedelta) -> dist.ProcessGroup:
    """Make the group for the list of ranks that contains this process, or a group of one if no list contains it.

    All processes must call this function.
    """
    everyone = dist.group.WORLD
    assert everyone is not None
    members = set(itertools.chain.from_iterable(lists))
    # torch derives a group's name from the number of groups that the process has made. So all processes must make
    # the same number of groups; otherwise later groups would have different names on different processes.
    lists = [*lists, *((rank,) for rank in range(dist.get_world_size()) if rank not in members)]
    if len(lists) == 1:
        return everyone
    if everyone.bound_device_id is not None:
        # All processes of an nccl communicator take part in splitting it, so one call makes all groups of a kind.
        group = dist.split_group(split_ranks=[list(ranks) for ranks in lists], timeout=timeout, group_desc=names)
    else:
        (mine,) = (ranks for ranks in lists if dist.get_rank() in ranks)
        group = dist.new_group(list(mine), timeout=timeout, use_local_synchronization=True, group_desc=names)
    assert isinstance(group, dist.ProcessGroup)
    return group


def rendezvous(timeout_s: float) -> Store:
    """The process group's store; before the group exists, a new store that only this attempt of the job uses.

    Raises:
        ValueError: `rendezvous.meet` failed.
    """
    return store() if dist.is_initialized() else meet(rank(), world_size(), timedelta(seconds=timeout_s))


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished all work launched on it. A CPU works synchronously and needs no wait."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def store() -> Store:
    """A new connection to the store of the process group, for a second thread or a different timeout."""
    return distributed_c10d._get_default_store().clone()  # pyright: ignore[reportAttributeAccessIssue]  # missing in the stub


def stop() -> None:
    """Destroy the process group. All ranks must call this function together."""
    # Free tensors with pending work first; otherwise gloo aborts at exit.
    gc.collect()
    dist.barrier()
    dist.destroy_process_group()
