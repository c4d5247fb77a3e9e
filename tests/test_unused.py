"""Claims about parameters that a step does not use, and frozen ones: trained and saved as on one process, anywhere."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from dtmega import config, families
from dtmega.checkpoint.resume import open_checkpoint
from dtmega.checkpoint.tensors import targets_of, tensors_of
from dtmega.config.families.bloom import BloomKeys
from dtmega.models.model import Model
from dtmega.ops import optim
from dtmega.plans.styles import Plan, Whole
from tests.layouts import DEBUG, FP32, write_text
from tests.resumed import Record, Training, train_all

pytestmark = pytest.mark.skipif(
    torch.__version__ < (2, 13),
    reason="FSDP2 of torch 2.11 reduces what each rank used, of which they must use the same",
)
UNUSED, SOMETIMES = "layers.1.unused.weight", "layers.2.scale.weight"
FROZEN = ("embed_norm.bias", "layers.0.mlp.up.weight", "layers.3.attn.out.bias")
LR, DECAY = 1e-2, 0.1
KEYS = DEBUG | {
    "train.steps": 6,
    "checkpoint.interval": 2,
    "checkpoint.keep": 9,
    "eval.interval": 0,
    "optim.lr": LR,
    "optim.min_lr": LR,
    "optim.schedule": "constant",
    "optim.warmup": 0,
    "optim.weight_decay": DECAY,
    "batch.global_batch_size": 4,
}
# The same run, stopped and gone on with on another layout. Without sequence parallelism, so that the planted scale
# needs no style of its own.
LEGS = {2: {"mesh.dp_shard": 2}, 4: {"mesh.pp": 2}, 6: {"mesh.tp": 2, "mesh.sequence_parallel": False}}


class Scale(nn.Module):
    """A gain for each channel, of the first half of a global batch only: of two data ranks one has no such sample."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))

    def forward(self, h: Tensor) -> Tensor:
        return h * self.weight


def scale_first_half(block: Any, args: tuple[Any, ...], out: Tensor) -> Tensor:
    sample_ids = args[3]
    return block.scale(out) if sample_ids is None or sample_ids[0] % 4 < 2 else out  # a drawn sample has no number


def build(honest: Any, cfg: BloomKeys) -> Model:
    model = honest(cfg)
    model.layers["1"].unused = nn.Linear(5, 3, bias=False)
    model.layers["2"].scale = Scale(cfg.hidden_size)
    model.layers["2"].register_forward_hook(scale_first_half)
    for name in FROZEN:
        model.get_parameter(name).requires_grad_(False)
    return model


def plan(honest: Any, cfg: BloomKeys, sequence_parallel: bool) -> Plan:
    word = Whole(sequence_parallel)
    return {**honest(cfg, sequence_parallel), "layers.1.unused": word, "layers.2.scale": word}


@contextlib.contextmanager
def with_such_parameters() -> Iterator[None]:
    honest: Any = families.named("bloom")
    changed = dataclasses.replace(
        honest, model=functools.partial(build, honest.model), plan=functools.partial(plan, honest.plan)
    )
    with patch.dict(families.BUILT_IN, bloom=lambda: changed):
        yield


def leg(folder: Path, text: dict[str, str], last: int, keys: dict[str, Any]) -> Training:
    more = {"train.exit_interval": last} if last < KEYS["train.steps"] else {}
    n = 1 if not keys else 2
    return Training(n, KEYS | text | keys | more, folder, with_such_parameters)


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> tuple[Path, Path]:
    """The runs of one process, and of three layouts one after the other."""
    home = tmp_path_factory.mktemp("unused")
    text = write_text(home)
    alone, moving = home / "alone", home / "moving"
    train_all([leg(alone, text, 6, {}), *(leg(moving, text, last, keys) for last, keys in LEGS.items())])
    return alone, moving


def test_on_changing_layouts_losses_and_every_parameter_are_those_of_one_process(folders):
    alone, moving = (Record(folder) for folder in folders)
    for key in ("loss", "grad_norm"):
        assert len(alone.series(key)) == 6
        assert moving.series(key) == pytest.approx(alone.series(key), rel=FP32[key])
    assert moving.final.keys() == alone.final.keys() >= {UNUSED, SOMETIMES, *FROZEN}
    far = {n: ((moving.final[n] - t).norm() / t.norm()).item() for n, t in alone.final.items() if n not in FROZEN}
    assert {n: e for n, e in far.items() if not e <= FP32["parameter"]} == {}


def saved(folder: Path, step: int) -> dict[str, Tensor]:
    checkpoint = open_checkpoint(str(folder / "checkpoints" / f"step-{step:08d}"))
    return {name: checkpoint.read(name) for name in checkpoint.tensors}


def test_an_unused_parameter_has_gradient_0_so_it_decays_and_its_moments_are_0(folders):
    for folder in folders:
        first, last = saved(folder, 2), saved(folder, 6)
        expected = first[f"model/{UNUSED}"] * (1 - LR * DECAY) ** 4
        assert torch.allclose(last[f"model/{UNUSED}"], expected, rtol=1e-6, atol=0)
        for moment in ("exp_avg", "exp_avg_sq"):
            assert not last[f"optimizer/{moment}/{UNUSED}"].any()
            assert last[f"optimizer/{moment}/{SOMETIMES}"].any()


def test_a_frozen_parameter_keeps_its_bits_and_is_saved_without_moments(folders):
    for folder in folders:
        first, last = saved(folder, 2), saved(folder, 6)
        for name in FROZEN:
            assert torch.equal(first[f"model/{name}"], last[f"model/{name}"])
            assert f"model/{name}" in last
        with_moments = {name.split("/")[-1] for name in last if name.startswith("optimizer/")}
        assert with_moments == {name.split("/")[-1] for name in last} - set(FROZEN)


def test_a_parameter_that_was_frozen_when_it_was_saved_is_not_trained_on_without_its_moments(folders):
    checkpoint = open_checkpoint(str(folders[0] / "checkpoints" / "step-00000006"))
    parameters = {name: nn.Parameter(checkpoint.read(f"model/{name}")) for name in (UNUSED, FROZEN[0])}
    optimizer = optim.build_optimizer(parameters.items(), config.Optim())
    with pytest.raises(ValueError, match=r"no moments of 'embed_norm.bias', which was frozen"):
        targets_of(checkpoint, parameters.items(), optimizer, 6)
    parameters[FROZEN[0]].requires_grad_(False)
    optimizer = optim.build_optimizer(parameters.items(), config.Optim())
    assert len(targets_of(checkpoint, parameters.items(), optimizer, 6)) == 2 + 2


def test_a_stage_of_frozen_parameters_only_has_an_optimizer_that_does_nothing():
    frozen = nn.Parameter(torch.ones(3), requires_grad=False)
    optimizer = optim.build_optimizer([("frozen", frozen)], config.Optim())
    optimizer.step()
    assert tensors_of({"a": frozen}, optimizer).keys() == {"model/a"}
    assert torch.equal(frozen, torch.ones(3))
