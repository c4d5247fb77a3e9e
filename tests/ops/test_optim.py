"""Claims about optim.py; the truth is Megatron's formulas, written out."""

import math
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from torch import nn

from dtmega.config import Batch, Config, Optim, Train
from dtmega.ops.optim import (
    build_optimizer,
    check_factors,
    clip_gradients,
    count_zeros,
    learning_rate,
    notes_on_warmup,
    set_rates,
    total_norm,
    weight_decay_at,
)
from dtmega.ops.optim.spikes import Spikes


def megatron(num: int, schedule: str, warmup: float, end: int, peak: float, low: float, tail: int = 0) -> float:
    """OptimizerParamScheduler.get_lr."""
    if warmup > 0 and num <= warmup:
        return peak * num / warmup
    if schedule == "constant":
        return peak
    if num > end:
        return low
    if schedule == "inverse-square-root":
        return max(low, peak * max(warmup, 1) ** 0.5 / num**0.5)
    if schedule == "WSD":
        return peak if num <= end - tail else low + (1 - (num - (end - tail)) / tail) * (peak - low)
    ratio = (num - warmup) / (end - warmup)
    coefficient = 1 - ratio if schedule == "linear" else 0.5 * (math.cos(math.pi * ratio) + 1)
    return low + coefficient * (peak - low)


@pytest.mark.parametrize("warmup", [0, 20])
@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ("constant", "constant"),
        ("linear", "linear"),
        ("cosine", "cosine"),
        ("inverse-sqrt", "inverse-square-root"),
        ("wsd", "WSD"),
    ],
)
def test_curve_is_megatrons(ours, theirs, warmup):
    low = 5e-5  # above 3e-4 / sqrt(100), where the root of a run without warm-up would end
    optim = Optim(lr=3e-4, min_lr=low, schedule=ours, warmup=warmup, decay=100, wsd_decay=30)
    for progress in range(1, 130):
        expected = megatron(progress, theirs, warmup, 100, 3e-4, low, 30)
        assert learning_rate(optim, progress, total=500) == pytest.approx(expected, rel=1e-12), progress


def test_without_a_decay_length_the_decay_ends_with_the_training():
    optim = Optim(lr=1e-3, min_lr=1e-4, schedule="cosine", warmup=5)
    assert learning_rate(optim, 200, total=200) == 1e-4
    assert learning_rate(optim, 199, total=200) > 1e-4


@pytest.mark.parametrize(("total", "tail"), [(500, 50), (19, 1), (5, 1)])
def test_the_default_tail_of_wsd_is_a_tenth_of_the_training_and_at_least_one_step(total, tail):
    default = Optim(lr=3e-4, schedule="wsd")
    rates = [learning_rate(default, progress, total) for progress in range(1, total + 1)]
    assert rates == pytest.approx([megatron(n, "WSD", 0, total, 3e-4, 0.0, tail) for n in range(1, total + 1)])


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine", "inverse-sqrt", "wsd"])
@pytest.mark.parametrize("warmup", [10, 20])
def test_a_warm_up_as_long_as_the_training_or_longer_is_all_there_is(schedule, warmup):
    optim = Optim(lr=1.0, schedule=schedule, warmup=warmup)
    assert [learning_rate(optim, n, total=10) for n in range(1, 11)] == pytest.approx(
        [n / warmup for n in range(1, 11)]
    )


def test_no_length_of_the_warm_up_makes_the_default_tail_of_wsd_jump():
    for warmup in (0, 50, 95, 99):
        optim = Optim(lr=1.0, schedule="wsd", warmup=warmup)
        rates = [learning_rate(optim, progress, total=100) for progress in range(warmup or 1, 101)]
        steepest = max(before - after for before, after in pairwise(rates))
        assert (rates[0], rates[-1]) == (1.0, 0.0)
        assert steepest <= 1 / min(10, 100 - warmup) + 1e-12


