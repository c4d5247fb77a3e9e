"""The proof that packed conversations do not see each other: which families of transformers pass it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dtmega.interop.hf import packing_proof
from tests import hf_models
from tests.hf_models import Case
from tests.interop.hf.test_training import EVERY

CPU = torch.device("cpu")
WRONG = ("bloom", "opt", "mpt", "xglm")
PROVEN = sorted({case.family for case in EVERY} - {*WRONG})


def on_meta(case: Case) -> Any:
    with torch.device("meta"):
        return hf_models.plain(case)


def test_a_family_with_windows_passes():
    packing_proof.prove(on_meta(Case("gemma3_text")), CPU)


@pytest.mark.parametrize("name", ["opt", "bloom"])
def test_a_family_that_ignores_positions_is_refused_with_the_remedy(name: str):
    with pytest.raises(ValueError, match=f"packed conversations of '{name}' see each other; expected pack=false"):
        packing_proof.prove(on_meta(Case(name)), CPU)


@pytest.mark.full
def test_at_least_28_families_are_proven():
    errors: dict[str, float] = {}
    for name in PROVEN:
        case = next(case for case in EVERY if case.family == name)
        errors[name] = max(packing_proof.deviations(on_meta(case), CPU).values())
    assert {name: error for name, error in errors.items() if error > packing_proof.TOLERANCE} == {}
    assert len(errors) >= 28
