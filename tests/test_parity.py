"""The layout never changes the numbers: a debug model of each family, many layouts, and one process as the truth."""

import contextlib
import json
from collections.abc import Callable, Iterator
from functools import partial, partialmethod
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

from dtmega import config, families, train
from dtmega.data.objectives.rows import IGNORED
from dtmega.data.text import open_text
from dtmega.pipelining.tied import Tied
from dtmega.plans import styles
from dtmega.training import sharded_model, step
from tests import layouts
from tests.layouts import (
    DEBUG,
    FAMILIES,
    FP32,
    PAIRS,
    TP2,
    Run,
    bound_of,
    debug_keys,
    deviation,
    family,
    keeping_initial,
    train_debug_model,
    truth_keys,
    write_data,
)
from tests.resumed import Record, Training, flags, train_all


@pytest.fixture(scope="session")
def data(tmp_path_factory) -> dict[str, dict[str, str]]:
    return write_data(tmp_path_factory.mktemp("data"))


# Fewer steps and microbatches than in the table of docs/layouts.md, with everything in them: warm-up, decay, an
# evaluation between two steps and one behind them. A third step would only repeat what the second one does.
SHORT = {"train.steps": 2, "eval.interval": 1, "optim.warmup": 1} | PAIRS
# A layer costs what all else does, and two show what four do, where no stage needs one of its own.
FEW_LAYERS = {"model.n_layers": 2}
FEW_LAYERS_OF_TWO_STACKS = FEW_LAYERS | {"model.n_decoder_layers": 1}
NO_SAMPLE = {"eval.sample_tokens": 0}
# 3 does not divide what a sample is otherwise padded to, and no rank of cp has a part of it.
SAMPLED = ["tp 3", "t5 of megatron, V 131, tp 3", "cp 2, gather", "t5, cp 2, gather"]
FEWEST = {"batch.micro_batch_size": 0}  # of one process: as many sequences in each as divide the batch, up to 4


def shortened(keys: dict[str, Any]) -> dict[str, Any]:
    """The keys of a layout, with fewer steps, without a sample, and with fewer layers where it does not count them."""
    two_stages = keys.get("mesh.pp") == 2 and keys.get("pipeline.schedule", "1F1B") in ("1F1B", "GPipe")
    cut = keys.keys() & {"mesh.pp", "pipeline.csv", "pipeline.stages", "pipeline.split"}
    counted = "recompute.layers" in keys or (cut and not (two_stages and cut == {"mesh.pp"}))
    few = FEW_LAYERS_OF_TWO_STACKS if keys.get("model.name") == "t5" else FEW_LAYERS
    return SHORT | NO_SAMPLE | ({} if counted else few) | keys


@pytest.fixture(scope="session")
def run(tmp_path_factory, data):
    """Train the debug model; equal requests share one run."""
    done: dict[str, Run] = {}

    def run(n: int, keys: dict[str, Any], plant: Callable[[], None] | None = None) -> Run:
        request = json.dumps([n, sorted(keys.items()), plant and plant.__name__])
        if request not in done:
            every = data[family(keys)] | SHORT | keys
            done[request] = train_debug_model(n, every, tmp_path_factory.mktemp("run"), plant)
        return done[request]

    return run


# Inductor writes 18 files of C++ for a block and its backward, which take a minute of a compiler that has none of them
# yet. All that is before it (Dynamo, autograd, decompositions, the partition) is run by every `make test`, and so are
# the two kernels of a loss in ops/test_cross_entropy.py.
TRACED = "compile, without Inductor"
LAYOUTS = layouts.LAYOUTS | {TRACED: layouts.LAYOUTS["compile"]}

