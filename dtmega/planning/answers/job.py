"""The question that a plan answers: a configuration, a number of ranks, the ranks' device and the device's memory.

The functions that refuse impossible layouts in training also refuse them here, with the same messages.
"""

from __future__ import annotations

import math
import re
from typing import NamedTuple

import torch

from dtmega import families, mesh
from dtmega.config import Config
from dtmega.data.loader import check_sizes
from dtmega.planning.prices import fabric as fabrics
from dtmega.planning.prices.fabric import Fabric
from dtmega.training.checks import check
from dtmega.training.choices import with_accumulation, with_micro_batch_size, with_params_dtype

DEFAULT_FABRICS = {"cuda": "h100-ib", "cpu": "cpu-gloo"}
UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
BYTES = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)")


class Memory(NamedTuple):
    """The memory of one device.

    Attributes:
        n_bytes: total memory of the device, in bytes.
        source: origin of `n_bytes`, in words.
        is_given: whether the user specified `n_bytes`; if so, a job that does not fit ends with exit code 4.
        reserve_bytes: part of the memory that tensors cannot use, in bytes.
        reserve_source: origin of `reserve_bytes`, in words.
    """

    n_bytes: int
    source: str
    is_given: bool
    reserve_bytes: int
    reserve_source: str

    def holds(self, peak_bytes: int) -> bool:
        """True if `peak_bytes` of tensors and the reserve together fit into the memory."""
        return peak_bytes + self.reserve_bytes <= self.n_bytes


class Machine(NamedTuple):
    """The hardware of every rank in a job.

    Attributes:
        device: device of each rank; the device need not exist.
        fabric_name: name or path of the fabric.
        fabric: speed and price of the device, and the links between devices.
        memory: memory of the device.
    """

    device: torch.device
    fabric_name: str
    fabric: Fabric
    memory: Memory

    @property
    def gpu_bytes(self) -> int | None:
        """Memory of a GPU; None for a CPU, as in `mesh.memory_bytes`."""
        return self.memory.n_bytes if self.device.type == "cuda" else None


class Job(NamedTuple):
    """A configuration, the layout to run it on, and the hardware.

    Attributes:
        cfg: configuration, with all open values filled in for this layout.
        sizes: size of each axis of the mesh.
        machine: hardware of every rank.
        imbalance: largest load of a rank's experts, as a multiple of the mean load in the rank's ep group.
    """

    cfg: Config
    sizes: dict[str, int]
    machine: Machine
    imbalance: float = 1.0

    @property
    def world(self) -> int:
        """The number of ranks in the job."""
        return math.prod(self.sizes.values())

    @property
    def data_size(self) -> int:
        """The number of data ranks over which the global batch is divided."""
        return self.sizes["dp_replicate"] * self.sizes["dp_shard"]


def machine_of(kind: str, fabric: str = "", memory: str | None = None, reserve: str | None = None) -> Machine:
    """The machine that a user describes.

    Args:
        kind: type of the device, "cuda" or "cpu".
        fabric: name of a shipped fabric, or path of a TOML file; '' for the device's default fabric.
        memory: total memory of the device, as text; None for the fabric's value.
        reserve: part of the memory that tensors cannot use, as text; None for the fabric's value.

    Raises:
        ValueError: the fabric does not exist, or `memory` or `reserve` is not a number of bytes.
    """
    device = torch.device("cuda", 0) if kind == "cuda" else torch.device("cpu")
    name = fabric or DEFAULT_FABRICS[kind]
    loaded = fabrics.load(name)
    gpu = loaded.gpu
    given_bytes = read_option("--memory", memory)
    given_reserve_bytes = read_option("--reserve", reserve)
    n_bytes, source = gpu.memory_bytes, f"{gpu.name}: {gpu.sources.get('memory_bytes', '')}"
    if given_bytes is not None:
        n_bytes, source = given_bytes, "--memory"
    reserve_bytes = gpu.reserve_bytes
    reserve_source = gpu.sources.get("reserve_bytes", "none in the fabric") + " (or --reserve)"
    if given_reserve_bytes is not None:
        reserve_bytes, reserve_source = given_reserve_bytes, "--reserve"
    whole = Memory(n_bytes, source, given_bytes is not None, reserve_bytes, reserve_source)
    return Machine(device, name, loaded, whole)


