"""Gradients that add up in shards: their values, losses, and the bytes that a rank holds between microbatches.

The wire is in tests/test_wire.py, the choice of [fsdp] accumulate in tests/training/test_choices.py.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from dtmega import config, families, mesh
from dtmega.data.objectives.rows import IGNORED
from dtmega.fsdp.sends import ReducesAndScatters
from dtmega.fsdp.shard_sums import ShardSums
from dtmega.models.initial import init_weights
from dtmega.ops import optim, ranges
from dtmega.ops.shards import boxes, local
from dtmega.training.checks import check
from dtmega.training.parallelize import parallelize
from dtmega.training.sharded_model import ShardedModel
from tests import ranks

V, D, HEADS, S, T, B, SEQUENCES = 32, 16, 4, 8, 4, 1, 8
FROZEN = ("embed_norm.weight", "layers.1.mlp.up.weight")
DECODER = {"name": "bloom", "n_layers": 4, "hidden_dropout": 0.1}
T5 = {"name": "t5", "n_layers": 2, "n_decoder_layers": 2, "kv_channels": 4}
SCHEDULES = ("GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")


def layout(model: dict[str, Any] = DECODER, schedule: str = "", **sizes: int) -> dict[str, Any]:
    """The sections of a configuration; without a given size, dp_shard is what is left of the ranks."""
    pipeline = {"pipeline": {"schedule": schedule}} if schedule else {}
    return {"model": model, "mesh": sizes, **pipeline}


# Name -> sections, on 4 ranks.
LAYOUTS = {
    "dp_shard 4": layout(),
    "HSDP 2 x 2": layout(dp_replicate=2),
    "cp 2 x dp_shard 2": layout(cp=2),
    "dp_shard 2 x tp 2": layout(tp=2),
    "cp 2 x dp_replicate 2": layout(cp=2, dp_replicate=2),
    "t5, dp_shard 4": layout(T5),
    "t5, pp 2 x dp_shard 2": layout(T5, "1F1B", pp=2),
    **{f"pp 2 x dp_shard 2, {name}": layout(schedule=name, pp=2) for name in SCHEDULES},
    "pp 2 x cp 2, ZBVZeroBubble": layout(schedule="ZBVZeroBubble", pp=2, cp=2),
}
# Copies of shards, two stacks with a backward in one part, and a backward in two parts.
LIGHT = {"HSDP 2 x 2", "t5, pp 2 x dp_shard 2", "pp 2 x dp_shard 2, ZBVZeroBubble"}
LONG = {
    "dp_shard 2": (2, layout()),
    "HSDP 2 x 2": (4, LAYOUTS["HSDP 2 x 2"]),
    "pp 2 x dp_shard 2, ZBVZeroBubble": (4, LAYOUTS["pp 2 x dp_shard 2, ZBVZeroBubble"]),
}
EIGHT = {"name": "bloom", "n_layers": 8}
# Name -> processes, and sections of a model with 8 layers, which put two into each of the V's stages.
WEIGHED = {
    "dp_shard 2": (2, layout(EIGHT)),
    "dp_shard 2, bf16": (2, {**layout(EIGHT), "precision": {"params": "bfloat16"}}),
    "pp 2 x dp_shard 2, 1F1B": (4, layout(EIGHT, "1F1B", pp=2)),
    "pp 2 x dp_shard 2, ZBVZeroBubble": (4, layout(EIGHT, "ZBVZeroBubble", pp=2)),
}
LIGHT |= {"dp_shard 2"}


def names(layouts: Iterable[str], light: set[str] = LIGHT) -> list[Any]:
    return [pytest.param(name, marks=() if name in light else pytest.mark.full) for name in layouts]


STEPS = 20


def configured(sections: dict[str, Any], accumulate: str) -> config.Config:
    sizes = {"vocab_size": V, "hidden_size": D, "n_heads": HEADS, "init_std": 0.2}
    is_t5 = sections["model"]["name"] == "t5"
    keys: dict[str, Any] = {
        "data": {"seq_len": S, **({"decoder_seq_len": T} if is_t5 else {})},
        "batch": {"micro_batch_size": B, "global_batch_size": SEQUENCES},
        "train": {"steps": STEPS},
        "optim": {"eps": 1e-6},
        "compile": {"enable": False},
        "fsdp": {"accumulate": accumulate},
    }
    if is_t5:
        del sizes["init_std"]
    return config.validate({**keys, **sections, "model": {**sizes, **sections["model"]}}, "test")


def rows(is_t5: bool, step: int = 0) -> dict[str, Tensor]:
    """A global batch, whose sequences have other numbers of labels."""
    generator = torch.Generator().manual_seed(step)
    length = T if is_t5 else S
    ids = torch.randint(V, (SEQUENCES, length + 1), generator=generator)
    labels = ids[:, 1:].where(torch.arange(length) >= torch.arange(SEQUENCES).unsqueeze(1) % length, IGNORED)
    ids, places = ids[:, :-1].contiguous(), torch.arange(length).repeat(SEQUENCES, 1)
    found = {"labels": labels, "sample_ids": torch.arange(SEQUENCES)}
    if not is_t5:
        return {**found, "tokens": ids, "places": places}
    text = torch.randint(V, (SEQUENCES, S), generator=generator)
    return {
        **found,
        "decoder_tokens": ids,
        "decoder_places": places,
        "tokens": text,
        "places": torch.arange(S).repeat(SEQUENCES, 1),
        "document_ids": torch.zeros_like(text),
        "decoder_document_ids": torch.zeros_like(ids),
    }


def n_labels(batch: dict[str, Tensor]) -> float:
    return float((batch["labels"] != IGNORED).sum())


def mine(batch: dict[str, Tensor], world: mesh.World) -> list[dict[str, Tensor]]:
    """The microbatches of this rank."""
    parts = {name: t.chunk(world.data_size)[world.data_rank].split(B) for name, t in batch.items()}
    return [dict(zip(parts, values, strict=True)) for values in zip(*parts.values(), strict=True)]


def built(sections: dict[str, Any], accumulate: str) -> ShardedModel:
    cfg = configured(sections, accumulate)
    world = mesh.start(torch.device("cpu"), mesh.resolve(cfg.mesh, dist.get_world_size()))
    check(cfg, world.sizes, world.device)
    model = parallelize(cfg, world)
    model.draw(seed=0)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name not in FROZEN)
    return model


class Held:
    """The bytes of this rank's gradients and of what they are reduced in, whole gradients and shards alike.

    These are the bytes of storages, each counted once: of `.grad`, and of the buffers of reduce-scatters.

    Attributes:
        between: at the end of each backward.
        reducing: at each reduce-scatter, without the gradients that it reduces and without buffers.
    """

    def __init__(self) -> None:
        gc.collect()
        self._before = gradient_bytes([])  # of models that others still refer to
        self.between: list[int] = []
        self.reducing: list[int] = []

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        honest_range, honest_sum, honest_buffer = ranges.named, ReducesAndScatters.__call__, ReducesAndScatters.allocate
        buffers: list[weakref.ref[Tensor]] = []

        @contextlib.contextmanager
        def named(name: str, stage: int, microbatch: int) -> Iterator[None]:
            with honest_range(name, stage, microbatch):
                yield
            if name.startswith("backward"):
                self.between.append(gradient_bytes(buffers) - self._before)

        def reduce(this: ReducesAndScatters, *args: Any, **keywords: Any) -> None:
            self.reducing.append(gradient_bytes([]) - self._before)
            honest_sum(this, *args, **keywords)

        def allocate(this: ReducesAndScatters, *args: Any, **keywords: Any) -> Tensor:
            buffer = honest_buffer(this, *args, **keywords)
            buffers.append(weakref.ref(buffer))
            return buffer

        with (
            patch.object(ranges, "named", named),
            patch.object(ReducesAndScatters, "__call__", reduce),
            patch.object(ReducesAndScatters, "allocate", allocate),
        ):
            yield


def gradient_bytes(buffers: Sequence[weakref.ref[Tensor]]) -> int:
    """The bytes of the gradients of all parameters of this process, also of those that no module has at present."""
    storages = {}
    for reference in buffers:
        buffer = reference()
        if buffer is not None:
            storages[buffer.untyped_storage().data_ptr()] = buffer.untyped_storage().nbytes()
    for each in gc.get_objects():
        if isinstance(each, nn.Parameter) and each.grad is not None:
            storage = local(each.grad).untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
        elif type(each).__name__ == "FSDPParam" and each.unsharded_accumulated_grad is not None:
            # In mixed precision FSDP2 keeps whole gradients in fp32, without a parameter.
            storage = each.unsharded_accumulated_grad.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


Parts = dict[str, list[tuple[tuple[slice, ...], Tensor]] | None]  # None: no gradient


def gradients_of(layouts: dict[str, dict[str, Any]]) -> dict[str, list[Parts]]:
    return {name: in_shards(sections) for name, sections in layouts.items()}


def in_shards(sections: dict[str, Any]) -> list[Parts]:
    """This rank's parts of gradients that add up in shards, of two equal steps with an evaluation between them."""
    model = built(sections, "sharded")
    batch = rows(sections["model"]["name"] == "t5")
    found = []
    for _ in range(2):
        model.losses(mine(batch, model.world))
        for _, parameter in model.named_parameters():
            parameter.grad = None
        model.forward_backward(mine(batch, model.world), {"tokens": n_labels(batch)})
        parts: Parts = {}
        # The copies of a tied parameter are compared by `losses_of`.
        for name, parameter in model.owned().items():
            gradient = parameter.grad
            parts[name] = None if gradient is None else [(box.where, box.part.clone()) for box in boxes(gradient)]
        found.append(parts)
    return found


