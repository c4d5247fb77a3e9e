"""planning/layouts.py: against training's own checks of every combination of the keys, one by one."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch

from dtmega import config, families, mesh
from dtmega.data import loader
from dtmega.pipelining.table import SCHEDULES
from dtmega.planning.search.layout import Layout, with_layout
from dtmega.planning.search.layouts import Fallen, Layouts
from dtmega.training import checks

CPU = torch.device("cpu")
# Sizes that refuse something on every axis: 6 heads, 3 layers, 40 tokens, a batch of 12.
SMALL = {
    "model": {"name": "llama", "vocab_size": 64, "hidden_size": 24, "n_layers": 3, "n_heads": 6, "n_kv_heads": 2},
    "data": {"seq_len": 40},
    "batch": {"micro_batch_size": 1, "global_batch_size": 12},
    "train": {"steps": 1},
}
LONG = pytest.mark.full


def config_of(**sections: dict) -> config.Config:
    values = {name: dict(keys) for name, keys in SMALL.items()}
    for name, keys in sections.items():
        values[name] = values.get(name, {}) | keys
    return families.resolve(config.validate(values, "test"))


def listed(cfg: config.Config, world: int, *fixed: str) -> set[Layout]:
    found = list(Layouts(cfg, fixed, world, CPU).legal(Fallen()))
    assert len(found) == len(set(found)), "a layout is listed twice"
    return set(found)


CHOICES = (
    (1, 2, 3, 4, 6, 12),
    (True, False),
    ("gather", "heads"),
    ("whole",),
    tuple(SCHEDULES),
    (0, 1, 2, 3),
    ("none", "selective", "full"),
    ("auto", True, False),
)


def meshes(world: int) -> list[tuple[int, ...]]:
    return [axes for axes in itertools.product(range(1, world + 1), repeat=5) if math.prod(axes) == world]


def combinations(world: int, n: int) -> Iterator[Layout]:
    """Some of the combinations of every value of every key that is varied, whatever they are good for."""
    chance = random.Random(world)
    for _ in range(n):
        values: list[Any] = [*chance.choice(meshes(world)), *(chance.choice(choice) for choice in CHOICES)]
        yield Layout(*values)


def plain(layout: Layout, cfg: config.Config) -> Layout:
    """The name under which a layout is listed: of values that do the same, one."""
    changes: dict = {}
    if layout.tp == 1:
        changes["sequence_parallel"] = cfg.mesh.sequence_parallel
    if layout.cp == 1:
        changes["cp_form"] = cfg.mesh.cp_form
    per_rank = SCHEDULES[layout.schedule].per_rank
    if layout.pp > 1 and per_rank in ("1", "2") and layout.virtual_stages == int(per_rank):
        changes["virtual_stages"] = 0
    if layout.pp > 1 and per_rank == "2+" and layout.virtual_stages == 0:
        changes["virtual_stages"] = 2
    as_auto = layout.n_shards == 1 or (layout.reshard_after_forward is (layout.pp == 1))
    if as_auto and not (layout.pp > 1 and layout.reshard_after_forward is True):
        changes["reshard_after_forward"] = "auto"
    return layout._replace(**changes)


def accepted(cfg: config.Config, layout: Layout, world: int) -> bool:
    changed = with_layout(cfg, layout)
    try:
        sizes = mesh.resolve(changed.mesh, world)
        checks.check(changed, sizes, CPU)
        loader.check_sizes(changed.batch, sizes["dp_replicate"] * sizes["dp_shard"])
    except ValueError:
        return False
    return True


EXACT = {"run": {"exact": True}}


def test_what_exact_refuses_of_a_t5_falls_at_its_own_degrees_only():
    t5 = {"name": "t5", "vocab_size": 64, "hidden_size": 24, "n_layers": 4, "n_decoder_layers": 4, "n_heads": 6}
    sections = {**EXACT, "data": {"seq_len": 40, "decoder_seq_len": 20}, "compile": {"enable": False}}
    cfg = config.validate({**SMALL, "model": t5, **sections}, "test")
    legal = listed(cfg, 4)
    degrees = {(layout.tp, layout.pp) for layout in legal}
    assert {(2, 1), (1, 2)} <= degrees
    assert not any(tp > 1 and pp > 1 for tp, pp in degrees)
    for layout in combinations(4, 60):
        assert accepted(cfg, layout, 4) == (plain(layout, cfg) in legal), layout


def test_what_exact_refuses_of_experts_falls_at_every_ep_above_1():
    moe = {"name": "moe", "vocab_size": 64, "hidden_size": 24, "n_layers": 4, "n_heads": 4, "n_experts": 4}
    keys = {**SMALL, "model": moe, "compile": {"enable": False}}
    eps = [{layout.ep for layout in listed(config.validate(keys | more, "test"), 4)} for more in ({}, EXACT)]
    assert eps == [{1, 2, 4}, {1}]


@pytest.mark.parametrize(
    ("world", "n"), [(2, 60), (4, 60), pytest.param(2, 4000, marks=LONG), pytest.param(4, 8000, marks=LONG)]
)
def test_exactly_what_training_accepts_is_listed(world: int, n: int):
    cfg = config_of(compile={"enable": False})
    legal = listed(cfg, world)
    for layout in combinations(world, n):
        assert accepted(cfg, layout, world) == (plain(layout, cfg) in legal), layout
    for layout in random.Random(n).sample(sorted(legal, key=str), min(n, len(legal))):
        assert accepted(cfg, layout, world), layout


MOE = {**SMALL["model"], "name": "moe", "n_experts": 4, "expert_ffn_hidden_size": 12}


def test_experts_are_divided_wherever_training_divides_them():
    cfg = config_of(model=MOE, compile={"enable": False})
    legal = listed(cfg, 4)
    assert {layout.ep for layout in legal} == {1, 2, 4}
    chance = random.Random(4)
    for layout in combinations(4, 40):
        with_ep = layout._replace(ep=chance.choice((1, 2, 3, 4)))
        assert accepted(cfg, with_ep, 4) == (plain(with_ep, cfg) in legal), with_ep
    for layout in chance.sample(sorted(legal, key=str), 20):
        assert accepted(cfg, layout, 4), layout


def test_a_given_ep_is_kept_and_one_that_divides_no_layout_is_refused():
    fixed = listed(config_of(model=MOE, mesh={"ep": 2}), 2, "mesh.ep")
    assert fixed == {layout for layout in listed(config_of(model=MOE), 2) if layout.ep == 2} != set()
    with pytest.raises(ValueError, match=r"ep=3 divides dp_shard x cp in no layout of 4 ranks \(\[mesh\] ep\)"):
        Layouts(config_of(model=MOE, mesh={"ep": 3}), ["mesh.ep"], 4, CPU)


def test_a_model_without_experts_has_no_layout_with_ep():
    assert {layout.ep for layout in listed(config_of(), 2)} == {1}


@cache
def all_of(world: int) -> tuple[int, int, int]:
    """Numbers of all layouts, of legal ones, and of those that fell."""
    fallen = Fallen()
    legal = sum(1 for _ in Layouts(config_of(), ("fsdp.accumulate",), world, CPU).legal(fallen))
    return legal + fallen.n, legal, fallen.n


def test_each_layout_is_legal_or_has_fallen_for_a_reason_of_training():
    """On 2 ranks, with whole gradients, there are 5 meshes, 6 microbatch sizes and 3 modes.

    pp 2 has 1F1B, GPipe, ZBVZeroBubble, DualPipeV and 3 schedules with 2 stages per rank, no further with 3 layers. tp
    and cp have 2 shapes, and dp_shard and cp free gathered weights or keep them.
    """
    n_all, legal, _ = all_of(2)
    pp, dp_replicate, dp_shard, cp, tp = 7, 1, 2, 2 * 2, 2
    assert n_all == (pp + dp_replicate + dp_shard + cp + tp) * 6 * 3
    assert 0 < legal < n_all


def test_reasons_are_those_of_training_and_count_every_layout_that_fell():
    fallen = Fallen()
    list(Layouts(config_of(), ("mesh.tp", "mesh.pp"), 8, CPU).legal(fallen))
    messages = "\n".join(reason.message for reason in fallen.reasons)
    assert "does not divide into micro_batch_size x data ranks" in messages
    assert "does not divide seq_len=40 ([mesh] cp, [data] seq_len)" in messages
    assert "cp_form = 'heads' divides heads among ranks" in messages
    assert fallen.n == sum(reason.n for reason in fallen.reasons)


@pytest.mark.parametrize(
    ("sections", "fixed", "kept"),
    [
        ({"mesh": {"tp": 2}}, "mesh.tp", lambda layout: layout.tp == 2),
        ({"mesh": {"pp": 2}}, "mesh.pp", lambda layout: layout.pp == 2),
        ({"batch": {"micro_batch_size": 3}}, "batch.micro_batch_size", lambda layout: layout.micro_batch_size == 3),
        ({"recompute": {"mode": "full"}}, "recompute.mode", lambda layout: layout.mode == "full"),
        ({"mesh": {"cp_form": "heads"}}, "mesh.cp_form", lambda layout: layout.cp_form == "heads"),
        ({"mesh": {"sequence_parallel": False}}, "mesh.sequence_parallel", lambda lay: not lay.sequence_parallel),
        (
            {"fsdp": {"reshard_after_forward": False}},
            "fsdp.reshard_after_forward",
            lambda layout: layout.reshard_after_forward is False,
        ),
        (
            {"mesh": {"pp": 2}, "pipeline": {"schedule": "GPipe"}},
            "pipeline.schedule",
            lambda layout: layout.schedule == "GPipe",
        ),
    ],
)
def test_a_fixed_key_keeps_its_value_and_loses_no_layout_that_has_it(sections: dict, fixed: str, kept):
    fixed_to = listed(config_of(**sections), 4, fixed)
    cfg = config_of()
    every = {layout for layout in listed(cfg, 4) if kept(plain(layout, cfg))}
    # Where a key makes no difference, a free layout has the file's value of it.
    assert {layout[:6] for layout in fixed_to} >= {layout[:6] for layout in every} != set()
    key = fixed.partition(".")[2]
    (section,) = [keys for keys in sections.values() if key in keys]
    assert {getattr(layout, key) for layout in fixed_to} == {section[key]}


def test_a_size_that_is_left_open_fixes_nothing():
    cfg = config_of(mesh={"dp_shard": -1}, batch={"micro_batch_size": 0})
    assert listed(cfg, 4, "mesh.dp_shard", "batch.micro_batch_size") == listed(cfg, 4)


def test_fixed_sizes_that_do_not_divide_the_ranks_are_refused_as_in_training():
    with pytest.raises(ValueError, match=r"tp=3 does not make 8 processes.* 8 % 3 = 2, expected 0"):
        Layouts(config_of(mesh={"tp": 3}), ["mesh.tp"], 8, CPU)


def test_a_key_that_is_not_varied_cannot_be_fixed():
    with pytest.raises(ValueError, match=r"optim\.lr is not varied: expected some of mesh\.pp, "):
        Layouts(config_of(), ["optim.lr"], 8, CPU)
