"""What [run] exact refuses, and what it lets through."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import nn

from dtmega import config, mesh
from dtmega.checkpoint.state import ExactState
from dtmega.config.reading import ConfigError
from dtmega.fsdp import exact as exact_sums
from dtmega.fsdp.exact import ExactSums, Groups, StageSums
from dtmega.fsdp.slots import Slot
from dtmega.ops.fixed_point import Grid
from dtmega.training import exact
from dtmega.training.checks import check

CPU = torch.device("cpu")
MACHINE = {"the kind of processor": "an EPYC", "MKL_CBWR": "", "the bits of products in float32": "0123456789abcdef"}


def configured(**sections: dict[str, Any]) -> config.Config:
    keys: dict[str, Any] = {
        "run": {"exact": True},
        "batch": {"micro_batch_size": 1, "global_batch_size": 4},
        "train": {"steps": 1},
    }
    return config.validate({**keys, **sections}, "test")


REFUSED = {
    "a T5 over tp and pp": (
        {"model": {"name": "t5"}, "mesh": {"tp": 2, "pp": 2}},
        "[model] name for [mesh] tp > 1 with pp > 1 in ('bloom', 'gpt', 'llama', 'moe', 'bert', 'hf'), got 't5'",
    ),
    "latent attention": (
        {"model": {"name": "moe", "kv_latent_size": 16, "rotary_channels": 4}},
        "[model] kv_latent_size in (0), got 16: latent attention is not proved",
    ),
    "experts over ranks": (
        {"model": {"name": "moe"}, "mesh": {"ep": 2}},
        "[mesh] ep in (1), got 2: an expert would add tokens of several ranks in floating point",
    ),
    "offload": ({"fsdp": {"cpu_offload": True}}, "[fsdp] cpu_offload in (False), got True"),
    "sums in bf16": ({"precision": {"reduce": "bfloat16"}}, "[precision] reduce in ('float32'), got 'bfloat16'"),
    "a compiled GPT": (
        {"model": {"name": "gpt"}, "compile": {"enable": True}},
        "[compile] enable in (False, 'auto'), got True: proved for bloom, llama only",
    ),
    "compiled norms of heads": (
        {"model": {"name": "llama", "qk_norm": True}, "compile": {"enable": True}},
        "[compile] enable in (False, 'auto'), got True: not proved with norms of heads or with windows",
    ),
    "a compiled window": (
        {"model": {"name": "llama", "window": 8}, "compile": {"enable": True}},
        "[compile] enable in (False, 'auto'), got True: not proved with norms of heads or with windows",
    ),
    "prefixes": (
        {"data": {"objective": "prefix-lm"}},
        "[data] objective in ('auto', 'conversations'), got 'prefix-lm'",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_proved_is_refused_with_what_is_allowed(name: str):
    sections, words = REFUSED[name]
    cfg = configured(**sections)
    with pytest.raises(ValueError, match=re.escape(f"[run] exact needs {words}")):
        check(cfg, mesh.resolve(cfg.mesh, 4), CPU)


def test_a_gpu_is_refused():
    cfg = configured()
    with pytest.raises(ValueError, match=r"\[run\] exact needs \[run\] device in \('cpu'\), got 'cuda'"):
        check(cfg, mesh.resolve(cfg.mesh, 1), torch.device("cuda"))


def test_an_open_size_of_microbatches_is_refused():
    with pytest.raises(ConfigError, match="micro_batch_size = 0 would follow the layout"):
        configured(batch={"micro_batch_size": 0, "global_batch_size": 4})


def test_without_the_key_nothing_is_refused():
    cfg = configured(run={"exact": False}, fsdp={"cpu_offload": True})
    check(cfg, mesh.resolve(cfg.mesh, 1), CPU)


def test_every_value_that_the_first_step_recorded_is_compared_and_named():
    cfg = configured()
    now = exact.fixed(cfg, mesh.resolve(cfg.mesh, 1), MACHINE, compiled=False)
    exact.check_fixed(ExactState({}, dict(now)), now)
    exact.check_fixed(None, now)
    for key, value in now.items():
        with pytest.raises(ValueError, match=re.escape(f"would change: {key} was 'other', is {value!r} (")):
            exact.check_fixed(ExactState({}, now | {key: "other"}), now)


# A change to the sections of a run with tp 2 and cp 2 -> the setting that tells it.
TELLING: dict[str, dict[str, Any]] = {
    "[batch] micro_batch_size": {"batch": {"micro_batch_size": 2, "global_batch_size": 4}},
    "[precision] params": {"precision": {"params": "bfloat16"}},
    "[mesh] tp": {"mesh": {"tp": 4, "cp": 2}},
    "[mesh] cp": {"mesh": {"tp": 2, "cp": 4}},
    "[mesh] cp_form = 'heads'": {"mesh": {"tp": 2, "cp": 2, "cp_form": "heads"}},
    "[mesh] sequence_parallel": {"mesh": {"tp": 2, "cp": 2, "sequence_parallel": False}},
    "[recompute] mode": {"recompute": {"mode": "full"}},
    "[recompute] method": {"recompute": {"mode": "full", "method": "block"}},
    "[recompute] layers": {"recompute": {"mode": "full", "layers": 2}},
}


@pytest.mark.parametrize("setting", TELLING)
def test_a_setting_that_changes_bits_is_recorded(setting: str):
    def recorded(**sections: dict[str, Any]) -> dict[str, Any]:
        cfg = configured(**{"mesh": {"tp": 2, "cp": 2, "cp_form": "gather"}, **sections})
        return exact.fixed(cfg, mesh.resolve(cfg.mesh, 8), MACHINE, compiled=False)

    before, after = recorded(), recorded(**TELLING[setting])
    assert before[setting] != after[setting]


def test_a_resumed_run_goes_on_with_the_grids_of_its_checkpoint():
    cfg = configured()
    sizes = mesh.resolve(cfg.mesh, 1)
    group = cast(dist.ProcessGroup, None)
    sums = ExactSums({"a": 4}, 1, Groups(group, group, group, group), CPU)
    was = ExactState({"a": 2.0**-20}, exact.fixed(cfg, sizes, MACHINE, compiled=False))
    exact.begin(sums, cfg, sizes, MACHINE, compiled=False, was=was)
    assert sums.state == was
    sums.begin(n_microbatches=4, scale=1.0)
    assert sums.grids["a"] == Grid.of(2.0**-20, 4)
    exact.begin(sums, cfg, sizes, MACHINE, compiled=False, was=None)
    sums.begin(n_microbatches=4, scale=1.0)
    assert sums.grids["a"] == Grid.of(1 / 4, 4)


def test_another_machine_is_told_where_it_is_allowed_and_everything_else_is_still_refused():
    cfg = configured()
    now = exact.fixed(cfg, mesh.resolve(cfg.mesh, 1), MACHINE, compiled=False)
    told: list[str] = []
    with exact.another_machine_allowed(told.append):
        exact.check_fixed(ExactState({}, now | {"MKL_CBWR": "COMPATIBLE", "the kind of processor": "abacus"}), now)
        with pytest.raises(ValueError, match="would change:"):
            exact.check_fixed(ExactState({}, now | {"[mesh] tp": "other"}), now)
    assert [line.partition(",")[0] for line in told] == [
        "the kind of processor was 'abacus'",
        "MKL_CBWR was 'COMPATIBLE'",
    ]
    with pytest.raises(ValueError, match="the kind of processor was 'abacus'"):
        exact.check_fixed(ExactState({}, now | {"the kind of processor": "abacus"}), now)


def test_a_run_whose_checkpoint_lacks_a_setting_goes_on_and_a_line_names_it():
    cfg = configured()
    now = exact.fixed(cfg, mesh.resolve(cfg.mesh, 1), MACHINE, compiled=False)
    older = ExactState({}, {key: value for key, value in now.items() if key != "MKL_CBWR"})
    exact.check_fixed(older, now)
    assert exact.not_recorded(older, MACHINE) == [
        "recorded from now on, because the checkpoint's dtmega did not: MKL_CBWR ([run] exact)"
    ]
    assert exact.not_recorded(ExactState({}, now), MACHINE) == exact.not_recorded(None, MACHINE) == []


def test_equal_gradients_of_two_ranks_that_share_a_microbatch_have_different_digests(monkeypatch):
    monkeypatch.setattr(exact, "dist", SimpleNamespace(group=SimpleNamespace(WORLD=object())))
    group = SimpleNamespace(size=lambda: 1)
    whole: Any = SimpleNamespace(full_name=str, blocks=list, read_by_layers=[], ties=[])
    whole.named_parameters = lambda: [("a", torch.zeros(3))]
    digests: set[int] = set()
    for place in ({"tp": tp, "cp": cp} for tp in range(2) for cp in range(3)):
        world: Any = SimpleNamespace(sizes={"tp": 2, "cp": 3}, coordinate=place.get, device=CPU)
        world.groups = dict.fromkeys(("fsdp", "dp_replicate", "tp"), group)
        sums = exact.sums(world, whole, {}, {})
        parameter = nn.Parameter(torch.zeros(3))
        parameter.grad = torch.tensor([0.1, -0.05, 0.0])
        sums.begin(n_microbatches=4, scale=1.0)
        sums.add([Slot("a", parameter, None, [], partial=False)], 0)
        assert sums.grids["a"] == Grid.of(1 / 4, 4 * 2 * 3)
        digests.add(int(sums.digests[0].total))
    assert len(digests) == 6


def test_all_gradients_are_summed_over_copies_and_those_of_which_tp_ranks_have_parts_over_tp_too(monkeypatch):
    def all_reduce(tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM, *, group: Any) -> None:
        """As if every rank had what is here."""
        if op == dist.ReduceOp.SUM:
            tensor *= group.size()

    monkeypatch.setattr(exact_sums, "dist", SimpleNamespace(all_reduce=all_reduce, ReduceOp=dist.ReduceOp))
    everyone, shards, copies, tp = (cast(Any, SimpleNamespace(size=lambda n=n: n)) for n in (15, 1, 5, 3))
    for partial in ([], ["part"], ["part", "whole"]):
        sums = ExactSums({"part": 2, "whole": 2}, 3, Groups(everyone, shards, copies, tp), CPU)
        stage = nn.ParameterDict({name: nn.Parameter(torch.zeros(2)) for name in sums.sizes})
        sums.of_stage[0] = StageSums(stage, str, [], [], partial, sums)
        sums.begin(n_microbatches=5, scale=1.0)
        for parameter in stage.values():
            parameter.grad = torch.tensor([0.125, -0.0625])
        sums.of_stage[0].swept(0)
        sums.finish([])
        for name, parameter in stage.items():
            times = 5 * 3 if name in partial else 5
            assert parameter.grad.tolist() == [0.125 * times, -0.0625 * times]
