"""The weights that a run reads beside its checkpoints (`checkpoint/starting.py`), in a parallel model."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from dtmega import config, families, rooms
from dtmega.checkpoint import starting
from dtmega.checkpoint.base import location
from dtmega.checkpoint.sources import Source
from dtmega.checkpoint.state import Base
from dtmega.training.sharded_model import ShardedModel


def load_beside(
    model: ShardedModel, source: Source, cfg: config.Config, was: Base | None, with_heartbeats: Callable[[Any], Any]
) -> Base | None:
    """Load the weights that the checkpoint leaves out, and draw the adapters of a new run.

    Args:
        model: parallel model to fill.
        source: result of `starting.weights_beside`.
        cfg: configuration of the run.
        was: description of the base in the checkpoint; None for a new run.
        with_heartbeats: function that wraps an iterable and reports progress.

    Returns:
        A description of the weights that the run's checkpoints leave out; None if they hold all weights.
    """
    lora = rooms.lora() if cfg.lora.rank else None
    stored = [(name, tensor) for name, tensor in model.stored_tensors() if lora is None or not lora.is_adapter(name)]
    counted = [name for name, parameter in model.counted_once().items() if not parameter.requires_grad]
    together = model.world.groups["shards"]
    digests = starting.load_beside(source, with_heartbeats(stored), counted, together, cfg.model, was)
    path = location(cfg.model, source)
    if was is not None:
        return was._replace(path=path)
    transposed: tuple[str, ...] = ()
    if lora is not None:
        for stage in model.stages.values():
            lora.draw_adapters(stage, cfg.run.seed)
        with torch.device("meta"):
            transposed = lora.transposed_layers(families.build(cfg))
    elements = sum(math.prod(source.tensors[name][1]) for name in digests)
    return Base(path, digests, transposed, elements) if digests else None
