"""planning/plan.py: which places of a pipeline share a plan, and that none of them holds more than it says."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from dtmega import families
from dtmega.planning import plan
from dtmega.planning.counting.role import FROZEN, GRADIENTS, MOMENTS, PARAMETERS, Role, plan_role
from tests import ranks
from tests.planning import real_step
from tests.planning.test_counts import DROPOUT, SMALL, T5, TIMEOUT_S

GPU = torch.device("cuda", 0)
PP = 4
ENDS_SHORT = [[0], [1, 2], [3, 4], [5]]
V = {"model.n_layers": 8, "pipeline.schedule": "ZBVZeroBubble", "pipeline.stages": [[i] for i in range(8)]}


def values_of(keys: dict[str, Any]) -> dict[str, Any]:
    """A small configuration over a pipeline, in sections."""
    return real_step.nested(SMALL | {"mesh.pp": PP} | keys)


def shared(keys: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> dict[int, list[int]]:
    """The place that a plan runs -> the places that share its role; nothing is run here."""
    monkeypatch.setattr(plan, "extrapolated", lambda role, *_: role)
    cfg, sizes = real_step.settled(values_of(keys), PP)

    def role_of(_cfg: Any, _sizes: Any, rank: int, *_: Any) -> Role:
        return Role(rank, 4, {}, [], [])

    planned = plan.plan_job(cfg, sizes, GPU, run_role=role_of)
    return {planned.roles[places[0]].rank: places for places in planned.places_by_role}


def test_ends_of_a_pipeline_have_roles_of_their_own_and_alike_places_share_one(monkeypatch: pytest.MonkeyPatch):
    assert shared({"pipeline.stages": ENDS_SHORT, "model.n_layers": 6}, monkeypatch) == {0: [0], 1: [1, 2], 3: [3]}


def test_both_ends_of_a_v_are_at_its_first_place_and_its_turn_at_the_last(monkeypatch: pytest.MonkeyPatch):
    assert shared(V, monkeypatch) == {0: [0], 2: [1, 2], 3: [3]}


def test_where_a_cell_has_two_actions_each_place_has_a_role_of_its_own(monkeypatch: pytest.MonkeyPatch):
    keys = V | {"pipeline.schedule": "DualPipeV", "batch.global_batch_size": 16}
    assert shared(keys, monkeypatch) == {0: [0], 1: [1], 2: [2], 3: [3]}


def test_an_encoder_and_a_decoder_have_different_roles(monkeypatch: pytest.MonkeyPatch):
    assert shared(T5 | {"pipeline.split": 2}, monkeypatch) == {0: [0], 1: [1], 2: [2], 3: [3]}


def test_frozen_weights_are_counted_apart_and_have_no_gradients_and_no_moments():
    cfg, sizes = real_step.settled(real_step.nested(SMALL | {"lora.rank": 2}), 1)
    held = plan_role(cfg, sizes, 0, GPU, [2]).held
    trained, frozen = families.elements(cfg)
    assert (held[FROZEN], held[PARAMETERS], held[GRADIENTS]) == (4 * frozen, 4 * trained, 4 * trained)
    assert 8 * trained <= held[MOMENTS] <= 8 * trained + 4 * 2 * 2 * 4 * cfg.model.n_layers  # and a count for each


FULL: dict[str, dict[str, Any]] = {
    "bloom, 1F1B": {"model.n_layers": 6, "pipeline.stages": ENDS_SHORT, **DROPOUT},
    "bloom, ZBV": V,
    "bloom, InterleavedZeroBubble": V | {"pipeline.schedule": "InterleavedZeroBubble"},
    "t5, 1F1B": {**T5, "pipeline.split": 2},
}


def planned_at(values: dict[str, Any], place: int) -> tuple[int, int]:
    """Peak and held bytes of the rank at a place, planned for itself."""
    dist.destroy_process_group()
    cfg, sizes = real_step.settled(values, PP)
    role = plan_role(cfg, sizes, place, GPU, [real_step.n_microbatches(cfg, sizes)])
    return role.peak.peak_bytes, sum(role.held.values())


@pytest.mark.full
@pytest.mark.parametrize("name", FULL)
def test_no_place_holds_more_than_its_role(name: str, monkeypatch: pytest.MonkeyPatch):
    for planned, places in shared(FULL[name], monkeypatch).items():
        found = {}
        for place in places:
            (found[place],) = ranks.run(1, planned_at, values_of(FULL[name]), place, timeout_s=TIMEOUT_S)
        assert found[planned] == tuple(max(each) for each in zip(*found.values(), strict=True))