def test_the_first_update_already_moves():
    assert learning_rate(Optim(lr=1e-3, warmup=10), 1, total=100) == pytest.approx(1e-4)


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
@pytest.mark.parametrize(("decay", "total"), [(0, 90), (90, 500)])
def test_a_warm_up_may_be_a_fraction_of_the_schedule(schedule, decay, total):
    optim = Optim(lr=3e-4, min_lr=1e-5, schedule=schedule, warmup_fraction=0.125, decay=decay)
    for progress in range(1, 100):
        # Megatron's --lr-warmup-fraction: lr_warmup_steps = fraction * lr_decay_steps, which need not be whole.
        expected = megatron(progress, schedule, 0.125 * 90, 90, 3e-4, 1e-5)
        assert learning_rate(optim, progress, total) == pytest.approx(expected, rel=1e-12), progress


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"warmup": 10}, []),
        ({"warmup": 11}, ["rises for 11 of the run's 20 steps: the warm-up is 11 steps long"]),
        ({"warmup": 2000}, ["rises for 20 of the run's 20 steps: the warm-up is 2,000 steps long"]),
        ({"warmup_fraction": 0.5}, []),
        ({"warmup_fraction": 0.1, "decay": 101}, ["rises for 10 of the run's 20 steps: the warm-up is 10 steps long"]),
        ({"warmup": 41, "unit": "samples"}, ["rises for 41 of the run's 80 samples: the warm-up is 41 samples long"]),
    ],
)
def test_a_warm_up_longer_than_half_of_the_run_is_told(keys, said):
    cfg = Config(train=Train(steps=20), batch=Batch(micro_batch_size=4, global_batch_size=4), optim=Optim(**keys))
    notes = notes_on_warmup(cfg, cfg.end(0, 0))
    assert [part in note for part, note in zip(said, notes, strict=True)] == [True] * len(said)


def get_wd(num_steps: int, style: str, start_wd: float, end_wd: float, wd_incr_steps: int) -> float:
    """OptimizerParamScheduler.get_wd."""
    if num_steps > wd_incr_steps:
        return end_wd
    if style == "constant":
        return end_wd
    incr_ratio = float(num_steps) / float(wd_incr_steps)
    coeff = incr_ratio if style == "linear" else 0.5 * (math.cos(math.pi * (1 - incr_ratio)) + 1.0)
    return start_wd + coeff * (end_wd - start_wd)


@pytest.mark.parametrize("unit", ["steps", "samples"])
@pytest.mark.parametrize("style", ["constant", "linear", "cosine"])
def test_the_weight_decay_is_megatrons_ramp(style, unit):
    start = 0.0 if style == "constant" else 0.02
    optim = Optim(weight_decay=0.3, weight_decay_schedule=style, start_weight_decay=start, unit=unit)
    cfg = Config(optim=optim, train=Train(steps=40))
    per_step = {"steps": 1, "samples": cfg.batch.global_batch_size}[unit]
    end = cfg.end(0, 0)
    for step in range(1, 45):
        expected = get_wd(step * per_step, style, start, 0.3, 40 * per_step)
        found = weight_decay_at(cfg, step, step * cfg.batch.global_batch_size, end)
        assert found == pytest.approx(expected, rel=1e-12), step


def test_keys_of_another_optimizer_and_two_warm_ups_are_refused():
    with pytest.raises(ValueError, match=r"\[optim\] beta2 would not be read with name='sgd'"):
        Optim(name="sgd", beta2=0.9)
    with pytest.raises(ValueError, match=r"\[optim\] momentum would not be read with name='adamw'"):
        Optim(momentum=0.5)
    with pytest.raises(ValueError, match=r"start_weight_decay would not be read .* weight_decay_schedule='constant'"):
        Optim(start_weight_decay=0.1)
    with pytest.raises(ValueError, match=r"two lengths of the warm-up"):
        Optim(warmup=3, warmup_fraction=0.1)
    for written in ("embed.*", "embed.*=fast", "=2", "a=-1", "a=inf"):
        with pytest.raises(ValueError, match=r"lr_factors has 'PATTERN=FACTOR'"):
            Optim(lr_factors=[written])


class Toy(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 5)
        self.head.weight = self.embed.weight


def test_matrices_and_embeddings_decay_biases_and_norms_do_not():
    model = Toy()
    optimizer = build_optimizer(model.named_parameters(), Optim(weight_decay=0.3))
    decay = {id(p): g["weight_decay"] for g in optimizer.param_groups for p in g["params"]}
    assert {name: decay[id(p)] for name, p in model.named_parameters()} == {
        "embed.weight": 0.3,
        "norm.weight": 0.0,
        "norm.bias": 0.0,
        "head.bias": 0.0,
    }


def test_the_first_pattern_that_fits_a_name_gives_the_factor_of_its_rate():
    model = Toy()
    section = Optim(weight_decay=0.3, lr_factors=["norm.bias=0", "norm.*=0.5", "*.weight=2", "norm.weight=7"])
    optimizer = build_optimizer(model.named_parameters(), section)
    set_rates(optimizer, 0.1, 0.2)
    found = {id(p): (g["lr"], g["weight_decay"]) for g in optimizer.param_groups for p in g["params"]}
    assert {name: found[id(p)] for name, p in model.named_parameters()} == {
        "embed.weight": (0.2, 0.2),
        "norm.weight": (0.05, 0.0),
        "norm.bias": (0.0, 0.0),
        "head.bias": (0.1, 0.0),
    }


def test_a_pattern_that_fits_no_name_is_refused():
    with pytest.raises(ValueError, match=r"no parameter has a name like 'layer.\*'; there are 'a.weight' to 'b.bias'"):
        check_factors(Optim(lr_factors=["a.*=2", "layer.*=3"]), ["a.weight", "b.bias"])