# Larger versions of layouts that stay, one whose time goes into compiling, and schedules that
# pipelining/test_pipelining.py also compares with one process, for fewer steps. V = 131 on tp 2 is in test_resume.py.
FULL = {"tp 4", "dp_shard 4", "pp 4", "V 131, dp_shard 4", "V 131, dp_shard 2 x tp 2", "microbatches of 8"}
FULL |= {"compile", "compile, tp 2", "bf16, tp 2", "V 131, tp 2", "fp16, dp_shard 2", "prefix, tp 2"}
FULL |= {f"{family}, tp 2" for family in FAMILIES}  # which is in dp_shard 2 x tp 2
FULL |= {"gpt, tp 4", "gpt, recompute full, tp 2"}  # whose plan is BLOOM's but for its positions
# tp 4 has all of Llama's plan, with norms of heads and windows: it copies heads of keys.
FULL |= {"llama, tp 4", "llama, dp_shard 2 x tp 2", "llama, recompute full, tp 2"}
LIGHT_OF_QWEN = {"qwen, tp 2, no sequence parallel", "qwen, tp 4", "qwen, cp 2, gather"}
FULL |= {name for name in LAYOUTS if name.startswith("qwen, ")}
FULL |= {"dp_shard 2 x tp 2", "HSDP 2 x 2"}  # with pp 2, and for GPT and BERT, these stay
FULL |= {"gpt, pp 2, 1F1B", "gpt, tp 2, no sequence parallel"}  # BERT's stages and embeddings are as these
FULL |= {"llama, pp 2, 1F1B"}  # test_lora.py has its stages
FULL |= {"tp 2", "microbatches of 2"}  # tp 3 is cut as tp 2 is; all others have other microbatches than one process
FULL |= {"fp16, tp 2", "prefix, pp 2"}  # fp16 over tp is in training/test_loss_scale.py, documents in stages are BERT's
FULL |= {"sgd, gated, dp_shard 2 x tp 2"}  # plans/ has gates over tp, ops/test_optimizers.py the formula of SGD
FULL |= {"V 128 padded to 144, tp 4", "recompute full, tp 2"}  # plans/ has both, every gradient
# Its heads over tp, and its stages, are in pp 2 x tp 2.
LIGHT_OF_BERT = {f"bert, {name}" for name in ("HSDP 2 x 2", "V 131, pp 2 x tp 2")}
FULL |= {name for name in LAYOUTS if name.startswith("bert, ")} - LIGHT_OF_BERT
# Its stages are cut in pp 3, its layers and a padded vocabulary in tp 3, its parameters in cp 2, where FSDP gathers
# them; both at once are BLOOM's and BERT's.
LIGHT_OF_T5 = {"t5, pp 3, split", "t5 of megatron, V 131, tp 3"}
FULL |= {name for name in LAYOUTS if name.startswith("t5")} - LIGHT_OF_T5
FULL |= {f"pp 2, {name}" for name in ("GPipe", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "DualPipeV")}
# Both forms of attention over cp, and cp with stages and data ranks; with tp, and families as LLaMA, in
# interop/hf/test_training.py, and prefixes in ops/test_context_parallel.py.
LIGHT_OF_CP = {"cp 2, gather", "cp 2 x pp 2, ZBV, heads", "bert, cp 3, heads"}
LIGHT_OF_CP |= {"gpt, cp 2 x dp_shard 2, gather", "t5, cp 2, gather"}
FULL |= {name for name in LAYOUTS if "mesh.cp" in LAYOUTS[name][1]}
FULL -= LIGHT_OF_CP | LIGHT_OF_QWEN
FULL |= {name for name in LAYOUTS if "sharded gradients" in name}  # fsdp/test_shard_sums.py has every gradient
# fsdp/test_exact.py has Muon to the bit where matrices are cut.
FULL |= {name for name in LAYOUTS if name.startswith("muon, ")} - {"muon, pp 2 x dp_replicate 2, ZBV"}
# Every collective of its plan, and its losses and loads over stages and parts of documents.
FULL |= {name for name in LAYOUTS if name.startswith("moe, ")}
FULL -= {"moe, ep, dp_shard 2 x tp 2", "moe, cp 2 x pp 2, ZBV, gather"}
WITH_CAPACITY = [name for name in LAYOUTS if name.startswith("moe with capacity, ")]
FULL |= {*WITH_CAPACITY}  # models/test_capacity.py has the pairs of each rank of cp, and a model's sums
EVERY = [pytest.param(name, marks=pytest.mark.full if name in FULL else ()) for name in LAYOUTS]


class Pair(NamedTuple):
    """Attributes:
    truth: of one process.
    samples: by rank and step, the numbers of those that the rank was given.
    said: what the first rank of the run printed.
    """

    run: Run
    truth: Run
    samples: list[list[list[int]]]
    said: str


@contextlib.contextmanager
def planting(folder: str, without_inductor: bool) -> Iterator[None]:
    traced = partialmethod(nn.Module.compile, backend="aot_eager_decomp_partition")
    with keeping_initial(folder), patch.object(nn.Module, "compile", traced if without_inductor else nn.Module.compile):
        yield


