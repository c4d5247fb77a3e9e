"""A layout: one value for each key that a search varies."""

from __future__ import annotations

from typing import Any, NamedTuple

from dtmega import config, mesh

# Key that a search varies (a field of `Layout`) -> section of the key. Older versions of dtmega lack some of the keys.
SECTIONS = {
    "pp": "mesh",
    "dp_replicate": "mesh",
    "dp_shard": "mesh",
    "cp": "mesh",
    "tp": "mesh",
    "micro_batch_size": "batch",
    "sequence_parallel": "mesh",
    "cp_form": "mesh",
    "accumulate": "fsdp",
    "schedule": "pipeline",
    "virtual_stages": "pipeline",
    "mode": "recompute",
    "reshard_after_forward": "fsdp",
    "ep": "mesh",
}
KEYS = tuple(f"{section}.{key}" for key, section in SECTIONS.items())


class Layout(NamedTuple):
    """One value for each key that a search varies. `SECTIONS` maps each key to its section."""

    pp: int
    dp_replicate: int
    dp_shard: int
    cp: int
    tp: int
    micro_batch_size: int
    sequence_parallel: bool
    cp_form: str
    accumulate: str
    schedule: str
    virtual_stages: int
    mode: str
    reshard_after_forward: str | bool
    ep: int = 1

    @property
    def sizes(self) -> dict[str, int]:
        """The size of each mesh axis."""
        return {axis: getattr(self, axis) for axis in mesh.AXES}

    @property
    def data_size(self) -> int:
        """The number of data ranks over which the global batch is divided."""
        return self.dp_replicate * self.dp_shard

    @property
    def n_shards(self) -> int:
        """The number of ranks over which parameters are sharded."""
        return self.dp_shard * self.cp

    @property
    def overrides(self) -> dict[str, Any]:
        """The keys and values of the layout, as in `--section.key value`."""
        return {f"{section}.{key}": getattr(self, key) for key, section in SECTIONS.items()}


def with_layout(cfg: config.Config, layout: Layout) -> config.Config:
    """Copy a configuration and set the layout's keys in the copy."""
    changes: dict[str, dict[str, Any]] = {}
    for name, value in layout.overrides.items():
        section, _, key = name.partition(".")
        changes.setdefault(section, {})[key] = value
    if layout.mode == "none":
        changes["recompute"] |= {"method": "uniform", "layers": 1}  # mode "none" requires these two values
    sections = {}
    for section, values in changes.items():
        sections[section] = getattr(cfg, section).model_copy(update=values)
    return cfg.model_copy(update=sections)


def describe(layout: Layout) -> str:
    """A layout on one line, without default values: `pp 12 x dp_shard 8, 1F1B, micro-batch 2, recompute full`."""
    axes = [f"{axis} {size}" for axis, size in layout.sizes.items() if size > 1]
    words = [" x ".join(axes) or "one rank"]
    if layout.ep > 1:
        words.append(f"ep {layout.ep}")
    if layout.pp > 1:
        virtual = f" x {layout.virtual_stages}" if layout.virtual_stages else ""
        words.append(layout.schedule + virtual)
    words.append(f"micro-batch {layout.micro_batch_size}")
    if layout.mode != "none":
        words.append(f"recompute {layout.mode}")
    if layout.tp > 1 and not layout.sequence_parallel:
        words.append("no sequence_parallel")
    if layout.cp > 1:
        words.append(f"cp_form {layout.cp_form}")
    if layout.accumulate != "whole":
        words.append(f"accumulate {layout.accumulate}")
    if layout.reshard_after_forward != "auto":
        words.append(f"reshard_after_forward {str(layout.reshard_after_forward).lower()}")
    return ", ".join(words)
