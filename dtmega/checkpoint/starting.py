"""The weights that a run reads at startup in addition to its checkpoint: a new run's weights, or a resumed run's base.

`base.py` describes what a checkpoint holds in place of frozen weights.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence

import torch.distributed as dist
from torch import Tensor

from dtmega import config
from dtmega.checkpoint.base import Base, Digesting, location, open_base
from dtmega.checkpoint.reader import Checkpoint
from dtmega.checkpoint.resume import state_of
from dtmega.checkpoint.sources import Source
from dtmega.checkpoint.weights import load_weights


def weights_beside(
    cfg: config.Config, candidates: Sequence[Checkpoint], weights_of: Callable[[config.Model], Source | None]
) -> Source | None:
    """Open the weights that a run reads in addition to its checkpoint; None if there are no such weights.

    Args:
        cfg: configuration of the run.
        candidates: checkpoints to resume from, newest first; empty for a new run.
        weights_of: function `weights` of `interop/stored.py`.

    Raises:
        ValueError: a run with frozen weights has no weights to start from, or its base is missing.
    """
    if candidates:
        state = state_of(candidates[0])
        if state.base is None:
            return None
        return open_base(state.base, cfg.model, state.config["model"], cfg.lora.base_path, weights_of)[1]
    if cfg.lora.base_path:
        raise ValueError(
            f"[lora] base_path={cfg.lora.base_path} is for a run that goes on; a new run starts from [model] init_from "
            f"or path"
        )
    source = weights_of(cfg.model)
    if source is None and (cfg.lora.rank or cfg.train.freeze):
        key = f"[lora] rank = {cfg.lora.rank}" if cfg.lora.rank else f"[train] freeze = {cfg.train.freeze}"
        raise ValueError(
            f"{key} without weights to start from: the frozen ones would stay as they are drawn from the seed; "
            f"expected a checkpoint or a model of transformers ([model] init_from, or [model] path with name = 'hf')"
        )
    return source


def load_beside(
    source: Source,
    stored: Iterable[tuple[str, Tensor]],
    counted: Collection[str],
    group: dist.ProcessGroup,
    model: config.Model,
    was: Base | None,
) -> dict[str, str]:
    """Load this rank's shards of the weights that the checkpoint leaves out. All ranks call this function.

    Args:
        source: result of `weights_beside`.
        stored: (name, tensor) pairs of this rank, without adapters. A name may appear twice.
        counted: names of the frozen parameters whose digests this rank contributes to (see `Digesting.digests`).
        group: process group of the ranks whose shards together make up one copy of the model.
        model: [model] section of the configuration.
        was: description of the base in the checkpoint; None for a new run.

    Returns:
        The digests of the frozen tensors, keyed by name.

    Raises:
        ValueError: the weights differ from the weights that the run started from.
    """
    if was is not None:
        stored = ((name, tensor) for name, tensor in stored if name in was.digests)
        counted = [name for name in counted if name in was.digests]
    digesting = Digesting(source, model.vocab_size, frozenset(counted))
    load_weights(digesting, stored, model.vocab_size)
    digests = digesting.digests(counted, group)
    if was is not None:
        was.check(digests, location(model, source))
    return digests
