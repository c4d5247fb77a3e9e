"""planning/prices/pricing.py: kernels and collectives against closed forms written again."""

from __future__ import annotations

import math

import pytest

from dtmega.planning.prices import fabric as fabrics
from dtmega.planning.prices import pricing
from dtmega.planning.prices.fabric import Fabric
from dtmega.planning.work import Message, Work

INSIDE, BETWEEN = 4e9, 1e9  # bytes/s of a rank
STEP_S, HOP_S = 2e-6, 5e-6
PEAK, MEMORY = 1e12, 1e11


def four_per_node(launch_s: float = 0.0, **gpu: object) -> Fabric:
    values = {
        "gpu": {
            "name": "toy",
            "memory_bytes": 2**30,
            "memory_bytes_per_s": MEMORY,
            "launch_s": launch_s,
            "peak_flops": {"bfloat16": PEAK},
            **gpu,
        },
        "node": {"ranks": 4, "bytes_per_s": INSIDE, "latency_s": STEP_S},
        "network": {"bytes_per_s": BETWEEN, "latency_s": HOP_S},
    }
    return fabrics.parse(values, "toy.toml")


def collective_s(kind: str, ranks: list[int], n_bytes: int) -> float:
    return pricing.collective_seconds(Message(kind, "tp", len(ranks), n_bytes), four_per_node(), ranks)


@pytest.mark.parametrize(
    ("kind", "passes", "rounds"),
    [("all-gather", 3 / 4, 1), ("reduce-scatter", 3 / 4, 1), ("all-reduce", 2 * 3 / 4, 2), ("broadcast", 1, 1)],
)
def test_a_collective_inside_a_node_takes_the_time_of_a_ring(kind: str, passes: float, rounds: int):
    expected = rounds * 3 * STEP_S + passes * 8_000_000 / INSIDE
    assert collective_s(kind, [4, 5, 6, 7], 8_000_000) == pytest.approx(expected)


def test_a_ring_with_one_rank_in_each_node_is_as_fast_as_one_network_card():
    assert collective_s("all-gather", [0, 4, 8], 9_000) == pytest.approx(2 * HOP_S + 2 / 3 * 9_000 / BETWEEN)


def test_a_ring_crosses_nodes_by_as_many_cards_as_it_has_ranks_in_each_and_never_faster_than_inside():
    two_of_each = collective_s("all-gather", [0, 1, 4, 5], 8_000)
    assert two_of_each == pytest.approx(2 * STEP_S + HOP_S + 3 / 4 * 8_000 / (2 * BETWEEN))
    one_and_four = collective_s("all-gather", [3, 4, 5, 6, 7], 10_000)  # all that leaves rank 3's node takes its card
    assert one_and_four == pytest.approx(3 * STEP_S + HOP_S + 4 / 5 * 10_000 / BETWEEN)
    all_of_three = collective_s("all-gather", list(range(12)), 12_000)
    assert all_of_three == pytest.approx(9 * STEP_S + 2 * HOP_S + 11 / 12 * 12_000 / min(INSIDE, 4 * BETWEEN))


def test_an_all_to_all_sends_each_pair_its_part_over_its_own_link():
    """Each of 4 ranks sends 3 parts of 2,000 bytes: over two nodes, one inside and two by its own card."""
    assert collective_s("all-to-all", [0, 1, 2, 3], 8_000) == pytest.approx(3 * STEP_S + 6_000 / INSIDE)
    crossing = collective_s("all-to-all", [0, 1, 4, 5], 8_000)
    assert crossing == pytest.approx(2 * STEP_S + HOP_S + max(2_000 / INSIDE, 4_000 / BETWEEN))
    alone_in_its_node = collective_s("all-to-all", [3, 4, 5, 6, 7], 10_000)
    assert alone_in_its_node == pytest.approx(3 * STEP_S + HOP_S + 4 * 2_000 / BETWEEN)


def test_a_group_of_one_rank_sends_nothing():
    assert collective_s("all-reduce", [3], 8_000) == 0


def test_a_message_between_two_ranks_takes_the_link_between_them():
    toy = four_per_node()
    assert pricing.send_seconds(4_000, toy, 2, 3) == pytest.approx(STEP_S + 4_000 / INSIDE)
    assert pricing.send_seconds(4_000, toy, 3, 4) == pytest.approx(HOP_S + 4_000 / BETWEEN)
    sent = Work("0F0", "pp", "c10d.send", message=Message("send", "pp", 2, 4_000, peer=4))
    assert pricing.seconds(sent, toy, 3, lambda name: []) == pytest.approx(HOP_S + 4_000 / BETWEEN)


def test_a_kernel_takes_the_slower_of_its_products_and_its_bytes_and_one_launch():
    toy = four_per_node(launch_s=1e-5, efficiency=0.5, half_side=100)
    reached = PEAK * 0.5 * 300 / 400
    product = Work("0F0", "compute", "aten.mm", flops=10**9, moved_bytes=1, product=(900, 300, 700), dtype="bfloat16")
    assert pricing.kernel_seconds(product, toy.gpu) == pytest.approx(1e-5 + 10**9 / reached)
    slow = product._replace(moved_bytes=10**9)
    assert pricing.kernel_seconds(slow, toy.gpu) == pytest.approx(1e-5 + 10**9 / MEMORY)
    copy = Work("0F0", "compute", "aten.copy_", moved_bytes=10**9, dtype="int64")
    assert pricing.kernel_seconds(copy, toy.gpu) == pytest.approx(1e-5 + 10**9 / MEMORY)


def test_fused_attention_has_an_efficiency_of_its_own():
    toy = four_per_node(attention_efficiency=0.25)
    attention = Work("0F0", "compute", "flex_attention", flops=10**12, dtype="bfloat16")
    assert pricing.kernel_seconds(attention, toy.gpu) == pytest.approx(4.0)


def test_measured_points_are_interpolated_over_the_logarithm_of_the_smallest_side():
    toy = four_per_node(measured={"bfloat16": [(64, 1e11), (1024, 5e11)]})
    for side, expected in ((16, 1e11), (64, 1e11), (256, 3e11), (1024, 5e11), (4096, 5e11)):
        assert pricing.reached_flops(toy.gpu, "bfloat16", (5000, side, 6000)) == pytest.approx(expected)


def test_a_product_in_a_dtype_that_the_fabric_lacks_is_refused():
    with pytest.raises(ValueError, match=r"no FLOP/s of toy for float8, expected one of bfloat16 .*peak_flops"):
        pricing.reached_flops(four_per_node().gpu, "float8", (1, 1, 1))


def test_the_latency_of_a_long_ring_grows_with_its_ranks():
    small = collective_s("all-gather", list(range(64)), 1)
    assert math.isclose(small, 48 * STEP_S + 15 * HOP_S + 63 / 64 / INSIDE, rel_tol=1e-9)
