"""[run] exact: every bit of losses, norms and weights on all data layouts and pipelines, against one process.

Its arithmetic is tested in tests/ops/test_fixed_point.py, its refusals in tests/training/test_exact.py, and a run that
goes on with another layout in tests/test_resume_exact.py. benchmarks/exact.py prints the whole table.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from dtmega import config, families, mesh
from dtmega.data.loader import StepBatch
from dtmega.data.objectives.rows import IGNORED
from dtmega.ops import fixed_point
from dtmega.ops.fixed_point import Grid
from dtmega.ops.optim import build_optimizer, set_rates
from dtmega.ops.shards import full_tensor
from dtmega.training.checks import check
from dtmega.training.loss_scale import LossScale
from dtmega.training.parallelize import parallelize
from dtmega.training.sharded_model import ShardedModel
from dtmega.training.step import StepResult, train_step
from tests import ranks

V, D, HEADS, S, B, STEPS = 37, 16, 4, 8, 1, 2
DROPOUT = {"hidden_dropout": 0.1, "attention_dropout": 0.1}
MODELS: dict[str, dict[str, Any]] = {
    "bloom": {"name": "bloom", **DROPOUT},
    "gpt": {"name": "gpt", "max_position_embeddings": S, **DROPOUT},
    "llama": {"name": "llama", "n_kv_heads": 2, "ffn_hidden_size": 24},
    "qwen": {
        **{"name": "llama", "n_kv_heads": 2, "ffn_hidden_size": 24, "kv_channels": 6},
        **{"qk_norm": True, "window": 3, "window_layers": [1]},
    },
    "moe": {
        **{"name": "moe", "n_kv_heads": 2, "n_experts": 6, "expert_ffn_hidden_size": 12, "ffn_hidden_size": 24},
        **{"router_bias": True, "balance_loss": 0.1, "router_z_loss": 0.01, "shared_experts": 1, "dense_layers": 1},
    },
    "bert": {"name": "bert", "max_position_embeddings": S, **DROPOUT},
    "hf": {"name": "hf"},
    "hf, tied": {"name": "hf"},
    "t5": {"name": "t5", "n_decoder_layers": 3, "init": "normal", "inner_dropout": 0.1, **DROPOUT},
}
MODELS["moe with capacity"] = {**MODELS["moe"], "capacity_factor": 1.0}
LEARNED = {"positions": "learned", "max_position_embeddings": S, "norm": "layer", "bias": True, "scale_scores": True}
MODELS["t5 of Megatron"] = {**MODELS["t5"], **LEARNED}
# Further keys of [data], by the [model] name.
DATA = {"t5": {"decoder_seq_len": S}, "hf": {"tokenizer": "bytes"}}
PACKED = {"data": {"objective": "conversations", "seq_len": S, "tokenizer": "bytes"}}
ZBV = {"pipeline": {"schedule": "ZBVZeroBubble"}}
LOOPED = {"pipeline": {"schedule": "LoopedBFS"}}
BF16 = {"precision": {"params": "bfloat16"}}
FP16 = {"precision": {"params": "float16", "initial_loss_scale": 20000.0}}
SGD = {"optim": {"name": "sgd", "lr": 0.1, "clip_grad": 0.3}}
MUON = {"optim": {"name": "muon", "lr": 1e-2, "eps": 1e-6, "clip_grad": 0.3}}
ADAM = {"optim": {"name": "adam", "lr": 1e-2, "eps": 1e-6, "clip_grad": 0.3}}


class Layout(NamedTuple):
    """A mesh, and what the process that it is compared with has in common with it.

    Attributes:
        n: number of processes.
        sizes: the [mesh].
        how: sections that only this layout has; None: none.
        same: sections that the truth has, too; None: none.
        layers: number of layers of both.
    """

    n: int
    sizes: dict[str, Any]
    how: dict[str, Any] | None = None
    same: dict[str, Any] | None = None
    layers: int = 2


LAYOUTS = {
    "dp_shard 2": Layout(2, {"dp_shard": 2}),
    "dp_shard 3": Layout(3, {"dp_shard": 3}),
    "dp_shard 4": Layout(4, {"dp_shard": 4}),
    "dp_replicate 2": Layout(2, {"dp_replicate": 2}),
    "HSDP 2 x 2": Layout(4, {"dp_replicate": 2, "dp_shard": 2}),
    **{
        f"pp 2, {name}": Layout(2, {"pp": 2}, {"pipeline": {"schedule": name}}, layers=4)
        for name in ("Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "DualPipeV")
    },
    "pp 2, GPipe": Layout(2, {"pp": 2}, {"pipeline": {"schedule": "GPipe"}}),
    "pp 2, 1F1B": Layout(2, {"pp": 2}),
    "pp 2, ZBV": Layout(2, {"pp": 2}, ZBV, layers=4),
    "pp 2 x dp_shard 2": Layout(4, {"pp": 2, "dp_shard": 2}),
    "pp 2 x dp_shard 2, LoopedBFS": Layout(4, {"pp": 2, "dp_shard": 2}, LOOPED, layers=4),
    "pp 2 x dp_replicate 2, ZBV": Layout(4, {"pp": 2, "dp_replicate": 2}, ZBV, layers=4),
    "tp 2 x dp_shard 2": Layout(4, {"tp": 2, "dp_shard": 2}),
    "tp 2 x dp_replicate 2": Layout(4, {"tp": 2, "dp_replicate": 2}),
    "tp 2 x pp 2": Layout(4, {"tp": 2, "pp": 2}),
    **{
        f"cp 2 x {axis} 2, {form}": Layout(4, {"cp": 2, "cp_form": form, axis: 2})
        for axis in ("dp_shard", "dp_replicate", "pp")
        for form in ("gather", "heads")
    },
    "bf16, dp_shard 2": Layout(2, {"dp_shard": 2}, same=BF16),
    "bf16, dp_replicate 2": Layout(2, {"dp_replicate": 2}, same=BF16),
    "bf16, pp 2": Layout(2, {"pp": 2}, same=BF16),
    "fp16, dp_shard 2": Layout(2, {"dp_shard": 2}, same=FP16),
    "fp16, pp 2": Layout(2, {"pp": 2}, same=FP16),
    "sgd, dp_shard 3": Layout(3, {"dp_shard": 3}, same=SGD),
    "adam, dp_shard 3": Layout(3, {"dp_shard": 3}, same=ADAM),
    "muon, dp_shard 2": Layout(2, {"dp_shard": 2}, same=MUON),
    "muon, dp_shard 3": Layout(3, {"dp_shard": 3}, same=MUON),
    "muon, dp_replicate 2": Layout(2, {"dp_replicate": 2}, same=MUON),
    "muon, HSDP 2 x 2": Layout(4, {"dp_replicate": 2, "dp_shard": 2}, same=MUON),
    "muon, pp 2": Layout(2, {"pp": 2}, same=MUON),
    "muon, pp 2 x dp_shard 2": Layout(4, {"pp": 2, "dp_shard": 2}, same=MUON),
    "muon, tp 2 x dp_shard 2": Layout(4, {"tp": 2, "dp_shard": 2}, same=MUON),
    "muon, cp 2 x dp_replicate 2": Layout(4, {"cp": 2, "dp_replicate": 2}, same=MUON),
    "recompute, dp_shard 2": Layout(2, {"dp_shard": 2}, same={"recompute": {"mode": "full"}}),
    "packed, dp_shard 2": Layout(2, {"dp_shard": 2}, same=PACKED),
    "packed, pp 2": Layout(2, {"pp": 2}, same=PACKED),
    "compile, dp_shard 2": Layout(2, {"dp_shard": 2}, same={"compile": {"enable": True}}),
    "compile, pp 2": Layout(2, {"pp": 2}, same={"compile": {"enable": True}}),
    "selective recompute, pp 2": Layout(2, {"pp": 2}, same={"recompute": {"mode": "selective"}}),
}
# Shards with uneven cuts and a tied weight; whole gradients; copies on stages of one rank, and of two; both reductions;
# sums over tp; what several layers read, some of them in one stage, others in later stages.
LIGHT = [
    ("bloom", "dp_shard 3"),
    ("bert", "dp_replicate 2"),
    ("gpt", "pp 2, ZBV"),
    ("bloom", "pp 2, 1F1B"),
    ("bloom", "muon, HSDP 2 x 2"),
    ("gpt", "muon, tp 2 x dp_shard 2"),
    ("t5", "pp 2 x dp_shard 2, LoopedBFS"),
    ("moe", "pp 2 x dp_shard 2, LoopedBFS"),
]
COMPILED = ("bloom", "llama")
# What a T5 refuses: schedules that split backward, and tp with pp.
NOT_T5 = ("InterleavedZeroBubble", "DualPipeV", "ZBV", "tp 2 x pp 2")


def runs(family: str, name: str) -> bool:
    """False for a case that is refused when a run starts."""
    if name.startswith("compile"):
        return family in COMPILED
    if name.startswith("fp16"):
        return not family.startswith("hf")
    if name.startswith("packed"):
        return not family.startswith(("bert", "t5"))
    if "muon" in name:
        return MODELS[family]["name"] != "moe"
    return not family.startswith("t5") or not name.endswith(NOT_T5)


CASES = [(family, name) for family in MODELS for name in LAYOUTS if runs(family, name)]


@functools.cache
def directory(tied: bool, n_layers: int) -> tempfile.TemporaryDirectory[str]:
    """A folder with the config.json of a Llama of transformers, and without weights, so that the seed decides them."""
    sizes = {"vocab_size": V, "hidden_size": D, "num_attention_heads": HEADS, "num_key_value_heads": 2}
    sizes |= {"num_hidden_layers": n_layers, "intermediate_size": 24, "max_position_embeddings": 64}
    values = {
        "model_type": "llama",
        "initializer_range": 0.2,
        "tie_word_embeddings": tied,
        "pad_token_id": None,
        **sizes,
    }
    folder = tempfile.TemporaryDirectory()
    Path(folder.name, "config.json").write_text(json.dumps(values))
    return folder


def model_of(family: str, layout: Layout) -> dict[str, Any]:
    if family.startswith("hf"):
        return MODELS[family] | {"path": directory("tied" in family, layout.layers).name}
    sizes = {"vocab_size": V, "hidden_size": D, "n_heads": HEADS, "n_layers": layout.layers, "init_std": 0.2}
    return sizes | MODELS[family]


def configured(family: str, layout: Layout) -> config.Config:
    keys: dict[str, Any] = {
        "run": {"exact": True},
        "model": model_of(family, layout),
        "data": {"seq_len": S} | DATA.get(MODELS[family]["name"], {}),
        "batch": {"micro_batch_size": B, "global_batch_size": 12},
        "train": {"steps": STEPS},
        "optim": {"eps": 1e-6, "lr": 1e-2, "clip_grad": 0.3},
        "compile": {"enable": False},
        "mesh": {"dp_shard": 1} | layout.sizes,
    }
    return families.resolve(config.validate({**keys, **(layout.how or {}), **(layout.same or {})}, "test"))


def microbatch(family: str, ids: list[int], packed: bool = False) -> dict[str, Tensor]:
    """Sequences by their numbers, each with another number of labels. Packed ones consist of two conversations."""
    rows: list[dict[str, Tensor]] = []
    for i in ids:
        generator = torch.Generator().manual_seed(i)
        tokens = torch.randint(V - 1, (S + 1,), generator=generator)
        labels = tokens[1:].where(torch.arange(S) >= i % S, IGNORED)
        row = {"tokens": tokens[:-1], "labels": labels, "sample_ids": torch.tensor(i), "places": torch.arange(S)}
        if packed:
            begins = 1 + i % (S - 1)
            second = torch.arange(S) >= begins
            row |= {"document_ids": second.long(), "position_ids": torch.arange(S) - begins * second}
        if family == "bert":
            row |= {"token_types": (torch.arange(S) > S // 2).long(), "swapped": torch.tensor(i % 2)}
        if family.startswith("t5"):
            # The texts of encoder and decoder, each with padding of another length.
            row |= {"decoder_tokens": tokens[:-1], "decoder_places": torch.arange(S), "tokens": tokens.flip(0)[1:]}
            row |= {
                "document_ids": (torch.arange(S) > i % S).long(),
                "decoder_document_ids": (labels == IGNORED).long(),
            }
        rows.append(row)
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


class NoPhases:
    """What a step tells about its phases, which nobody hears."""

    def enter(self, name: str) -> None:
        """Forget the name."""


class Step(NamedTuple):
    """What a step uses (`training.stepping.Stepping`)."""

    cfg: config.Config
    world: mesh.World
    model: ShardedModel
    optimizer: torch.optim.Optimizer
    phases: NoPhases
    loss_scale: LossScale | None
    spikes: None = None


def begun(family: str, layout: Layout) -> Step:
    cfg = configured(family, layout)
    world = mesh.start(torch.device("cpu"), mesh.resolve(cfg.mesh, dist.get_world_size()))
    check(cfg, world.sizes, world.device)
    model = parallelize(cfg, world)
    model.draw(seed=0)
    optimizer = build_optimizer(model.named_parameters(), cfg.optim, cfg.run.exact, model.matrices)
    set_rates(optimizer, cfg.optim.lr, 0.1)
    loss_scale = LossScale(cfg.precision) if cfg.precision.params == "float16" else None
    return Step(cfg, world, model, optimizer, NoPhases(), loss_scale)


def stepped(run: Step, step: int) -> StepResult:
    size = run.cfg.batch.global_batch_size
    n_mine = size // run.world.data_size
    first = step * size + run.world.data_rank * n_mine
    parts = [[*range(i, i + B)] for i in range(first, first + n_mine, B)]
    packed = run.cfg.data.objective == "conversations"
    return train_step(run, StepBatch(0, size, [microbatch(run.cfg.model.name, ids, packed) for ids in parts]))


class Bits(NamedTuple):
    """What a layout may not change.

    Attributes:
        steps: all numbers of each step.
        grids: the grids of each step.
        tensors: digests of this rank's weights and of the optimizer's state for them after each step, by name.
        validation: sums of the losses of a validation after the last step.
        statistics: the number of zeros, and the norm of the weights.
    """

    steps: list[StepResult]
    grids: list[dict[str, Grid]]
    tensors: list[dict[str, str]]
    validation: list[float]
    statistics: dict[str, float]


def bits_of(cases: list[tuple[str, Layout]]) -> list[Bits]:
    return [_bits(*case) for case in cases]


def _bits(family: str, layout: Layout) -> Bits:
    run = begun(family, layout)
    steps, grids, tensors = [], [], []
    for step in range(STEPS):
        steps.append(stepped(run, step))
        assert run.model.exact is not None
        grids.append(run.model.exact.grids)
        tensors.append(digests(run))
    statistics = run.model.statistics(num_zeros=True, params_norm=True)
    n_mine = 12 // run.world.data_size
    mine = range(run.world.data_rank * n_mine, (run.world.data_rank + 1) * n_mine)
    packed = run.cfg.data.objective == "conversations"
    totals = run.model.losses([microbatch(family, [i], packed) for i in mine])
    dist.all_reduce(totals, group=run.world.groups["loss"])
    run.model.check_copies()
    return Bits(steps, grids, tensors, totals.tolist(), statistics)


def digests(run: Step) -> dict[str, str]:
    """Digests of the weights that this rank has a part of, and of the optimizer's state for them, by name."""
    found: dict[str, str] = {}
    for name, parameter in run.model.owned().items():
        found[name] = digest(parameter.detach())
        for key, value in run.optimizer.state[parameter].items():
            found[f"{name} {key}"] = digest(value)
    return found


