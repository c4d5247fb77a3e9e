"""Muon on one process, against torch's own and closed forms, and owners of matrices that are cut over ranks.

That no layout changes a number is in tests/test_parity.py, and to the bit in tests/fsdp/test_exact.py.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from dtmega import config, families, mesh
from dtmega.config.reading import ConfigError
from dtmega.models.model import Fused
from dtmega.ops.optim.muon import adjustment, orthogonalized
from dtmega.ops.optim.owners import Owners, divided
from dtmega.ops.shards import dim_to_cut, local
from dtmega.training.checks import check
from tests import ranks
from tests.layouts import write_text
from tests.ops.test_optim import get_wd, megatron
from tests.ops.test_optimizers import DECAY, KEYS, LOW, PEAK, START_DECAY, STEPS, trained

HEADS, K = 4, 2
MUON: dict[str, Any] = {
    "optim.name": "muon",
    "optim.adamw_lr": 0.02,
    "optim.muon_momentum": 0.8,
    "optim.adjust_lr_fn": "original",
    "model.n_heads": HEADS,
    "model.hidden_size": HEADS * K,
    "model.glu": "swiglu",
}


def closed_form(matrix: Tensor) -> Tensor:
    """Newton-Schulz acts on singular values only: five times 3.4445 s - 4.775 s^3 + 2.0315 s^5."""
    u, s, v = torch.linalg.svd(matrix.double(), full_matrices=False)
    s = s / s.norm()
    for _ in range(5):
        s = 3.4445 * s - 4.775 * s**3 + 2.0315 * s**5
    return u @ s.diag() @ v


@pytest.mark.parametrize("shape", [(6, 6), (5, 12), (12, 5), (1, 7)])
def test_newton_schulz_changes_singular_values_as_its_polynomial_and_nothing_else(shape):
    generator = torch.Generator().manual_seed(0)
    matrix = 1e-3 * torch.randn(shape, generator=generator)
    torch.testing.assert_close(orthogonalized(matrix).double(), closed_form(matrix), rtol=0, atol=2e-5)


def test_newton_schulz_of_zeros_is_zero():
    assert not orthogonalized(torch.zeros(3, 4)).any()


def parts_by_hand(name: str, weight: Tensor) -> list[list[int]]:
    """The rows of each matrix in a weight: q, k and v of all heads, and values and gates."""
    rows = range(len(weight))
    if name.endswith("qkv.weight"):
        return [[row for row in rows if row // K % 3 == part] for part in range(3)]
    if name.endswith("up.weight"):
        return [list(rows[0::2]), list(rows[1::2])]
    return [list(rows)]


class ByHand:
    """torch.optim.Muon's formulas with AdamW's for all other parameters, in fp64."""

    def __init__(self, name: str) -> None:
        self.is_muons = name.endswith(("qkv.weight", "out.weight", "up.weight", "down.weight"))
        self.name = name
        self.n = 0
        self.m = self.v = torch.zeros(())

    def updated(self, weight: Tensor, gradient: Tensor, rate: float, decay: float) -> Tensor:
        self.n += 1
        if not self.is_muons:
            rate *= 0.02 / PEAK
            self.m = 0.8 * self.m + 0.2 * gradient
            self.v = 0.9 * self.v + 0.1 * gradient**2
            step = self.m / (1 - 0.8**self.n) / ((self.v / (1 - 0.9**self.n)).sqrt() + 1e-3)
            return weight - rate * decay * weight - rate * step
        self.m = 0.8 * self.m + 0.2 * gradient
        direction = 0.2 * gradient + 0.8 * self.m
        step = torch.zeros_like(weight)
        for rows in parts_by_hand(self.name, weight):
            a, b = len(rows), weight.shape[1]
            step[rows] = max(1, a / b) ** 0.5 * closed_form(direction[rows])
        return weight - rate * decay * weight - rate * step


@pytest.mark.parametrize("shape", [(6, 6), (5, 12), (12, 5)])
def test_updates_that_match_adamws_have_elements_of_a_fifth(shape: tuple[int, int]):
    orthogonal = torch.nn.init.orthogonal_(torch.empty(shape))
    factor = adjustment("match_rms_adamw", orthogonal.shape)
    assert (factor * orthogonal).square().mean().sqrt().item() == pytest.approx(0.2, rel=1e-6)


def test_every_update_is_the_formula_written_out(tmp_path: Path):
    # The second start goes on from what the first one saved, momentum and moments.
    keys = KEYS | MUON | {"train.exit_interval": 3} | write_text(tmp_path / "text")
    gradients, weights = trained(keys, tmp_path / "run", starts=2)
    assert len(gradients) == STEPS
    for name, weight in weights[0].items():
        state = ByHand(name)
        factor = 0.25 if name.startswith("layers.0.attn.") else 1.0
        for step in range(1, STEPS + 1):
            rate = factor * megatron(step, "linear", 0.3 * STEPS, STEPS, PEAK, LOW)
            decay = get_wd(step, "linear", START_DECAY, DECAY, STEPS) if weight.ndim > 1 else 0.0
            weight = state.updated(weight, gradients[step - 1][name], rate, decay)
            torch.testing.assert_close(weights[step][name], weight, rtol=1e-4, atol=1e-5)
            weight = weights[step][name]


def matrices_of(**model: Any) -> dict[str, Fused]:
    cfg = config.validate({"model": model, "train": {"steps": 1}}, "test")
    with torch.device("meta"):
        return families.build(cfg).matrices()


def test_muon_trains_matrices_that_are_no_embeddings_and_predict_nothing():
    found = matrices_of(name="bert", max_position_embeddings=16, hidden_size=8, n_heads=2, n_layers=1)
    in_layer = {f"layers.0.{name}.weight" for name in ("attn.qkv", "attn.out", "mlp.up", "mlp.down")}
    assert {*found} == in_layer | {"head.dense.weight", "order.pooler.weight"}


def test_a_head_that_is_not_tied_is_not_muons():
    found = matrices_of(name="llama", hidden_size=8, n_heads=2, n_layers=1, tied=False)
    assert [name for name in found if not name.startswith("layers.")] == []


def numbered(rows: int, columns: int) -> Tensor:
    return torch.arange(float(rows * columns)).view(rows, columns)


def cut_by(matrix: Tensor, over_tp: Placement, grid: Any) -> nn.Parameter:
    """A matrix as a plan and FSDP2 leave it: first cut over tp, then over the data ranks."""
    owner = nn.Module()
    owner.weight = nn.Parameter(distribute_tensor(matrix, grid["tp"], [over_tp]))
    fully_shard(owner, mesh=grid["fsdp"], shard_placement_fn=dim_to_cut)
    return owner.weight


def owned() -> tuple[list[int], list[bool], list[bool]]:
    """The numbers of this rank's matrices; whether each was whole there; whether this rank got its parts back."""
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp"))
    wholes = [numbered(10, 3), numbered(7, 4), numbered(4, 5), numbered(12, 4), numbered(2, 2), numbered(5, 3)]
    cuts: list[Placement] = [Shard(0), Shard(1), Replicate(), _StridedShard(0, split_factor=3), Shard(0)]
    matrices: list[Tensor] = [cut_by(whole, cut, grid) for whole, cut in zip(wholes, cuts, strict=False)]
    matrices.append(wholes[-1])  # every rank has all of it
    group = dist.group.WORLD
    assert group is not None
    owners = Owners(matrices, [float(whole.numel()) for whole in wholes], group, (1, 2, 2))
    parts = [local(matrix.detach()).clone() for matrix in matrices]
    numbers: list[int] = []
    were_whole: list[bool] = []

    def change(number: int, whole: Tensor) -> None:
        numbers.append(number)
        were_whole.append(torch.equal(whole, wholes[number]))
        whole += 100 * (number + 1)

    owners.compute(parts, change)
    came_back = []
    for number, (part, matrix) in enumerate(zip(parts, matrices, strict=True)):
        came_back.append(torch.equal(part, local(matrix.detach()) + 100 * (number + 1)))
    return numbers, were_whole, came_back


