"""The bytes that loads of one checkpoint read from an object store, on several layouts.

    python -m benchmarks.object_bytes        a table; about a minute, everything on the loopback interface

Two processes save tensors cut along their rows. Then each layout loads them, and the store counts the bytes of its
answers. `held` is what all ranks together hold, and `rows` the rows (first dimension) that hold these parts.
"""

from __future__ import annotations

import os
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from dtmega.checkpoint import manifest, tensor_files
from dtmega.checkpoint.files import open_root
from dtmega.checkpoint.reader import Checkpoint
from tests.checkpoint.object_server import serving

ROOT = "s3://bucket/run"
SIZES = {
    "22 MB, 20 matrices of 512 x 512": {f"model/{i}": (512, 512) for i in range(20)} | {"model/norm": (512,)},
    "336 MB, 5 matrices of 4096 x 4096": {f"model/{i}": (4096, 4096) for i in range(5)},
}
LAYOUTS: dict[str, tuple[int, Any]] = {
    "rows over 2 ranks, as saved": (2, Shard(0)),
    "one process": (1, Replicate()),
    "rows over 4 ranks": (4, Shard(0)),
    "columns over 2 ranks": (2, Shard(1)),
}


def main() -> None:
    print("| tensors | layout of the load | read | / held | / rows |\n| --- | --- | ---: | ---: | ---: |")
    for name, shapes in SIZES.items():
        with serving() as server, TemporaryDirectory() as folder:
            os.environ.update(server.environment)
            mp.spawn(work, (f"{folder}/save", shapes, 2, Shard(0), True), nprocs=2)
            for number, (layout, (world, placement)) in enumerate(LAYOUTS.items()):
                server.bytes_sent = 0
                mp.spawn(work, (f"{folder}/{number}", shapes, world, placement, False), nprocs=world)
                sent = server.bytes_sent
                held, rows = wanted(shapes, world, placement)
                print(
                    f"| {name} | {layout} | {sent / 1e6:.1f} MB | {sent / held:.2f} | {sent / rows:.2f} |", flush=True
                )


def wanted(shapes: dict[str, tuple[int, ...]], world: int, placement: Any) -> tuple[int, int]:
    """The bytes that all ranks together hold, and the bytes of the rows that hold these parts."""
    total = 4 * sum(torch.Size(shape).numel() for shape in shapes.values())
    columns = sum(4 * torch.Size(shape).numel() for shape in shapes.values() if len(shape) == 2)
    return total, total + (world - 1) * columns if placement == Shard(1) else total


def work(rank: int, store: str, shapes: dict[str, tuple[int, ...]], world: int, placement: Any, saves: bool) -> None:
    """Save or load on one rank, and compare what is loaded with what was saved."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, world), rank=rank, world_size=world)
    mesh, group = init_device_mesh("cpu", (world,)), dist.group.WORLD
    assert group is not None
    whole, tensors = {}, {}
    for number, (name, shape) in enumerate(shapes.items()):
        whole[name] = torch.full(shape, 1.0 + number)
        cut = placement if placement != Shard(1) or len(shape) == 2 else Shard(0)
        tensors[name] = distribute_tensor(whole[name], mesh, [cut], src_data_rank=None)
    files = open_root(ROOT)
    if saves:
        attempt = files.new_attempt()
        written = tensor_files.save(files, "a", tensors, 1, {}, group, attempt)
        if written is not None:
            files.publish("a", manifest.dump(written), attempt)
    else:
        empty = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
        tensor_files.load_tensors(Checkpoint(files, "a"), empty, group)
        for name, tensor in empty.items():
            assert torch.equal(tensor.to_local(), tensors[name].to_local()), name
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
