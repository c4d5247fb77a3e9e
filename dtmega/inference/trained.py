"""A trained model, to be used: opened from a checkpoint, on one process or cut over several, whatever wrote it.

    used = opened(path, step, axes, startup)      # on every rank
    logits = used.model(tokens)                   # [B, S, V], the same on every rank

Several processes are for a model that does not fit into one, or answers too slowly there: [mesh] as in training, but in
fp32, and without cutting the sequence, of which one token at a time is computed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor

from dtmega import config, families, mesh
from dtmega.checkpoint import manifest
from dtmega.checkpoint.reader import Checkpoint
from dtmega.checkpoint.resume import open_checkpoint, state_of
from dtmega.checkpoint.weights import Weights, load_weights
from dtmega.data.tokenizers.tokenizer import Tokenizer, load_tokenizer
from dtmega.distributed.agreement import Startup
from dtmega.formats.whole import check_stored
from dtmega.models.show import CONTINUATION, Show
from dtmega.pipelining.relay import Relay
from dtmega.training.parallelize import parallelize


class Used(NamedTuple):
    """An opened model.

    Attributes:
        cfg: of the run, for these processes.
        checkpoint: the path of what was read.
        step: how many steps it was trained.
        show: what there is to see of it.
        model: a `Model` that is whole, or a `Relay`, which is called as if it were.
    """

    cfg: config.Config
    checkpoint: str
    step: int
    tokenizer: Tokenizer
    show: Show
    model: Any


def opened(path: str, step: int | None, axes: Mapping[str, int], startup: Startup) -> Used:
    """The model of a run.

    Args:
        path: of a run directory, or of one checkpoint.
        step: of the checkpoint; None: the newest.
        axes: keys of [mesh].
        startup: of the ranks, which all call this.

    Raises:
        Refused: on every rank, after it was said: nothing there, damaged, a mesh that does not fit.
    """
    first: Checkpoint | None = None
    with startup.step("checkpoint") as found:
        if startup.rank == 0:
            first = open_checkpoint(path, step)  # held from here on: a run that goes on may delete it
            found.tell = first.path
    with startup.step("configuration") as same:
        checkpoint = open_checkpoint(found.told) if first is None else first
        cfg = for_use(config_of(path, checkpoint), axes)
        family = families.of(cfg.model)
        model_section = family.reread_directory(cfg.model, state_of(checkpoint).digest)
        weights = Weights(checkpoint)
        check_stored(model_section, weights, checkpoint.path)
        cfg = cfg.model_copy(update={"model": model_section})
        tokenizer = load_tokenizer(cfg.data.tokenizer)
        device = mesh.pick_device(cfg.run.device)
        sizes = mesh.resolve(cfg.mesh, startup.size)
        if startup.size > 1:
            check(cfg, sizes)
        same.same = {"checkpoint": checkpoint.manifest.step, "tokenizer": tokenizer.fingerprint}
    if startup.size == 1:
        with startup.step("model"):
            model = family.build(model_section).to(device)
            model.init_buffers(cfg.run.seed)
            _read(weights, cfg, ((model.full_name(name), t) for name, t in model.stored_tensors()))
    else:
        with startup.step("process groups"):
            world = mesh.start(device, sizes, startup.timeout_s, startup.store)
        with startup.step("model"):
            cut = parallelize(cfg, world)
            _read(weights, cfg, startup.at_work(cut.stored_tensors()))
        model = cut.stages[0] if sizes["pp"] == 1 else Relay(cut.stages, world.groups["pp"], device)
    model.eval()
    return Used(cfg, checkpoint.path, state_of(checkpoint).progress.step, tokenizer, family.show, model)


def for_use(cfg: config.Config, axes: Mapping[str, int]) -> config.Config:
    """The configuration of a run without what is for training, or for the layout that trained it."""
    changed = {
        "mesh": config.Mesh.model_validate({**axes, "sequence_parallel": False}),
        "precision": config.Precision(params="float32"),
        "pipeline": config.Pipeline(),
        "recompute": config.Recompute(),
        "fsdp": config.Fsdp(),
        "compile": config.Compile(enable=False),
    }
    return cfg.model_copy(update=changed)


def check(cfg: config.Config, sizes: Mapping[str, int]) -> None:
    """Refuse a mesh for this model.

    Raises:
        ValueError: the mesh cannot hold the model.
    """
    family = families.of(cfg.model)
    family.check(cfg, sizes)
    if sizes["pp"] > 1 and family.show is not CONTINUATION:
        raise ValueError(
            f"in a pipeline only a decoder alone says something: expected pp=1, got {sizes['pp']}, for a model of name "
            f"= '{cfg.model.name}' ([mesh] pp)"
        )


def _read(weights: Weights, cfg: config.Config, parameters: Iterable[tuple[str, Tensor]]) -> None:
    load_weights(weights, parameters, cfg.model.padded_vocab_size)


def agreed(token: Tensor) -> bool:
    """A `settle` for several processes: all take the token of rank 0, where logits differ in their last bit."""
    dist.broadcast(token, src=0)
    return True


def config_of(path: str, checkpoint: Checkpoint) -> config.Config:
    """The configuration of the run in a directory, or of that which saved a checkpoint, as it is recorded there.

    Raises:
        ValueError: it is of weights only, which `convert` has made: nothing says how text becomes tokens.
    """
    of_run = Path(path, "config.toml")
    # One beside a checkpoint's tensors is a draft by `convert`, which may not know the tokenizer.
    if of_run.is_file() and not Path(path, manifest.NAME).exists():
        return config.read(of_run)
    recorded = state_of(checkpoint).config
    if "data" not in recorded:
        raise ValueError(f"{checkpoint.path} holds weights only, and no tokenizer: name a run, or a checkpoint of one")
    return config.validate(recorded, checkpoint.path)