def digest(tensor: Tensor) -> str:
    return hashlib.sha256(full_tensor(tensor).contiguous().numpy().tobytes()).hexdigest()


def truth_of(layout: Layout) -> Layout:
    """The same tp and cp on as few processes as possible, without a pipeline."""
    sizes = {key: value for key, value in layout.sizes.items() if key in ("tp", "cp", "cp_form")}
    n = sizes.get("tp", 1) * sizes.get("cp", 1)
    return Layout(n, sizes, same=layout.same, layers=layout.layers)


def of_all(wanted: list[tuple[str, str]]) -> dict[tuple[str, str], tuple[list[Bits], Bits]]:
    """The bits of every rank of the wanted cases, and those of their truth; one group of ranks for each size."""
    jobs: list[tuple[str, Layout]] = []
    for family, name in wanted:
        jobs += [(family, LAYOUTS[name]), (family, truth_of(LAYOUTS[name]))]
    found: dict[str, list[Bits]] = {}
    for n in sorted({layout.n for _, layout in jobs}):
        here = {repr(job): job for job in jobs if job[1].n == n}
        of_ranks = ranks.run(n, bits_of, [*here.values()], timeout_s=600.0)
        for i, key in enumerate(here):
            found[key] = [of_rank[i] for of_rank in of_ranks]
    bits = {}
    for family, name in wanted:
        truth = found[repr((family, truth_of(LAYOUTS[name])))]
        bits[family, name] = found[repr((family, LAYOUTS[name]))], truth[0]
    return bits


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest) -> Mapping[tuple[str, str], tuple[list[Bits], Bits]]:
    items = [item for item in request.session.items if item.path == request.path and "found" in item.fixturenames]
    return of_all([(item.callspec.params["family"], item.callspec.params["name"]) for item in items])


