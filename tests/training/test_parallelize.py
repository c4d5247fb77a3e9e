"""Claims that combinations are refused with the reason, and that what is built computes and watches what it should."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from dtmega import config, families, mesh
from dtmega.fsdp import wrapped
from dtmega.fsdp.masters import Masters
from dtmega.models.layers import LMHead
from dtmega.ops import keyed
from dtmega.ops.compiled_softmax import CompiledPasses
from dtmega.ops.shards import dim_to_cut, local
from dtmega.ops.softmax import Passes
from dtmega.training.checks import check
from dtmega.training.choices import reshards, with_micro_batch_size
from dtmega.training.parallelize import parallelize
from dtmega.training.sharded_model import ShardedModel
from tests import hf_models, ranks
from tests.operations import Operations

CPU = torch.device("cpu")
GPU = torch.device("cuda")

T5 = {"model__name": "t5"}
HEADS = {"mesh__cp_form": "heads"}
SIX_HEADS = {"model__name": "llama", "model__hidden_size": 48, "model__n_heads": 6, "model__n_kv_heads": 2}


def sections(**overrides: object) -> config.Config:
    """A configuration with 8 heads and 8 microbatches; keys are section__key."""
    values: dict[str, dict] = {"train": {"steps": 1}, "batch": {"micro_batch_size": 1, "global_batch_size": 8}}
    for name, value in overrides.items():
        section, _, key = name.partition("__")
        values.setdefault(section, {})[key] = value
    return config.validate(values, "test")


@pytest.mark.parametrize(
    ("world", "overrides", "message"),
    [
        (3, {"mesh__tp": 3}, r"tp=3 does not divide n_heads=8 \(\[mesh\] tp, \[model\] n_heads\)"),
        (2, {"mesh__tp": 2, "model__ffn_hidden_size": 1001}, "tp=2 does not divide ffn_hidden_size=1001"),
        (1, {"data__decoder_seq_len": 64}, r"decoder_seq_len=64 means nothing to a model without such sequences"),
        (2, {"mesh__tp": 2, "data__seq_len": 255}, r"tp=2 does not divide seq_len=255 \(\[mesh\] tp, \[data\] seq_len"),
        (4, {"mesh__tp": 4, "model__vocab_size": 9}, "tp=4 ranks x 3 rows leave a rank without any of 9"),
        (3, {"mesh__tp": 3, **SIX_HEADS}, r"tp=3 and n_kv_heads=2: neither divides the other.* \(\[mesh\] tp"),
        (1, {"model__name": "gpt", "data__seq_len": 1025}, r"seq_len=1025 is more than the 1024 positions of the mod"),
        (1, {"pipeline__draw": "x.svg"}, r"there is no pipeline for \[pipeline\] draw: expected pp > 1, got 1"),
        (
            1,
            {"pipeline__schedule": "GPipe", "pipeline__virtual_stages": 2, "mesh__pp": -1, "mesh__dp_shard": 1},
            "virt",
        ),
        (2, {"mesh__pp": 2, "fsdp__reshard_after_forward": True}, "reshard_after_forward"),
        (2, {"mesh__pp": 2, "recompute__mode": "selective", "compile__enable": True}, "pytorch#166926"),
        (2, {"mesh__pp": 2, "pipeline__schedule": "ZBVZeroBubble", "compile__enable": True}, "backward in two parts"),
        (2, {"mesh__pp": 2, "pipeline__schedule": "DualPipeV", "recompute__mode": "full"}, "backward in two parts"),
        (8, {"mesh__pp": 8}, r"8 stages cannot be cut from n_layers=4"),
        (4, {"mesh__pp": 4, "batch__global_batch_size": 3}, "3 microbatches"),
        (
            8,
            {"mesh__pp": 2, "mesh__dp_replicate": 2, "mesh__dp_shard": 2, "batch__global_batch_size": 4},
            r"4 sequences / \(4 data ranks x micro_batch_size=1\) = 1 microbatches",
        ),
        # Under a causal mask a rank holds two slices.
        (
            2,
            {"mesh__cp": 2, "data__seq_len": 254},
            r"^2 x cp = 4 does not divide seq_len=254 \(\[mesh\] cp, \[data\] s",
        ),
        (
            2,
            {"mesh__cp": 2, "data__seq_len": 254, "data__objective": "prefix-lm"},
            "2 x cp = 4 does not divide seq_len",
        ),
        (
            3,
            {"mesh__cp": 3, "model__name": "bert"},
            r"^cp=3 does not divide seq_len=256 \(\[mesh\] cp, \[data\] seq_len",
        ),
        (3, {"mesh__cp": 3, **T5}, "^cp=3 does not divide seq_len=256"),
        (2, {"mesh__cp": 2, **T5, "data__decoder_seq_len": 66}, "^2 x cp = 4 does not divide decoder_seq_len=66"),
        (
            8,
            {"mesh__cp": 2, "mesh__tp": 4, "data__seq_len": 252},
            r"tp=4 does not divide seq_len / cp = 252 / 2 = 126 \(\[mesh\] tp, \[mesh\] cp, \[mesh\] sequence_parallel",
        ),
        (
            6,
            {"mesh__cp": 3, "mesh__tp": 2, "data__seq_len": 252, **HEADS},
            r"expected tp x cp = 6 to divide n_heads=8, .* \(\[mesh\] cp_form, cp, tp\)",
        ),
        (
            3,
            {"mesh__cp": 3, "data__seq_len": 252, **SIX_HEADS, **HEADS},
            "and cp=3 the 2 heads of keys and values of a tp rank",
        ),
    ],
)
def test_a_combination_that_cannot_work_is_refused(world, overrides, message):
    cfg = sections(**overrides)
    with pytest.raises(ValueError, match=message):
        check(cfg, mesh.resolve(cfg.mesh, world), CPU)


@pytest.mark.parametrize(
    ("world", "overrides"),
    [
        (1, {}),
        (2, {"mesh__tp": 2, "data__seq_len": 255, "mesh__sequence_parallel": False}),
        (2, {"mesh__pp": 2, "recompute__mode": "full", "compile__enable": True}),
        (2, {"mesh__pp": 2, "recompute__mode": "selective"}),
        (1, {"recompute__mode": "selective", "compile__enable": True}),
        (2, {"mesh__pp": 2, "pipeline__schedule": "ZBVZeroBubble"}),
        (2, {"mesh__pp": 2, "fsdp__reshard_after_forward": False}),
        (1, {"fsdp__reshard_after_forward": True}),
        (4, {"mesh__pp": 4, "batch__global_batch_size": 4}),
        (8, {"mesh__pp": 2, "mesh__tp": 2}),
        (8, {"mesh__tp": 8}),
        (2, {"mesh__cp": 2, "model__name": "bert", "data__seq_len": 254}),
        (2, {"mesh__cp": 2, **T5, "data__seq_len": 254, "data__decoder_seq_len": 68}),
        (8, {"mesh__cp": 2, "mesh__tp": 4, "data__seq_len": 252, "mesh__sequence_parallel": False}),
        (2, {"mesh__cp": 2, **SIX_HEADS, **HEADS}),
        # What can exchange heads may also gather keys, and does where heads cannot be divided.
        (3, {"mesh__cp": 3, "data__seq_len": 252, **SIX_HEADS, "mesh__cp_form": "gather"}),
        (3, {"mesh__cp": 3, "data__seq_len": 252, **SIX_HEADS, "mesh__cp_form": "auto"}),
    ],
)
def test_what_works_is_let_through(world, overrides):
    cfg = sections(**overrides)
    check(cfg, mesh.resolve(cfg.mesh, world), CPU)


@pytest.mark.parametrize("keys", [{"recompute__mode": "selective"}, {"pipeline__schedule": "ZBVZeroBubble"}])
def test_what_compiled_blocks_cannot_is_refused_where_they_are_compiled_unasked(keys):
    cfg = sections(mesh__pp=2, **keys)
    check(cfg, mesh.resolve(cfg.mesh, 2), CPU)
    with pytest.raises(ValueError, match=r"\[compile\] enable"):
        check(cfg, mesh.resolve(cfg.mesh, 2), GPU)


# Another value of each key of [pipeline]; a new key needs one.
ANOTHER = {
    "schedule": "GPipe",
    "virtual_stages": 2,
    "stages": [[0, 1], [2, 3]],
    "split": 1,
    "csv": "x.csv",
    "draw": "x.svg",
}


@pytest.mark.parametrize("key", config.Pipeline.model_fields)
def test_no_key_of_a_pipeline_is_ignored_where_there_is_none(key):
    cfg = sections(**{f"pipeline__{key}": ANOTHER[key]})
    with pytest.raises(ValueError, match=rf"there is no pipeline for \[pipeline\] {key}: expected pp > 1"):
        check(cfg, mesh.resolve(cfg.mesh, 1), CPU)


def places(values: dict[str, dict[str, object]]) -> dict[str, set[str]]:
    """The kinds of devices of parameters and of buffers, where "meta" stands for a GPU that computes."""
    cfg = families.resolve(config.validate(values | {"train": {"steps": 1}, "fsdp": {"cpu_offload": True}}, "test"))
    try:
        world = mesh.start(CPU, mesh.resolve(cfg.mesh, 1))
        (stage,) = parallelize(cfg, dataclasses.replace(world, device=torch.device("meta"))).stages.values()
    finally:
        dist.destroy_process_group()
    buffers = {f"buffer {name.rpartition('.')[2]}": {b.device.type} for name, b in stage.named_buffers()}
    return {"parameters": {p.device.type for p in stage.parameters()}, **buffers}


def test_offloaded_parameters_are_in_host_memory_and_buffers_where_the_model_computes():
    dropout: dict[str, dict[str, object]] = {"model": {"hidden_dropout": 0.1}}
    assert places(dropout) == {"parameters": {"cpu"}} | {
        f"buffer {name}": {"meta"} for name in ("slopes", "head_ids", "key")
    }


def test_rotary_frequencies_of_a_transformers_model_are_where_it_computes():
    case = hf_models.Case("llama")
    found = places({"model": {"name": "hf", "path": hf_models.saved([case])[case]}, "data": {"tokenizer": "bytes"}})
    assert found["parameters"] == {"cpu"}
    assert found["buffer inv_freq"] == {"meta"}


def test_a_transformers_model_may_have_a_sequence_that_tp_does_not_divide():
    case = hf_models.Case("llama")
    keys: dict[str, object] = {"model__name": "hf", "model__path": hf_models.saved([case])[case]}
    cfg = sections(mesh__tp=2, data__seq_len=13, data__tokenizer="bytes", **keys)
    check(families.resolve(cfg), mesh.resolve(cfg.mesh, 2), CPU)


def runs(schedule: str, pp: int, n: int) -> bool:
    """Ask torch's classes whether this schedule can run n microbatches."""
    rounds = max(1, n // pp)
    return {"1F1B": n >= pp, "DualPipeV": n >= 2 * pp, "Interleaved1F1B": n % rounds == 0}[schedule] and n > 0


@pytest.mark.parametrize("schedule", ["1F1B", "DualPipeV", "Interleaved1F1B"])
@pytest.mark.parametrize("sizes", [[8], [12], [72], [8, 16, 24]])
@pytest.mark.parametrize(
    ("pp", "replicate", "shard", "tp"),
    [(1, 1, 1, 1), (1, 2, 1, 1), (1, 1, 4, 2), (2, 1, 1, 1), (2, 1, 2, 1), (2, 2, 2, 1), (4, 1, 1, 1)],
)
def test_an_open_microbatch_is_the_largest_up_to_4_that_the_layout_can_have(pp, replicate, shard, tp, sizes, schedule):
    cfg = sections(
        batch__micro_batch_size=0,
        batch__global_batch_size=sizes[-1],
        batch__rampup=[sizes[0], 8, 100] if sizes[1:] else [],
        pipeline__schedule=schedule,
    )
    right = [1]  # also where nothing fits
    for b in (2, 3, 4):
        shares = [divmod(size, replicate * shard * b) for size in sizes]
        if all(rest == 0 and (pp == 1 or runs(schedule, pp, n)) for n, rest in shares):
            right.append(b)
    found = with_micro_batch_size(cfg, {"pp": pp, "dp_replicate": replicate, "dp_shard": shard, "cp": 1, "tp": tp})
    assert found.batch.micro_batch_size == right[-1]
    assert found.model_copy(update={"batch": cfg.batch}) == cfg


def test_a_microbatch_that_is_given_stays():
    cfg = sections(batch__micro_batch_size=8)
    assert with_micro_batch_size(cfg, mesh.resolve(cfg.mesh, 1)) is cfg


@pytest.fixture
def alone() -> Iterator[Callable[..., ShardedModel]]:
    """`alone(**keys)` is the model of these keys on this one process."""

    def model(**keys: object) -> ShardedModel:
        cfg = sections(**SMALL | keys)
        made = parallelize(cfg, mesh.start(CPU, mesh.resolve(cfg.mesh, 1)))
        made.draw(cfg.run.seed)
        return made

    yield model
    dist.destroy_process_group()


SMALL: dict[str, object] = {
    "model__vocab_size": 31,
    "model__hidden_size": 16,
    "model__n_layers": 2,
    "model__n_heads": 4,
    "model__init_std": 0.2,
    "data__seq_len": 8,
}
MASKED = -100


def microbatches(seed: int = 1) -> list[dict[str, Tensor]]:
    """Three, of different numbers of tokens with a loss."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for i in range(3):
        ids = torch.randint(31, (2, 9), generator=generator)
        labels = ids[:, 1:].clone()
        labels[:, : 2 * i] = MASKED
        found.append({"tokens": ids[:, :-1], "labels": labels, "sample_ids": torch.arange(2) + 2 * i})
    return found


def cross_entropy(model: ShardedModel) -> Tensor:
    """The loss by torch, from the logits: the sum over all tokens of all microbatches."""
    (stage,) = model.stages.values()
    logits = torch.cat([stage(m["tokens"], sample_ids=m["sample_ids"]) for m in microbatches()])
    labels = torch.cat([m["labels"] for m in microbatches()])
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=MASKED, reduction="sum")


def test_loss_and_gradients_of_a_step_are_torchs_of_the_sum_over_the_given_number_of_tokens(alone):
    model = alone()
    named = dict(model.named_parameters())
    assert len(named) == len([*model.named_parameters()]) == 2 * 12 + 5  # the head's weight is the embedding's
    truth = cross_entropy(model)
    gradients = torch.autograd.grad(truth / 7, list(named.values()))
    model.forward_backward(microbatches(), {"tokens": 7.0})
    total = model.forward_backward(microbatches(), {"tokens": 7.0})
    assert total.dtype == torch.float64
    assert total.item() == pytest.approx(truth.item(), rel=1e-6)
    for (name, parameter), gradient in zip(named.items(), gradients, strict=True):
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad, 2 * gradient, rtol=1e-4, atol=1e-5, msg=name)  # they add up
    zeros = sum(int((g == 0).sum()) for g in model.gradients())
    norm = torch.cat([p.flatten() for p in named.values()]).norm().item()
    assert model.statistics(True, True) == {"num_zeros": zeros, "params_norm": pytest.approx(norm, rel=1e-6)}
    assert model.statistics(False, False) == {}


@pytest.mark.parametrize("wrapped", [False, True])
def test_an_evaluation_is_without_dropout_and_training_goes_on_with_it_on_the_shards(alone, wrapped):
    # What asks for offloading is wrapped by FSDP2, on one process too.
    model = alone(model__hidden_dropout=0.5, fsdp__cpu_offload=wrapped)
    found = model.losses(microbatches())
    (stage,) = model.stages.values()
    assert all(module.training for module in stage.modules())
    assert all(isinstance(p, DTensor) == wrapped for _, p in model.named_parameters())
    assert not found.requires_grad
    dropped = model.forward_backward(microbatches(), {"tokens": 1.0})
    stage.eval()
    with torch.no_grad():
        assert found.item() == pytest.approx(cross_entropy(model).item(), rel=1e-6)
    assert dropped.item() != pytest.approx(found.item(), rel=1e-3)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("mode", ["none", "full"])
def test_on_one_process_mixed_precision_has_the_numbers_of_fsdp2_to_the_bit(alone, dtype, mode):
    keys = {"precision__params": dtype, "recompute__mode": mode, "model__hidden_dropout": 0.1}
    plain, wrapped = alone(**keys), alone(**keys, fsdp__cpu_offload=True)
    for model in (plain, wrapped):
        dict(model.named_parameters())["layers.1.mlp.up.weight"].requires_grad_(False)
    check_bits(plain, wrapped, microbatches())


def check_bits(plain: ShardedModel, wrapped: ShardedModel, batch: list[dict[str, Tensor]]) -> None:
    """Check two steps on plain parameters against the same on those that FSDP2 holds."""
    for step in range(2):
        losses = [model.forward_backward(batch, {"tokens": 7.0}) for model in (plain, wrapped)]
        assert torch.equal(*losses)
        theirs = dict(wrapped.named_parameters())
        for name, parameter in plain.named_parameters():
            assert (parameter.dtype, type(parameter)) == (torch.float32, torch.nn.Parameter)
            gradient = theirs[name].grad
            if gradient is None:
                assert parameter.grad is None, name
                continue
            assert parameter.grad is not None
            assert torch.equal(parameter.grad, local(gradient)), (step, name)
            with torch.no_grad():
                for each, its in ((parameter, parameter.grad), (local(theirs[name].detach()), local(gradient))):
                    each -= 0.1 * its
        for model in (plain, wrapped):
            for _, parameter in model.named_parameters():
                parameter.grad = None


def mixed_on_two() -> None:
    """Check copies over two ranks, each with microbatches of its own."""
    keys: dict[str, object] = {"mesh__dp_replicate": 2, "mesh__dp_shard": 1, "precision__params": "bfloat16"}
    models = []
    for offload in (False, True):
        cfg = sections(**SMALL | keys | {"fsdp__cpu_offload": offload})
        models.append(parallelize(cfg, mesh.start(CPU, mesh.resolve(cfg.mesh, 2))))
        models[-1].draw(cfg.run.seed)
    plain, wrapped = models
    check_bits(plain, wrapped, microbatches(dist.get_rank()))


def test_copies_over_ranks_have_the_numbers_of_fsdp2_in_mixed_precision_to_the_bit():
    ranks.run(2, mixed_on_two)


def test_copies_that_compute_have_no_memory_between_steps_and_none_after_their_last_gradient(alone, monkeypatch):
    model = alone(precision__params="bfloat16")
    (stage,) = model.stages.values()
    seen: list[dict[str, int]] = []
    honest = Masters.release

    def release(masters: Masters) -> None:
        assert {p.dtype for p in stage.parameters()} == {torch.bfloat16}
        seen.append({name: p.untyped_storage().size() for name, p in stage.named_parameters()})
        copies.extend(stage.parameters())
        honest(masters)

    copies: list[Tensor] = []
    monkeypatch.setattr(Masters, "release", release)
    model.losses(microbatches())
    assert {copy.untyped_storage().size() for copy in copies} == {0}
    model.forward_backward(microbatches(), {"tokens": 7.0})
    in_use, freed = seen
    assert in_use == {name: 2 * p.numel() for name, p in stage.named_parameters()}
    assert set(freed.values()) == {0}
    assert {p.dtype for p in stage.parameters()} == {torch.float32}


def test_initial_values_and_masks_are_those_of_the_seed(alone):
    model = alone(run__seed=7, model__hidden_dropout=0.5)
    weight = dict(model.named_parameters())["embed.weight"]
    truth = keyed.normal(7, "embed.weight", torch.arange(31 * 16).view(31, 16)) * 0.2
    assert torch.equal(weight, truth.float())
    for name in ("embed_dropout", "layers.1.mlp_dropout"):
        assert model.stages[0].get_buffer(f"{name}.key").item() == keyed.key(7, name)


@pytest.mark.parametrize(
    ("mode", "norms", "products"),
    [
        # Two norms in a layer, one at each end. QKV, output, up, down of each layer; the gradient of the head's weight.
        ("none", 2 * 2 + 2, 2 * 4 + 1),
        # But for the last product of each block, whose result backward does not need.
        ("full", 2 * (2 * 2) + 2, 2 * (4 + 3) + 1),
        ("selective", 2 * (2 * 2) + 2, 2 * 4 + 1),
    ],
)
def test_what_recompute_computes_again_is_whole_blocks_or_all_but_products(alone, mode, norms, products):
    model = alone(recompute__mode=mode)
    with Operations() as operations:
        model.forward_backward(microbatches()[:1], {"tokens": 1.0})
    assert (operations.counts["native_layer_norm"], operations.counts["addmm"]) == (norms, products)


@pytest.mark.parametrize(
    ("asked", "pp", "dp_shard", "expected"),
    [
        ("auto", 1, 2, True),
        ("auto", 1, 1, False),
        ("auto", 2, 2, False),
        (False, 1, 2, False),
        (True, 1, 1, True),
    ],
)
def test_weights_are_freed_where_that_saves_memory_or_as_asked(asked, pp, dp_shard, expected):
    assert reshards(sections(fsdp__reshard_after_forward=asked), pp, dp_shard) is expected


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("offload", [True, False])
@pytest.mark.parametrize("reshard", [True, False])
def test_what_fsdp2_is_asked_for(alone, monkeypatch, device, offload, reshard):
    model = alone().stages[0]
    cfg = sections(fsdp__cpu_offload=offload, precision__params="bfloat16")
    asked, honest = [], wrapped.fully_shard

    def fully_shard(module: Any, **keywords: Any) -> None:
        asked.append((module, keywords))
        honest(module, **keywords | {"mesh": here, "offload_policy": OffloadPolicy()})

    monkeypatch.setattr(wrapped, "fully_shard", fully_shard)
    here, there = init_device_mesh("cpu", (1,)), Mock(device_type=device, **{"size.return_value": 1})
    wrapped.apply_fsdp(model, model.blocks(), there, cfg, reshard=reshard)
    first, last = model.blocks()
    # Backward begins with the last block, and needs the root's first and last.
    assert [(module, keywords["reshard_after_forward"]) for module, keywords in asked] == [
        (first, reshard),
        (last, False),
        (model, False),
    ]
    for _, keywords in asked:
        assert (keywords["mesh"], keywords["shard_placement_fn"]) == (there, dim_to_cut)
        policy = keywords["mp_policy"]
        assert (policy.param_dtype, policy.reduce_dtype) == (torch.bfloat16, torch.float32)
        assert not policy.cast_forward_inputs
        assert isinstance(keywords["offload_policy"], CPUOffloadPolicy) == (offload and device == "cuda")


class Flat(TorchDispatchMode):
    """Counts what makes a flat tensor of so many elements."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size, self.counts = size, Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and out.shape == (self.size,):
            self.counts[func.overloadpacket.__name__] += 1
        return out


def test_without_other_ranks_the_gradients_of_a_block_are_cast_into_one_buffer_and_not_divided(alone):
    # What asks for offloading is wrapped by FSDP2, on one process too.
    model = alone(precision__params="bfloat16", fsdp__cpu_offload=True)
    (stage,) = model.stages.values()
    counts = {"tokens": 7.0}
    model.forward_backward(microbatches(), counts)
    with Flat(sum(p.numel() for p in stage.blocks()[0].parameters())) as flat:
        model.forward_backward(microbatches(), counts)
    assert flat.counts == {"empty": 2, "copy_": 2}  # of two blocks; what is copied to itself is left alone


@pytest.mark.parametrize(("enable", "device", "compiled"), [(0, "cpu", False), (1, "cpu", True), (1, "cuda", False)])
def test_the_loss_is_compiled_where_the_blocks_are_if_it_is_faster_there(alone, monkeypatch, enable, device, compiled):
    monkeypatch.setattr("dtmega.ops.softmax.COMPILED_ON", {device})
    head = alone(compile__enable=bool(enable)).stages[0].get_submodule("head")
    assert isinstance(head, LMHead)
    assert head.loss_terms()["passes"] is (CompiledPasses if compiled else Passes)


# Keys, the rank that drifts, and of which parameters.
COPIES: dict[str, tuple[dict[str, object], int, tuple[str, ...]]] = {
    "tp": ({"mesh__tp": 2, "model__n_layers": 1}, 1, ("",)),
    "dp_replicate": ({"mesh__dp_replicate": 2, "mesh__dp_shard": 1, "model__n_layers": 1}, 1, ("",)),
    "pp, first": ({"mesh__pp": 2}, 0, ("embed", "qkv")),
    "pp, last": ({"mesh__pp": 2}, 1, ("embed", "qkv", "norm")),
    "pp, V": ({"mesh__pp": 2, "pipeline__schedule": "ZBVZeroBubble", "model__n_layers": 4}, 0, ("embed", "qkv")),
}


def drifting() -> dict[str, list[tuple[str, str]]]:
    """The lines that are said after one bit of each parameter has flipped, where this rank is the one that drifts."""
    found: dict[str, list[tuple[str, str]]] = {}
    for layout, (keys, drifts, which) in COPIES.items():
        cfg = sections(**SMALL | keys)
        model = parallelize(cfg, mesh.start(CPU, mesh.resolve(cfg.mesh, 2)))
        model.draw(cfg.run.seed)
        named = [(name, parameter) for name, parameter in model.named_parameters() if any(w in name for w in which)]
        here = dist.get_rank() == drifts
        count = torch.tensor(len(named) if here else 0)
        dist.all_reduce(count)
        for i in range(int(count)):
            if here:
                flip(named[i][1])
            message = said(model.check_copies)
            if here:
                flip(named[i][1])
                found.setdefault(layout, []).append((named[i][0], message))
        assert said(model.check_copies) == ""
    return found


@torch.no_grad()
def flip(parameter: Tensor) -> None:
    local(parameter).view(torch.int32).view(-1)[-1] ^= 1


def said(check: Callable[[], None]) -> str:
    try:
        check()
    except RuntimeError as error:
        return str(error)
    return ""


def test_a_copy_of_any_parameter_that_drifts_is_named():
    first, second = ranks.run(2, drifting)
    found = first | second
    assert found.keys() == COPIES.keys()
    whole = ("norm.weight", "norm.bias", "out.bias", "down.bias")  # what tp does not cut
    for name, message in found["tp"]:
        assert ("copies over tp: 1 of" in message and f"'{name}'" in message) == name.endswith(whole)
        assert (message == "") != name.endswith(whole)
    for name, message in found["dp_replicate"]:
        assert "copies over dp_replicate: 1 of" in message
        assert f"'{name}'" in message
    for layout in ("pp, first", "pp, last", "pp, V"):
        for name, message in found[layout]:
            assert ("the copies of 'embed.weight' on stages [0, " in message) == (name == "embed.weight")
            assert (message == "") != (name == "embed.weight")
    # Every kind was there.
    assert len(found["dp_replicate"]) == len(found["tp"]) == 12 + 5
    assert [name for name, _ in found["pp, V"]].count("embed.weight") == 2
