"""Claims that linears in bfloat16 have torch's results and gradients by the products that a CPU with AMX is fast at."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from dtmega.ops.cpu.linear import WIDE, multiply_on_amx
from tests.operations import Operations, needs_onednn_bfloat16


def result_and_gradients(model: nn.Module, x: Tensor) -> list[Tensor]:
    x = x.clone().requires_grad_()
    out = model(x)
    weights = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return [out, *torch.autograd.grad(out.double().square().sum(), [x, *weights])]


@pytest.mark.parametrize("bias", [pytest.param(True, marks=needs_onednn_bfloat16), False])
@pytest.mark.parametrize(("n_inputs", "n_outputs"), [(8, 24), (24, 8)])
def test_results_and_gradients_are_those_of_fp64_as_far_as_bfloat16_says(n_inputs, n_outputs, bias):
    torch.manual_seed(0)
    x = torch.randn(2, 5, n_inputs).bfloat16()
    ours = nn.Linear(n_inputs, n_outputs, bias).bfloat16()
    torchs, truth = nn.Linear(n_inputs, n_outputs, bias).bfloat16(), nn.Linear(n_inputs, n_outputs, bias).double()
    for model in (torchs, truth):
        model.load_state_dict(ours.state_dict())
    multiply_on_amx(ours)
    exact = result_and_gradients(truth, x.double())
    for mine, its, right in zip(result_and_gradients(ours, x), result_and_gradients(torchs, x), exact, strict=True):
        assert mine.dtype == torch.bfloat16
        distance = (mine.double() - right).norm()
        assert distance <= 2**-8 * right.norm()
        assert distance <= 1.01 * (its.double() - right).norm() + 1e-12


@needs_onednn_bfloat16
@pytest.mark.parametrize(("times", "transposed"), [(WIDE, 1), (1, 0)])
def test_only_of_a_wide_matrix_is_the_gradient_made_from_a_transposed_copy(times, transposed):
    model = nn.Linear(8 * times, 8).bfloat16()
    multiply_on_amx(model)
    out = model(torch.randn(16, 8 * times).bfloat16())
    with Operations() as operations:
        out.sum().backward()
    assert (operations.counts["wide_gradient"], operations.counts["mm"]) == (transposed, 1 - transposed)


@pytest.mark.parametrize("case", ["fp32", "no gradients", "frozen"])
def test_all_else_is_computed_by_torch(case):
    model = nn.Linear(8, 8).to(torch.float32 if case == "fp32" else torch.bfloat16)
    model.weight.requires_grad_(case != "frozen")
    multiply_on_amx(model)
    x = torch.randn(16, 8).to(model.weight.dtype)
    with torch.set_grad_enabled(case != "no gradients"), Operations() as operations:
        model(x)
    assert operations.counts["addmm"] == 1
    assert operations.counts["biased_product"] == 0