def cases() -> list[Any]:
    return [pytest.param(*case, marks=() if case in LIGHT else pytest.mark.full) for case in CASES]


@pytest.mark.parametrize(("family", "name"), cases())
def test_every_loss_norm_and_weight_has_the_bits_of_one_process(found, family: str, name: str):
    of_ranks, truth = found[family, name]
    assert truth.steps[0].loss != truth.steps[-1].loss
    assert math.isfinite(truth.steps[-1].loss)
    assert not any(step.skipped for step in truth.steps)
    held = set[str]()
    for rank in of_ranks:
        assert rank.steps == truth.steps
        assert rank.grids == truth.grids
        assert rank.validation == truth.validation
        assert rank.statistics == truth.statistics
        for step in range(STEPS):
            assert rank.tensors[step] == {key: truth.tensors[step][key] for key in rank.tensors[step]}
        held |= rank.tensors[0].keys()
    assert held == truth.tensors[0].keys()


@pytest.mark.parametrize(("family", "name"), [("gpt", "muon, tp 2 x dp_shard 2")])
def test_a_sum_of_as_many_gradients_at_their_limit_as_a_step_has_fits_into_62_bits(found, family: str, name: str):
    """A GPT's embedding is its head, too, and each of two tp ranks has a part of both gradients."""
    n_gradients = 12 // B * 2 * 2
    (limits,) = {grid.limit / 2.0**grid.exponent for grid in found[family, name][1].grids[0].values()}
    assert 2**61 < n_gradients * limits <= 2**62