@pytest.fixture(scope="session")
def trained(request, tmp_path_factory, data) -> dict[str, Pair]:
    """Every layout of this session, in one group of processes: most of what a short run takes comes once a process."""
    folder = tmp_path_factory.mktemp("layouts")
    here = [item for item in request.session.items if item.path == Path(__file__)]
    asked = {item.callspec.params["name"] for item in here if "trained" in item.fixturenames}
    names = sorted((name for name in LAYOUTS if name in asked), key=lambda name: "compile" in name)  # which comes last
    asked_of = {name: shortened(LAYOUTS[name][1]) for name in names}
    for name in set(SAMPLED) & set(names):
        asked_of[name] |= {"eval.sample_tokens": DEBUG["eval.sample_tokens"]}
    layers = ("model.n_layers", "model.n_decoder_layers")
    truth_of = {
        name: SHORT
        | NO_SAMPLE
        | truth_keys(LAYOUTS[name][1])
        | FEWEST
        | {key: keys[key] for key in layers if key in keys}
        for name, keys in asked_of.items()
    }
    wanted = {str(keys): (1, keys) for keys in truth_of.values()}
    wanted |= {name: (LAYOUTS[name][0], keys) for name, keys in asked_of.items()}
    folders = {what: folder / str(i) for i, what in enumerate(wanted)}
    trainings = []
    for what, (n, keys) in wanted.items():
        plant = partial(planting, str(folders[what]), what == TRACED)
        every = debug_keys(data[family(keys)] | keys)
        trainings.append(Training(n, every, folders[what] / "run", plant))
    samples = dict(zip(wanted, train_all(trainings), strict=True))
    runs = {what: Run(left) for what, left in folders.items()}
    said = {name: (folders[name] / "run" / "stdout-0").read_text() for name in names}
    return {name: Pair(runs[name], runs[str(truth_of[name])], samples[name], said[name]) for name in names}


@pytest.mark.parametrize("name", EVERY)
def test_a_layout_gives_the_numbers_of_one_process(trained, name):
    keys = LAYOUTS[name][1]
    this, truth = trained[name].run, trained[name].truth
    for parameter, value in truth.initial.items():
        assert torch.equal(this.initial[parameter][: len(value)], value), f"{parameter} starts with other bits"
    bound = bound_of(keys)
    found = deviation(this, truth)
    assert all(found[quantity] <= bound[quantity] for quantity in bound), found


@pytest.mark.full
@pytest.mark.parametrize("name", [name for name in WITH_CAPACITY if "bf16" not in name])
def test_experts_drop_the_same_share_of_the_global_batch_on_each_layout(trained, name):
    this, truth = trained[name].run.dropped, trained[name].truth.dropped
    assert this == truth
    assert all(0 < share < 1 for share in truth)
    assert len(truth) > SHORT["train.steps"]  # of steps and of evaluations


def check_unseen(keys: dict[str, Any], final: dict[str, torch.Tensor]) -> None:
    """What no softmax sees is 0 in a run's last checkpoint, as it was drawn; all beside it has moved."""
    cfg = config.load(flags(keys, Path("not made")))
    with torch.device("meta"):
        model = families.build(cfg)
    assert model.unseen()
    for parameter, marked in model.unseen().items():
        assert not final[parameter][marked].any()
        assert final[parameter][~marked].all()


@pytest.mark.parametrize(
    "name", ["tp 3", "pp 2, ZBVZeroBubble", "bf16, dp_shard 2", "fp16, pp 2", "t5 of megatron, V 131, tp 3"]
)
def test_a_bias_of_keys_that_no_softmax_sees_stays_as_it_was_drawn(trained, name):
    check_unseen(debug_keys(shortened(LAYOUTS[name][1])), trained[name].run.final)


def test_such_a_bias_stays_where_shards_begin_within_a_head(tmp_path, data):
    sizes = {"model.n_layers": 1, "model.n_heads": 3, "model.hidden_size": 12, "mesh.dp_shard": 2}
    keys = debug_keys(data["bloom"] | SHORT | sizes | {"eval.interval": 0})
    train_all([Training(2, keys, tmp_path)])
    check_unseen(keys, Record(tmp_path).final)


@pytest.mark.parametrize("name", ["bert, HSDP 2 x 2"])
def test_ranks_have_other_numbers_of_masked_tokens_and_some_samples_have_padding(trained, data, name):
    cfg = config.load(flags(debug_keys(data["bert"] | SHORT | LAYOUTS[name][1]), Path("not made")))
    rows = open_text(cfg, families.objective(cfg)).rows("train")
    padded = set()
    for of_ranks in zip(*trained[name].samples, strict=True):  # of a step
        given = [[rows[range(g, g + 1)] for g in samples] for samples in of_ranks]
        padded |= {bool(one["document_ids"].any()) for of_rank in given for one in of_rank}
        n_masked = {sum(int((one["labels"] != IGNORED).sum()) for one in of_rank) for of_rank in given}
        assert len(n_masked) > 1
    assert padded == {True, False}


@pytest.mark.parametrize("name", SAMPLED)
def test_a_finished_run_shows_a_sample(trained, name):
    assert "\na sample:\n" in trained[name].said


def put(where: Any, name: str, instead: Callable[..., Any]) -> None:
    assert hasattr(where, name), f"{where} has no {name} any more: nothing would be planted"
    setattr(where, name, instead)


