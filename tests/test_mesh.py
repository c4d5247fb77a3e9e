"""Claims about mesh.py; the lists are those in the comments of Megatron's `mpu/initialize.py`."""

import itertools
import re
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.testing._internal.distributed.fake_pg import FakeStore

from dtmega import config, mesh
from dtmega.checkpoint.run import Checkpoints
from dtmega.ops.cpu import features
from tests import ranks

REPO = Path(__file__).parents[1]
CPU = torch.device("cpu")

MEGATRON = mesh.resolve(config.Mesh(pp=4, tp=2), 16)  # its example: 16 GPUs, tp 2, pp 4


@pytest.mark.parametrize(
    ("axes", "lists"),
    [
        (("tp",), [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [10, 11], [12, 13], [14, 15]]),
        (("pp",), [[0, 4, 8, 12], [1, 5, 9, 13], [2, 6, 10, 14], [3, 7, 11, 15]]),
        (mesh.DATA, [[0, 2], [1, 3], [4, 6], [5, 7], [8, 10], [9, 11], [12, 14], [13, 15]]),
        (mesh.DERIVED["model"], [[0, 1, 4, 5, 8, 9, 12, 13], [2, 3, 6, 7, 10, 11, 14, 15]]),
    ],
)
def test_ranks_are_grouped_as_megatron_groups_them(axes, lists):
    assert mesh.rank_groups(MEGATRON, axes) == lists


def test_the_description_prints_every_group():
    text = mesh.describe_groups(MEGATRON)
    assert "tp           [0,1] [2,3] [4,5] [6,7] [8,9] [10,11] [12,13] [14,15]" in text
    assert "model        [0,1,4,5,8,9,12,13] [2,3,6,7,10,11,14,15]" in text
    assert [line.split()[0] for line in text.splitlines()] == [
        *mesh.AXES,
        *mesh.DERIVED,
    ]


# The axes along which the ranks of a group differ, as the table at the top of mesh.py and Megatron have them.
VARYING = {
    "pp": {"pp"},
    "dp_replicate": {"dp_replicate"},
    "dp_shard": {"dp_shard"},
    "cp": {"cp"},
    "tp": {"tp"},
    "data": {"dp_replicate", "dp_shard"},
    "fsdp": {"dp_shard", "cp"},
    "loss": {"pp", "dp_replicate", "dp_shard", "cp"},
    "shards": {"pp", "dp_shard", "cp", "tp"},
    "model": {"pp", "cp", "tp"},
}
FIVE = {"pp": 3, "dp_replicate": 2, "dp_shard": 3, "cp": 2, "tp": 2}
# Ranks count through the axes, the last one fastest.
PLACES = [dict(zip(FIVE, place, strict=True)) for place in itertools.product(*map(range, FIVE.values()))]


def test_a_group_is_the_ranks_that_differ_in_its_axes_only():
    lists = mesh.group_lists(FIVE)
    assert lists.keys() == VARYING.keys()
    for name, varying in VARYING.items():
        together: dict[tuple[int, ...], list[int]] = {}
        for rank, place in enumerate(PLACES):
            together.setdefault(tuple(place[axis] for axis in FIVE if axis not in varying), []).append(rank)
        assert sorted(lists[name]) == sorted(together.values()), name


def test_the_number_of_a_data_rank_counts_shards_within_replicas():
    expected = [(place["dp_replicate"] * FIVE["dp_shard"] + place["dp_shard"], 2 * 3) for place in PLACES]
    assert [mesh.data_coordinate(FIVE, rank) for rank in range(len(PLACES))] == expected


def test_minus_one_is_what_is_left():
    assert mesh.resolve(config.Mesh(dp_shard=-1, tp=2, pp=2), 16)["dp_shard"] == 4
    assert mesh.resolve(config.Mesh(dp_shard=1, dp_replicate=-1), 6)["dp_replicate"] == 6


