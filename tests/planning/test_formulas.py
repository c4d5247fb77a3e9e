"""planning/prices/formulas.py: against the figures that the papers print."""

from __future__ import annotations

import pytest

from dtmega.pipelining.table import named_table, simulate
from dtmega.planning.prices import formulas

GIB = 2**30
# Figure 1 of arXiv:2205.05198: activations of the first rank in GiB, as github.com/calculon-ai/calculon transcribes
# them: layers, hidden size, heads, microbatch, pipeline, stages per rank; all with tp 8 and S 2048.
PAPER = {
    "22B": ((48, 6144, 64, 4, 1, 1), 59.25, 9.5625),
    "175B": ((96, 12288, 96, 1, 8, 3), 66.84375, 12.3515625),
    "530B": ((105, 20480, 128, 1, 35, 3), 114.0234375, 23.076171875),
}


def layers_in_flight(layers: int, p: int, v: int) -> float:
    """The layers whose activations the first rank of a 1F1B pipeline keeps (arXiv:2205.05198, section 4.2.3)."""
    return layers * (1 + (p - 1) / (p * v)) if v > 1 else float(layers)


@pytest.mark.parametrize("model", PAPER)
def test_activations_are_those_of_korthikantis_figure(model: str):
    (layers, h, a, b, p, v), everything, selective = PAPER[model]
    in_flight = layers_in_flight(layers, p, v)
    kept = formulas.activation_bytes_per_layer(2048, b, h, a, t=8) * in_flight / GIB
    assert kept == pytest.approx(everything, rel=1e-3)
    kept = formulas.activation_bytes_per_layer(2048, b, h, a, 8, sequence_parallel=True, recompute="selective")
    assert kept * in_flight / GIB == pytest.approx(selective, rel=1e-3)


def test_activations_of_one_layer_are_the_rows_of_korthikantis_table():
    s, b, h, a, t = 2048, 2, 4096, 32, 4
    unit = s * b * h
    bytes_of = formulas.activation_bytes_per_layer
    assert bytes_of(s, b, h, a) == unit * (34 + 5 * a * s / h)
    assert bytes_of(s, b, h, a, t) == unit * (10 + 24 / t + 5 * a * s / (h * t))
    assert bytes_of(s, b, h, a, t, sequence_parallel=True) == unit * (34 / t + 5 * a * s / (h * t))
    assert bytes_of(s, b, h, a, t, recompute="selective") == unit * (10 + 24 / t)
    assert bytes_of(s, b, h, a, t, recompute="full") == 2 * unit
    assert bytes_of(s, b, h, a, t, True, "full") == 2 * unit / t


def test_zero_has_the_bytes_of_rajbhandaris_figure():
    """7.5 billion parameters on 64 ranks: 120, 31.4, 16.6 and 1.9 GB (arXiv:1910.02054, figure 1)."""
    found = [formulas.zero_bytes(7.5e9, 64, stage) / 1e9 for stage in range(4)]
    assert found == pytest.approx([120, 31.4, 16.6, 1.9], abs=0.05)


def test_a_stage_that_zero_lacks_is_refused():
    with pytest.raises(ValueError, match="stage=4, expected 0 to 3"):
        formulas.zero_bytes(1, 1, 4)


@pytest.mark.parametrize(("schedule", "v"), [("GPipe", 1), ("1F1B", 1), ("Interleaved1F1B", 3)])
def test_the_bubble_is_that_of_the_simulated_schedule(schedule: str, v: int):
    p, m = 4, 8
    bubble = simulate(named_table(schedule, p, v, m)).bubble
    assert formulas.bubble_over_ideal(p, m, v) == pytest.approx(bubble / (1 - bubble))
