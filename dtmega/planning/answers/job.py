"""The question that a plan answers: a configuration, a number of ranks, their device and its memory.

A layout that cannot run is refused by the functions that refuse it in training, with the same words.
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
from dtmega.training.accumulation import with_accumulation
from dtmega.training.checks import check
from dtmega.training.parallelize import with_micro_batch_size, with_params_dtype

DEFAULT_FABRICS = {"cuda": "h100-ib", "cpu": "cpu-gloo"}
UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
BYTES = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)")


class Memory(NamedTuple):
    """The memory of one device.

    Attributes:
        n_bytes: bytes of the whole device.
        source: origin of `n_bytes`, in words.
        is_given: True if the user has given it; then a job that does not fit ends with exit code 4.
        reserve_bytes: bytes that tensors cannot use.
        reserve_source: origin of `reserve_bytes`, in words.
    """

    n_bytes: int
    source: str
    is_given: bool
    reserve_bytes: int
    reserve_source: str

    def holds(self, peak_bytes: int) -> bool:
        """True if tensors with this peak fit beside the reserve."""
        return peak_bytes + self.reserve_bytes <= self.n_bytes


class Machine(NamedTuple):
    """The hardware of every rank in a job.

    Attributes:
        device: the device, which need not exist.
        fabric_name: name or path of the fabric.
        fabric: speed and price of the device, and the links to the others.
        memory: memory of the device.
    """

    device: torch.device
    fabric_name: str
    fabric: Fabric
    memory: Memory

    @property
    def gpu_bytes(self) -> int | None:
        """Memory of a GPU; None for a CPU, as `mesh.memory_bytes` answers."""
        return self.memory.n_bytes if self.device.type == "cuda" else None


class Job(NamedTuple):
    """A configuration on a layout.

    Attributes:
        cfg: the configuration, with all open values filled in for this layout.
        sizes: size of each axis of the mesh.
        machine: hardware of every rank.
        imbalance: largest load of a rank's experts, as a multiple of the mean of its ep group.
    """

    cfg: Config
    sizes: dict[str, int]
    machine: Machine
    imbalance: float = 1.0

    @property
    def world(self) -> int:
        """Number of ranks."""
        return math.prod(self.sizes.values())

    @property
    def data_size(self) -> int:
        """Number of data ranks, which share the global batch."""
        return self.sizes["dp_replicate"] * self.sizes["dp_shard"]


def machine_of(kind: str, fabric: str = "", memory: str | None = None, reserve: str | None = None) -> Machine:
    """The machine that a user describes.

    Args:
        kind: the device, "cuda" or "cpu".
        fabric: name of a shipped fabric, or path of a TOML file; '' for the default of the device.
        memory: number of bytes as text, instead of the fabric's.
        reserve: number of bytes that tensors cannot use, as text, instead of the fabric's.

    Raises:
        ValueError: there is no such fabric, or a text is no number of bytes.
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
    """The number of ranks of a mesh without open sizes.

    Raises:
        ValueError: a size is -1, which is what is left of a number of ranks that nobody has given.
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
    """Fill in what a configuration leaves open on this layout, and refuse what cannot run there.

    Args:
        asked: the configuration as the user has written it (`config.load`).
        world: number of ranks; None for the product of the mesh.
        machine: hardware of every rank. The memory of the device decides the meaning of [fsdp] accumulate = "auto".
        imbalance: largest load of a rank's experts, as a multiple of the mean of its ep group.

    Raises:
        ValueError: training would refuse this configuration on this layout, the number of ranks is open, the fabric
            lacks the speed of the products, or no rank can have such a load.
    """
    asked = families.resolve(asked)
    sizes = mesh.resolve(asked.mesh, world or world_of(asked))
    cfg = with_micro_batch_size(asked, sizes)
    check(cfg, sizes, machine.device)
    check_sizes(cfg.batch, sizes["dp_replicate"] * sizes["dp_shard"])
    cfg = with_accumulation(cfg, sizes, machine.gpu_bytes)
    check_imbalance(imbalance, cfg.mesh.ep)
    return priced(Job(with_dtype(cfg, machine.device), sizes, machine, imbalance))


def check_imbalance(imbalance: float, ep: int) -> None:
    """Refuse a load of experts that no rank can have.

    Raises:
        ValueError: the largest load is below the mean, or above the tokens of all ranks in the group.
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
    """Choose the dtype that [precision] params = "auto" means for a new run: bfloat16 on a GPU."""
    if cfg.precision.params != "auto":
        return cfg
    is_fast = device.type == "cuda" or mesh.has_fast_bfloat16(device)
    return with_params_dtype(cfg, "bfloat16" if is_fast else "float32")


def priced(job: Job) -> Job:
    """Check that the fabric has the speed of the job's matrix products, and return the job.

    Raises:
        ValueError: the fabric lacks this speed.
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
    """Parse the number of bytes of an option: 80GiB, 80GB, 1.5TiB or 85899345920; None if it is not given.

    Raises:
        ValueError: the text is no number of bytes.
    """
    if text is None:
        return None
    matched = BYTES.fullmatch(text.strip())
    if matched is None or matched[2].upper() not in UNITS:
        raise ValueError(f"{option} {text:.80}: expected a number of bytes such as 80GiB, 80GB or 85899345920")
    return round(float(matched[1]) * UNITS[matched[2].upper()])