@functools.cache
def truth(is_t5: bool) -> dict[str, Tensor]:
    """The gradients of the whole batch at once, by plain autograd."""
    cfg = configured(layout(T5 if is_t5 else DECODER), "whole")
    model = families.build(cfg)
    init_weights(model, seed=0)
    model.init_buffers(cfg.run.seed)
    batch = rows(is_t5)
    (model(**batch)["lm"] / n_labels(batch)).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def asked(request: pytest.FixtureRequest, fixture: str) -> set[str]:
    """The layouts of this session's tests that use the fixture."""
    items = [item for item in request.session.items if item.path == request.path and fixture in item.fixturenames]
    return {item.callspec.params["name"] for item in items}


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest) -> dict[str, list[list[Parts]]]:
    """Layout -> what each rank found; of those that are asked for, in one group."""
    layouts = {name: LAYOUTS[name] for name in asked(request, "found")}
    results = ranks.run(4, gradients_of, layouts)
    return {name: [result[name] for result in results] for name in layouts}


@pytest.mark.parametrize("name", names(LAYOUTS, LIGHT - {"pp 2 x dp_shard 2, ZBVZeroBubble"}))
def test_every_gradient_is_that_of_the_whole_batch_on_one_process_and_frozen_parameters_have_none(found, name: str):
    expected = truth(name.startswith("t5"))
    seen = {parameter: torch.zeros_like(gradient) for parameter, gradient in expected.items()}
    for rank in found[name]:
        for of_step in rank:
            for parameter, parts in of_step.items():
                if parameter in FROZEN:
                    assert parts is None
                    continue
                assert parts is not None
                for where, part in parts:
                    assert (part - expected[parameter][where]).abs().max() <= 1e-5 * expected[parameter].abs().max()
                    seen[parameter][where] = 1
    assert {parameter for parameter, places in seen.items() if not places.all()} == set(FROZEN) & seen.keys()


