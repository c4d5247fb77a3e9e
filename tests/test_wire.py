"""The formulas of traffic.py against what a step hands to torch.distributed, operation by operation."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dtmega import config, families, mesh, train
from dtmega.checkpoint.state import HEALTHY
from dtmega.data.loader import StepBatch
from dtmega.distributed import exit_codes
from dtmega.mesh import World
from dtmega.ops import cross_entropy
from dtmega.ops.attention import attention
from dtmega.ops.attention_rule import attention_rule
from dtmega.ops.context_parallel import ContextParallel
from dtmega.ops.optim import build_optimizer
from dtmega.pipelining.schedule import splits_backward
from dtmega.pipelining.split import plan_stages
from dtmega.plans import mappings
from dtmega.training.choices import wraps
from dtmega.training.health import Health
from dtmega.training.pace import Pace
from dtmega.training.parallelize import parallelize
from dtmega.training.phases import StepTimes
from tests import ranks
from tests.traffic import KINDS, Traffic, attention_over_ranks, sent_bytes, traffic_of_a_step

CHUNK_TOKENS = 16  # of the loss; a microbatch has 3 x 8 tokens, so a full chunk and a smaller one
MODEL = {"vocab_size": 31, "hidden_size": 16, "n_heads": 4}
ONLY_STEPS = {
    "train": {"steps": 9, "drift_interval": 0},
    "eval": {"interval": 0},
    "checkpoint": {"interval": 0},
    "compile": {"enable": False},
}

# Name -> processes, the smallest number of microbatches, keys.
AXES: dict[str, tuple[int, int, dict[str, Any]]] = {
    "tp 2": (2, 1, {"mesh": {"tp": 2}, "model": {"label_smoothing": 0.1}}),
    "tp 2, no sequence parallel": (2, 1, {"mesh": {"tp": 2, "sequence_parallel": False}}),
    "dp_shard 2": (2, 1, {"mesh": {"dp_shard": 2}}),
    "dp_shard 2, weights kept": (2, 1, {"mesh": {"dp_shard": 2}, "fsdp": {"reshard_after_forward": False}}),
    "dp_replicate 2": (2, 1, {"mesh": {"dp_replicate": 2}}),
    "dp_shard 2 x tp 2": (4, 1, {"mesh": {"dp_shard": 2, "tp": 2}}),
    "pp 2, 1F1B": (2, 2, {"mesh": {"pp": 2}}),
    "cp 2, gather": (2, 1, {"mesh": {"cp": 2, "cp_form": "gather"}}),
    "cp 2, heads": (2, 1, {"mesh": {"cp": 2, "cp_form": "heads"}}),
}
TP2: dict[str, Any] = {"mesh": {"tp": 2}}
TP2_ALONE: dict[str, Any] = {"mesh": {"tp": 2, "sequence_parallel": False}}
HSDP: dict[str, Any] = {"mesh": {"dp_replicate": 2, "dp_shard": 2}}
SHARDED = {"fsdp": {"accumulate": "sharded"}}
V32 = {"model": {"pad_vocab_to_multiple": 4}}  # every rank has as much of the tied weight
FP32_STREAM = {"model": {"fp32_residual": True}}
MORE: dict[str, tuple[int, int, dict[str, Any]]] = {
    "tp 2, recompute": (2, 1, {**TP2, "recompute": {"mode": "full"}, "model": {"hidden_dropout": 0.1}}),
    "tp 2, recompute of one layer": (2, 1, {**TP2, "recompute": {"mode": "full", "method": "block", "layers": 1}}),
    "tp 2, no sequence parallel, recompute": (2, 1, {**TP2_ALONE, "recompute": {"mode": "selective"}}),
    "dp_shard 2, bf16": (2, 1, {"mesh": {"dp_shard": 2}, "precision": {"params": "bfloat16"}}),
    "dp_replicate 2, bf16": (2, 1, {"mesh": {"dp_replicate": 2}, "precision": {"params": "bfloat16"}}),
    "dp_replicate 2 x dp_shard 2, bf16 sums": (4, 1, {**HSDP, "precision": {"reduce": "bfloat16"}}),
    "pp 2 x dp_replicate 2, ZBV": (
        4,
        2,
        {"mesh": {"pp": 2, "dp_replicate": 2}, "pipeline": {"schedule": "ZBVZeroBubble"}, **V32},
    ),
    "pp 2 x tp 2, ZBV": (4, 2, {"mesh": {"pp": 2, "tp": 2}, "pipeline": {"schedule": "ZBVZeroBubble"}, **V32}),
    "pp 2 x dp_shard 2": (4, 2, {"mesh": {"pp": 2, "dp_shard": 2}, **V32}),
    "pp 2 x tp 2, bf16": (4, 2, {"mesh": {"pp": 2, "tp": 2}, "precision": {"params": "bfloat16"}, **V32}),
    "pp 2, bf16, fp32 stream": (2, 2, {"mesh": {"pp": 2}, "precision": {"params": "bfloat16"}, **FP32_STREAM}),
    "cp 2, gather, recompute": (2, 1, {"mesh": {"cp": 2, "cp_form": "gather"}, "recompute": {"mode": "full"}}),
    "cp 2, heads, recompute": (2, 1, {"mesh": {"cp": 2, "cp_form": "heads"}, "recompute": {"mode": "selective"}}),
    "cp 2 x tp 2": (4, 1, {"mesh": {"cp": 2, "cp_form": "gather", "tp": 2}, **V32}),
    "cp 2 x tp 2, heads, bf16": (
        4,
        1,
        {"mesh": {"cp": 2, "cp_form": "heads", "tp": 2}, "precision": {"params": "bfloat16"}, **V32},
    ),
    "cp 2 x dp_shard 2": (4, 1, {"mesh": {"cp": 2, "cp_form": "heads", "dp_shard": 2}}),
    "cp 2 x dp_replicate 2": (4, 1, {"mesh": {"cp": 2, "cp_form": "gather", "dp_replicate": 2}}),
    "cp 2 x pp 2": (4, 2, {"mesh": {"cp": 2, "cp_form": "gather", "pp": 2}, **V32}),
    "dp_shard 2, sharded gradients": (2, 2, {"mesh": {"dp_shard": 2}, **SHARDED}),
    "dp_replicate 2, sharded gradients": (2, 2, {"mesh": {"dp_replicate": 2}, **SHARDED}),
    "dp_replicate 2 x cp 2, sharded gradients": (
        4,
        2,
        {"mesh": {"dp_replicate": 2, "cp": 2, "cp_form": "gather"}, **SHARDED},
    ),
    "pp 2 x dp_shard 2, sharded gradients": (4, 2, {"mesh": {"pp": 2, "dp_shard": 2}, **V32, **SHARDED}),
    "pp 2 x dp_shard 2, ZBV, sharded gradients": (
        4,
        2,
        {"mesh": {"pp": 2, "dp_shard": 2}, "pipeline": {"schedule": "ZBVZeroBubble"}, **V32, **SHARDED},
    ),
    "dp_shard 2, more metrics": (2, 1, {"mesh": {"dp_shard": 2}, "log": {"num_zeros": True, "params_norm": True}}),
}


class Wire(TorchDispatchMode):
    """Counts what is handed to groups of more than one rank while it is active, forward and backward.

    On a CPU autograd runs backward in the thread that called it, so the mode is active there too.

    Attributes:
        seen: (group, kind, payload bytes) -> operations. A group is called by all its names: those with the same
            ranks share one.
    """

    def __init__(self, groups: dict[str, dist.ProcessGroup]) -> None:
        super().__init__()
        self.names: dict[str, str] = {}
        for name, group in groups.items():
            self.names[group.group_name] = " = ".join(filter(None, (self.names.get(group.group_name), name)))
        self.alone = {group.group_name for group in groups.values() if group.size() == 1}
        self.seen: Counter[tuple[str, str, int]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        group = group_name(func, args, kwargs) if "c10d" in func.namespace else ""
        if group and group not in self.alone:
            payload_bytes = max(
                sum(t.nbytes for t in tree_leaves(x) if isinstance(t, torch.Tensor)) for x in (*args, out)
            )
            self.seen[self.names[group], KINDS[func.name()], payload_bytes] += 1
        return out


def group_name(func: Any, args: Any, kwargs: Any) -> str:
    """The name of the group that an operation is handed to; '' if to none, as waiting is."""
    named = {**dict(zip((a.name for a in func._schema.arguments), args, strict=False)), **kwargs}
    group = named.get("process_group", named.get("group_name", ""))
    return dist.ProcessGroup.unbox(group).group_name if isinstance(group, torch.ScriptObject) else group


def start(cfg: config.Config) -> tuple[World, dict[str, dist.ProcessGroup]]:
    world = mesh.start(torch.device("cpu"), mesh.resolve(cfg.mesh, dist.get_world_size()))
    assert dist.group.WORLD is not None
    world.groups["world"] = dist.group.WORLD
    return world, world.groups


Counted = list[tuple[Counter[tuple[str, str, int]], Counter[tuple[str, str, int]]]]


def all_counted(layouts: dict[str, list[dict[str, Any]]]) -> dict[str, Counted]:
    """One layout after the other."""
    return {name: counted_and_expected(values) for name, values in layouts.items()}


def counted_and_expected(values: list[dict[str, Any]]) -> Counted:
    """The operations of this rank in the second step of each configuration (all of one mesh), and by the formula."""
    cross_entropy.CHUNK_TOKENS, cross_entropy.CHUNK_LOGITS = {"cpu": CHUNK_TOKENS}, 0
    world, groups = start(config.validate(values[0], "test"))
    found = []
    for cfg in (config.validate(v, "test") for v in values):
        model = parallelize(cfg, world)
        model.draw(cfg.run.seed)
        optimizer = build_optimizer(model.named_parameters(), cfg.optim)
        wire, text = Wire(groups), Mock(splits={"valid": None})
        with contextlib.ExitStack() as second_step, contextlib.suppress(StopIteration):
            batches: Any = two_batches(cfg, world, functools.partial(second_step.enter_context, wire))
            nobody = {
                "checkpoints": Mock(),
                "metrics": Mock(),
                "watch": Mock(signals=[]),
                "phases": Mock(**{"end_step.return_value": StepTimes(1.0, {}, 1.0)}),
                "health": Health(cfg.train, HEALTHY),
                "pace": Pace(0, world.device),
                "exit_status": exit_codes.ExitStatus(),
            }
            nobody["checkpoints"].poll.return_value = []
            run = train.Run(cfg, cfg, world, text, model, optimizer, batches, **nobody)
            train.train(run, train.Progress())
        pieces, pipeline, splits = families.pieces(cfg.model), {}, False
        if world.sizes["pp"] > 1:
            stages = plan_stages(cfg, pieces, world.sizes["pp"])
            splits = splits_backward(cfg, world.sizes["pp"])
            held = stages.ranks[world.coordinate("pp")]
            pipeline = {"stages": stages.pieces, "held": held, "splits_backward": splits}
        wrapped = wraps(cfg, world.sizes, splits)
        expected: Counter[tuple[str, str, int]] = Counter()
        for traffic in traffic_of_a_step(cfg, pieces, world.sizes, CHUNK_TOKENS, wrapped, **pipeline):
            for _, axis, kind, ops, payload_bytes in handed_to_gloo(traffic, world.sizes):
                expected[wire.names[groups[axis].group_name], kind, payload_bytes] += ops
        found.append((wire.seen, expected))
    return found


def handed_to_gloo(traffic: Traffic, sizes: dict[str, int]) -> list[Traffic]:
    """The operations on a CPU, where FSDP's two collectives are a message to, and one from, each other rank."""
    n = sizes["dp_shard"] * sizes["cp"]
    if traffic.axis != "fsdp":
        return [traffic]
    ops, payload_bytes = (n - 1) * traffic.ops, traffic.payload_bytes // n
    return [traffic._replace(kind=kind, ops=ops, payload_bytes=payload_bytes) for kind in ("send", "receive")]


