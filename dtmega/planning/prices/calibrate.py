"""Measure this machine as a fabric. Write the fabric to a TOML file that `--fabric` accepts.

A single process measures matrix products, copies and small kernels. Several processes (under torchrun) also measure
all-gathers over the process group that `mesh.start` has made. Every rank must call `calibrate`.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tomli_w
import torch
import torch.distributed as dist

from dtmega.mesh import synchronize
from dtmega.planning.prices.fabric import Fabric, parse
from dtmega.training import device_peaks

SIDES = (32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
LONG_SIDE = {"cuda": 8192, "cpu": 1024}  # size of the two long sides of a measured matrix product
LAUNCHES = 100
ENOUGH_S = 0.05  # no larger products are measured after the first product that takes longer than this
LEAST_REPEATS = 5
LEAST_S = 0.2  # minimum total time of the repetitions in one measurement
GATHERS = 20
COPY_BYTES = 2**28
MESSAGE_BYTES = (2**12, 2**24)  # output sizes of the two all-gathers that separate latency from bandwidth


def calibrate(device: torch.device, dtypes: tuple[str, ...] = ("float32", "bfloat16")) -> Fabric:
    """Measure a device and, if there are several ranks, the links between the ranks.

    Power and price are not measured, so both are 0. If the ranks are on several nodes, both links get the values of the
    slowest link, which limits the whole group; edit the values of the faster link by hand.

    Args:
        device: device on which this process computes.
        dtypes: dtypes of the products to measure.
    """
    measured = {dtype: _products(device, getattr(torch, dtype)) for dtype in dtypes}
    peaks = {}
    for dtype, points in measured.items():
        known = device_peaks.reference_flops(device, dtype) if device.type == "cuda" else 0.0
        peaks[dtype] = max(known, *(flops for _, flops in points))
    copied = torch.empty(COPY_BYTES // 2, dtype=torch.uint8, device=device)
    copy_s = _shortest_s(copied.clone, device)
    launch_s = _shortest_s(_many_launches(device), device) / LAUNCHES
    here = "measured by dtmega.planning.prices.calibrate"
    gpu: dict[str, Any] = {
        "name": torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU of {socket.gethostname()}",
        "memory_bytes": _memory_bytes(device),
        "memory_bytes_per_s": COPY_BYTES / copy_s,
        "launch_s": launch_s,
        "peak_flops": peaks,
        "measured": measured,
    }
    n_ranks, bytes_per_s, latency_s, n_nodes = _links(device)
    link_source = here if n_ranks > 1 else "not measured: one process"
    if n_nodes > 1:
        link_source = f"{here}, the slowest link of {n_ranks} ranks on {n_nodes} nodes"
    link = {"bytes_per_s": bytes_per_s, "latency_s": latency_s}
    values = {
        "gpu": gpu | {"sources": dict.fromkeys(set(gpu) - {"name"}, here)},
        "node": {"ranks": max(1, n_ranks // n_nodes), **link, "sources": dict.fromkeys(("ranks", *link), link_source)},
        "network": {**link, "sources": dict.fromkeys(link, link_source)},
    }
    return parse(values, "calibration")


def write(fabric: Fabric, path: str) -> None:
    """Write a fabric as a TOML file.

    Raises:
        ValueError: the file cannot be written.
    """
    tables = fabric.model_dump(exclude_unset=True)
    try:
        Path(path).write_text(tomli_w.dumps(tables), encoding="utf-8")
    except OSError as error:
        raise ValueError(f"cannot write the fabric to {path}: {error.strerror} (--calibrate)") from None


def _products(device: torch.device, dtype: torch.dtype) -> list[tuple[int, float]]:
    """Measure matrix products with a growing smallest side. Return a list of (smallest side, FLOP/s).

    The first product that takes longer than ENOUGH_S ends the list. The other two sides of each product are long, as in
    a model: a small square product would mostly wait for its launch.
    """
    points = []
    for side in SIDES:
        long = max(side, LONG_SIDE[device.type])
        matrix = torch.linspace(-1, 1, long * side, device=device).view(long, side).to(dtype)
        seconds = _shortest_s(lambda matrix=matrix: matrix @ matrix.T, device)
        points.append((side, 2 * long * side * long / seconds))
        if seconds > ENOUGH_S:
            break
    return points


def _many_launches(device: torch.device) -> Callable[[], object]:
    """Return a function that launches many small kernels, one after another.

    On a GPU, the kernels are captured in a graph. Without a graph, the GPU would wait for the host to launch each
    kernel. In a training step, the host runs ahead of the GPU, so launches cost no time.
    """
    small = torch.zeros(1, device=device)

    def launch_many() -> None:
        for _ in range(LAUNCHES):
            small.add_(1)

    if device.type != "cuda":
        return launch_many
    launch_many()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch_many()
    return graph.replay


def _shortest_s(work: Callable[[], object], device: torch.device) -> float:
    """Run `work` repeatedly and return the shortest time in seconds; other processes can only lengthen the time."""
    work()
    times_s: list[float] = []
    while len(times_s) < LEAST_REPEATS or sum(times_s) < LEAST_S:
        synchronize(device)
        started_s = time.perf_counter()
        work()
        synchronize(device)
        times_s.append(time.perf_counter() - started_s)
    return min(times_s)


def _memory_bytes(device: torch.device) -> int:
    """The size of the device's memory in bytes."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _links(device: torch.device) -> tuple[int, float, float, int]:
    """Measure the links. Return (number of ranks, bandwidth, latency of one step of a ring, number of nodes).

    An all-gather of S bytes over n ranks takes (n - 1) latencies and (n - 1) / n x S / bandwidth, so two sizes S
    determine the latency and the bandwidth. For a single rank, the bandwidth is a placeholder.
    """
    n = dist.get_world_size() if dist.is_initialized() else 1
    if n == 1:
        return 1, 1e9, 0.0, 1
    hosts: list[Any] = [None] * n
    dist.all_gather_object(hosts, socket.gethostname())
    seconds = []
    for n_bytes in MESSAGE_BYTES:
        part = torch.zeros(n_bytes // n, dtype=torch.uint8, device=device)
        parts = [torch.zeros_like(part) for _ in range(n)]
        times_s = []
        for _ in range(GATHERS):  # a constant, so that all ranks run the same number of gathers
            dist.barrier()
            synchronize(device)
            started_s = time.perf_counter()
            dist.all_gather(parts, part)
            synchronize(device)
            slowest = torch.tensor([time.perf_counter() - started_s], dtype=torch.float32, device=device)
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            times_s.append(slowest.item())
        seconds.append(min(times_s))
    share = (n - 1) / n
    small, large = MESSAGE_BYTES
    bytes_per_s = share * (large - small) / max(1e-9, seconds[1] - seconds[0])
    latency_s = max(0.0, seconds[0] - share * small / bytes_per_s) / (n - 1)
    return n, bytes_per_s, latency_s, len(set(hosts))
