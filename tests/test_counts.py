"""Exact figures of a step, against closed forms: memory of its state, collectives when compiled, graphs."""

from __future__ import annotations

import functools
from collections import Counter
from typing import Any

import pytest

from tests import counts, ranks

D, V, L = 16, 32, 3
# Megatron's layer: QKV, output and two of the feed-forward are cut, with the biases of the first and the third.
CUT = L * ((3 * D * D + 3 * D) + D * D + (4 * D * D + 4 * D) + 4 * D * D) + V * D
# The other biases and all LayerNorms are whole on each rank.
WHOLE = L * (D + D + 4 * D) + 4 * D
LAYOUTS: dict[str, dict[str, Any]] = {
    "dp_shard 2": {"mesh": {"dp_shard": 2}},
    "dp_shard 2, bf16": {"mesh": {"dp_shard": 2}, "precision": {"params": "bfloat16"}},
    "tp 2": {"mesh": {"tp": 2}},
}


def on_two_ranks() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, sections in LAYOUTS.items():
        found[name] = counts.state_bytes(counts.begin(counts.settings(**sections)))
    tp: dict[str, Any] = {"mesh": {"tp": 2}}
    found["eager"] = counts.messages(counts.begin(counts.settings(**tp)))
    with counts.traced_only():
        found["compiled"] = counts.messages(counts.begin(counts.settings(**tp, compile={"enable": True})))
    return found


def on_one_rank() -> dict[str, Any]:
    steps, breaks = counts.graphs_by_step(4)
    state = {
        params: counts.state_bytes(counts.begin(counts.settings(precision={"params": params})))
        for params in ("float32", "bfloat16")
    }
    return {"graphs": steps, "breaks": breaks, **state}


@functools.cache
def measured(n: int) -> list[dict[str, Any]]:
    return ranks.run(n, on_one_rank if n == 1 else on_two_ranks)


@pytest.mark.parametrize("params", ["float32", "bfloat16"])
def test_weight_gradient_and_two_moments_take_16_bytes_a_parameter(params: str):
    (found,) = measured(1)
    assert found[params] == 16 * (CUT + WHOLE)


@pytest.mark.parametrize("layout", ["dp_shard 2", "dp_shard 2, bf16"])
def test_fsdp_halves_all_of_the_state(layout: str):
    assert [found[layout] for found in measured(2)] == [8 * (CUT + WHOLE)] * 2


def test_tensor_parallelism_halves_the_state_of_what_it_cuts():
    assert [found["tp 2"] for found in measured(2)] == [16 * (CUT // 2 + WHOLE)] * 2


def test_a_compiled_step_sends_what_an_eager_one_sends():
    for found in measured(2):
        assert found["compiled"] == found["eager"]
        assert Counter(name for name, _ in found["eager"].elements())["gloo:all_reduce"] > 4 * L


def test_no_graph_breaks_and_none_is_made_after_the_first_step():
    (found,) = measured(1)
    assert found["breaks"] == {}
    assert found["graphs"] == found["graphs"][:1] * 4