def two_batches(cfg: config.Config, world: World, count: Callable[[], object]) -> Iterator[StepBatch]:
    size, shape = cfg.batch.global_batch_size, (cfg.batch.micro_batch_size, cfg.data.seq_len)
    microbatch = {
        "tokens": torch.arange(shape[0] * shape[1]).view(shape) % cfg.model.vocab_size,
        "labels": torch.ones(shape, dtype=torch.int64),
        "sample_ids": torch.arange(shape[0]),
        "places": torch.arange(shape[1]).repeat(shape[0], 1),
    }
    batch = StepBatch(0, size, [microbatch] * (size // (world.data_size * shape[0])))
    yield batch
    count()  # from here on: the first step also checks that ranks have the same batch
    yield batch


def wasteful(values: list[dict[str, Any]]) -> Counted:
    """The same, where leaving a parallel region gathers twice in its backward."""
    honest = mappings._Scatter.backward
    mappings._Scatter.backward = staticmethod(lambda ctx, *grads: (honest(ctx, *grads), honest(ctx, *grads))[0])
    return counted_and_expected(values)


def in_both_vocabularies() -> Counter:
    _, groups = start(config.validate({**ONLY_STEPS, "mesh": {"tp": 2}}, "test"))
    group, functional = groups["tp"], torch.ops._c10d_functional
    x, both = torch.ones(4), torch.ones(8)
    with Wire(groups) as wire:
        dist.all_reduce(x, group=group)
        mappings._all_gather_into(both, x, group=group)
        mappings._reduce_scatter_into(x, both, group=group)
        functional.wait_tensor(functional.all_reduce(x, "sum", group.group_name))
        functional.wait_tensor(functional.all_gather_into_tensor(x, 2, group.group_name))
        functional.wait_tensor(functional.reduce_scatter_tensor(both, "sum", 2, group.group_name))
    return wire.seen


def settings(keys: dict[str, Any], n_layers: int, sequences: int) -> dict[str, Any]:
    return {
        **ONLY_STEPS,
        **keys,
        "model": {**MODEL, "n_layers": n_layers, **keys.get("model", {})},
        "data": {"seq_len": 8},
        "batch": {"micro_batch_size": 3, "global_batch_size": 3 * sequences},
    }


# Each combines what other cases have one by one.
REPEATS = {"pp 2 x tp 2, ZBV", "dp_replicate 2 x dp_shard 2, bf16 sums"}
REPEATS |= {"cp 2 x tp 2", "cp 2 x dp_shard 2", "cp 2 x dp_replicate 2", "cp 2 x pp 2", "pp 2 x dp_shard 2"}
REPEATS |= {"dp_shard 2 x tp 2"}
REPEATS |= {f"{name}, sharded gradients" for name in ("dp_shard 2", "dp_replicate 2", "pp 2 x dp_shard 2")}


@functools.cache
def configurations(repeats: bool) -> dict[str, tuple[int, list[dict[str, Any]]]]:
    """Name -> processes, and a configuration for each number of layers and factor of microbatches."""
    found = {}
    for layouts in (AXES, MORE):
        for name, (n, least, keys) in layouts.items():
            # What a layer and a microbatch add is seen on the axes alone. ZBV has four stages.
            more = [(4, 2)] if "ZBV" in name else [(2, 2)]
            sizes = [(2, 1), (3, 2)] if layouts is AXES else more
            data = keys["mesh"].get("dp_shard", 1) * keys["mesh"].get("dp_replicate", 1)
            values = [settings(keys, n_layers, factor * least * data) for n_layers, factor in sizes]
            if (name in REPEATS) is repeats:
                found[name] = (n, values)
    return found


@functools.cache
def measured(n: int, repeats: bool) -> list[dict[str, Counted]]:
    """The results by rank of every layout of so many processes, in one group."""
    layouts = {name: values for name, (size, values) in configurations(repeats).items() if size == n}
    return ranks.run(n, all_counted, layouts)


def check(name: str) -> None:
    """Check each number of layers and factor of microbatches, on every rank."""
    repeats = name in REPEATS
    n, values = configurations(repeats)[name]
    for rank, found in enumerate(measured(n, repeats)):
        for value, (counted, expected) in zip(values, found[name], strict=True):
            assert counted == expected, f"rank {rank} of {value}"


def rows(layouts: Iterable[str]) -> list[Any]:
    return [pytest.param(name, marks=pytest.mark.full if name in REPEATS else ()) for name in layouts]


@pytest.mark.parametrize("name", rows(AXES))
def test_a_step_is_what_the_formula_says_per_layer_and_per_microbatch(name: str):
    check(name)


@pytest.mark.parametrize("name", rows(MORE))
def test_a_step_is_what_the_formula_says_with_more_to_it(name: str):
    check(name)


def attended(cases: list[tuple[int, int]]) -> list[Counted]:
    """The operations over cp of one attention, forward and backward, in both forms, and by the formula."""
    n = dist.get_world_size()
    _, groups = start(config.validate({**ONLY_STEPS, "mesh": {"cp": n}}, "test"))
    of_rank, head_size = 4, 8
    places = torch.arange(n * of_rank).view(1, -1)
    found = []
    for n_heads, n_kv_heads in cases:
        both: Counted = []
        for by_heads in (False, True):
            context = ContextParallel(groups["cp"], by_heads)
            shapes = [(1, heads, of_rank, head_size) for heads in (n_heads, n_kv_heads, n_kv_heads)]
            q, k, v = (torch.ones(shape, requires_grad=True) for shape in shapes)
            rule = attention_rule(context.slice(places, True), causal=True, context=context)
            with Wire(groups) as wire:
                attention(q, k, v, rule).sum().backward()
            expected: Counter[tuple[str, str, int]] = Counter()
            for one in attention_over_ranks(by_heads, False, 1, 1, n_heads, n_kv_heads, of_rank * head_size * 4, n):
                expected[wire.names[groups["cp"].group_name], one.kind, one.payload_bytes] += one.ops
            both.append((wire.seen, expected))
        found.append(both)
    return found


SHARED_KEYS = [(6, 6), (12, 6), (24, 6)]


@pytest.mark.parametrize("n", [2, 3])
def test_attention_over_ranks_sends_what_the_formula_says_where_heads_share_keys(n: int):
    for both in itertools.chain.from_iterable(ranks.run(n, attended, SHARED_KEYS)):
        for counted, expected in both:
            assert counted == expected


# Heads of queries, heads of keys, cp, tp. Of two equals gathering is chosen, which any number of heads allows.
WHERE = [(12, 12, cp, tp) for cp in (2, 3, 4) for tp in (1, 2)] + [(32, 32, 2, 4), (32, 32, 8, 4), (64, 8, 2, 1)]
WHERE += [(64, 8, 8, 1), (64, 8, 4, 2), (32, 8, 4, 1), (32, 8, 8, 1), (16, 8, 4, 1), (16, 8, 2, 4), (24, 12, 3, 1)]


@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize(("n_heads", "n_kv_heads", "cp", "tp"), WHERE)
def test_the_form_that_is_chosen_is_the_one_that_sends_fewer_bytes(
    n_heads: int, n_kv_heads: int, cp: int, tp: int, recomputes: bool
):
    model = {"name": "llama", "hidden_size": 4 * n_heads, "n_heads": n_heads, "n_kv_heads": n_kv_heads}
    recompute = {"recompute": {"mode": "full" if recomputes else "none"}}
    cfg = config.validate({**ONLY_STEPS, "mesh": {"cp": cp, "tp": tp}, "model": model, **recompute}, "test")
    heads, kv_heads = n_heads // tp, n_kv_heads // tp
    gather, exchange = (
        sent_bytes(attention_over_ranks(by_heads, recomputes, 1 + recomputes, 1, heads, kv_heads, 2**10, cp), cp)
        for by_heads in (False, True)
    )
    divides = heads % cp == 0 and kv_heads % cp == 0
    sizes = mesh.resolve(cfg.mesh, cp * tp)
    assert families.of(cfg.model).attends_by_heads(cfg, sizes) is (divides and exchange < gather)


def test_a_pipeline_that_gathers_several_times_a_step_has_no_formula():
    keys = {"mesh": {"pp": 2, "dp_shard": 2}, "fsdp": {"reshard_after_forward": True}}
    cfg = config.validate(settings(keys, 2, 4), "test")
    sizes = mesh.resolve(cfg.mesh, 4)
    with pytest.raises(ValueError, match="reshard_after_forward=True"):
        traffic_of_a_step(cfg, families.pieces(cfg.model), sizes, CHUNK_TOKENS, True, [["layers.0"], ["layers.1"]])
    many = config.validate(settings({"mesh": {"pp": 2, "dp_shard": 2}}, 8, 4), "test")
    pieces, stages = families.pieces(many.model), [[f"layers.{i}"] for i in range(8)]
    assert traffic_of_a_step(many, pieces, sizes, CHUNK_TOKENS, True, stages, held=(0, 2, 4))
    with pytest.raises(ValueError, match="and 4 stages per rank"):
        traffic_of_a_step(many, pieces, sizes, CHUNK_TOKENS, True, stages, held=(0, 2, 4, 6))


def test_layers_that_are_not_megatrons_have_no_formula():
    cfg = config.validate(settings({"mesh": {"tp": 2}}, 2, 4), "test")
    pieces = families.pieces(cfg.model)
    pieces[2] = pieces[2]._replace(elements=pieces[2].elements - 1)
    with pytest.raises(ValueError, match=r"layers.1 has 3279 elements, expected Megatron's 3280 \(\[model\] name\)"):
        traffic_of_a_step(cfg, pieces, mesh.resolve(cfg.mesh, 2), CHUNK_TOKENS, wrapped=False)


def test_ends_with_learned_positions_have_no_formula():
    keys = settings({"mesh": {"tp": 2}}, 2, 4)
    keys["model"] |= {"name": "gpt", "max_position_embeddings": 12}
    cfg = config.validate(keys, "test")
    with pytest.raises(ValueError, match=r"no formula for the ends of this model: .* \(\[model\] name\)"):
        traffic_of_a_step(cfg, families.pieces(cfg.model), mesh.resolve(cfg.mesh, 2), CHUNK_TOKENS, wrapped=False)


def test_an_all_gather_that_nobody_asked_for_is_found_in_backward():
    ((counted, expected),) = ranks.run(2, wasteful, [settings({"mesh": {"tp": 2}}, 3, 1)])[0]
    assert counted - expected == {("tp = shards = model = world", "all-gather", 3 * 8 * 16 * 4): 2 * 3 + 1}


def test_operations_count_the_same_in_place_and_functional():
    gathered = {("tp = shards = model = world", kind, 32): 2 for kind in ("all-gather", "reduce-scatter")}
    assert ranks.run(2, in_both_vocabularies)[0] == {("tp = shards = model = world", "all-reduce", 16): 2, **gathered}
