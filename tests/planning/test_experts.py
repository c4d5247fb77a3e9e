"""Plans of experts that are divided over ranks (`mesh.ep`): against CPU ranks whose tokens go to chosen experts."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from dtmega.models.routing import Router
from dtmega.planning.counting.role import Role
from tests import ranks
from tests.planning import real_step
from tests.planning.test_counts import BF16, CPU, SMALL, TIMEOUT_S, assert_alike

MOE = {
    "model.name": "moe",
    "model.n_kv_heads": 2,
    "model.ffn_hidden_size": 64,
    "model.n_experts": 4,
    "model.expert_ffn_hidden_size": 32,
    "model.n_layers": 2,
    "mesh.dp_shard": 2,
    "mesh.ep": 2,
}
# Two tokens' experts, in turn. The first of two ranks has experts 0 and 1.
EVEN = [[0, 2], [3, 1]]
UNEVEN = [[0, 1], [1, 3]]  # the first rank receives 3 of 4 rows, 1.5 times the mean
LAYOUTS: dict[str, tuple[int, dict[str, Any], list[list[int]], float]] = {
    "dp_shard 2": (2, {}, EVEN, 1.0),
    "dp_shard 2, uneven, bf16": (2, BF16, UNEVEN, 1.5),
    "dp_shard 2 x cp 2, uneven": (4, {"mesh.cp": 2, "mesh.cp_form": "gather"}, UNEVEN, 1.5),
    "HSDP 2 x 2, full recompute": (4, {"mesh.dp_replicate": 2, "recompute.mode": "full"}, EVEN, 1.0),
    "dp_shard 2 x tp 2": (4, {"mesh.tp": 2}, EVEN, 1.0),
    "dp_shard 2 x pp 2, uneven": (4, {"mesh.pp": 2}, UNEVEN, 1.5),
}
ALWAYS = ("dp_shard 2, uneven, bf16",)


def measured(values: dict[str, Any], experts: list[list[int]]) -> real_step.Measured:
    """Train some steps on this rank, where the experts of the tokens are given."""
    choose = Router.choose

    def choose_given(router: Router, scores: Tensor) -> Tensor:
        chosen = choose(router, scores)
        return chosen.copy_(torch.tensor(experts).repeat(len(chosen) // len(experts), 1))

    with patch.object(Router, "choose", choose_given):
        return real_step.measured(values)


def planned(values: dict[str, Any], imbalance: float) -> Role:
    """The plan of this rank with its own load. In each layout above, the first rank of an ep group has an even number."""
    is_first = dist.get_rank() % 2 == 0
    return real_step.planned(values, CPU, imbalance=imbalance if is_first else 2 - imbalance)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in ALWAYS else pytest.mark.full) for name in LAYOUTS]
)
def test_a_plan_of_experts_holds_sends_and_peaks_as_a_rank_with_this_load(name: str):
    n, keys, experts, imbalance = LAYOUTS[name]
    keys = MOE | keys
    values = real_step.nested(SMALL | keys)
    roles = ranks.run(n, planned, values, imbalance, timeout_s=TIMEOUT_S)
    reals = ranks.run(n, measured, values, experts, timeout_s=TIMEOUT_S)
    assert_alike(reals, roles, keys)