def held_by(sections: dict[str, Any], accumulate: str) -> Held:
    model, held = built(sections, accumulate), Held()
    batch = rows(is_t5=False)
    for _, parameter in model.named_parameters():
        parameter.requires_grad_(True)
    with held.watching():
        model.forward_backward(mine(batch, model.world), {"tokens": n_labels(batch)})
    return held


def all_held(layouts: dict[str, dict[str, Any]]) -> dict[str, dict[str, Held]]:
    modes = ("whole", "sharded")
    return {name: {how: held_by(sections, how) for how in modes} for name, sections in layouts.items()}


# Elements of a layer (two LayerNorms, QKV, output, MLP) and of each end (the tied weight, a LayerNorm).
LAYER, END = 12 * D * D + 13 * D, V * D + 2 * D
# Name -> elements of the gradients on each rank before they are sharded.
ELEMENTS = {
    "dp_shard 2": [END + 8 * LAYER + 2 * D] * 2,
    "dp_shard 2, bf16": [END + 8 * LAYER + 2 * D] * 2,
    "pp 2 x dp_shard 2, 1F1B": [END + 4 * LAYER] * 4,
    "pp 2 x dp_shard 2, ZBVZeroBubble": [2 * END + 4 * LAYER] * 2 + [4 * LAYER] * 2,
}