def gradients() -> list[torch.Tensor]:
    return [torch.full((n,), value) for n, value in ((20, 1.0), (4, 2.0), (4, 3.0), (5, 4.0))]


CPU = torch.device("cpu")


@pytest.fixture
def alone():
    """A process group of one."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_norm_is_over_all_tensors(alone):
    assert total_norm(gradients(), CPU, alone) == pytest.approx(math.sqrt(20 * 1**2 + 4 * 2**2 + 4 * 3**2 + 5 * 4**2))


def test_the_norm_of_a_large_gradient_on_a_cpu_is_that_of_fp64(alone):
    gradient = 0.01 * torch.randn(8200, 65, generator=torch.Generator().manual_seed(0))
    assert total_norm([gradient], CPU, alone) == pytest.approx(gradient.double().norm().item(), rel=1e-7)


def test_clipping_scales_by_megatrons_factor():
    clipped = gradients()
    clip_gradients(clipped, 1e-3, 1e-4)  # a norm beside which 1e-6 counts
    for before, after in zip(gradients(), clipped, strict=True):
        torch.testing.assert_close(after, before * 1e-4 / (1e-3 + 1e-6))


@pytest.mark.parametrize("largest", [0.0, 1e6])
def test_a_norm_below_the_limit_or_no_limit_changes_nothing(largest):
    clipped = gradients()
    clip_gradients(clipped, 12.5, largest)
    assert all(torch.equal(a, b) for a, b in zip(gradients(), clipped, strict=True))


def test_zeros_are_counted(alone):
    assert count_zeros([torch.tensor([0.0, 1.0]), torch.zeros(3)], CPU, alone) == 4
    assert count_zeros([torch.zeros(1, dtype=torch.int8).expand(2**24 + 1)], CPU, alone) == 2**24 + 1


def test_a_rank_without_tensors_adds_nothing(alone):
    assert total_norm([], CPU, alone) == 0.0
    assert count_zeros([], CPU, alone) == 0


def quiet(n: int) -> list[tuple[float, float]]:
    """Steps with a mean loss of 3 and a mean gradient norm of 1; both have a standard deviation of 0.1."""
    unit = 0.1 / math.sqrt(3)
    deviations = [3 * unit if i % 4 == 0 else -unit for i in range(n)]  # their median is not their mean
    return [(3 + deviation, 1 + deviation) for deviation in deviations]


@pytest.mark.parametrize(
    ("loss", "grad_norm", "spike"), [(3.599, 1.599, False), (3.601, 1.0, True), (3.0, 1.601, True), (0.0, 0.0, False)]
)
@pytest.mark.parametrize("n", [64, 128])
def test_a_spike_is_six_sigma_above_the_mean_of_loss_or_gradient_norm(n, loss, grad_norm, spike):
    assert Spikes(6, quiet(n)).is_spike(loss, grad_norm) == spike


def test_nothing_is_a_spike_before_half_the_window():
    assert not Spikes(6, quiet(63)).is_spike(100.0, 100.0)


def test_the_window_moves_takes_spikes_and_takes_no_nan():
    spikes = Spikes(6, quiet(128))
    spikes.is_spike(math.nan, 1.0)
    spikes.is_spike(3.0, math.inf)
    assert list(spikes.recent) == quiet(128)
    spikes.is_spike(2.0, 1.0)
    spikes.is_spike(100.0, 1.0)
    assert list(spikes.recent) == [*quiet(128)[2:], (2.0, 1.0), (100.0, 1.0)]


@pytest.mark.parametrize("name", ["adamw", "adam", "sgd"])
def test_an_exact_update_of_an_element_does_not_depend_on_the_part_of_the_tensor(name: str):
    initial = torch.randn(1000, generator=torch.Generator().manual_seed(0))

    def updated(cuts: list[int]) -> torch.Tensor:
        parts = [nn.Parameter(part.clone()) for part in initial.tensor_split(cuts)]
        named = [(f"{i}.weight", part) for i, part in enumerate(parts)]
        optimizer = build_optimizer(named, Optim(name=name), exact=True)
        set_rates(optimizer, 1e-2, 0.1)
        generator = torch.Generator().manual_seed(1)
        for _ in range(5):
            gradient = torch.randn(1000, generator=generator)
            for part, of_part in zip(parts, gradient.tensor_split(cuts), strict=True):
                part.grad = of_part.clone()
            optimizer.step()
        return torch.cat([part.detach() for part in parts])

    whole = updated([])
    for cuts in ([500], [333, 667], [7, 13, 100], list(range(1, 60, 3))):
        assert torch.equal(updated(cuts), whole)
