"""step.py: what the time of a step is the time of."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dtmega import config, mesh, train
from dtmega.data.loader import StepBatch, TrainBatches
from dtmega.data.objectives.next_token import NEXT_TOKEN
from dtmega.data.objectives.sums import divisors
from dtmega.training import phases
from dtmega.training.sharded_model import ShardedModel
from dtmega.training.step import count, over_ranks
from tests import ranks
from tests.layouts import DEBUG, write_text
from tests.operations import Operations
from tests.resumed import Record, flags

# Seconds that each part takes on the clock of this test.
PARTS = {"data": 1000, "rate": 100, "forward": 10, "optimizer": 1, "device": 0.125}


def test_tokens_are_counted_one_by_one_beyond_what_fp32_can_count():
    labels = torch.zeros(1, dtype=torch.int8).expand(2**24 + 1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        world: Any = SimpleNamespace(device=torch.device("cpu"), groups={"data": dist.group.WORLD})
        assert count(world, NEXT_TOKEN, StepBatch(0, 1, [{"labels": labels}])) == {"tokens": 2**24 + 1}
        none = count(world, NEXT_TOKEN, StepBatch(0, 1, [{"labels": labels[:5] - 100}]))
        assert none == {"tokens": 0}
        assert divisors(none) == {"tokens": 1}
    finally:
        dist.destroy_process_group()


def told() -> dict[str, Any]:
    """The losses and norms of some layouts of two ranks, of which each has other numbers; and the messages of one."""
    found: dict[str, Any] = {}
    rank = dist.get_rank()
    for axis in ("pp", "dp_replicate", "dp_shard", "tp"):
        cfg = config.validate({"train": {"steps": 1}, "mesh": {axis: 2}}, "test")
        world = mesh.start(torch.device("cpu"), mesh.resolve(cfg.mesh, 2))
        with Operations() as operations:
            totals, squared = over_ranks(world, torch.tensor([1.0, 3.0]).double() * 10**rank, torch.tensor(2.0 + rank))
        found[axis] = totals.tolist(), squared
        found["messages"] = sum(n for name, n in operations.counts.items() if "allgather" in name)
    return found


def test_losses_and_norms_are_added_up_over_their_own_ranks_by_one_message():
    for rank, found in enumerate(ranks.run(2, told)):
        assert found["messages"] == 1
        assert found["pp"] == ([11.0, 33.0], 5.0)
        assert found["dp_shard"] == ([11.0, 33.0], 5.0)
        assert found["dp_replicate"] == ([11.0, 33.0], 2.0 + rank)  # as large on all copies, once a step
        assert found["tp"] == ([10.0**rank, 3 * 10.0**rank], 5.0)  # both ranks have the whole loss


def test_the_time_of_a_step_is_from_the_wait_for_data_until_the_device_is_done_with_the_update(tmp_path, monkeypatch):
    clock, order = [0.0], []

    def takes(part: str, owner: Any, name: str) -> None:
        honest = getattr(owner, name)

        def part_of_a_step(*args: Any, **keywords: Any) -> Any:
            clock[0] += PARTS[part]
            order.append(part)
            return honest(*args, **keywords)

        monkeypatch.setattr(owner, name, part_of_a_step)

    takes("data", TrainBatches, "__next__")
    takes("rate", train.optim, "rate_at")
    takes("forward", ShardedModel, "forward_backward")
    takes("optimizer", train.optim.AdamW, "step")
    takes("device", mesh, "synchronize")
    monkeypatch.setattr(phases, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    keys = DEBUG | write_text(tmp_path) | {"train.steps": 2, "eval.interval": 1, "model.n_layers": 1}
    try:
        assert train.main(flags(keys, tmp_path / "run")) == 0
    finally:
        dist.destroy_process_group()
    assert order == [*PARTS] * 2
    tokens = keys["batch.global_batch_size"] * keys["data.seq_len"]
    for line in Record(tmp_path / "run").steps.values():
        assert line["step_time_s"] == sum(PARTS.values())
        assert line["tokens_per_s"] == pytest.approx(tokens / sum(PARTS.values()))
