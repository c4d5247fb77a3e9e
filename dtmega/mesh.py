"""The process group and the device mesh: who is here, on which device, and who shares what with whom."""

from __future__ import annotations

import gc
import os
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


class World(NamedTuple):
    """This process among the others.

    Attributes:
        rank, size: of all processes.
        device: where this process computes.
        data: the 1-D mesh over which batches are cut and losses are summed.
    """

    rank: int
    size: int
    device: torch.device
    data: DeviceMesh


def world_size() -> int:
    """Processes that the launcher started; 1 without a launcher."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def rank() -> int:
    return int(os.environ.get("RANK", "0"))


def pick_device(wanted: str) -> torch.device:
    """cuda:LOCAL_RANK where there is a GPU (or where `wanted` insists), else cpu.

    Raises:
        ValueError: [run] device = "cuda" on a machine without one, or fewer GPUs than local processes.
    """
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    local_rank, here = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if local_rank >= here:
        raise ValueError(
            f"local rank {local_rank} needs GPU number {local_rank}, but this machine has {here} "
            f"(--nproc-per-node, or [run] device = 'cpu')"
        )
    return torch.device("cuda", local_rank)


def start(device: torch.device) -> World:
    """Join the process group (nccl or gloo by device) and make the mesh. Works with and without torchrun."""
    timeout = timedelta(minutes=10)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = "nccl" if device.type == "cuda" else "gloo"
    device_id = device if device.type == "cuda" else None
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group(backend, timeout=timeout, device_id=device_id)
    else:
        dist.init_process_group(
            backend,
            store=dist.HashStore(),  # pyright: ignore[reportPrivateImportUsage]  # documented, missing in __all__
            rank=0,
            world_size=1,
            timeout=timeout,
            device_id=device_id,
        )
    data = init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("data",))
    return World(dist.get_rank(), dist.get_world_size(), device, data)


def stop() -> None:
    """Leave the process group. Tensors with pending work are collected first: gloo aborts at exit otherwise."""
    gc.collect()
    dist.barrier()
    dist.destroy_process_group()