def row_bias_on_every_rank() -> None:
    honest = styles.Row.forward

    def forward(self, module, x):
        out = honest(self, module, x)
        return out + styles.local_part(module.bias)  # of the second of two ranks

    put(styles.Row, "forward", forward)


def tied_gradient_of_one_stage_only() -> None:
    put(Tied, "sum_gradients", lambda self: None)


def slopes_of_the_first_heads_everywhere() -> None:
    def shard_buffers(model, mesh, plan):
        for name, style in plan.items():
            if isinstance(style, styles.ShardBuffer):
                setattr(model, name, getattr(model, name).chunk(mesh.size(), style.dim)[0].clone())

    put(families, "shard_buffers", shard_buffers)


def mean_of_the_ranks_means() -> None:
    """Each rank divides by twice its own tokens instead of by those of both."""

    def count(world, objective, batch):
        return {"tokens": 2.0 * sum(int((m["labels"] != IGNORED).sum()) for m in batch.microbatches)}

    put(step, "count", count)


def norm_gradients_of_the_own_tokens_only() -> None:
    put(sharded_model, "sum_partial_gradients", lambda model, names, mesh: None)


def dropout_of_the_own_part_only() -> None:
    def forward(self, module, x, sample_ids, places):
        return type(module).forward(module, x, sample_ids, places[:, : x.shape[1]])

    put(styles.SequenceShard, "forward", forward)


@pytest.mark.full  # how sharp the comparison is, as tests/planted.py says of all tests
@pytest.mark.parametrize(
    ("plant", "keys"),
    [
        (row_bias_on_every_rank, TP2),
        (slopes_of_the_first_heads_everywhere, TP2),
        (norm_gradients_of_the_own_tokens_only, TP2),
        (dropout_of_the_own_part_only, TP2),
        (tied_gradient_of_one_stage_only, {"mesh.pp": 2}),
        (mean_of_the_ranks_means, {"mesh.dp_shard": 2}),
    ],
)
def test_a_planted_error_is_seen(run, plant, keys):
    found = deviation(run(2, keys | {"train.drift_interval": 0}, plant), run(1, {}))
    assert any(found[quantity] > FP32[quantity] for quantity in FP32), found


def one_bit_of_a_replica() -> None:
    """Plant another LayerNorm weight on rank 1 before the second step."""
    honest, steps = sharded_model.ShardedModel.forward_backward, []

    def forward_backward(self, microbatches, counts, scale=None):
        steps.append(None)
        if len(steps) == 2 and dist.get_rank() == 1:
            weight = dict(self.named_parameters())["layers.1.attn_norm.weight"].to_local()
            weight.detach().view(torch.int32)[5] ^= 1 << 12  # the last bit may be lost in the update's rounding
        return honest(self, microbatches, counts, scale)

    sharded_model.ShardedModel.forward_backward = forward_backward


@pytest.mark.parametrize("keys", [TP2 | FEW_LAYERS, {"mesh.dp_replicate": 2} | FEW_LAYERS])
def test_a_replica_that_drifts_stops_the_run_and_is_named(run, keys):
    with pytest.raises(AssertionError, match=r"layers\.1\.attn_norm\.weight"):
        run(2, keys, one_bit_of_a_replica)


def a_batch_of_its_own_for_each_rank() -> None:
    train.mesh.data_coordinate = lambda sizes, rank: (rank, 2)


@pytest.mark.parametrize("keys", [TP2, {"mesh.pp": 2}])
def test_ranks_that_should_share_a_batch_and_do_not_are_stopped_at_the_start(run, keys):
    with pytest.raises(AssertionError, match="the first batch, which tp and pp ranks must share"):
        run(2, keys | {"eval.interval": 0}, a_batch_of_its_own_for_each_rank)


@pytest.mark.parametrize(
    "keys",
    [
        TP2,
        # test_resume.py goes on from these two.
        pytest.param({"mesh.dp_shard": 2}, marks=pytest.mark.full),
        pytest.param({"mesh.pp": 2, "pipeline.schedule": "ZBVZeroBubble"}, marks=pytest.mark.full),
        pytest.param(TP2 | {"model.name": "moe"}, marks=pytest.mark.full),  # and with the biases of its routers
    ],
)
def test_a_run_stopped_on_one_layout_goes_on_with_its_numbers_on_another(run, data, tmp_path, keys):
    text, model = data["bloom"], {key: keys[key] for key in keys.keys() & {"model.name"}}
    train_debug_model(2, text | SHORT | keys | {"train.exit_interval": 1}, tmp_path)
    found = deviation(train_debug_model(1, text | SHORT | model, tmp_path), run(1, model))
    assert all(found[quantity] <= FP32[quantity] for quantity in FP32), found