@pytest.mark.parametrize(
    ("sizes", "world", "message"),
    [
        ({"tp": 3}, 16, "tp=3 does not make 16 processes, .*16 % 3 = 1"),
        ({"pp": 2, "dp_shard": 2}, 16, "4 != 16"),
        ({"tp": -1}, 16, "one of them"),
        ({"tp": 0}, 16, "positive"),
    ],
)
def test_sizes_that_do_not_multiply_to_the_world_show_the_equation(sizes, world, message):
    with pytest.raises(ValueError, match=message):
        mesh.resolve(config.Mesh(**sizes), world)


@pytest.mark.parametrize(
    ("wanted", "gpus", "local_rank", "expected"),
    [
        ("auto", 0, None, "cpu"),
        ("auto", 4, None, "cuda:0"),
        ("auto", 4, 3, "cuda:3"),
        ("cpu", 4, 3, "cpu"),
        ("cuda", 4, 1, "cuda:1"),
    ],
)
def test_a_process_computes_on_the_gpu_of_its_place_on_the_machine(monkeypatch, wanted, gpus, local_rank, expected):
    machine(monkeypatch, gpus, local_rank)
    assert mesh.pick_device(wanted) == torch.device(expected)


@pytest.mark.parametrize(("wanted", "gpus", "local_rank"), [("auto", 4, 4), ("cuda", 0, None)])
def test_a_process_without_a_gpu_of_its_own_is_refused(monkeypatch, wanted, gpus, local_rank):
    machine(monkeypatch, gpus, local_rank)
    with pytest.raises(ValueError, match=f"needs GPU number {local_rank or 0}, but this machine has {gpus} "):
        mesh.pick_device(wanted)


def machine(monkeypatch: pytest.MonkeyPatch, gpus: int, local_rank: int | None) -> None:
    """Pretend that there are so many GPUs, and that this process is so many after the first."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setenv("RANK", "9")
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    if local_rank is not None:
        monkeypatch.setenv("LOCAL_RANK", str(local_rank))


class Started(Exception):
    """Raised by a process group that is not really made."""


@pytest.mark.parametrize(
    ("device", "backend", "bound"), [(CPU, "gloo", None), (torch.device("cuda", 3), "nccl", torch.device("cuda", 3))]
)
def test_the_process_group_is_of_the_device_and_has_the_place_store_and_timeout_it_was_given(
    monkeypatch, device, backend, bound
):
    asked, used, store = [], [], dist.HashStore()

    def init_process_group(*args: Any, **keywords: Any) -> None:
        asked.append((*args, keywords))
        raise Started

    monkeypatch.setattr(dist, "init_process_group", init_process_group)
    monkeypatch.setattr(torch.cuda, "set_device", used.append)
    monkeypatch.setenv("RANK", "5")
    monkeypatch.setenv("WORLD_SIZE", "6")
    with pytest.raises(Started):
        mesh.start(device, mesh.resolve(config.Mesh(), 6), 33, store)
    place = {"store": store, "rank": 5, "world_size": 6, "timeout": timedelta(seconds=33), "device_id": bound}
    assert asked == [(backend, place)]
    assert used == ([device] if bound else [])


def test_ranks_meet_as_the_launcher_numbers_them_and_for_as_long_as_they_are_told(monkeypatch):
    monkeypatch.setattr(mesh, "meet", lambda *asked: asked)
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert mesh.rendezvous(7) == (0, 1, timedelta(seconds=7))
    monkeypatch.setenv("RANK", "5")
    monkeypatch.setenv("WORLD_SIZE", "6")
    assert mesh.rendezvous(7) == (5, 6, timedelta(seconds=7))


def test_who_asks_for_the_store_gets_a_connection_of_its_own():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        one, another = mesh.store(), mesh.store()
    finally:
        dist.destroy_process_group()
    assert one is not another
    one.set("a", "b")
    assert another.get("a") == b"b"


def test_only_a_gpu_is_waited_for(monkeypatch):
    waited = []
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    for device in (CPU, torch.device("cuda", 1)):
        mesh.synchronize(device)
    assert waited == [torch.device("cuda", 1)]


class Calls:
    """The calls of torch's functions that make groups."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.new: list[list[int]] = []
        self.split: list[list[list[int]]] = []
        self.timeouts: set[timedelta] = set()
        honest = dist.new_group

        def new_group(members: list[int], **keywords: Any) -> Any:
            self.new.append(members)
            return honest(members, **keywords)

        def split_group(split_ranks: list[list[int]], **keywords: Any) -> Any:
            self.split.append(split_ranks)
            self.timeouts.add(keywords["timeout"])
            return dist.group.WORLD

        monkeypatch.setattr(dist, "new_group", new_group)
        monkeypatch.setattr(dist, "split_group", split_group)


