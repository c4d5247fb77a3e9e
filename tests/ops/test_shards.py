"""Boxes: which part of a tensor a rank holds, in any layout that plans, FSDP2 or a user can give it."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from dtmega.ops.shards import boxes, dim_of_experts, dim_to_cut, full_tensor, in_parts, local
from tests import ranks

RANKS = 4
# Even, uneven, fewer rows than ranks, none at all; in three parts each of which tp divides, or does not.
SHAPES = [(), (0,), (1,), (3,), (24,), (8, 12), (7, 5), (3, 24), (1, 6), (24, 1), (12, 2, 6), (2, 3, 5)]
PARTS = [2, 3]


def layouts(shape: tuple[int, ...], n_axes: int) -> list[tuple[Placement, ...]]:
    """Every axis whole, or cutting any dim: as it is, or in parts."""
    one: list[Placement] = [Replicate(), *(Shard(dim) for dim in range(len(shape)))]
    one += [_StridedShard(dim, split_factor=n) for dim in range(len(shape)) for n in PARTS if shape[dim] % n == 0]
    found = []
    for placements in itertools.product(one, repeat=n_axes):
        cut = [p.dim for p in placements if not p.is_replicate()]  # pyright: ignore[reportAttributeAccessIssue]
        strided = [p for p in placements if isinstance(p, _StridedShard)]
        # One dim cut twice: by FSDP2 and tp, which `fsdp` below is about, is all there is.
        if len(set(cut)) == len(cut) or not strided:
            found.append(placements)
    return found


def held(tensor: DTensor) -> dict[str, Any]:
    """Check that this rank's boxes hold what they say, and all it holds; returns the elements for others to compare."""
    numbers = torch.arange(tensor.numel()).view(tensor.shape)
    parts = boxes(tensor)
    mine = local(tensor)
    where = torch.zeros(tensor.shape, dtype=torch.int64)
    for box in parts:
        where[box.where] += 1
    return {
        "right": all(torch.equal(box.part, numbers[box.where]) for box in parts),
        "put together": not in_parts(tensor) or torch.equal(full_tensor(tensor), numbers),
        "dtype": not in_parts(tensor) or full_tensor(tensor).dtype == tensor.dtype,
        "views": all(box.part.untyped_storage().data_ptr() == mine.untyped_storage().data_ptr() for box in parts),
        "all": sorted(x for box in parts for x in box.part.flatten().tolist()) == sorted(mine.flatten().tolist()),
        "empty": any(box.part.numel() == 0 for box in parts),
        "where": where,
        "n": len(parts),
    }


def one_axis_and_two(meshes: dict[str, DeviceMesh]) -> dict[tuple[Any, ...], dict[str, Any]]:
    found = {}
    for (name, mesh), shape in itertools.product(meshes.items(), SHAPES):
        for placements in layouts(shape, mesh.ndim):
            numbers = torch.arange(torch.Size(shape).numel()).view(shape)
            found[name, shape, str(placements)] = held(distribute_tensor(numbers, mesh, placements, src_data_rank=None))
    return found


class Cut(nn.Module):
    """A module of one parameter that tp has cut."""

    def __init__(self, shape: tuple[int, ...], tp: DeviceMesh, placement: Placement) -> None:
        super().__init__()
        numbers = torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape)
        self.weight = nn.Parameter(distribute_tensor(numbers, tp, [placement], src_data_rank=None))


def fsdp(mesh: DeviceMesh) -> dict[tuple[Any, ...], dict[str, Any]]:
    """The shards that FSDP2 makes of parameters that tp has cut before, on the dims that the trainer has it cut."""
    found = {}
    for shape in [(12,), (12, 6), (7, 5), (3, 24), (1, 6), (24, 6)]:
        for placement in layouts(shape, 1):
            if len(shape) == 1 and isinstance(placement[0], _StridedShard):
                continue  # FSDP2 would have to cut the same dim, in which plans leave a vector whole
            module = Cut(shape, mesh["tp"], placement[0])
            fully_shard(module, mesh=mesh["dp"], shard_placement_fn=dim_to_cut)
            weight = module.weight
            assert isinstance(weight, DTensor)
            result = held(weight.detach())
            result["in parts"] = in_parts(weight)
            found[shape, str(placement[0])] = result
    return found