NARROW = "layers.1.mlp.up.weight"


def beyond_grid() -> tuple[list[StepResult], list[bool], list[float]]:
    """Four steps, of which the second begins with a grid that is much too fine for one tensor."""
    run = begun("bloom", Layout(2, {"dp_shard": -1}))
    assert run.model.exact is not None
    results, changed, largest = [], [], []
    for step in range(4):
        if step == 1:
            run.model.exact.state.maxima[NARROW] = 2.0**-60
        before = [weight.clone() for weight in run.model.weights()]
        results.append(stepped(run, step))
        after = run.model.weights()
        changed.append(any(not torch.equal(a, b) for a, b in zip(before, after, strict=True)))
        largest.append(run.model.exact.state.maxima[NARROW])
    return results, changed, largest


def test_a_gradient_beyond_its_grid_is_named_and_all_ranks_skip_that_step_and_not_the_next():
    of_one = ranks.run(1, beyond_grid)
    of_two = ranks.run(2, beyond_grid)
    assert of_two == of_one * 2
    results, changed, largest = of_one[0]
    assert [result.beyond_grid for result in results] == [(), (NARROW,), (), ()]
    assert [result.skipped for result in results] == [False, True, False, False]
    assert changed == [True, False, True, True]
    assert largest[1] > 1e-9


