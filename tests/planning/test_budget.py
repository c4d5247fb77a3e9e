"""planning/prices/budget.py: against BLOOM's own account of its run."""

from __future__ import annotations

import pytest

from dtmega.planning.prices import fabric
from dtmega.planning.prices.budget import budget

JEAN_ZAY = fabric.load("a100-opa")


def test_blooms_days_are_those_of_its_readme_and_its_mfu_that_of_its_log():
    """105 s a step of 2048 x 2048 tokens: 341e9 tokens take 98.8 days. 111.8 TFLOP/s of a GPU are 35.8 % of 312."""
    per_token = 111.8e12 * 384 * 105 / 2048**2
    cost = budget(105, 2048**2, per_token, 384, JEAN_ZAY, "bfloat16", 341e9)
    assert cost.days == pytest.approx(105 * 341e9 / (2048 * 2048 * 3600 * 24))
    assert cost.mfu == pytest.approx(0.358, abs=5e-4)
    assert cost.tokens_per_s_per_gpu == pytest.approx(2048**2 / 105 / 384)
    assert cost.gpu_hours == pytest.approx(384 * 24 * cost.days)
    assert cost.energy_kwh == pytest.approx(cost.gpu_hours * 0.4)
    assert (cost.cost, cost.currency) == (pytest.approx(1.5 * cost.gpu_hours), "USD")
    assert cost.relative_error == JEAN_ZAY.gpu.held_out_error > 0


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"tokens": 0}, "tokens=0, expected a positive number"),
        ({"step_time_s": float("nan")}, "step_time_s=nan, expected a positive number"),
        ({"dtype": "float8"}, r"no peak FLOP/s for float8, expected one of bfloat16, float16, float32, .*peak_flops"),
    ],
)
def test_a_number_that_makes_no_budget_is_refused(changed: dict, message: str):
    given = {
        "step_time_s": 1.0,
        "tokens_per_step": 8,
        "flops_per_token": 1.0,
        "n_gpus": 8,
        "fabric": JEAN_ZAY,
        "dtype": "bfloat16",
        "tokens": 1e9,
    }
    with pytest.raises(ValueError, match=message):
        budget(**(given | changed))
