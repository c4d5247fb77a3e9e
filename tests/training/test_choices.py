"""[fsdp] accumulate: what 'auto' chooses, and what a start says about it. What follows is in tests/fsdp."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch.distributed as dist
from torch import nn

from dtmega import config, families, mesh, train
from dtmega.distributed import exit_codes
from dtmega.distributed.agreement import Startup
from dtmega.training.choices import accumulates, accumulation_note, whole_gradient_bytes, with_accumulation
from tests import ranks
from tests.layouts import DEBUG, write_text
from tests.resumed import flags
from tests.test_faults import alone

GIB = 2**30
MODES = ("whole", "sharded", "auto")
D, V, L = 14336, 250880, 70  # BLOOM-176B
LAYER, NORM = 12 * D * D + 13 * D, 2 * D


def bloom_176b(*options: str) -> config.Config:
    return config.load(["--config", "bloom-176b.toml", *options])


def small(accumulate: str = "auto", **sections: Any) -> config.Config:
    values = {"train": {"steps": 1}, "fsdp": {"accumulate": accumulate}, **sections}
    return config.validate(values, "test")


def sizes(**axes: int) -> dict[str, int]:
    return dict.fromkeys(mesh.AXES, 1) | axes


@pytest.mark.parametrize(
    ("layout", "elements"),
    [({"tp": 4, "pp": 12}, 6 * LAYER + V * D + NORM), ({"tp": 4}, L * LAYER + V * D + 2 * NORM)],
    ids=["pp 12", "no pipeline"],
)
def test_whole_gradients_of_the_fullest_rank_are_its_layers_and_ends_over_tp(layout: dict[str, int], elements: int):
    for dtype, n_bytes in (("float32", 4), ("bfloat16", 2)):
        cfg = bloom_176b("--precision.reduce", dtype)
        assert whole_gradient_bytes(cfg, sizes(dp_shard=8, **layout)) == n_bytes * elements // 4


def test_a_tied_weight_counts_on_each_of_a_ranks_stages_and_a_frozen_one_nowhere(monkeypatch):
    model = {"name": "bloom", "vocab_size": 1000, "hidden_size": 8, "n_heads": 2, "n_layers": 4}
    cfg = small(model=model, pipeline={"schedule": "DualPipeV", "stages": [[], [0, 1], [2, 3], []]})
    both_ends = 2 * (1000 * 8 + 2 * 8)  # on rank 0 of two
    assert whole_gradient_bytes(cfg, sizes(pp=2, dp_shard=2)) == 4 * both_ends
    honest = families.build

    def frozen(cfg: config.Config) -> nn.Module:
        whole = honest(cfg)
        whole.get_parameter("embed.weight").requires_grad_(False)
        return whole

    monkeypatch.setattr(families, "build", frozen)
    layers = 4 * (12 * 8 * 8 + 13 * 8)  # on rank 1
    assert whole_gradient_bytes(cfg, sizes(pp=2, dp_shard=2)) == 4 * layers


def test_a_rank_has_the_gradients_of_its_own_share_of_the_experts():
    layers, ffn, hidden, n_experts = 48, 768, 2048, 128
    experts = layers * n_experts * 3 * hidden * ffn
    whole = ["--config", "qwen3-30b-a3b.toml", "--mesh.dp_shard", "4"]
    rest = whole_gradient_bytes(config.load(whole), sizes(dp_shard=4)) - 4 * experts
    divided = config.load([*whole, "--mesh.ep", "2"])
    assert whole_gradient_bytes(divided, sizes(dp_shard=4)) == rest + 4 * experts // 2


def test_auto_is_sharded_where_whole_gradients_take_more_than_a_tenth_of_a_gpu():
    cfg = small()
    whole_bytes = 4 * sum(p.numel() for p in families.build(cfg).parameters())
    for axes in ({"dp_shard": 2}, {"cp": 2}, {"dp_shard": 2, "dp_replicate": 2}):
        assert accumulates(cfg, sizes(**axes), 10 * whole_bytes - 1) == "sharded"
        assert accumulates(cfg, sizes(**axes), 10 * whole_bytes) == "whole"
        assert accumulates(cfg, sizes(**axes), None) == "whole"
    assert accumulates(bloom_176b("--fsdp.accumulate", "auto"), sizes(tp=4, pp=12, dp_shard=8), 80 * GIB) == "sharded"


@pytest.mark.parametrize("asked", MODES)
def test_where_nothing_is_sharded_gradients_are_whole_whatever_is_asked(asked: str):
    for axes in ({}, {"tp": 2}, {"dp_replicate": 2}, {"pp": 2, "tp": 2}):
        assert accumulates(small(asked), sizes(**axes), 1) == "whole"


@pytest.mark.parametrize("asked", ["whole", "sharded"])
@pytest.mark.parametrize("memory_bytes", [None, 1, 2**60])
def test_what_is_asked_for_is_done_where_parameters_are_sharded(asked: str, memory_bytes):
    assert accumulates(small(asked), sizes(cp=2), memory_bytes) == asked


@pytest.mark.parametrize("memory_bytes", [None, 1, 2**60])
def test_a_choice_is_chosen_again_on_any_device(memory_bytes):
    chosen = with_accumulation(small(), sizes(dp_shard=2), memory_bytes)
    assert chosen.fsdp.accumulate == accumulates(small(), sizes(dp_shard=2), memory_bytes)
    for other in (None, 1, 2**60):
        assert with_accumulation(chosen, sizes(dp_shard=2), other) == chosen
    assert chosen.model_copy(update={"fsdp": small().fsdp}) == small()


def test_the_default_is_not_spoken_of_and_others_are_in_one_line():
    auto, sharded = "([fsdp] accumulate = 'auto')", "[fsdp] accumulate = 'sharded'"
    assert accumulation_note(small("whole"), sizes(dp_shard=2), 1) == []
    assert accumulation_note(small("sharded"), sizes(tp=2), None) == [
        f"nothing is sharded (dp_shard x cp = 1 x 1 = 1), so {sharded} changes nothing"
    ]
    assert accumulation_note(small("sharded"), sizes(cp=2), None) == [
        f"gradients add up in shards, and are summed over ranks after each microbatch ({sharded})"
    ]
    assert accumulation_note(small(), sizes(dp_shard=2), None) == [
        f"gradients add up whole between microbatches, as always on CPUs {auto}"
    ]
    large, layout = bloom_176b("--fsdp.accumulate", "auto"), sizes(tp=4, pp=12, dp_shard=8)
    assert accumulation_note(large, layout, 80 * GIB) == [
        "gradients add up in shards between microbatches: whole ones take 17.1 GiB of a device's 80 GiB, more than "
        f"1/10 {auto}"
    ]
    assert accumulation_note(large, layout, 192 * GIB) == [
        "gradients add up whole between microbatches: whole ones take 17.1 GiB of a device's 192 GiB, at most 1/10 "
        f"{auto}"
    ]


KEYS = DEBUG | {"model.n_layers": 1, "train.steps": 1, "eval.interval": 0, "fsdp.accumulate": "auto"}


def of_a_group(argv: list[str]) -> tuple[str, str, bool]:
    """What this rank saves, and does, where only rank 0 has a GPU's memory."""
    mesh.memory_bytes = lambda device: 1 if dist.get_rank() == 0 else None
    with contextlib.ExitStack() as closing:
        run, _ = train.begin(argv, Startup(), closing, exit_codes.ExitStatus())
        return run.saved_cfg.fsdp.accumulate, run.cfg.fsdp.accumulate, run.model.sharded


def test_all_ranks_do_what_the_memory_of_rank_0_asks_for_and_the_configuration_stays_open(tmp_path):
    argv = flags(KEYS | write_text(tmp_path) | {"mesh.dp_shard": 2}, tmp_path / "run")
    assert ranks.run(2, of_a_group, argv) == [("auto", "sharded", True)] * 2


def test_a_run_of_shards_goes_on_alone_and_says_that_nothing_is_sharded(tmp_path, capsys):
    keys = KEYS | write_text(tmp_path) | {"fsdp.accumulate": "sharded"}
    assert alone(keys, tmp_path / "run") == exit_codes.DONE
    assert "(dp_shard x cp = 1 x 1 = 1), so [fsdp] accumulate = 'sharded' changes nothing\n" in capsys.readouterr().out