def world_of(cfg: Config) -> int:
    """The number of ranks in a mesh whose sizes are all given.

    Raises:
        ValueError: a size is -1, which requires a number of ranks, but the user has given no number.
    """
    sizes = {axis: getattr(cfg.mesh, axis) for axis in mesh.AXES}
    for axis, size in sizes.items():
        if size < 1:
            raise ValueError(
                f"{axis}={size} is what the other axes leave of the number of ranks: expected a positive size, or the "
                f"number of ranks ([mesh] {axis}, --world)"
            )
    return math.prod(sizes.values())


def lay_out(asked: Config, world: int | None, machine: Machine, imbalance: float = 1.0) -> Job:
    """Fill in the open values of a configuration for this layout. Refuse a job that cannot run.

    Args:
        asked: configuration as the user wrote it (`config.load`).
        world: number of ranks; None for the product of the mesh sizes.
        machine: hardware of every rank. The memory of the device decides the meaning of [fsdp] accumulate = "auto".
        imbalance: largest load of a rank's experts, as a multiple of the mean load in the rank's ep group.

    Raises:
        ValueError: training would refuse this configuration on this layout, the number of ranks is not known, the
            fabric lacks the speed of matrix products in the configured dtype, or no rank can have the load `imbalance`.
    """
    asked = families.resolve(asked)
    sizes = mesh.resolve(asked.mesh, world or world_of(asked), "--world")
    cfg = with_micro_batch_size(asked, sizes)
    check(cfg, sizes, machine.device)
    check_sizes(cfg.batch, sizes["dp_replicate"] * sizes["dp_shard"])
    cfg = with_accumulation(cfg, sizes, machine.gpu_bytes)
    check_imbalance(imbalance, cfg.mesh.ep)
    return priced(Job(with_dtype(cfg, machine.device), sizes, machine, imbalance))


def check_imbalance(imbalance: float, ep: int) -> None:
    """Refuse an expert load that no rank can have.

    Raises:
        ValueError: the largest load is below the mean or above the total load of the ep group.
    """
    if ep == 1 and imbalance != 1:
        raise ValueError(
            f"--imbalance {imbalance:g} has no effect with ep=1: each rank computes the experts of its own tokens, so "
            f"the load is always even; expected no --imbalance, or ep > 1 ([mesh] ep)"
        )
    if not 1 <= imbalance <= ep:
        raise ValueError(
            f"--imbalance {imbalance:g} is the largest load of {ep} ranks as a multiple of their mean: expected 1 "
            f"(even) to ep={ep} (one rank has all tokens) ([mesh] ep)"
        )


def with_dtype(cfg: Config, device: torch.device) -> Config:
    """Resolve [precision] params = "auto" for a new run: bfloat16 if the device is fast in bfloat16, else float32."""
    if cfg.precision.params != "auto":
        return cfg
    is_fast = device.type == "cuda" or mesh.has_fast_bfloat16(device)
    return with_params_dtype(cfg, "bfloat16" if is_fast else "float32")


def priced(job: Job) -> Job:
    """Return the job, after checking that the fabric specifies the speed of the job's matrix products.

    Raises:
        ValueError: the fabric lacks the speed for the job's dtype.
    """
    gpu, dtype = job.machine.fabric.gpu, job.cfg.precision.params
    if dtype not in gpu.peak_flops:
        known = ", ".join(gpu.peak_flops)
        raise ValueError(
            f"the fabric has no FLOP/s of {gpu.name} for {dtype}, expected one of {known} (--fabric: [gpu] peak_flops; "
            f"[precision] params)"
        )
    return job


def read_option(option: str, text: str | None) -> int | None:
    """Parse an option's number of bytes, such as 80GiB, 1.5TiB or 85899345920; return None if `text` is None.

    Raises:
        ValueError: `text` is not a number of bytes.
    """
    if text is None:
        return None
    matched = BYTES.fullmatch(text.strip())
    if matched is None or matched[2].upper() not in UNITS:
        raise ValueError(f"{option} {text:.80}: expected a number of bytes such as 80GiB, 80GB or 85899345920")
    n_bytes = round(float(matched[1]) * UNITS[matched[2].upper()])
    if 0 < n_bytes < 1000:
        raise ValueError(f"{option} {text:.80} is {n_bytes} bytes: expected a unit, such as {matched[1]}GiB")
    return n_bytes
