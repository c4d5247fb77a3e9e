"""The bytes that loads of one checkpoint read from an object store, on several layouts.

    python -m benchmarks.object_bytes        a table; some minutes, everything on the loopback interface

One to three ranks save a model with its moments. Then each layout loads the checkpoint, and the store counts its
answers. `held` is what all ranks together hold, and `rows` the rows (first dimension) that hold these parts. The bytes
read include the manifest, which each rank reads.
"""

from __future__ import annotations

import os
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from dtmega import config, mesh
from dtmega.checkpoint import manifest, tensor_files
from dtmega.checkpoint.files import open_root
from dtmega.checkpoint.reader import Checkpoint
from dtmega.ops.shards import Box, boxes
from dtmega.training.parallelize import parallelize
from tests import ranks
from tests.object_server import Server, serving

ROOT = "s3://bucket/run"
Keys = dict[str, Any]
MODELS: dict[str, Keys] = {
    "`configs/bloom.toml`": {},
    "one layer of BLOOM-560m, vocabulary 8,192": {"hidden_size": 1024, "n_heads": 16, "n_layers": 1},
}
DP2: Keys = {"dp_shard": 2}
LAYOUTS: dict[str, tuple[int, Keys]] = {
    "one process": (1, {}),
    "dp 2": (2, DP2),
    "dp 3": (3, {"dp_shard": 3}),
    "dp 4": (4, {"dp_shard": 4}),
    "tp 2": (2, {"tp": 2}),
    "pp 2": (2, {"pp": 2}),
    "dp 2 x tp 2": (4, {"dp_shard": 2, "tp": 2}),
}
SAVED_ON = ("dp 2", "one process", "dp 3", "dp 2 x tp 2")


class Read(NamedTuple):
    """What one rank has loaded.

    Attributes:
        held: bytes of the parts that it holds.
        rows: bytes of the rows that hold these parts.
    """

    held: int
    rows: int


def main() -> None:
    print("| model | saved on | loaded on | read | / held | / rows | requests |")
    print("| --- | --- | --- | ---: | ---: | ---: | ---: |")
    for name, model in MODELS.items():
        for saved_on in SAVED_ON if name == "`configs/bloom.toml`" else SAVED_ON[:1]:
            with serving() as server:
                measure(server, name, model, saved_on)


def measure(server: Server, name: str, model: Keys, saved_on: str) -> None:
    """Print a line for each layout that loads what one layout has saved."""
    from benchmarks.object_bytes import load, save  # by a name that ranks can import

    world, layout = LAYOUTS[saved_on]
    ranks.run(world, save, server.environment, model, layout)
    for loaded_on, (world, layout) in LAYOUTS.items():
        server.bytes_sent, before = 0, len(server.seen)
        found: list[Read] = ranks.run(world, load, server.environment, model, layout)
        read = server.bytes_sent
        held, rows = sum(each.held for each in found), sum(each.rows for each in found)
        requests = sum(request.key.endswith(".bin") for request in server.seen[before:])
        figures = f"{read / 1e6:.1f} MB | {read / held:.2f} | {read / rows:.2f} | {requests}"
        print(f"| {name} | {saved_on} | {loaded_on} | {figures} |", flush=True)


def tensors_on(model: Keys, layout: Keys) -> dict[str, Tensor]:
    """The tensors of a run's checkpoint as this rank holds them, empty."""
    cfg = config.load(["--config", "configs/bloom.toml", "--run.device", "cpu", "--precision.params", "float32"])
    cfg = cfg.model_copy(
        update={"model": cfg.model.model_copy(update=model), "mesh": cfg.mesh.model_copy(update=layout)}
    )
    sizes = mesh.resolve(cfg.mesh, dist.get_world_size())
    parallel = parallelize(cfg, mesh.start(torch.device("cpu"), sizes))
    tensors = {}
    for name, parameter in parallel.named_parameters():
        for kind in ("model", "optimizer/exp_avg", "optimizer/exp_avg_sq"):
            tensors[f"{kind}/{name}"] = torch.zeros_like(parameter.detach())
    return tensors


def truth(name: str, shape: tuple[int, ...]) -> Tensor:
    """A whole tensor whose elements tell its name and their places."""
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape) % 65_521 + len(name)


def save(environment: dict[str, str], model: Keys, layout: Keys) -> None:
    """Save a checkpoint together with the other ranks."""
    os.environ.update(environment)
    tensors = tensors_on(model, layout)
    for name, tensor in tensors.items():
        for offsets, part in boxes(tensor):
            part.copy_(truth(name, tuple(tensor.shape))[Box(offsets, part).where])
    group = dist.group.WORLD
    assert group is not None
    files = open_root(ROOT)
    attempt = files.new_attempt()
    written = tensor_files.save(files, "a", tensors, 1, {}, group, attempt)
    if written is not None:
        files.publish("a", manifest.dump(written), attempt)


def load(environment: dict[str, str], model: Keys, layout: Keys) -> Read:
    """Load this rank's parts, and compare them with what was saved."""
    os.environ.update(environment)
    tensors = tensors_on(model, layout)
    group = dist.group.WORLD
    assert group is not None
    tensor_files.load_tensors(Checkpoint(open_root(ROOT), "a"), tensors, group)
    held, rows = 0, 0
    for name, tensor in tensors.items():
        for offsets, part in boxes(tensor):
            assert torch.equal(part, truth(name, tuple(tensor.shape))[Box(offsets, part).where]), name
            held += part.nbytes
            if part.numel():
                rows += part.shape[0] * tensor.shape[1:].numel() * part.itemsize
    return Read(held, rows)


if __name__ == "__main__":
    main()
