"""Open a trained model for inference, in one process or split over several processes.

    trained = open_trained(path, step, axes, startup)   # on every rank
    logits = trained.model(tokens)                      # [B, S, V], the same on every rank

Use several processes for a model that is too large or too slow for one process. The processes use [mesh] as in
training, except that they compute in fp32 and without sequence parallelism. Generation computes one token at a time,
which leaves no sequence to split.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor

from dtmega import config, families, mesh, rooms
from dtmega.checkpoint import manifest
from dtmega.checkpoint.reader import Checkpoint
from dtmega.checkpoint.resume import open_checkpoint, state_of
from dtmega.checkpoint.sources import Source, check_stored
from dtmega.checkpoint.weights import Merged, load_weights, whole_weights
from dtmega.data.indexed_files.record import END_IDS
from dtmega.data.tokenizers.load import load_tokenizer
from dtmega.data.tokenizers.tokenizer import Tokenizer
from dtmega.distributed.agreement import Startup
from dtmega.models.show import CONTINUATION, Show
from dtmega.pipelining.relay import Relay
from dtmega.training.checks import check_experts
from dtmega.training.parallelize import parallelize


class TrainedModel(NamedTuple):
    """A model that has been read from a checkpoint.

    Attributes:
        cfg: the run's configuration, after `inference_config` has replaced the sections that matter only for training.
        checkpoint: path of the checkpoint.
        step: number of steps that the model was trained for.
        tokenizer: the run's tokenizer.
        show: kind of sample that `dtmega generate` prints for this model family, such as continuations of prompts.
        model: the whole `Model`, or a `Relay` of pipeline stages, which is called like a `Model`.
        end_ids: ids of the tokens that end a turn in the run's training conversations; [] if the run has none.
    """

    cfg: config.Config
    checkpoint: str
    step: int
    tokenizer: Tokenizer
    show: Show
    model: Any
    end_ids: list[int]


def open_trained(path: str, step: int | None, axes: Mapping[str, int], startup: Startup) -> TrainedModel:
    """Read a run's model from a checkpoint. All ranks call this function.

    Args:
        path: a run directory, or the folder of one checkpoint.
        step: step of the checkpoint to read; None for the newest checkpoint.
        axes: size of each axis of [mesh].
        startup: `Startup` of the ranks that take part.

    Raises:
        Refused: there is no checkpoint, the checkpoint is damaged, or the mesh does not fit the model. Every rank
            raises this error, after the reason has been printed.
    """
    first: Checkpoint | None = None
    with startup.step("checkpoint") as search:
        if startup.rank == 0:
            # From now on, the checkpoint's files stay open, because a run that is still training may delete them.
            first = open_checkpoint(path, step)
            search.send = first.path
    with startup.step("configuration") as comparison:
        checkpoint = open_checkpoint(search.received) if first is None else first
        cfg = config_of_run(path, checkpoint)
        base_path = cfg.lora.base_path
        cfg = inference_config(cfg, axes)
        family = families.of(cfg.model)
        model_section = family.reread_directory(cfg.model, state_of(checkpoint).digest)
        weights = whole_weights(checkpoint, model_section, rooms.stored().weights, base_path)
        check_stored(model_section, weights, checkpoint.path)
        cfg = cfg.model_copy(update={"model": model_section})
        tokenizer = load_tokenizer(cfg.data.tokenizer)
        device = mesh.pick_device(cfg.run.device)
        sizes = mesh.resolve(cfg.mesh, startup.size)
        if startup.size > 1:
            check_mesh(cfg, sizes)
        comparison.must_match = {"checkpoint": checkpoint.manifest.step, "tokenizer": tokenizer.fingerprint}
    if startup.size == 1:
        with startup.step("model"):
            model = family.build(model_section).to(device)
            model.init_buffers(cfg.run.seed)
            _read(weights, cfg, ((model.full_name(name), t) for name, t in model.stored_tensors()))
    else:
        with startup.step("process groups"):
            world = mesh.start(device, sizes, startup.timeout_s, startup.store, ep=cfg.mesh.ep)
        with startup.step("model"):
            parallel = parallelize(cfg, world)
            _read(weights, cfg, startup.with_heartbeats(parallel.stored_tensors()))
            if isinstance(weights, Merged):
                weights.verify(parallel.counted_once(), world.groups["shards"])
        model = parallel.stages[0] if sizes["pp"] == 1 else Relay(parallel.stages, world.groups["pp"], device)
    model.eval()
    state = state_of(checkpoint)
    end_ids = state.identity.get(END_IDS, [])
    return TrainedModel(cfg, checkpoint.path, state.progress.step, tokenizer, family.show, model, end_ids)


def inference_config(cfg: config.Config, axes: Mapping[str, int]) -> config.Config:
    """Adapt a run's configuration to inference: the given mesh, fp32, and defaults for keys that only training needs.

    LoRA adapters are merged into the weights when the weights are read, so the model itself has no adapters.

    Args:
        cfg: the run's configuration.
        axes: size of each axis of [mesh].
    """
    changed = {
        "lora": config.Lora(),
        "train": cfg.train.model_copy(update={"freeze": []}),
        "mesh": config.Mesh.model_validate({**axes, "sequence_parallel": False}),
        "precision": config.Precision(params="float32"),
        "pipeline": config.Pipeline(),
        "recompute": config.Recompute(),
        "fsdp": config.Fsdp(),
        "compile": config.Compile(enable=False),
    }
    return cfg.model_copy(update=changed)


def check_mesh(cfg: config.Config, sizes: Mapping[str, int]) -> None:
    """Check that a mesh fits the model.

    Args:
        cfg: the run's configuration.
        sizes: size of each mesh axis.

    Raises:
        ValueError: the mesh cannot split the model, or the mesh has a pipeline and the model is not decoder-only.
    """
    family = families.of(cfg.model)
    family.check(cfg, sizes)
    if cfg.mesh.ep > 1:
        check_experts(cfg)
    if sizes["pp"] > 1 and family.show is not CONTINUATION:
        raise ValueError(
            f"in a pipeline only decoder-only models generate text: expected pp=1, got {sizes['pp']}, for a model of "
            f"name = '{cfg.model.name}' ([mesh] pp)"
        )


def _read(weights: Source, cfg: config.Config, parameters: Iterable[tuple[str, Tensor]]) -> None:
    """Fill this rank's parameters from the checkpoint.

    Args:
        parameters: pairs (name in the whole model, tensor).
    """
    load_weights(weights, parameters, cfg.model.padded_vocab_size)


def settle_as_rank_0(tokens: Tensor) -> bool:
    """Replace the sampled tokens, int64 [B], with rank 0's tokens. Generation by several processes needs this function.

    The function serves as `Sampling.settle`, and always returns True, so that generation continues. Without this
    function, ranks might sample different tokens, because logits may differ between ranks in the last bit.
    """
    dist.broadcast(tokens, src=0)
    return True


def config_of_run(path: str, checkpoint: Checkpoint) -> config.Config:
    """The configuration of a run, from the run directory's `config.toml` or, without that file, from the checkpoint.

    Raises:
        ValueError: the checkpoint holds weights only (as written by `convert`), so the run's tokenizer is unknown.
    """
    config_file = Path(path, "config.toml")
    # A config.toml in a checkpoint's folder is a draft written by `convert`, which may not know the tokenizer.
    if config_file.is_file() and not Path(path, manifest.NAME).exists():
        return config.read(config_file)
    recorded = state_of(checkpoint).config
    if "data" not in recorded:
        raise ValueError(f"{checkpoint.path} holds weights only, and no tokenizer: name a run, or a checkpoint of one")
    return config.validate(recorded, checkpoint.path)
