"""Claims about checkpoint/data_files.py: sizes of blocks, and parts that are read together."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import xxhash
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from dtmega.checkpoint import manifest, tensor_files
from dtmega.checkpoint.data_files import Extent, side_by_side
from dtmega.checkpoint.files import Disk
from dtmega.checkpoint.manifest import Damaged, StoredChunk
from dtmega.checkpoint.reader import Checkpoint
from dtmega.checkpoint.resume import open_checkpoint
from dtmega.checkpoint.state import State
from dtmega.ops.shards import local
from tests import ranks
from tests.checkpoint.test_reader import store

MIB = 2**20


def xxh3(data: bytes) -> str:
    return xxhash.xxh3_128_hexdigest(data)


def test_a_checkpoint_of_the_first_format_is_read_by_its_blocks_of_4_mib(tmp_path):
    """Written here as the first format was, for its writer is gone."""
    whole = torch.arange(2 * MIB + 2, dtype=torch.float32)
    data = whole.numpy().tobytes()
    blocks = [data[: 4 * MIB], data[4 * MIB : 8 * MIB], data[8 * MIB :]]
    chunk = [[0], [2 * MIB + 2], "data-00000.bin", 0, [xxh3(block) for block in blocks]]
    content = {
        "format": 1,
        "step": 5,
        "state": State.of({}).model_dump(),
        "files": {"data-00000.bin": len(data)},
        "tensors": {"x": {"dtype": "float32", "shape": [2 * MIB + 2], "chunks": [chunk]}},
    }
    folder = tmp_path / "a"
    folder.mkdir()
    body = b'{"content":' + json.dumps(content).encode()
    (folder / "manifest.json").write_bytes(body + b',"xxh3":"%s"}\n' % xxh3(body).encode())
    (folder / "data-00000.bin").write_bytes(data)
    checkpoint = open_checkpoint(str(folder))
    part = slice(MIB + 7, MIB + 9)
    assert torch.equal(checkpoint.read("x", (part,)), whole[part])
    assert checkpoint.bytes_read == 4 * MIB
    checkpoint.verify()
    damaged = bytearray(data)
    damaged[-1] ^= 1
    (folder / "data-00000.bin").write_bytes(damaged)
    with pytest.raises(Damaged, match=r"the bytes of 'x' from 8388608 to 8388616 do not match"):
        open_checkpoint(str(folder)).read("x", (slice(2 * MIB + 1, None),))


@pytest.mark.parametrize("gigabytes", [0, 0.02, 1, 7, 90, 600, 3000])
def test_the_digests_of_a_checkpoint_take_at_most_10_mb_until_its_blocks_have_4_mib(gigabytes):
    n_bytes = int(gigabytes * 1e9)
    size = manifest.block_bytes_for(n_bytes)
    n_blocks = math.ceil(n_bytes / size)
    in_manifest = len(json.dumps("0" * 32)) + 1
    assert n_blocks * in_manifest < 10e6 or size == 4 * MIB
    # None is larger than it must be.
    assert size == 16 * 1024 or 2 * n_blocks * in_manifest > 9e6


def extents(*ranges: tuple[str, int, int]) -> list[Extent]:
    """Extents at these places of these files."""
    found = []
    for file, start, stop in ranges:
        chunk = StoredChunk((0,), (stop - start,), file, start, ())
        found.append(Extent("x", torch.uint8, chunk, (slice(0, stop - start),), 16, start, stop))
    return found


@pytest.mark.parametrize(
    ("ranges", "groups"),
    [
        ([("a", 0, 4), ("a", 4, 8)], [[0, 1]]),
        ([("a", 4, 8), ("a", 0, 4)], [[1, 0]]),
        ([("a", 0, 4), ("a", 5, 8)], [[0], [1]]),
        ([("a", 0, 4), ("b", 4, 8)], [[0], [1]]),
        # Two boxes in one block: it is read once.
        ([("a", 0, 8), ("a", 0, 8), ("a", 8, 10)], [[0, 1, 2]]),
        # The first group is full with 10 bytes, and what is longer stands alone.
        ([("a", 0, 6), ("a", 6, 10), ("a", 10, 14), ("a", 14, 99), ("a", 99, 101)], [[0, 1], [2], [3], [4]]),
        # A range that ends before the range in front of it does not shorten the group.
        ([("a", 0, 8), ("a", 2, 4), ("a", 8, 9)], [[0, 1, 2]]),
        ([], []),
    ],
)
def test_ranges_without_gaps_are_one_read_up_to_its_limit(ranges, groups):
    assert side_by_side(extents(*ranges), most_bytes=10) == groups


def test_of_boxes_that_are_read_together_the_damaged_one_is_named(tmp_path):
    path = store(f"{tmp_path}/a", {"x": torch.ones(6, 2)}, {"x": [[0], [0]]})
    data = Path(path, "data-00000.bin")
    raw = bytearray(data.read_bytes())
    raw[-1] ^= 1
    data.write_bytes(raw)
    checkpoint = Checkpoint(Disk(str(tmp_path)), "a")
    group = dist.group.WORLD
    if group is None:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        group = dist.group.WORLD
    assert group is not None
    with pytest.raises(Damaged, match="the bytes of 'x' from 0 to 48 do not match"):
        tensor_files.load_tensors(checkpoint, {"x": torch.zeros(6, 2)}, group)


SHAPES = {f"model/{i}": (48 + i, 512) for i in range(4)} | {"model/norm": (512,)}


def save_and_load(folder: str, n_savers: int, saves: bool) -> Any:
    """Save, or load and return (bytes read, bytes held) of this rank."""
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh, group = init_device_mesh("cpu", (world,)), dist.group.WORLD
    assert group is not None
    files, tensors = Disk(folder), {}
    whole = {name: torch.arange(math.prod(shape), dtype=torch.float32).view(shape) for name, shape in SHAPES.items()}
    for name, tensor in whole.items():
        tensors[name] = distribute_tensor(tensor, mesh, [Shard(0)], src_data_rank=None)
    if saves:
        assert world == n_savers
        written = tensor_files.save(files, "a", tensors, 1, {}, group)
        if written is not None:
            with files.create("a", manifest.NAME) as file:
                file.write(manifest.dump(written))
        return None
    empty = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    checkpoint = Checkpoint(files, "a")
    tensor_files.load_tensors(checkpoint, empty, group)
    assert all(torch.equal(local(empty[name]), local(tensors[name])) for name in tensors), rank
    return checkpoint.bytes_read, sum(local(tensor).nbytes for tensor in tensors.values())


@pytest.mark.parametrize(("n_savers", "n_loaders"), [(2, 3), pytest.param(1, 4, marks=pytest.mark.full)])
def test_ranks_of_another_layout_read_little_more_than_they_hold(tmp_path, n_savers, n_loaders):
    ranks.run(n_savers, save_and_load, str(tmp_path), n_savers, True)
    found = ranks.run(n_loaders, save_and_load, str(tmp_path), n_savers, False)
    read = sum(each for each, _ in found)
    held = sum(each for _, each in found)
    assert held == sum(4 * math.prod(shape) for shape in SHAPES.values())
    # Matrices of 98 KB: each of the n - 1 borders between two ranks' rows costs at most one block of 16 KiB.
    assert held <= read <= held + (n_loaders - 1) * len(SHAPES) * 16 * 1024
