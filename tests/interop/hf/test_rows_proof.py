"""The proof that a row's numbers do not depend on other rows and conversations: which families of transformers pass."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from dtmega import mesh
from dtmega.interop.hf import rope, rows_proof
from dtmega.training.parallelize import parallelize
from tests import hf_models, hf_train, ranks
from tests.hf_models import Case
from tests.interop.hf.test_rope import longrope
from tests.interop.hf.test_training import EVERY

OWN_NORM = LlamaRMSNorm.forward
CPU = torch.device("cpu")
WRONG = ("bloom", "opt", "mpt", "xglm")
PROVEN = sorted({case.family for case in EVERY} - {*WRONG})


def on_meta(case: Case) -> Any:
    with torch.device("meta"):
        return hf_models.plain(case)


def test_a_family_with_windows_passes():
    rows_proof.prove(on_meta(Case("gemma3_text")), CPU, packs=True)


@pytest.mark.parametrize("name", ["opt", "bloom"])
def test_a_family_that_ignores_positions_is_refused_with_the_remedy(name: str):
    with pytest.raises(ValueError, match=f"packed conversations of '{name}' see each other; expected pack=false"):
        rows_proof.prove(on_meta(Case(name)), CPU, packs=True)
    rows_proof.prove(on_meta(Case(name)), CPU, packs=False)


def test_frequencies_of_the_longest_conversation_of_a_microbatch_are_refused():
    rows_proof.prove(longrope(), CPU, packs=True)
    with (
        patch.object(rope, "choose_by_conversation", lambda model: None),
        pytest.raises(ValueError, match="packed conversations of 'phi3' see each other"),
    ):
        rows_proof.prove(longrope(), CPU, packs=True)


def norm_of_rows(self: Any, x: torch.Tensor) -> torch.Tensor:
    """A norm that reads a maximum over the rows of a microbatch."""
    return OWN_NORM(self, x) + 1e-2 * x.amax(0)


def started(path: str) -> dict[str, str]:
    """What starts of a model whose norms read all rows say, on each axis and with packed conversations."""
    said = {}
    packed = {"data": {"objective": "conversations"}}
    with patch.object(LlamaRMSNorm, "forward", norm_of_rows):
        for layout, more in {"tp 2": {}, "pp 2": {}, "cp 2": {}, "dp 2": packed}.items():
            keys = hf_train.LAYOUTS[layout][1]
            cfg = hf_train.configured(path, keys, **more)
            world = mesh.start(CPU, mesh.resolve(cfg.mesh, 2))
            said[layout] = ranks.message(parallelize, cfg, world)
    return said


def test_a_model_that_reads_a_maximum_over_rows_is_refused_at_each_start_that_proves_something(tmp_path: Path):
    hf_models.build(Case("llama")).save_pretrained(tmp_path)
    for said in ranks.run(2, started, str(tmp_path)):
        words = "'llama' computes a row differently beside other rows of a microbatch"
        assert {layout: text.startswith(words) for layout, text in said.items()} == dict.fromkeys(said, True), said


@pytest.mark.full
def test_at_least_28_families_are_proven():
    wrong = []
    for name in PROVEN:
        case = next(case for case in EVERY if case.family == name)
        wrong += [name for found in rows_proof.deviations(on_meta(case), CPU, packs=True) if not found.ok]
    assert wrong == []
    assert len(PROVEN) >= 28
