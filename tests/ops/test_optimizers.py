"""Every update of a run, by the formulas of its optimizer written out, from the gradients that it had."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from dtmega.ops import optim
from tests import ranks
from tests.layouts import write_text
from tests.ops.test_optim import get_wd, megatron
from tests.test_faults import alone, replaced
from tests.test_loop import SMALL

STEPS = 5
PEAK, LOW, START_DECAY, DECAY = 0.05, 0.01, 0.1, 0.5
KEYS = SMALL | {
    "train.steps": STEPS,
    "eval.interval": 0,
    "optim.lr": PEAK,
    "optim.min_lr": LOW,
    "optim.schedule": "linear",
    "optim.warmup": 0,
    "optim.warmup_fraction": 0.3,
    "optim.clip_grad": 0.0,
    "optim.weight_decay": DECAY,
    "optim.weight_decay_schedule": "linear",
    "optim.start_weight_decay": START_DECAY,
    "optim.lr_factors": ["layers.0.attn.*=0.25"],
}
ADAM = {"optim.name": "adam", "optim.beta1": 0.8, "optim.beta2": 0.9, "optim.eps": 1e-3}
SGD = {"optim.name": "sgd", "optim.beta1": 0.9, "optim.beta2": 0.95, "optim.eps": 1e-8, "optim.momentum": 0.7}
Weights = dict[str, Tensor]


def trained(keys: dict[str, Any], folder: Path, starts: int = 1) -> tuple[list[Weights], list[Weights]]:
    """Gradients of each update, and the weights before the first one and after each, in fp64."""
    honest = optim.build_optimizer
    gradients: list[Weights] = []
    weights: list[Weights] = []

    def noting(named: Any, *others: Any) -> torch.optim.Optimizer:
        parameters = dict(named)
        optimizer = honest(parameters.items(), *others)
        update = optimizer.step

        def step() -> None:
            if not weights:
                weights.append({name: p.detach().double() for name, p in parameters.items()})
            gradients.append({name: p.grad.double() for name, p in parameters.items()})
            update()
            weights.append({name: p.detach().double() for name, p in parameters.items()})

        optimizer.step = step
        return optimizer

    with replaced(optim, "build_optimizer", noting):
        assert [alone(keys, folder) for _ in range(starts)] == [0] * starts
    return gradients, weights


class Adam:
    """Kingma and Ba (arXiv:1412.6980), algorithm 1, with the decay in the gradient."""

    def __init__(self) -> None:
        self.n = 0
        self.m = self.v = torch.zeros(())

    def direction(self, gradient: Tensor) -> Tensor:
        self.n += 1
        self.m = 0.8 * self.m + 0.2 * gradient
        self.v = 0.9 * self.v + 0.1 * gradient**2
        return self.m / (1 - 0.8**self.n) / ((self.v / (1 - 0.9**self.n)).sqrt() + 1e-3)


class Momentum:
    """Sutskever et al. (2013) without Nesterov's look ahead, in torch's form: the rate is outside of the buffer."""

    buffer: Tensor | float = 0.0

    def direction(self, gradient: Tensor) -> Tensor:
        self.buffer = 0.7 * self.buffer + gradient
        return self.buffer


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> dict[str, str]:
    return write_text(tmp_path_factory.mktemp("text"))


@pytest.mark.parametrize(("keys", "formula"), [(ADAM, Adam), (SGD, Momentum)], ids=["adam", "sgd"])
def test_every_update_is_the_formula_written_out(text, tmp_path, keys, formula):
    # The second start goes on from what the first one saved, moments and all.
    gradients, weights = trained(KEYS | keys | text | {"train.exit_interval": 3}, tmp_path / "run", starts=2)
    assert len(gradients) == STEPS
    for name, weight in weights[0].items():
        state = formula()
        factor = 0.25 if name.startswith("layers.0.attn.") else 1.0
        for step in range(1, STEPS + 1):
            rate = factor * megatron(step, "linear", 0.3 * STEPS, STEPS, PEAK, LOW)
            decay = get_wd(step, "linear", START_DECAY, DECAY, STEPS) if weight.ndim > 1 else 0.0
            weight = weight - rate * state.direction(gradients[step - 1][name] + decay * weight)
            # The weights themselves are fp32.
            torch.testing.assert_close(weights[step][name], weight, rtol=1e-5, atol=1e-6)
            weight = weights[step][name]
    assert not math.isclose(weights[0]["embed.weight"].norm().item(), weights[-1]["embed.weight"].norm().item())


def updated(kind: type[torch.optim.Adam]) -> tuple[list[Tensor], bool]:
    """This rank's parts of parameters and moments after two updates; whether all moments are cut as parameters are."""
    mesh = init_device_mesh("cpu", (2,))
    generator = torch.Generator().manual_seed(1)
    cuts = (Shard(0), Shard(1), Replicate())
    parameters = [
        torch.nn.Parameter(distribute_tensor(torch.randn(5, 3, generator=generator), mesh, [cut])) for cut in cuts
    ]
    optimizer = kind(parameters, lr=0.1, weight_decay=0.1, fused=True)
    for _ in range(2):
        for parameter, cut in zip(parameters, cuts, strict=True):
            parameter.grad = distribute_tensor(torch.randn(5, 3, generator=generator), mesh, [cut])
        optimizer.step()
    moments = [optimizer.state[p][name] for p in parameters for name in ("exp_avg", "exp_avg_sq")]
    alike = all(isinstance(m, DTensor) and m.placements == parameters[i // 2].placements for i, m in enumerate(moments))
    return [t.to_local().detach() for t in (*parameters, *moments)], alike


def both_updated() -> list[tuple[list[Tensor], bool]]:
    kinds = (optim.AdamW, torch.optim.AdamW, optim.Adam, torch.optim.Adam)
    return [updated(kind) for kind in kinds]


def test_updates_of_local_parts_have_the_bits_that_torch_gives_dtensors_and_moments_stay_dtensors():
    for found in ranks.run(2, both_updated):
        assert [alike for _, alike in found] == [True] * 4
        ours, torchs, adam, torchs_adam = (parts for parts, _ in found)
        assert all(map(torch.equal, ours, torchs))
        assert all(map(torch.equal, adam, torchs_adam))
        assert not all(map(torch.equal, ours, adam))
