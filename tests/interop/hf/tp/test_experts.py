"""transformers' mixtures whose experts are divided over ep, against undivided ones, each rank with its own batch."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoConfig, AutoModelForCausalLM

from dtmega.__main__ import main as dtmega_main
from dtmega.distributed import exit_codes
from dtmega.interop.hf.families import OVER_EP
from dtmega.interop.hf.tp.command import verify_experts
from dtmega.interop.hf.tp.verify import Verification
from dtmega.ops.expert_parallel import Arrived
from tests import ranks

LIGHT = ("qwen3_moe",)


def verified(kinds: list[str]) -> dict[str, Verification]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("ep",))
    found = {}
    for kind in kinds:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind))
        found[kind] = verify_experts(model, mesh)
    return found


def swapped(kind: str) -> Verification:
    """The verification of an exchange that gives the last row's result to the first row, and so on."""
    give_back = Arrived.__new__

    def flipped(cls: type, rows: torch.Tensor, experts: torch.Tensor, back: object) -> Arrived:
        return give_back(cls, rows, experts, lambda results: back(results).flip(0))  # pyright: ignore[reportCallIssue]

    with patch.object(Arrived, "__new__", flipped):
        return verified([kind])[kind]


@pytest.mark.parametrize(
    "kind", [kind if kind in LIGHT else pytest.param(kind, marks=pytest.mark.full) for kind in OVER_EP]
)
def test_a_mixture_with_divided_experts_has_the_loss_logits_and_gradients_of_an_undivided_one(kind: str):
    for found in ranks.run(2, verified, [kind]):
        assert found[kind].ok, found[kind]


def test_a_result_that_comes_back_to_another_row_is_found():
    for found in ranks.run(2, swapped, "qwen3_moe"):
        assert not found.ok
        assert not found.raised


def refusals() -> list[str]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("ep",))
    found = []
    for kind in ("llama", "mixtral"):
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind))
        found.append(ranks.message(verify_experts, model, mesh))
    return found


def test_a_model_whose_experts_cannot_be_shared_evenly_is_refused_though_its_clone_could_be_divided():
    for without_experts, uneven in ranks.run(3, refusals):
        assert "'llama' has no experts that transformers can compute on other ranks" in without_experts
        assert "ep=3 does not divide n_experts=8: 8 % 3 = 2" in uneven


@pytest.mark.parametrize("flag", ["--generic", "--no-sequence-parallel"])
def test_flags_of_tensor_parallelism_are_refused_with_ep(capsys: pytest.CaptureFixture[str], flag: str):
    assert dtmega_main(["verify-plan", "d", "--ep", "2", flag]) == exit_codes.REFUSED
    assert "are for tensor parallelism: expected neither (--ep)" in capsys.readouterr().err
