"""The bytes that experts send over `mesh.ep` in a real step against their closed form (`tests/traffic.py`)."""

from __future__ import annotations

from collections import Counter
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from dtmega.models.routing import Router
from dtmega.training.step import train_step
from tests import ranks
from tests.planning import real_step
from tests.test_wire import Wire
from tests.traffic import BYTES, experts_over_ranks, leaving_bytes

D, E, K = 16, 4, 2
MICROBATCHES, TOKENS, LAYERS = 2, 3 * 8, 2
SMALL = {
    "model.name": "moe",
    "model.vocab_size": 31,
    "model.hidden_size": D,
    "model.n_heads": 4,
    "model.n_kv_heads": 2,
    "model.n_layers": LAYERS + 1,
    "model.dense_layers": 1,
    "model.n_experts": E,
    "model.experts_per_token": K,
    "model.expert_ffn_hidden_size": 12,
    "data.seq_len": 8,
    "batch.micro_batch_size": 3,
    "train.steps": 9,
    "compile.enable": False,
    "mesh.dp_shard": 2,
    "mesh.ep": 2,
}
# The experts of a rank's tokens, three in turn, by data rank; two of four ranks have the experts 0 and 1.
CHOSEN = (((0, 2), (3, 2), (1, 0)), ((3, 2), (2, 3), (0, 3)), ((0, 1), (1, 0), (0, 1)), ((2, 0), (1, 3), (3, 1)))
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "dp_shard 2": (2, {}),
    "recompute, bf16": (2, {"recompute.mode": "full", "precision.params": "bfloat16"}),
    "dp_shard 4": (4, {"mesh.dp_shard": 4}),
    "tp 2": (4, {"mesh.tp": 2, "model.n_kv_heads": 2}),
    "HSDP 2 x 2, recompute": (4, {"mesh.dp_replicate": 2, "recompute.mode": "full"}),
}


class Leaving(Wire):
    """Counts the bytes that leave this rank in all-to-alls of floating-point numbers, too."""

    def __init__(self, groups: dict[str, dist.ProcessGroup]) -> None:
        super().__init__(groups)
        self.n_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.c10d.alltoall_base_.default and args[1].is_floating_point():
            _, rows, group, _, sent, *_ = args
            own = dist.ProcessGroup.unbox(group).rank()
            self.n_bytes += (sum(sent) - sent[own]) * rows.shape[1] * rows.itemsize
        return super().__torch_dispatch__(func, types, args, kwargs)


Counted = tuple[Counter[tuple[str, int]], int]


def counted_and_expected(all_keys: list[dict[str, Any]]) -> list[tuple[Counted, Counted]]:
    return [compare(SMALL | keys) for keys in all_keys]


def compare(keys: dict[str, Any]) -> tuple[Counted, Counted]:
    """The all-to-alls over ep in a step of this rank, and the bytes of rows that leave it; and by the formula."""
    data_ranks = keys["mesh.dp_shard"] * keys.get("mesh.dp_replicate", 1)
    keys = keys | {"batch.global_batch_size": 3 * MICROBATCHES * data_ranks}
    run = real_step.built(real_step.nested(keys))
    cfg, world = run.cfg, run.world

    def choose_given(router: Router, scores: Tensor) -> Tensor:
        return torch.tensor(CHOSEN[world.data_rank]).repeat(len(scores) // 3, 1)

    with patch.object(Router, "choose", choose_given), Leaving(world.groups) as wire:
        train_step(run, real_step.batch_of(run))
    of_ep = wire.names[world.groups["ep"].group_name]
    seen: Counter[tuple[str, int]] = Counter()
    for (group, kind, n_bytes), ops in wire.seen.items():
        if kind == "all-to-all":
            seen[group, n_bytes] += ops

    # tp is the axis that varies fastest, so the data ranks of an ep group are neighbours.
    ep, own = world.groups["ep"].size(), world.groups["ep"].rank()
    first = world.data_rank - own
    rows = [[rows_for(data_rank, owner) for owner in range(ep)] for data_rank in range(first, first + ep)]
    sent, received = rows[own], [row[own] for row in rows]
    n = MICROBATCHES * LAYERS
    forwards = 2 * n if cfg.recompute.mode == "full" else n
    row_bytes = D * BYTES[cfg.precision.params]
    expected: Counter[tuple[str, int]] = Counter()
    for one in experts_over_ranks(forwards, n, sent, received, row_bytes, E):
        expected[of_ep, one.payload_bytes] += one.ops
    return (seen, wire.n_bytes), (expected, leaving_bytes(forwards, n, sent, received, row_bytes, own))


def rows_for(data_rank: int, owner: int) -> int:
    """The number of rows that a data rank has for the two experts of a place in its ep group."""
    experts = [expert for token in CHOSEN[data_rank] for expert in token]
    return sum(expert // 2 == owner for expert in experts) * TOKENS // 3


@pytest.mark.parametrize("n", [2, pytest.param(4, marks=pytest.mark.full)])
def test_experts_send_what_the_formula_says(n: int):
    names = [name for name, (size, _) in CASES.items() if size == n]
    for rank, found in enumerate(ranks.run(n, counted_and_expected, [CASES[name][1] for name in names])):
        for name, (counted, expected) in zip(names, found, strict=True):
            assert counted == expected, f"rank {rank} of {name}"
