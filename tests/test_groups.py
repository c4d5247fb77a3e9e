"""Claims about the group of each operation, and the part of each rank, where no two groups have the same ranks.

48 processes, of which one at a time is here: torch's "fake" process group, in which nobody answers. What a rank
computes with that is of no use; what it asks for, of whom, and which parameters it holds, is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from dtmega import config, families, mesh
from dtmega.data.objectives.sums import Tally
from dtmega.mesh import World
from dtmega.ops import cost, cross_entropy
from dtmega.ops.shards import local
from dtmega.training import evaluate, pipelined, step
from dtmega.training.parallelize import parallelize
from dtmega.training.sharded_model import ShardedModel
from tests import test_wire
from tests.test_wire import Wire, settings

SIZES = {"pp": 3, "dp_replicate": 2, "dp_shard": 2, "cp": 2, "tp": 2}
N = 48
# The vocabulary leaves no rank with a smaller part, so that the formulas of traffic.py hold on all.
KEYS: dict[str, Any] = {"mesh": SIZES, "model": {"pad_vocab_to_multiple": 4}}
FIRST, MIDDLE, LAST = 5, 16 + 14, 32 + 3  # a rank of each pipeline stage, of which there are 16


@pytest.fixture
def pretend() -> Iterator[Callable[..., None]]:
    """Be that one of n ranks."""

    def be(rank: int, n: int = N) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=n)

    yield be
    dist.destroy_process_group()


def cfg_of(**more: Any) -> config.Config:
    keys = {**KEYS, **more, "mesh": SIZES | more.get("mesh", {})}
    return config.validate(settings(keys, n_layers=3, sequences=3 * 4), "test")


def world_of(cfg: config.Config) -> World:
    return mesh.start(torch.device("cpu"), mesh.resolve(cfg.mesh, N))


def handed(groups: dict[str, dist.ProcessGroup], what: Callable[[], object]) -> dict[tuple[str, str], int]:
    """The number of operations of each kind that `what` hands to each group."""
    with Wire(groups) as wire:
        what()
    found: Counter[tuple[str, str]] = Counter()
    for (group, kind, _), ops in wire.seen.items():
        found[group, kind] += ops
    return dict(found)


def zero_gradients(model: ShardedModel) -> None:
    for _, parameter in model.named_parameters():
        parameter.grad = torch.zeros_like(parameter)


def test_a_step_on_replicas_of_shards_of_parts_is_what_the_formula_says(monkeypatch, pretend):
    for name in ("CHUNK_TOKENS", "CHUNK_LOGITS"):
        monkeypatch.setattr(cross_entropy, name, getattr(cross_entropy, name))  # which `counted_and_expected` changes
    pretend(7, 24)
    mesh = {"dp_replicate": 3, "dp_shard": 2, "cp": 2, "cp_form": "gather", "tp": 2}
    keys = {"mesh": mesh, "model": {"vocab_size": 32}}
    ((counted, expected),) = test_wire.counted_and_expected([settings(keys, n_layers=3, sequences=2 * 6)])
    assert counted == expected


@pytest.mark.parametrize(("rank", "ends"), [(FIRST, True), (MIDDLE, False), (LAST, True)])
def test_what_a_step_sums_after_backward_is_handed_to_the_groups_that_it_is_about(pretend, monkeypatch, rank, ends):
    pretend(rank)
    cfg = cfg_of()
    world, groups = test_wire.start(cfg)
    model = parallelize(cfg, world)
    assert model.pipeline is not None

    def nobody_answers(microbatches: object, tally: Tally) -> None:
        loss = torch.ones((), requires_grad=True)
        assert tally.add({"lm": loss}) == [(loss, 1 / (3 * 3 * 8))]  # microbatches x B x S, as nobody adds to it
        zero_gradients(model)

    monkeypatch.setattr(model.pipeline, "step", nobody_answers)
    run: Any = Mock(cfg=cfg, world=world, model=model, loss_scale=None)
    batch = next(test_wire.two_batches(cfg, world, Wire({})))
    found = handed(groups, lambda: step.train_step(run, batch))
    tied = {("pp 0+2", "all-reduce"): 1} if ends else {}
    loss_and_norm = {("world", "all-gather"): 1}
    assert found == {("data", "all-reduce"): 1, ("tp", "all-reduce"): 1} | loss_and_norm | tied


@pytest.mark.parametrize("rank", [FIRST, MIDDLE, LAST])
def test_what_all_ranks_tell_is_added_up_over_those_with_other_tokens_and_those_with_other_elements(
    pretend, monkeypatch, rank
):
    pretend(rank)
    world = world_of(cfg_of())
    told = torch.tensor([[2.0**r, 2.0**r] for r in range(N)], dtype=torch.float64)  # a digit for each rank
    monkeypatch.setattr(step.replica_check, "gather_vectors", lambda *_: told)
    totals, squared_norm = step.over_ranks(world, torch.zeros(1, dtype=torch.float64), torch.zeros(()))
    same_tp = [r for r in range(N) if r % 2 == rank % 2]
    same_replica = [r for r in range(N) if r // 8 % 2 == rank // 8 % 2]
    assert totals.tolist() == [sum(2.0**r for r in same_tp)]
    assert squared_norm == sum(2.0**r for r in same_replica)


def test_every_other_collective_of_the_loop_is_handed_to_its_group(pretend, monkeypatch):
    pretend(FIRST)
    cfg = cfg_of()
    world, groups = test_wire.start(cfg)
    model = parallelize(cfg, world)
    zero_gradients(model)
    batch = next(test_wire.two_batches(cfg, world, Wire({})))
    run: Any = Mock(cfg=cfg, world=world, model=model, watch=Mock(signals=[]))
    run.metrics.evaluating.side_effect = lambda batches, *_: batches
    monkeypatch.setattr(evaluate, "eval_batches", lambda *_: [batch])

    assert handed(groups, lambda: step.check_same_batch(batch, world)) == {("model", "all-gather"): 1}
    assert handed(groups, lambda: model.statistics(True, False)) == {("shards", "all-reduce"): 1}
    assert handed(groups, lambda: model.statistics(False, True)) == {("shards", "all-reduce"): 1}
    copies = handed(groups, model.check_copies)
    assert copies == {("dp_replicate", "all-gather"): 1, ("tp", "all-gather"): 1, ("pp 0+2", "all-gather"): 1}
    monkeypatch.setattr(model, "losses", lambda _: torch.zeros(1))
    found = handed(groups, lambda: evaluate.mean_losses(run, "valid"))
    assert found == {("world", "all-reduce"): 1, ("data", "all-reduce"): 1, ("loss", "all-reduce"): 1}


def test_over_the_shards_each_element_of_the_model_comes_once_but_all_here_are_clipped(pretend):
    # As many shards as there are tp ranks would hide who counts what: half of it twice is all of it.
    cfg = cfg_of(model={"vocab_size": 32}, mesh={"pp": 2, "dp_shard": 3})
    everything = cost.n_parameters(families.pieces(cfg.model))
    n_weights = n_gradients = 0
    for rank in [rank for rank in range(N) if rank // 12 % 2 == 0]:  # of one replica
        pretend(rank)
        model = parallelize(cfg, world_of(cfg))
        n_weights += sum(part.numel() for part in model.weights())
        assert model.gradients() == model.gradients(every=True) == []
        zero_gradients(model)
        held = [parameter for _, parameter in model.named_parameters()]
        n_gradients += sum(part.numel() for part in model.gradients())
        clipped = model.gradients(every=True)
        assert [part.data_ptr() for part in clipped] == [local(p.grad).data_ptr() for p in held if p.grad is not None]
        assert len(clipped) == len(held)
    assert n_weights == n_gradients == everything


def test_the_ranks_of_a_stage_share_muons_matrices_out_in_the_order_of_their_numbers(pretend):
    cfg = cfg_of(mesh={"pp": 2, "dp_shard": 3}, optim={"name": "muon"})
    pretend(MIDDLE)
    matrices = parallelize(cfg, world_of(cfg)).matrices
    assert matrices is not None
    assert dist.get_process_group_ranks(matrices.group) == [*range(24, 48)]
    assert matrices.sizes == (2, 3 * 2, 2)  # copies, shards (cp shares them out too), tp


@pytest.mark.parametrize("rank", range(0, 16, 5))
def test_where_shards_are_copied_each_of_them_has_a_part_of_every_expert_if_there_are_fewer_experts(pretend, rank):
    pretend(rank, 16)
    sizes = {"pp": 1, "dp_replicate": 2, "dp_shard": 8, "cp": 1, "tp": 1}
    model = {"name": "moe", "n_experts": 4, "expert_ffn_hidden_size": 8, "ffn_hidden_size": 8}
    cfg = cfg_of(mesh=sizes | {"ep": 2}, model=model)
    held = dict(parallelize(cfg, mesh.start(torch.device("cpu"), sizes, ep=2)).named_parameters())
    with torch.device("meta"):
        whole = dict(families.build(cfg).named_parameters())
    # A rank has two experts, as three others do of its copy of the model.
    found = {name: local(p).numel() * 8 for name, p in held.items() if ".experts." in name}
    assert found == {name: whole[name].numel() for name in found}
    assert found


class Built(Exception):
    """Raised by a pipeline that is not really made."""


@pytest.mark.parametrize(
    ("keys", "shape", "dtype"),
    [
        ({}, (3, 2, 16), torch.float32),  # B, S / cp / tp, D
        ({"mesh": {"sequence_parallel": False}}, (3, 4, 16), torch.float32),
        ({"precision": {"params": "bfloat16"}}, (3, 2, 16), torch.bfloat16),
    ],
)
@pytest.mark.parametrize(("rank", "stage"), [(FIRST, 0), (MIDDLE, 1), (LAST, 2)])
def test_a_pipeline_gets_the_stages_of_its_rank_and_the_shape_of_what_goes_between_them(
    pretend, monkeypatch, keys, shape, dtype, rank, stage
):
    def pipeline(wanted: Any, stages: Any, group: Any, boundaries: Any, device: Any, sums: Any) -> None:
        assert (wanted, list(stages), device, sums) == (cfg.pipeline, [stage], torch.device("cpu"), {})
        assert dist.get_process_group_ranks(group) == [rank % 16, rank % 16 + 16, rank % 16 + 32]
        assert [[*boundary] for boundary in boundaries] == [["hidden"]] * 2
        for boundary in boundaries:
            hidden = boundary["hidden"]
            assert (tuple(hidden.shape), hidden.dtype, hidden.device.type) == (shape, dtype, "meta")
        raise Built

    pretend(rank)
    cfg = cfg_of(**keys)
    monkeypatch.setattr(pipelined, "Pipeline", pipeline)
    with pytest.raises(Built):
        parallelize(cfg, world_of(cfg))