def test_every_matrix_is_whole_on_one_owner_and_each_rank_gets_its_part_back():
    found = ranks.run(4, owned)
    assert sorted(number for numbers, _, _ in found for number in numbers) == [*range(6)]
    for _, were_whole, came_back in found:
        assert all(were_whole)
        assert came_back == [True] * 6


def test_work_is_divided_evenly_and_the_first_rank_has_the_most():
    costs = [5.0, 1.0, 4.0, 2.0, 3.0, 6.0, 3.0]
    owners = divided(costs, 3)
    loads = [sum(cost for cost, owner in zip(costs, owners, strict=True) if owner == rank) for rank in range(3)]
    assert sum(loads) == sum(costs)
    assert max(loads) - min(loads) <= 1
    assert loads[0] == max(loads)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"fsdp": {"cpu_offload": True}}, "expected cpu_offload=false ([fsdp] cpu_offload, [optim] name)"),
        (
            {"lora": {"rank": 2}, "model": {"init_from": "runs/base"}},
            "expected another optimizer, such as 'adamw' ([optim] name, [lora] rank)",
        ),
    ],
)
def test_muon_on_the_host_and_muon_for_adapters_are_refused(keys: dict[str, Any], message: str):
    cfg = config.validate({"optim": {"name": "muon"}, "train": {"steps": 1}, **keys}, "test")
    with pytest.raises(ValueError, match=re.escape(message)):
        check(cfg, mesh.resolve(cfg.mesh, 1), torch.device("cpu"))


@pytest.mark.parametrize(("name", "key"), [("muon", "momentum"), ("adamw", "adamw_lr"), ("sgd", "muon_momentum")])
def test_a_key_that_the_optimizer_does_not_read_is_refused(name: str, key: str):
    with pytest.raises(ConfigError, match=re.escape(f"[optim] {key} would not be read with name='{name}'")):
        config.validate({"optim": {"name": name, key: 0.5}, "train": {"steps": 1}}, "test")