def overflowing_in_fp16() -> tuple[StepResult, dict[str, float], dict[str, float], float]:
    """A step whose loss scale is far too large, between two that are not."""
    scaled = {"precision": {"params": "float16", "initial_loss_scale": 1024.0, "hysteresis": 1}}
    run = begun("bloom", Layout(2, {"dp_shard": -1}, same=scaled))
    assert run.model.exact is not None
    assert run.loss_scale is not None
    stepped(run, 0)
    before = dict(run.model.exact.state.maxima)
    run.loss_scale.state = run.loss_scale.state._replace(scale=2.0**60)
    result = stepped(run, 1)
    return result, before, run.model.exact.state.maxima, run.loss_scale.scale


def test_an_overflow_in_float16_halves_the_loss_scale_and_leaves_the_grids():
    for result, before, after, scale in ranks.run(2, overflowing_in_fp16):
        assert result.overflowed
        assert result.beyond_grid == ()
        assert before == after
        assert scale == 2.0**59


def beyond_grid_in_fp16() -> tuple[StepResult, float]:
    """A step with a grid that is much too fine, in float16, and the loss scale after it."""
    run = begun("bloom", Layout(1, {}, same=FP16))
    assert run.model.exact is not None
    assert run.loss_scale is not None
    run.model.exact.state.maxima[NARROW] = 2.0**-60
    return stepped(run, 0), run.loss_scale.scale