@pytest.fixture
def pretended():
    """A process group of that many ranks, of which one is here and none is heard."""

    def pretend(n: int, rank: int) -> dist.ProcessGroup:
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=n)
        assert dist.group.WORLD is not None
        return dist.group.WORLD

    yield pretend
    dist.destroy_process_group()


MANY = mesh.resolve(config.Mesh(pp=8, dp_replicate=4, cp=2, tp=8), 16384)


@pytest.mark.parametrize("rank", [0, 9000, 16383])
def test_each_of_16384_ranks_makes_one_group_of_a_kind_and_none_that_it_is_not_in(monkeypatch, pretended, rank):
    pretended(16384, rank)
    calls = Calls(monkeypatch)
    world = mesh.start(CPU, MANY)
    mine = {name: next(g for g in lists if rank in g) for name, lists in mesh.group_lists(MANY).items()}
    assert calls.new == [*mine.values()]
    assert calls.split == []
    assert {name: dist.get_process_group_ranks(group) for name, group in world.groups.items()} == mine
    assert world.mesh.mesh_dim_names == ("pp", "dp_replicate", "fsdp", "tp")
    assert [world.mesh.get_group(dim) for dim in mesh.LAID_OUT] == [world.groups[dim] for dim in mesh.LAID_OUT]


@pytest.mark.parametrize("rank", [0, 50, 71])
def test_a_rank_knows_its_place(pretended, rank):
    pretended(72, rank)
    world = mesh.start(CPU, FIVE)
    place = PLACES[rank]
    assert (world.rank, world.size, world.device, world.sizes) == (rank, 72, CPU, FIVE)
    assert (mesh.rank(), mesh.world_size()) == (rank, 72)
    assert {axis: world.coordinate(axis) for axis in mesh.AXES} == place
    assert (world.data_rank, world.data_size) == (place["dp_replicate"] * 3 + place["dp_shard"], 6)
    assert (world.tp.mesh_dim_names, world.tp.size(), world.tp.get_local_rank()) == (("tp",), 2, place["tp"])
    assert world.fsdp.mesh_dim_names == ("dp_replicate", "fsdp")  # HSDP
    assert (world.fsdp.shape, world.fsdp.get_local_rank("fsdp")) == ((2, 3 * 2), place["dp_shard"] * 2 + place["cp"])


def test_without_replicas_parameters_are_cut_over_one_axis(pretended):
    pretended(4, 3)
    assert mesh.start(CPU, mesh.resolve(config.Mesh(tp=2), 4)).fsdp.mesh_dim_names == ("fsdp",)


def test_a_communicator_that_is_bound_to_a_device_is_split_once_a_kind_by_every_rank(monkeypatch, pretended):
    """nccl needs that: a process that stays away from a split would be waited for."""
    splits = []
    for rank in (0, 9000):
        everyone = pretended(16384, rank)
        calls = Calls(monkeypatch)
        everyone.bound_device_id = torch.device("cuda", 0)
        mesh.start(CPU, MANY, timeout_s=9).between([0, 3, 7])
        splits.append(calls.split)
        assert calls.new == []
        assert calls.timeouts == {timedelta(seconds=9)}
        dist.destroy_process_group()
    pretended(1, 0)
    assert splits[0] == splits[1]
    places = [[pipeline[place] for place in (0, 3, 7)] for pipeline in mesh.rank_groups(MANY, ("pp",))]
    for split, lists in zip(splits[0], [*mesh.group_lists(MANY).values(), places], strict=True):
        assert split[: len(lists)] == lists
        assert sorted(rank for members in split for rank in members) == list(range(16384))