def everything() -> dict[str, Any]:
    meshes = {
        "4": init_device_mesh("cpu", (4,), mesh_dim_names=("tp",)),
        "2 x 2": init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")),
    }
    found = {"placed": one_axis_and_two(meshes), "fsdp": fsdp(meshes["2 x 2"]), "rank": dist.get_rank()}
    return found | {"experts": dims_of_experts(meshes["2 x 2"])}


def dims_of_experts(mesh: DeviceMesh) -> dict[tuple[tuple[int, ...], int], int]:
    """The dim by which FSDP2 cuts a rank's experts in two, by the shape of all experts and the dim that tp cuts."""
    found: dict[tuple[tuple[int, ...], int], int] = {}
    for shape, cut in itertools.product([(8, 8, 6), (6, 8, 6), (6, 8, 3), (6, 5, 4)], (1, 2)):
        if shape[cut] % 2 == 0:
            experts = distribute_tensor(torch.zeros(shape), mesh, [Shard(0), Shard(cut)])
            found[shape, cut] = dim_of_experts(experts, 2).dim
    return found


@functools.cache
def on_four() -> list[dict[str, Any]]:
    return ranks.run(RANKS, everything)


def check_tiles(results: list[dict[str, Any]]) -> None:
    """Check all ranks: each holds what it says, no element twice, and together they have each equally often."""
    for found in results:
        assert found["right"]
        assert found["put together"]
        assert found["dtype"]
        assert found["views"]
        assert found["all"]
        assert not found["empty"]
        assert int(found["where"].sum()) == found["where"].count_nonzero()
    total: Tensor = sum(found["where"] for found in results)  # pyright: ignore[reportAssignmentType]
    copies = set(total.flatten().tolist())
    assert len(copies) <= 1
    assert copies <= {1, 2, 4}


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_boxes_of_all_ranks_tile_the_tensor_and_hold_what_distribute_tensor_gave_them(shape: tuple[int, ...]):
    keys = [key for key in on_four()[0]["placed"] if key[1] == shape]
    assert keys
    for key in keys:
        try:
            check_tiles([found["placed"][key] for found in on_four()])
        except AssertionError as error:
            raise AssertionError(f"{key}: {error}") from None


def test_they_tile_what_fsdp2_cuts_after_tp():
    several = set()
    for key in on_four()[0]["fsdp"]:
        results = [found["fsdp"][key] for found in on_four()]
        try:
            check_tiles(results)
        except AssertionError as error:
            raise AssertionError(f"{key}: {error}") from None
        if any(found["n"] > 1 for found in results):
            several.add(key)
            assert all(found["in parts"] for found in results)
    # GPT-2's [q | k | v] stays in three parts; what FSDP2 and tp have both cut along one dim is one box.
    assert ((12, 6), "_S(1, 3)") in several
    assert ((12, 6), "S(0)") not in several
    assert not any(found["fsdp"][(12, 6), "S(0)"]["in parts"] for found in on_four())


def test_a_plain_tensor_is_one_box_and_a_view():
    tensor = torch.arange(6).view(2, 3)
    (box,) = boxes(tensor)
    assert (box.offsets, box.where) == ((0, 0), (slice(0, 2), slice(0, 3)))
    box.part.zero_()
    assert not tensor.any()


def test_fsdp2_cuts_experts_by_the_first_dim_that_divides_evenly_and_that_tp_has_not_cut():
    expected = {
        **{((8, 8, 6), 1): 0, ((8, 8, 6), 2): 0, ((6, 8, 6), 1): 2, ((6, 8, 6), 2): 1},
        **{((6, 8, 3), 1): 0, ((6, 5, 4), 2): 0},
    }
    assert [found["experts"] for found in on_four()] == [expected] * RANKS