@pytest.fixture(scope="module")
def weighed(request: pytest.FixtureRequest) -> dict[str, list[dict[str, Held]]]:
    """Layout -> what each rank held, in each mode; of those that are asked for, in one group for each size."""
    held, wanted = {}, asked(request, "weighed")
    for n in (2, 4):
        layouts = {name: sections for name, (size, sections) in WEIGHED.items() if size == n and name in wanted}
        if not layouts:
            continue
        results = ranks.run(n, all_held, layouts)
        held |= {name: [result[name] for result in results] for name in layouts}
    return held


@pytest.mark.parametrize("name", names(WEIGHED))
def test_between_microbatches_a_rank_holds_whole_gradients_or_its_shards(weighed, name: str):
    for held, elements in zip(weighed[name], ELEMENTS[name], strict=True):
        assert max(held["whole"].between) == 4 * elements
        assert max(held["sharded"].between) == 4 * elements / 2


@pytest.mark.parametrize("name", names(WEIGHED))
def test_within_a_backward_the_gradients_outside_of_blocks_wait_whole_and_of_no_other_block(weighed, name: str):
    for held, elements in zip(weighed[name], ELEMENTS[name], strict=True):
        assert max(held["sharded"].reducing) <= 4 * elements / 2 + 4 * (END + 2 * D)
        assert 4 * (END + 2 * D) < 4 * LAYER


def losses_of(sections: dict[str, Any]) -> list[list[float]]:
    """The losses of both modes."""
    return [twenty_steps(built(sections, how), configured(sections, how)) for how in ("whole", "sharded")]


def twenty_steps(model: ShardedModel, cfg: config.Config) -> list[float]:
    optimizer = optim.build_optimizer(model.named_parameters(), cfg.optim)
    optim.set_rates(optimizer, 1e-2, 0.1)
    found = []
    for step in range(STEPS):
        optimizer.zero_grad()
        batch = rows(is_t5=False, step=step)
        totals = model.forward_backward(mine(batch, model.world), {"tokens": n_labels(batch)})
        optimizer.step()
        dist.all_reduce(totals, group=model.world.groups["loss"])
        found.append(totals.item() / n_labels(batch))
    model.check_copies()
    return found


@pytest.mark.full  # the gradients that these losses follow from are compared one by one above
@pytest.mark.parametrize("name", LONG)
def test_twenty_losses_differ_by_at_most_a_millionth_from_those_of_whole_gradients(name: str):
    n, sections = LONG[name]
    whole, sharded = ranks.run(n, losses_of, sections)[0]
    assert abs(whole[0] - whole[-1]) > 0.1
    assert sharded == pytest.approx(whole, rel=1e-6, abs=0)


class Noting(ShardSums):
    """Notes for which microbatches it was told that they are a step's last."""

    def __init__(self, stage: nn.Module) -> None:
        super().__init__(stage)
        self.lasts: list[bool] = []

    def expect(self, last: bool) -> None:
        self.lasts.append(last)
        super().expect(last)


def lasts_of(schedules: Sequence[str]) -> dict[str, list[list[bool]]]:
    """What each of this rank's stages was told, in two steps with an evaluation after each."""
    found = {}
    for schedule in schedules:
        model = built(layout(schedule=schedule, pp=2, dp_shard=1), "whole")
        assert model.pipeline is not None
        # FSDP2 wraps the stages of a backward in two parts on a single data rank, too.
        sums = {number: Noting(stage) for number, stage in model.stages.items()}
        model.pipeline._sums = {**sums}
        for _ in range(2):
            model.forward_backward(mine(rows(is_t5=False), model.world), {"tokens": 1.0})
            model.losses(mine(rows(is_t5=False), model.world))
        found[schedule] = [one.lasts for one in sums.values()]
    return found


def test_the_last_microbatch_of_a_step_is_the_one_whose_weights_come_last_on_each_stage():
    n = SEQUENCES // B
    for found in ranks.run(2, lasts_of, ("InterleavedZeroBubble", "DualPipeV")):
        for of_stages in found.values():
            assert of_stages == [([False] * (n - 1) + [True]) * 2] * 2
