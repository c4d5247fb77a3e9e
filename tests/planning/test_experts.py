"""Plans of experts that are divided over ranks (`mesh.ep`): against CPU ranks whose tokens go to chosen experts."""

from __future__ import annotations

import time
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from dtmega import config, mesh
from dtmega.models.routing import Router
from dtmega.planning.answers.answer import traffic
from dtmega.planning.answers.job import check_imbalance
from dtmega.planning.counting.role import Role, plan_role
from dtmega.planning.plan import Plan, time_step, totals
from dtmega.planning.prices.fabric import load
from dtmega.planning.prices.rank_time import groups_of
from tests import ranks
from tests.planning import real_step
from tests.planning.test_counts import CPU, SMALL, TIMEOUT_S, assert_alike

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
    "dp_shard 2, uneven": (2, {}, UNEVEN, 1.5),
    "dp_shard 2 x cp 2, uneven": (4, {"mesh.cp": 2, "mesh.cp_form": "gather"}, UNEVEN, 1.5),
    "HSDP 2 x 2, full recompute": (4, {"mesh.dp_replicate": 2, "recompute.mode": "full"}, EVEN, 1.0),
    "dp_shard 2 x tp 2": (4, {"mesh.tp": 2}, EVEN, 1.0),
    "dp_shard 2 x pp 2, uneven": (4, {"mesh.pp": 2}, UNEVEN, 1.5),
}
WAIT_S = 0.01  # in which gloo's thread lets go of a message's tensors, so that the profiler sees when they are freed
GPU = torch.device("cuda", 0)


def measured(values: dict[str, Any], experts: list[list[int]]) -> real_step.Measured:
    """Train some steps on this rank, where the experts of the tokens are given."""
    choose, exchange = Router.choose, dist.all_to_all_single

    def choose_given(router: Router, scores: Tensor) -> Tensor:
        chosen = choose(router, scores)
        return chosen.copy_(torch.tensor(experts).repeat(len(chosen) // len(experts), 1))

    def exchange_and_wait(*args: Any, **kwargs: Any) -> None:
        exchange(*args, **kwargs)
        time.sleep(WAIT_S)

    with patch.object(Router, "choose", choose_given), patch.object(dist, "all_to_all_single", exchange_and_wait):
        return real_step.measured(values)


def planned(values: dict[str, Any], imbalance: float) -> Role:
    """The plan of this rank with its own load. In these layouts the first rank of an ep group has an even number."""
    is_first = dist.get_rank() % 2 == 0
    return real_step.planned(values, CPU, imbalance=imbalance if is_first else 2 - imbalance)


@pytest.mark.full
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_plan_of_experts_holds_sends_and_peaks_as_a_rank_with_this_load(name: str):
    n, keys, experts, imbalance = LAYOUTS[name]
    keys = MOE | keys
    values = real_step.nested(SMALL | keys)
    roles = ranks.run(n, planned, values, imbalance, timeout_s=TIMEOUT_S)
    reals = ranks.run(n, measured, values, experts, timeout_s=TIMEOUT_S)
    assert_alike(reals, roles, keys)


@pytest.fixture(scope="module")
def uneven() -> Plan:
    """A layer of experts over 2 of 4 data ranks, planned for a rank with 1.5 times the mean load: two microbatches."""
    keys = SMALL | MOE | {"model.n_layers": 1, "mesh.dp_shard": 4, "batch.global_batch_size": 16}
    cfg, sizes = real_step.settled(real_step.nested(keys), 4)
    role = plan_role(cfg, sizes, 0, GPU, [2], imbalance=1.5)
    return Plan(cfg, sizes, GPU, 2, None, [], {0: role}, 2, 1.5)


def test_a_planned_rank_computes_and_receives_as_many_rows_as_the_imbalance_says(uneven: Plan):
    """A microbatch has 2 x 24 tokens with 2 experts each."""
    role = uneven.roles[0]
    rows = round(1.5 * 2 * 24 * 2)
    width, ffn = 48, 32
    sent = {n_bytes: n for (_, kind, n_bytes), n in totals(role).messages.items() if kind == "all-to-all"}
    assert sent == {rows * width * 4: 2 * 4, MOE["model.n_experts"] * 8: 2}
    flops = {name: n for name, n in totals(role).flops.items() if "grouped" in name}
    assert flops == {
        "dtmega.grouped_product": 2 * 2 * 3 * 2 * rows * width * ffn,
        "dtmega.grouped_gradient": 2 * 3 * 2 * rows * width * ffn,
    }


def test_messages_of_experts_are_priced_over_their_own_groups(uneven: Plan):
    fabric = load("h100-ib")
    rows = traffic(uneven.roles[0], fabric, uneven.sizes, 2)
    found = {(row.axis, row.collective, row.n_ranks) for row in rows}
    assert {("ep", "all-to-all", 2), ("efsdp", "all-gather", 2), ("efsdp", "reduce-scatter", 2)} <= found
    assert {"ep", "efsdp"} <= set(time_step(uneven, fabric).communication_by_axis)


def test_a_plan_says_which_loads_it_assumes_and_that_the_data_decides_them():
    cfg = config.validate({"mesh": {"ep": 2}, "train": {"steps": 1}}, "test")
    even, uneven = (Plan(cfg, {}, CPU, 1, None, [], {}, 1, imbalance).assumptions for imbalance in (1.0, 1.5))
    assert even == [
        "assumed: even loads: each of the ranks that share the experts (ep 2) receives 50.0% of their tokens' rows; "
        "how many it receives in a run depends on the data (--imbalance)"
    ]
    assert "the fullest of the ranks that share the experts (ep 2) receives 75.0%" in uneven[0]
    assert not Plan(config.validate({"train": {"steps": 1}}, "test"), {}, CPU, 1, None, [], {}, 1).assumptions


@pytest.mark.parametrize(
    ("imbalance", "ep", "words"),
    [
        (1.5, 1, "--imbalance 1.5 has no effect with ep=1: .*, so the load is always even"),
        (2.5, 2, r"--imbalance 2.5 .*: expected 1 \(even\) to ep=2 \(one rank has all tokens\) \(\[mesh\] ep\)"),
        (0.5, 2, r"--imbalance 0.5 .*: expected 1 \(even\) to ep=2"),
    ],
)
def test_a_load_that_no_rank_can_have_is_refused(imbalance: float, ep: int, words: str):
    with pytest.raises(ValueError, match=words):
        check_imbalance(imbalance, ep)
    check_imbalance(1.0, ep)


def test_groups_of_a_price_are_those_of_the_mesh():
    """ep 2 of dp_shard 2 x cp 2 x tp 2: neighbours among the ranks 1, 3, 5 and 7 that share rank 3's place in tp."""
    sizes = dict.fromkeys(mesh.AXES, 2) | {"pp": 1, "dp_replicate": 1}
    groups = groups_of(sizes, 3, 2)
    assert (groups("ep"), groups("efsdp"), groups("fsdp")) == ([1, 3], [3, 7], [1, 3, 5, 7])
