"""A fabric: the speed, memory and price of one kind of GPU, and of the links between GPUs.

    fabric = load("h100-ib")             # a file in fabrics/, by name
    fabric = load("mine.toml")           # a user's file
    seconds = pricing.seconds(work, fabric, rank, groups)

Rates and latencies apply to one GPU. `[gpu.sources]`, `[node.sources]` and `[network.sources]` give the source of each
number: a data sheet, a paper, or a measurement.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, model_validator

from dtmega.config import reading
from dtmega.config.schema import Section, key

SHIPPED = Path(__file__).parent / "fabrics"
Positive = Annotated[float, Field(gt=0)]
Share = Annotated[float, Field(gt=0, le=1)]
# A measured point: (smallest side of the product, FLOP/s reached). TOML has lists but no tuples, and strict validation
# would refuse a list, so `strict` is False.
Point = Annotated[tuple[Annotated[int, Field(ge=1)], Positive], Field(strict=False)]
Sources = dict[str, str]


class Gpu(Section):
    """One kind of GPU or other device with its own memory."""

    name: str = key("", "the device's name")
    memory_bytes: int = key(0, "memory of one device", gt=0)
    reserve_bytes: int = key(0, "memory that tensors cannot use: context, communication library, fragmentation", ge=0)
    memory_bytes_per_s: Positive = key(1.0, "bandwidth of the memory, reads and writes together")
    launch_s: float = key(0.0, "time between two kernels on one stream, and before a message begins", ge=0)
    power_w: float = key(0.0, "power of the device under load", ge=0)
    price_per_hour: float = key(0.0, "price of one device for one hour", ge=0)
    currency: str = key("USD", "currency of the price")
    peak_flops: dict[str, Positive] = key({}, "FLOP/s that count as 100 %, by dtype")
    efficiency: Share = key(1.0, "share of the peak that large matrix products reach")
    half_side: float = key(0.0, "smallest side of a product that reaches half of what large products reach", ge=0)
    attention_efficiency: Share = key(1.0, "share of the peak that fused attention reaches")
    held_out_error: float = key(0.0, "mean relative error of the efficiency's fit on held-out figures; 0: no fit", ge=0)
    measured: dict[str, list[Point]] = key({}, "points (smallest side, FLOP/s reached), by dtype, instead of a formula")
    sources: Sources = key({}, "where each number comes from, by key")

    @model_validator(mode="after")
    def _complete(self) -> Gpu:
        if not self.peak_flops:
            raise ValueError("peak_flops is empty, expected FLOP/s by dtype such as { bfloat16 = 1e15 }")
        for dtype, points in self.measured.items():
            sides = [side for side, _ in points]
            if not sides or sides != sorted(set(sides)):
                raise ValueError(f"measured.{dtype} has sides {sides}, expected at least one, ascending")
        return self


class Node(Section):
    """The links inside a node."""

    ranks: int = key(1, "number of ranks in one node", ge=1)
    bytes_per_s: Positive = key(1.0, "bandwidth of one rank in each direction")
    latency_s: float = key(0.0, "time of one step of a ring beside the transfer itself", ge=0)
    sources: Sources = key({}, "where each number comes from, by key")


class Network(Section):
    """The links between nodes."""

    bytes_per_s: Positive = key(1.0, "bandwidth between nodes for each rank, in each direction")
    latency_s: float = key(0.0, "time of one step of a ring beside the transfer itself", ge=0)
    sources: Sources = key({}, "where each number comes from, by key")


class Fabric(Section):
    """A cluster of identical nodes with identical GPUs."""

    gpu: Gpu
    node: Node
    network: Network


SECTIONS: dict[str, type[Section]] = {"gpu": Gpu, "node": Node, "network": Network}
# Section -> keys that have no sensible default.
REQUIRED = {
    "gpu": ("name", "memory_bytes", "memory_bytes_per_s", "peak_flops"),
    "node": ("ranks", "bytes_per_s"),
    "network": ("bytes_per_s",),
}


class _Suggester:
    """Suggests corrections for unknown keys in a fabric's file."""

    def of_key(self, section: str, key: str, families: Mapping[str, str], option: bool = False) -> str:
        fields = list(SECTIONS[section].model_fields) if section in SECTIONS else []
        close = difflib.get_close_matches(key, fields, 1)
        if close:
            return f"; did you mean {close[0]}?"
        return f"; expected {', '.join(fields)}" if fields else self.of_section(section)

    def of_section(self, section: str) -> str:
        return f"; expected [{'], ['.join(SECTIONS)}]"

    def section(self, written: str) -> str:
        """The section that a name may mean; '' as a fabric has too few sections for guesses."""
        return ""


def names() -> list[str]:
    """The names of the shipped fabrics."""
    return sorted(path.stem for path in SHIPPED.glob("*.toml"))


def load(name: str) -> Fabric:
    """Read a shipped fabric by name, or a user's TOML file by path.

    Raises:
        ValueError: the fabric or file does not exist, the file is not TOML, or a key is unknown, missing or out of
            range.
    """
    path = SHIPPED / f"{name}.toml"
    if not path.is_file():
        path = Path(name)
        if path.suffix != ".toml":
            raise ValueError(
                f"--fabric {name}: expected one of {', '.join(names())}, or the path of a TOML file (FILE.toml)"
            )
    return parse(reading.read_toml(path), str(path))


def parse(values: Mapping[str, Any], source: str) -> Fabric:
    """Make a fabric from the values in a file.

    Args:
        values: section -> key -> value.
        source: name of the file, for messages.

    Raises:
        ValueError: a key is unknown, missing or out of range. The message has one line for each error.
    """
    missing = []
    for section, kind in SECTIONS.items():
        table = values.get(section, {})
        for name in REQUIRED[section]:
            if isinstance(table, dict) and name not in table:
                description = kind.model_fields[name].description
                missing.append(f"{source}: [{section}] {name} is missing: {description}")
    if missing:
        raise ValueError("\n".join(missing))
    return reading.validate(Fabric, values, source, _Suggester)
