"""float16: the loss scale is Megatron's, enters before the first rounding, and is part of what a run resumes."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from dtmega import config
from dtmega.checkpoint.resume import open_checkpoint, state_of
from dtmega.checkpoint.state import ScaleState
from dtmega.models import layers
from dtmega.ops import optim
from dtmega.ops.cross_entropy import linear_cross_entropy
from dtmega.ops.shards import local
from dtmega.training.checks import check
from dtmega.training.loss_scale import LossScale
from dtmega.training.sharded_model import ShardedModel
from tests import ranks
from tests.layouts import DEBUG, one_rank, write_sentences, write_text
from tests.resumed import Record, flags
from tests.test_faults import alone

FLOAT16 = {"precision.params": "float16"}
SMALL = (
    DEBUG
    | FLOAT16
    | {
        "model.hidden_size": 16,
        "model.n_layers": 1,
        "model.n_heads": 2,
        "data.seq_len": 12,
        "batch.micro_batch_size": 2,
        "batch.global_batch_size": 4,
        "eval.interval": 0,
        "log.num_zeros": False,
        "log.params_norm": False,
        "log.interval": 1,
        "train.drift_interval": 0,
    }
)


class MegatronsScaler:
    """`DynamicGradScaler.update` of megatron/optimizer/grad_scaler.py, as it is written there."""

    def __init__(self, initial_scale: float, min_scale: float, growth_interval: int, hysteresis: int) -> None:
        self.scale = initial_scale
        self.min_scale, self.growth_interval, self.hysteresis = min_scale, growth_interval, hysteresis
        self.growth_tracker, self.hysteresis_tracker = 0, hysteresis

    def update(self, found_inf: bool) -> None:
        if found_inf:
            self.growth_tracker = 0
            self.hysteresis_tracker -= 1
            if self.hysteresis_tracker <= 0:
                self.scale = max(self.scale * 0.5, self.min_scale)
        else:
            self.growth_tracker += 1
            if self.growth_tracker == self.growth_interval:
                self.growth_tracker = 0
                self.hysteresis_tracker = self.hysteresis
                self.scale = self.scale * 2.0


@pytest.mark.parametrize(("window", "hysteresis", "share"), [(1, 1, 0.5), (4, 2, 0.25), (5, 3, 0.25)])
def test_the_scale_is_megatrons_after_each_step(window: int, hysteresis: int, share: float):
    precision = config.Precision(
        params="float16",
        initial_loss_scale=64.0,
        min_loss_scale=4.0,
        loss_scale_window=window,
        hysteresis=hysteresis,
    )
    ours, theirs = LossScale(precision), MegatronsScaler(64.0, 4.0, window, hysteresis)
    overflows = torch.rand(400, generator=torch.Generator().manual_seed(window)) < share
    seen = set[float]()
    for step, overflowed in enumerate(overflows.tolist()):
        # In the middle it is what a checkpoint has kept of it.
        ours = LossScale(precision, ours.state) if step == 200 else ours
        ours.update(overflowed)
        theirs.update(overflowed)
        assert ours.scale == theirs.scale, step
        seen.add(ours.scale)
    assert min(seen) == 4.0
    assert max(seen) > 64.0


def test_a_new_scale_doubles_after_one_whole_window_without_an_overflow():
    ours = LossScale(config.Precision(params="float16", initial_loss_scale=64.0, loss_scale_window=3))
    scales = []
    for _ in range(6):
        ours.update(overflowed=False)
        scales.append(ours.scale)
    assert scales == [64.0, 64.0, 128.0, 128.0, 128.0, 256.0]


def test_a_scale_that_goes_on_with_a_shorter_window_doubles_at_the_next_step():
    precision = config.Precision(params="float16", initial_loss_scale=64.0, loss_scale_window=3)
    ours = LossScale(precision, ScaleState(scale=64.0, growth=10, hysteresis=2))
    ours.update(overflowed=False)
    assert ours.state == ScaleState(scale=128.0, growth=0, hysteresis=precision.hysteresis)


def test_the_defaults_are_megatrons():
    defaults = config.Precision()
    ours = defaults.initial_loss_scale, defaults.loss_scale_window, defaults.hysteresis, defaults.min_loss_scale
    assert ours == (2**32, 1000, 2, 1)


def rare_words() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """64 tokens whose label is all but certain: every other of 1000 words has a probability of about 1e-8.

    Returns:
        h, weight and labels, in float16, and the gradient of their mean loss by the weight, in fp64.
    """
    generator = torch.Generator().manual_seed(0)
    h = torch.cat([torch.randn(64, 15, generator=generator), torch.full((64, 1), 4.0)], dim=1).half()
    weight = 0.05 * torch.randn(1000, 16, generator=generator)
    weight[0, 15] = 18.4 / 4.0
    weight = weight.half()
    labels = torch.zeros(64, dtype=torch.int64)
    logits = (h @ weight.T).double().requires_grad_()
    assert logits.softmax(1)[:, 1:].median().item() == pytest.approx(1e-8, rel=0.2)
    torch.nn.functional.cross_entropy(logits, labels).backward()
    assert logits.grad is not None
    return h, weight, labels, logits.grad.T @ h.double()


def weight_gradient(h: Tensor, weight: Tensor, labels: Tensor, expected: float, factor: float) -> Tensor:
    w = weight.clone().requires_grad_()
    (linear_cross_entropy(h, w, labels, expected=expected) * factor).backward()
    assert w.grad is not None
    return w.grad


def test_the_zeros_in_the_heads_gradient_go_as_the_scale_grows():
    h, weight, labels, truth = rare_words()
    scales = [2.0**exponent for exponent in (0, 8, 16, 24)]
    zeros, errors = [], []
    for scale in scales:
        gradient = weight_gradient(h, weight, labels, scale / len(h), scale / len(h))
        zeros.append(int((gradient == 0).sum()))
        error = (gradient.double() / scale - truth)[1:]  # of all words but the one that is certain
        errors.append((error.norm() / truth[1:].norm()).item())
    assert zeros == sorted(zeros, reverse=True)
    of_all_but_one = truth[1:].numel()
    assert zeros[0] >= of_all_but_one
    assert zeros[-1] == 0
    assert errors[0] == 1
    assert errors[-1] < 2e-3


@pytest.mark.parametrize("scale", [1.0, 2.0**24, 2.0**32])
def test_a_scale_around_the_loss_comes_too_late_for_the_head(scale: float):
    h, weight, labels, _ = rare_words()
    gradient = weight_gradient(h, weight, labels, 1.0, scale / len(h))
    assert (gradient[1:] == 0).double().mean() > 0.95


def test_the_gradient_is_right_whatever_was_expected():
    generator = torch.Generator().manual_seed(0)
    h, weight = (torch.randn(n, 16, generator=generator) for n in (64, 131))
    labels = torch.randint(131, (64,), generator=generator)
    plain = weight_gradient(h, weight, labels, 1.0, 0.25)
    assert torch.equal(weight_gradient(h, weight, labels, 0.25, 0.25), plain)
    torch.testing.assert_close(weight_gradient(h, weight, labels, 3.7, 0.25), plain)


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> dict[str, str]:
    return write_text(tmp_path_factory.mktemp("text"))


def infinite_at(lost: Callable[[int], bool], rank: int = 0) -> None:
    """Plant, on one rank, an element that is not finite in the first gradient of each of these steps."""
    honest = ShardedModel.forward_backward

    def forward_backward(self: ShardedModel, microbatches: Any, *args: Any) -> Tensor:
        totals = honest(self, microbatches, *args)
        step = int(microbatches[0]["sample_ids"].min()) // SMALL["batch.global_batch_size"] + 1
        if lost(step) and dist.get_rank() == rank:
            gradient = next(iter(self.owned().values())).grad
            assert gradient is not None
            local(gradient).view(-1)[0] = math.inf
        return totals

    ShardedModel.forward_backward = forward_backward


@pytest.fixture
def infinite(monkeypatch):
    """`infinite_at`, undone after the test."""
    monkeypatch.setattr(ShardedModel, "forward_backward", ShardedModel.forward_backward)
    return infinite_at


def expected_rates(lines: dict[int, dict[str, Any]], sizes: int) -> dict[int, float]:
    """The expected rates of a schedule that counts samples: those of skipped steps do not count."""
    rates, learned = {}, 0
    section = config.Optim(lr=1e-2, min_lr=1e-4, schedule="linear", unit="samples", warmup=8)
    for step, line in lines.items():
        if "skipped" not in line:
            learned += sizes
            rates[step] = optim.learning_rate(section, learned, total=sizes * len(lines))
    return rates


# The scale is doubled after 3 steps, and 2^26 is too much for this model.
SEARCHING = {
    "train.steps": 14,
    "precision.initial_loss_scale": 2.0**26,
    "precision.loss_scale_window": 3,
    "optim.unit": "samples",
    "optim.schedule": "linear",
    "optim.warmup": 8,
    "train.max_skipped": 1,
}
STOP = 10  # in a window


@pytest.fixture(scope="module")
def searched(text, tmp_path_factory) -> Record:
    folder = tmp_path_factory.mktemp("whole") / "run"
    assert alone(SMALL | text | SEARCHING, folder) == 0
    return Record(folder)


def test_a_run_finds_its_scale_and_says_it_in_every_line(searched):
    scaler = MegatronsScaler(2.0**26, 1.0, 3, 2)
    for line in searched.steps.values():
        assert line["loss_scale"] == scaler.scale
        assert math.isfinite(line["loss"])
        scaler.update("skipped" in line)
    scales = searched.series("loss_scale")
    assert scales[1] == scales[0] > scales[2]  # halved by the second overflow
    assert any(after > before for before, after in itertools.pairwise(scales))
    # Two in a row would end the run, if they counted.
    assert sum("skipped" in line for line in searched.steps.values()) > 3


def test_an_overflow_consumes_its_samples_and_moves_no_learning_rate(searched):
    assert [line["tokens"] for line in searched.steps.values()] == [4 * 12 * step for step in searched.steps]
    rates = {step: line["lr"] for step, line in searched.steps.items() if "lr" in line}
    assert rates == pytest.approx(expected_rates(searched.steps, 4))


def test_a_run_that_was_stopped_in_a_window_goes_on_to_the_bit(text, searched, tmp_path):
    cut = SMALL | text | SEARCHING | {"train.exit_interval": STOP}
    assert alone(cut, tmp_path) == 0
    state = state_of(open_checkpoint(str(tmp_path)))
    overflowed = sum("skipped" in line for step, line in searched.steps.items() if step <= STOP)
    assert state.loss_scale == (searched.steps[STOP + 1]["loss_scale"], STOP - overflowed, 0)
    assert state.progress == (STOP, 4 * STOP, overflowed, overflowed, 4 * overflowed)
    assert 0 < state.updates == STOP - overflowed < 3
    assert alone(SMALL | text | SEARCHING, tmp_path) == 0
    resumed = Record(tmp_path)
    for key in ("loss", "grad_norm", "loss_scale"):
        assert resumed.series(key) == searched.series(key)
    assert all(torch.equal(resumed.final[name], tensor) for name, tensor in searched.final.items())


def test_the_head_is_told_scale_over_tokens_before_each_forward(text, tmp_path, monkeypatch):
    honest, told = layers.linear_cross_entropy, []

    def noting(*args: Any, **terms: Any) -> Tensor:
        told.append(terms["expected"])
        return honest(*args, **terms)

    monkeypatch.setattr(layers, "linear_cross_entropy", noting)
    keys = {"train.steps": 2, "precision.initial_loss_scale": 2.0**12, "precision.loss_scale_window": 1}
    no_evaluation = {"data.eod_mask_loss": False, "data.split": "1,0,0", "eval.sample_tokens": 0}
    assert alone(SMALL | text | keys | no_evaluation, tmp_path) == 0
    tokens = 4 * 12
    assert told == [2**12 / tokens, 2**12 / tokens, 2**13 / tokens, 2**13 / tokens]  # of two microbatches each


def test_float16_follows_fp32_within_its_rounding(text, tmp_path):
    keys = SMALL | text | {"train.steps": 4, "checkpoint.final": False}
    runs = {}
    for dtype, scale in (("float32", 2.0**32), ("float16", 2.0**16)):
        precision = {"precision.params": dtype, "precision.initial_loss_scale": scale}
        assert alone(keys | precision, tmp_path / dtype) == 0
        lines = [json.loads(line) for line in (tmp_path / dtype / "metrics.jsonl").read_text().splitlines()]
        runs[dtype] = [line for line in lines if "loss" in line]
    for key in ("loss", "grad_norm", "lr"):
        ours, theirs = ([line[key] for line in runs[dtype]] for dtype in ("float16", "float32"))
        # fp16 has 11 bits: 2^-12 per rounding.
        assert ours == pytest.approx(theirs, rel=2e-3)
    assert [line["loss"] for line in runs["float16"]] != [line["loss"] for line in runs["float32"]]


def test_overflows_count_as_faults_once_the_scale_is_at_its_least(text, tmp_path, infinite):
    infinite(lambda step: True)
    keys = {"train.steps": 9, "train.max_skipped": 2, "checkpoint.final": False, "precision.hysteresis": 1}
    keys |= {"precision.initial_loss_scale": 4.0, "precision.min_loss_scale": 1.0}
    with pytest.raises(RuntimeError, match="3 steps in a row"):
        alone(SMALL | text | keys, tmp_path)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["loss_scale"] for line in lines] == [4, 2, 1, 1, 1]


def in_the_second_step_of_the_second_rank() -> None:
    infinite_at(lambda step: step == 2, rank=1)


@pytest.mark.parametrize("keys", [{"mesh.pp": 2}, {"mesh.tp": 2}, {"mesh.dp_shard": 2}], ids=str)
def test_an_overflow_on_one_rank_is_one_on_all(text, tmp_path, keys):
    short = {"train.steps": 3, "precision.hysteresis": 1, "precision.initial_loss_scale": 2.0**12}
    checked = {"train.drift_interval": 1, "model.n_layers": 2}
    argv = flags(SMALL | text | short | checked | keys, tmp_path / "run")
    ranks.run(2, one_rank, argv, str(tmp_path), in_the_second_step_of_the_second_rank)
    steps = Record(tmp_path / "run").steps
    assert [line["loss_scale"] for line in steps.values()] == [2**12, 2**12, 2**11]
    assert [step for step, line in steps.items() if "skipped" in line] == [2]


def test_a_bert_goes_through_a_forced_overflow_and_on_from_the_middle_of_a_window(tmp_path, infinite):
    infinite(lambda step: step in (2, 3))
    keys = {key: value for key, value in SMALL.items() if key != "data.eod_mask_loss"} | write_sentences(tmp_path)
    keys |= {"model.name": "bert", "model.max_position_embeddings": 32, "data.seq_len": 24, "train.steps": 8}
    keys |= {"model.fp32_residual": True, "model.query_key_layer_scaling": True, "optim.schedule": "linear"}
    keys |= {"precision.initial_loss_scale": 2.0**14, "precision.loss_scale_window": 4, "eval.sample_tokens": 0}
    assert alone(keys, tmp_path / "whole") == 0
    assert [alone(keys | {"train.exit_interval": 5}, tmp_path / "cut") for _ in range(2)] == [0, 0]
    whole, cut = Record(tmp_path / "whole"), Record(tmp_path / "cut")
    assert [math.log2(scale) for scale in whole.series("loss_scale")] == [14, 14, 14, 13, 13, 13, 13, 14]
    section = config.Optim(lr=1e-2, min_lr=1e-4, schedule="linear", warmup=5)
    learned = {1: 1, 4: 2, 5: 3, 6: 4, 7: 5, 8: 6}
    rates = {step: line["lr"] for step, line in whole.steps.items() if "lr" in line}
    assert rates == pytest.approx({step: optim.learning_rate(section, n, total=8) for step, n in learned.items()})
    for key in ("loss", "grad_norm", "loss_scale", "tokens"):
        assert cut.series(key) == whole.series(key)
    assert all(torch.equal(cut.final[name], tensor) for name, tensor in whole.final.items())


def test_what_cannot_be_scaled_is_refused():
    argv = ["--config", "hf", "--model.path", "x", "--precision.params", "float16"]
    with pytest.raises(ValueError, match=r"params = 'float16' is not for name = 'hf', expected one of float32, bf"):
        check(config.load(argv), {"pp": 1, "tp": 1}, torch.device("cpu"))
    with pytest.raises(ValueError, match=r"no loss scale for \[precision\] hysteresis: expected params = 'float16'"):
        config.Precision(hysteresis=3)
    with pytest.raises(ValueError, match=r"initial_loss_scale=1.0 is below min_loss_scale=2.0"):
        config.Precision(params="float16", initial_loss_scale=1.0, min_loss_scale=2.0)
