"""Before anything starts, refuse combinations of keys and layouts that cannot work."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from dtmega import config, families, rooms
from dtmega.ops import cost, optim
from dtmega.training.choices import compiling

SIZES = ("vocab_size", "hidden_size", "ffn_hidden_size", "kv_channels", "max_position_embeddings")


def check(cfg: config.Config, sizes: Mapping[str, int], device: torch.device) -> None:
    """Refuse a configuration that the model or the pipeline cannot run with.

    Raises:
        ValueError: tp does not divide a size of the model, the pipeline schedule does not fit, or two features cannot
            be combined. The message states the reason and the keys to change.
    """
    check_model(cfg, sizes)
    if cfg.run.exact:
        rooms.exact().check(cfg, sizes, device)
    check_pipeline(cfg, sizes, device, families.pieces(cfg.model) if sizes["pp"] > 1 else [])


def check_model(cfg: config.Config, sizes: Mapping[str, int]) -> None:
    """Refuse a configuration that the model cannot run with. The number of microbatches does not affect these checks.

    Raises:
        ValueError: the model cannot run with this configuration (`check`).
    """
    family = families.of(cfg.model)
    # 'auto' becomes bfloat16 or float32, which every family supports.
    if cfg.precision.params not in (*family.dtypes, "auto"):
        raise ValueError(
            f"params = '{cfg.precision.params}' is not for name = '{cfg.model.name}', expected one of "
            f"{', '.join(family.dtypes)} ([precision] params, [model] name)"
        )
    try:
        family.check(cfg, sizes)
    except RuntimeError as error:
        if "size calculation overflowed" not in str(error):
            raise
        sizes_of_tensors = ", ".join(key for key in SIZES if hasattr(cfg.model, key))
        raise ValueError(f"no computer holds a tensor of this model: {error} ([model] {sizes_of_tensors})") from None
    if cfg.mesh.ep > 1:
        check_experts(cfg)
    if cfg.optim.name == "muon":
        check_matrices(cfg)
    if cfg.train.freeze or cfg.lora.rank or cfg.optim.lr_factors:
        with torch.device("meta"):
            whole = families.build(cfg)
        optim.check_factors(cfg.optim, [whole.full_name(name) for name, _ in whole.named_parameters()])


def check_experts(cfg: config.Config) -> None:
    """Refuse expert parallelism for a model whose experts cannot be divided over ep ranks.

    Raises:
        ValueError: the model has no experts that can be divided, ep does not divide the number of experts, or
            recomputation is selective.
    """
    ep = cfg.mesh.ep
    if cfg.recompute.mode == "selective":
        # torch's selective checkpoint counts a block's operators, and FSDP gathers experts inside the block. The
        # recomputation runs fewer operators than forward if the experts are still gathered.
        raise ValueError(
            f"selective recompute does not count the gathering of experts as forward did: expected mode = 'full' or "
            f"'none' with ep={ep} ([recompute] mode, [mesh] ep)"
        )
    with torch.device("meta"):
        experts = families.build(cfg).experts()
    if not experts:
        raise ValueError(
            f"ep={ep} divides the experts of a mixture, and name = '{cfg.model.name}' has none here: expected ep=1 "
            f"([mesh] ep, [model] name)"
        )
    for module in experts:
        rooms.expert_parallel().check_divisible(module, ep)


def check_matrices(cfg: config.Config) -> None:
    """Refuse Muon for a model that Muon cannot train.

    Raises:
        ValueError: there are adapters, the optimizer runs on the host, or a trained weight is not a matrix.
    """
    if cfg.lora.rank:
        raise ValueError(
            "name='muon' would turn each factor of an adapter by itself, and no layout is proved: expected another "
            "optimizer, such as 'adamw' ([optim] name, [lora] rank)"
        )
    if cfg.fsdp.cpu_offload:
        raise ValueError(
            "name='muon' multiplies matrices, which takes the host too long: expected cpu_offload=false "
            "([fsdp] cpu_offload, [optim] name)"
        )
    with torch.device("meta"):
        families.build(cfg).matrices()


def check_pipeline(
    cfg: config.Config, sizes: Mapping[str, int], device: torch.device, pieces: Sequence[cost.Piece]
) -> None:
    """Refuse a pipeline that cannot run, keys that do not work with a pipeline, and [pipeline] keys without a pipeline.

    Args:
        cfg: configuration of the run.
        sizes: resolved size of each mesh axis.
        device: device on which the rank computes.
        pieces: embedding, layers and head of the whole model; not used without a pipeline.

    Raises:
        ValueError: the pipeline cannot run with this configuration (`check`).
    """
    pp = sizes["pp"]
    idle = [key for key, field in config.Pipeline.model_fields.items() if getattr(cfg.pipeline, key) != field.default]
    if pp == 1 and idle:
        raise ValueError(f"there is no pipeline for [pipeline] {', '.join(idle)}: expected pp > 1, got 1 ([mesh] pp)")
    if pp > 1 and cfg.fsdp.reshard_after_forward is True:
        raise ValueError(
            "under a pipeline weights stay gathered between microbatches ([fsdp] reshard_after_forward, [mesh] pp)"
        )
    if pp > 1 and cfg.recompute.mode == "selective" and compiling(cfg, device):
        raise ValueError(
            "selective recompute of compiled blocks under a pipeline breaks in torch (pytorch#166926) "
            "([recompute] mode, [compile] enable, [mesh] pp)"
        )
    if pp > 1:
        data_size = sizes["dp_replicate"] * sizes["dp_shard"]
        rooms.schedule().check_schedule(cfg, pieces, pp, data_size, compiling(cfg, device))