@pytest.mark.parametrize(
    ("sizes", "shared"),
    [
        ({}, [{"pp", "dp_replicate", "cp", "tp"}, {"dp_shard", "data", "fsdp", "loss", "shards"}]),
        ({"pp": 2, "dp_shard": 4}, [{"pp", "model"}, {"loss", "shards"}, {"dp_shard", "data", "fsdp"}]),
        ({"cp": 2, "dp_replicate": 4}, [{"cp", "fsdp", "model", "shards"}, {"dp_replicate", "data"}]),
    ],
)
def test_names_with_the_same_ranks_share_one_group(pretended, sizes, shared):
    pretended(8, 5)
    world = mesh.start(CPU, mesh.resolve(config.Mesh(**sizes), 8))
    for names in shared:
        assert len({id(world.groups[name]) for name in names}) == 1, names


BETWEEN = [[0, 3], [0, 1, 3], [0, 1, 2, 3]]  # the last is pp itself


def meet(sizes: dict[str, int], folder: str) -> dict[str, Any]:
    """The findings of this rank in its groups; the process group itself, too, is made by `mesh.start`."""
    me, n = dist.get_rank(), dist.get_world_size()
    mesh.stop()  # all together: one that leaves while others are still connecting ends them
    cfg = config.load(["--config", "bloom", "--run.timeout_s", "33", "--run.dir", folder])
    honest = dist.init_process_group

    def init_process_group(backend: str, *, timeout: timedelta, **others: Any) -> None:
        honest(backend, store=dist.FileStore(f"{folder}/store", n), rank=me, world_size=n, timeout=timeout)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "init_process_group", init_process_group)
        world = mesh.start(CPU, mesh.resolve(config.Mesh(**sizes), n), cfg.run.collective_timeout_s())
    for _ in range(2):
        for places in BETWEEN:
            assert world.between(places) is world.groups.get(f"pp {'+'.join(map(str, places))}")
    Checkpoints(cfg, CPU).close()
    sums = {}
    for name, group in world.groups.items():
        total = torch.tensor(2**me)
        dist.all_reduce(total, group=group)
        sums[name] = total.item()
    every_group = distributed_c10d._world.pg_names
    timeouts = {group._get_backend(CPU).options._timeout.total_seconds() for group in every_group}
    return {"sums": sums, "timeouts": timeouts, "groups": len(every_group)}


def test_every_group_joins_its_ranks_and_lets_the_watch_come_first(tmp_path):
    """The job has 8 processes, where some of 4 places of a pipeline share a parameter."""
    sizes = mesh.resolve(config.Mesh(pp=4, tp=2), 8)
    found = ranks.run(8, meet, {"pp": 4, "tp": 2}, str(tmp_path))
    for rank, here in enumerate(found):
        lists = {name: next(g for g in lists if rank in g) for name, lists in mesh.group_lists(sizes).items()}
        for places in BETWEEN:
            if rank // 2 in places:
                lists[f"pp {'+'.join(map(str, places))}"] = [2 * place + rank % 2 for place in places]
        assert here["sums"] == {name: sum(2**other for other in g) for name, g in lists.items()}
        assert here["timeouts"] == {66.0}
        # All, pp, tp, each one alone, one for checkpoints, and two between some places, for others each one alone.
        assert here["groups"] == 7


def meet_unprepared() -> str:
    dist.new_group([0], use_local_synchronization=True)
    try:
        mesh.start(CPU, mesh.resolve(config.Mesh(), 2))
    except ValueError as error:
        return str(error)
    return ""


def test_groups_of_some_ranks_made_before_are_refused_where_torch_would_wait_for_names_that_differ():
    for message in ranks.run(2, meet_unprepared):
        assert "1 to 2 process groups, expected equally many" in message


@pytest.mark.skipif(not Path("/proc/cpuinfo").exists(), reason="the system does not say what the CPU has")
def test_a_cpu_is_fast_at_bfloat16_if_it_has_tiles_or_dot_products_of_it():
    has = set(re.findall(r"\w+", Path("/proc/cpuinfo").read_text()))
    assert ("amx_tile" in has) is features.HAS_TILES
    assert ({"amx_tile", "avx512_bf16"} & has != set()) is mesh.has_fast_bfloat16(torch.device("cpu"))
