"""What cannot be combined is refused before anything starts, with the reason."""

import dataclasses

import pytest
import torch
import torch.distributed as dist

from dtmega import config, mesh, models
from dtmega.parallelize import check, fitted, parallelize
from tests import hf_models

CPU = torch.device("cpu")


def sections(**overrides: object) -> config.Config:
    """A configuration with 8 heads and 8 microbatches; keys are section__key."""
    values: dict[str, dict] = {"train": {"steps": 1}, "batch": {"micro_batch_size": 1, "global_batch_size": 8}}
    for name, value in overrides.items():
        section, _, key = name.partition("__")
        values.setdefault(section, {})[key] = value
    return config.validate(values, "test")


@pytest.mark.parametrize(
    ("world", "overrides", "message"),
    [
        (3, {"mesh__tp": 3}, r"tp=3 does not divide n_heads=8 \(\[mesh\] tp, \[model\] n_heads\)"),
        (2, {"mesh__tp": 2, "model__ffn_hidden_size": 1001}, "tp=2 does not divide ffn_hidden_size=1001"),
        (2, {"mesh__tp": 2, "data__seq_len": 255}, r"tp=2 does not divide seq_len=255 \(\[mesh\] tp, \[data\] seq_len"),
        (1, {"pipeline__draw": "x.svg"}, r"there is no pipeline for \[pipeline\] draw: expected pp > 1, got 1"),
        (
            1,
            {"pipeline__schedule": "GPipe", "pipeline__virtual_stages": 2, "mesh__pp": -1, "mesh__dp_shard": 1},
            "virt",
        ),
        (2, {"mesh__pp": 2, "fsdp__reshard_after_forward": True}, "reshard_after_forward"),
        (2, {"mesh__pp": 2, "recompute__mode": "selective", "compile__enable": True}, "pytorch#166926"),
        (2, {"mesh__pp": 2, "pipeline__schedule": "ZBVZeroBubble", "compile__enable": True}, "backward in two parts"),
        (8, {"mesh__pp": 8}, r"8 stages cannot be cut from n_layers=4"),
        (4, {"mesh__pp": 4, "batch__global_batch_size": 2}, "2 microbatches"),
    ],
)
def test_a_combination_that_cannot_work_is_refused(world, overrides, message):
    cfg = sections(**overrides)
    with pytest.raises(ValueError, match=message):
        check(cfg, mesh.resolve(cfg.mesh, world), CPU)


@pytest.mark.parametrize(
    ("world", "overrides"),
    [
        (1, {}),
        (2, {"mesh__tp": 2, "data__seq_len": 255, "mesh__sequence_parallel": False}),
        (2, {"mesh__pp": 2, "recompute__mode": "full", "compile__enable": True}),
        (8, {"mesh__pp": 2, "mesh__tp": 2}),
    ],
)
def test_what_works_is_let_through(world, overrides):
    cfg = sections(**overrides)
    check(cfg, mesh.resolve(cfg.mesh, world), CPU)


def places(values: dict[str, dict[str, object]]) -> dict[str, set[str]]:
    """The kinds of devices of parameters and of buffers, where "meta" stands for a GPU that computes."""
    cfg = models.resolved(config.validate(values | {"train": {"steps": 1}, "fsdp": {"cpu_offload": True}}, "test"))
    try:
        world = mesh.start(CPU, mesh.resolve(cfg.mesh, 1))
        (stage,) = parallelize(cfg, dataclasses.replace(world, device=torch.device("meta"))).stages.values()
    finally:
        dist.destroy_process_group()
    buffers = {f"buffer {name.rpartition('.')[2]}": {b.device.type} for name, b in stage.named_buffers()}
    return {"parameters": {p.device.type for p in stage.parameters()}, **buffers}


def test_offloaded_parameters_are_in_host_memory_and_buffers_where_the_model_computes():
    dropout = {"model": {"hidden_dropout": 0.1}}
    assert places(dropout) == {"parameters": {"cpu"}} | {
        f"buffer {name}": {"meta"} for name in ("slopes", "head_ids", "key")
    }


def test_rotary_frequencies_of_a_transformers_model_are_where_it_computes():
    case = hf_models.Case("llama")
    found = places({"model": {"name": "hf", "path": hf_models.saved([case])[case]}, "data": {"tokenizer": "bytes"}})
    assert found["parameters"] == {"cpu"}
    assert found["buffer inv_freq"] == {"meta"}


def fits(size: int, data: int, pp: int, needs: int, micro: int) -> bool:
    return size % (data * micro) == 0 and (pp == 1 or size // (data * micro) >= needs)


@pytest.mark.parametrize("schedule", ["1F1B", "DualPipeV"])
@pytest.mark.parametrize("sizes", [[8], [12], [8, 16, 24]])
@pytest.mark.parametrize(("pp", "data", "tp"), [(1, 1, 1), (1, 2, 1), (1, 4, 2), (2, 1, 1), (2, 2, 1), (4, 1, 1)])
def test_an_open_microbatch_is_the_largest_up_to_4_that_the_layout_can_have(pp, data, tp, sizes, schedule):
    cfg = sections(
        batch__micro_batch_size=0,
        batch__global_batch_size=sizes[-1],
        batch__rampup=[sizes[0], 8, 100] if sizes[1:] else [],
        pipeline__schedule=schedule,
    )
    needs = {"1F1B": pp, "DualPipeV": 2 * pp}[schedule]
    right = [b for b in (1, 2, 3, 4) if all(fits(size, data, pp, needs, b) for size in sizes)]
    found = fitted(cfg, {"pp": pp, "dp_replicate": 1, "dp_shard": data, "cp": 1, "tp": tp})
    assert found.batch.micro_batch_size == max(right, default=1)


def test_a_microbatch_that_is_given_stays():
    cfg = sections(batch__micro_batch_size=8)
    assert fitted(cfg, mesh.resolve(cfg.mesh, 1)) is cfg


@pytest.mark.parametrize("key", [{"model__elements": [1, 2]}, {"model__digest": "0123"}])
def test_what_the_trainer_counts_for_a_model_of_transformers_is_not_for_others(key):
    with pytest.raises(ValueError, match="elements and digest are set by the trainer"):
        models.resolved(sections(**key))