def test_a_gradient_beyond_its_grid_leaves_the_loss_scale():
    ((result, scale),) = ranks.run(1, beyond_grid_in_fp16)
    assert result.beyond_grid == (NARROW,)
    assert not result.overflowed
    assert scale == 20000.0


def norms_in_fp16() -> list[float]:
    """The norms of the first gradient with loss scales of 2^10 and 2^14, which round the same in float16."""
    found = []
    for exponent in (10, 14):
        scaled = {"precision": {"params": "float16", "initial_loss_scale": 2.0**exponent}}
        found.append(stepped(begun("llama", Layout(1, {}, same=scaled)), 0).grad_norm)
    found.append(stepped(begun("llama", Layout(1, {})), 0).grad_norm)
    return found


def test_the_loss_scale_is_in_no_gradient():
    (norms,) = ranks.run(1, norms_in_fp16)
    assert norms[0] == pytest.approx(norms[2], rel=1e-2)
    assert norms[1] == pytest.approx(norms[2], rel=1e-2)


def sums_of_losses() -> tuple[float, float]:
    """A microbatch's sum of losses, in training and in validation."""
    run = begun("llama", Layout(1, {}))
    fixed_point.SCALAR = 2.0**10  # a coarse grid, as a loss in fp32 has few bits
    rows = [microbatch("llama", [S - 1])]
    return run.model.forward_backward(rows, {"tokens": 1.0}).item(), run.model.losses(rows).item()


def test_sums_of_losses_are_multiples_of_the_grid_in_training_and_validation():
    (found,) = ranks.run(1, sums_of_losses)
    for total in found:
        assert 0 < total < 8
        assert (total * 2**10).is_integer()
