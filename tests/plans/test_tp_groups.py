"""Tensor parallelism on groups of 1, 2 and 4 of four ranks, in the shapes and tolerances of the originals' own tests.

docs/originals.md lists those tests. At tp 2 the groups are {0, 2} and {1, 3}, which no default would choose, and each
group has a batch of its own, so that a sum over the wrong ranks shows. fp64 is used where fp32 cannot hold a tolerance.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

from dtmega import config, mesh, plans
from dtmega.config.families.bert import BertKeys
from dtmega.config.families.bloom import BloomKeys
from dtmega.config.families.gpt import GPTKeys
from dtmega.config.families.llama import LlamaKeys
from dtmega.config.families.t5 import T5Keys
from dtmega.data.objectives.rows import IGNORED
from dtmega.models.bert import Bert
from dtmega.models.bloom import Bloom
from dtmega.models.gpt import GPT
from dtmega.models.initial import init_weights
from dtmega.models.llama import Llama
from dtmega.models.model import Model
from dtmega.models.t5 import T5
from dtmega.ops.vocab_loss import vocab_parallel_cross_entropy
from dtmega.plans import bert, bloom, gpt, llama, t5
from dtmega.plans.styles import Column, Row
from dtmega.training.recompute import recompute
from tests import ranks

B, S, T, V, HEADS = 2, 24, 8, 131, 4
SIZES: dict[str, Any] = {"vocab_size": V, "hidden_size": 32, "n_heads": HEADS}
MODELS: dict[str, Callable[[], Model]] = {
    "bloom": lambda: Bloom(BloomKeys(**SIZES, n_layers=1)),
    "gpt": lambda: GPT(GPTKeys(**SIZES, n_layers=1, max_position_embeddings=S)),
    "llama": lambda: Llama(LlamaKeys(**SIZES, n_layers=1, n_kv_heads=2)),
    "bert": lambda: Bert(BertKeys(**SIZES, n_layers=1, max_position_embeddings=S)),
    "t5": lambda: T5(T5Keys(**SIZES, n_layers=1, n_decoder_layers=1)),
}
PLANS: dict[str, Callable[..., Any]] = {
    "bloom": bloom.plan,
    "gpt": gpt.plan,
    "llama": llama.plan,
    "bert": bert.plan,
    "t5": t5.plan,
}


def whole(family: str) -> Any:
    """A model for one process. Every parameter, norms and biases too, is drawn by the length of its name."""
    model = MODELS[family]()
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(torch.randn(p.shape, generator=torch.Generator().manual_seed(len(name))) * 0.2)
    model.init_buffers(seed=1)
    return model


def cut(model: Any, tp: DeviceMesh, family: str) -> list[str]:
    table = PLANS[family](model.cfg)
    partial = plans.apply_plan(model, tp, table)
    plans.shard_buffers(model, tp, table)
    return partial


def batch(family: str, seed: int) -> dict[str, Tensor]:
    """Two samples, of which the second one has padding where the family pads."""
    generator = torch.Generator().manual_seed(seed)
    places = torch.arange(S).repeat(B, 1)
    found = {
        "tokens": torch.randint(V, (B, S), generator=generator),
        "labels": torch.randint(V, (B, S), generator=generator),
        "sample_ids": torch.arange(B),
        "places": places,
    }
    if family == "bert":
        ends = torch.tensor([[S], [1]])  # nothing but the first token is text
        found["labels"][places >= ends] = IGNORED
        found |= {"token_types": (places > 9).long(), "swapped": torch.tensor([1, 0])}
        found["document_ids"] = (places >= ends).long()
    if family == "t5":
        decoder_places, ends, decoder_ends = places[:, :T], torch.tensor([[S], [15]]), torch.tensor([[T], [3]])
        found["labels"] = found["labels"][:, :T].where(decoder_places < decoder_ends, IGNORED)
        found |= {"decoder_tokens": torch.randint(V, (B, T), generator=generator), "decoder_places": decoder_places}
        found["document_ids"] = (places >= ends).long()
        found["decoder_document_ids"] = (decoder_places >= decoder_ends).long()
    return found


def far(ours: Tensor, truth: Tensor) -> float:
    """The largest absolute difference, which is what the originals compare with their tolerances."""
    return (ours - truth).abs().max().item()


def gradients(model: Any, total: Tensor, partial: list[str], tp: DeviceMesh) -> dict[str, Tensor]:
    """The gradients of whole parameters, by name."""
    model.zero_grad()
    total.backward()
    plans.sum_partial_gradients(model, partial, tp)
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {name: g.full_tensor() if isinstance(g, DTensor) else g for name, g in found.items()}


def cross_entropy(tp: DeviceMesh, seed: int, label_smoothing: float = 0.0) -> dict[str, float]:
    """Batch 13, sequence 17, a vocabulary of 11 TP, logits times 1000."""
    generator, n, me = torch.Generator().manual_seed(seed), tp.size(), tp.get_local_rank()
    logits = (torch.randn(13, 17, 11 * n, generator=generator, dtype=torch.float64) * 1000).requires_grad_()
    target = torch.randint(11 * n, (13, 17), generator=generator)
    shard = logits.detach().chunk(n, -1)[me].requires_grad_()
    losses = vocab_parallel_cross_entropy(shard, target, tp.get_group(), label_smoothing=label_smoothing)
    flat = logits.flatten(0, 1), target.flatten()
    expected = F.cross_entropy(*flat, reduction="none", label_smoothing=label_smoothing).view(13, 17)
    losses.mean().backward()
    expected.mean().backward()
    assert shard.grad is not None
    assert logits.grad is not None
    return {"loss": far(losses, expected), "gradient": far(shard.grad, logits.grad.chunk(n, -1)[me])}


def smoothed(tp: DeviceMesh, seed: int) -> dict[str, float]:
    return cross_entropy(tp, seed, label_smoothing=0.1)


def linears(tp: DeviceMesh, seed: int) -> dict[str, float]:
    """Batch 7, 13 TP inputs, 17 TP outputs. With loss = sum(y * g): dW = g^T x, db = sum g, dX = g W."""
    generator, n, me = torch.Generator().manual_seed(seed), tp.size(), tp.get_local_rank()
    x, g = (torch.randn(7, 1, size * n, generator=generator, dtype=torch.float64) for size in (13, 17))
    found = {}
    for kind, style in (("column", Column(False).entering()), ("row", Row(False))):
        linear = nn.Linear(13 * n, 17 * n).double()
        weight, bias = linear.weight.detach().clone(), linear.bias.detach().clone()
        for t in (weight, bias):
            dist.broadcast(t, group=tp.get_group(), group_src=0)
        linear.load_state_dict({"weight": weight, "bias": bias})
        parallelize_module(linear, tp, style, src_data_rank=None)
        cut_in, cut_out = (x, g.chunk(n, 2)[me]) if kind == "column" else (x.chunk(n, 2)[me], g)
        mine = cut_in.clone().requires_grad_()
        y = linear(mine)
        (y * cut_out).sum().backward()
        assert isinstance(linear.weight.grad, DTensor)
        assert isinstance(linear.bias.grad, DTensor)
        assert mine.grad is not None
        dx = g @ weight
        found |= {
            f"{kind} dW": far(linear.weight.grad.full_tensor(), torch.einsum("bso,bsi->oi", g, x)),
            f"{kind} db": far(linear.bias.grad.full_tensor(), g.sum((0, 1))),
            f"{kind} dX": far(mine.grad, dx if kind == "column" else dx.chunk(n, 2)[me]),
        }
    return found


def logits_of_fp16(tp: DeviceMesh, seed: int) -> dict[str, float]:
    """The deviation of logits in fp16, with ALiBi and with learned positions."""
    found = {}
    for family in ("bloom", "gpt"):
        truth, model = (whole(family).half().eval() for _ in range(2))
        cut(model, tp, family)
        tokens = batch(family, seed)["tokens"]
        found[family] = far(model(tokens).float(), truth(tokens).float())
    return found


def labels_and_whole_logits(tp: DeviceMesh, seed: int) -> dict[str, float]:
    """The loss that a model computes from labels, against the cross-entropy of the whole logits that it returns.

    Deviations of a gradient are relative to its largest element.
    """
    found: dict[str, float] = {}
    for family in ("bloom", "llama"):
        model, rows = whole(family), batch(family, seed)
        partial = cut(model, tp, family)
        loss = model(**rows)["lm"]
        logits = model(rows["tokens"])
        expected = F.cross_entropy(logits.flatten(0, 1), rows["labels"].flatten(), reduction="sum")
        found[f"{family} loss"] = abs(loss.item() / expected.item() - 1)
        of_loss, of_logits = (gradients(model, total, partial, tp) for total in (loss, expected))
        errors = [far(of_loss[name], g) / g.abs().max().clamp(min=1e-3).item() for name, g in of_logits.items()]
        found[f"{family} gradients"] = max(errors)
    return found


def recomputed_gradients(tp: DeviceMesh, seed: int) -> dict[str, float]:
    """Loss and gradients with full recompute, each TP group with a batch of its own."""
    found: dict[str, float] = {}
    for family in ("bloom", "bert", "t5"):
        truth, model, rows = whole(family), whole(family), batch(family, seed)
        partial = cut(model, tp, family)
        recompute(model, config.Recompute(mode="full"))
        ours, expected = (sum(each(**rows).values()) for each in (model, truth))
        assert isinstance(ours, Tensor)
        assert isinstance(expected, Tensor)
        found[f"{family} loss"] = abs(ours.item() / expected.item() - 1)
        of_truth = gradients(truth, expected, [], tp)
        errors = {}
        for name, g in gradients(model, ours, partial, tp).items():
            errors[name] = far(g, of_truth[name]) / of_truth[name].abs().max().clamp(min=1e-3).item()
        found[f"{family} gradients"] = max(errors.values())
    return found


# What is compared with one process -> the function that measures it, and the largest deviation that it may have.
DEVIATIONS: dict[str, tuple[Callable[[DeviceMesh, int], dict[str, float]], float]] = {
    "cross-entropy": (cross_entropy, 1e-6),
    "linears": (linears, 1e-6),
    "logits in fp16": (logits_of_fp16, 5e-3),
    "label smoothing": (smoothed, 1e-6),
    "labels and whole logits": (labels_and_whole_logits, 1e-5),
    "recompute": (recomputed_gradients, 1e-5),
}


def initial_values(tp: DeviceMesh, seed: int) -> dict[str, bool]:
    """True if drawing a model's values after cutting it gives slices of the values of the whole model."""
    found = {}
    for family in ("llama", "t5"):
        truth, model = MODELS[family](), MODELS[family]()
        cut(model, tp, family)
        for each in (truth, model):
            init_weights(each, seed)
        pairs = zip(model.named_parameters(), truth.parameters(), strict=True)
        found |= {f"{family} {n}": isinstance(p, DTensor) and torch.equal(p.full_tensor(), q) for (n, p), q in pairs}
    return found


def who_sees_whom(tp: DeviceMesh, seed: int) -> dict[str, bool]:
    """True if a changed token of the first sample changes exactly the logits that may depend on it."""
    found: dict[str, bool] = {}
    prefix = torch.zeros(B, S).bool()
    prefix[:, :9] = True
    documents = torch.zeros(B, S, dtype=torch.int64)
    documents[:, 12:] = 1
    prefixes = prefix.clone()
    prefixes[:, 12:16] = True
    with_prefix, packed = {"prefix": prefix}, {"prefix": prefixes, "document_ids": documents}
    # What is changed -> where, what else there is, and where logits change.
    changes: dict[str, tuple[int, dict[str, Tensor], range]] = {
        "a token": (10, {}, range(10, S)),
        "a target": (15, with_prefix, range(15, S)),
        "an input": (3, with_prefix, range(S)),
        "an input of the first document": (3, packed, range(12)),
        "an input of the second document": (14, packed, range(12, S)),
        "a target of the second document": (20, packed, range(20, S)),
    }
    for family in ("bloom", "gpt", "llama"):
        model, tokens = whole(family).eval(), batch(family, seed)["tokens"]
        cut(model, tp, family)
        for what, (place, rows, expected) in changes.items():
            others = tokens.clone()
            others[0, place] = (others[0, place] + 1) % V
            with torch.no_grad():
                changed = (model(tokens, **rows) != model(others, **rows)).any(-1)
            truth = torch.zeros(B, S).bool()
            truth[0, expected.start : expected.stop] = True
            found[f"{family}: {what}"] = torch.equal(changed, truth)
    return found


def no_nan(tp: DeviceMesh, seed: int) -> dict[str, bool]:
    """True for each finite gradient. The second sample is padding but for one token."""
    model, rows = whole("bert"), batch("bert", seed)
    partial = cut(model, tp, "bert")
    found = gradients(model, sum(model(**rows).values()), partial, tp)  # pyright: ignore[reportArgumentType]
    return {name: bool(g.isfinite().all()) for name, g in found.items()}


EXACT: dict[str, Callable[[DeviceMesh, int], dict[str, bool]]] = {
    "initial values": initial_values,
    "who sees whom": who_sees_whom,
    "padding": no_nan,
}


def places(tp: int) -> dict[str, Any]:
    """The place of this rank on a mesh of all ranks, as the trainer makes it."""
    n = dist.get_world_size()
    world = mesh.start(torch.device("cpu"), mesh.resolve(config.Mesh(tp=tp, dp_shard=n // tp), n))
    return {
        "tp": (world.coordinate("tp"), tp),
        "data": (world.data_rank, world.data_size),
        "group of tp": dist.get_process_group_ranks(world.groups["tp"]),
        "group of data": dist.get_process_group_ranks(world.groups["data"]),
    }


def everything() -> dict[int, dict[str, Any]]:
    """All measurements of this rank of four, by tp."""
    found: dict[int, dict[str, Any]] = {}
    for tp in TP:
        here = init_device_mesh("cpu", (tp, 4 // tp), mesh_dim_names=("tp", "dp"))
        replica = here.get_local_rank("dp")
        found[tp] = {"places": places(tp)}
        found[tp] |= {name: measure(here["tp"], 1 + replica) for name, (measure, _) in DEVIATIONS.items()}
        found[tp] |= {name: measure(here["tp"], 1 + replica) for name, measure in EXACT.items()}
    return found


TP = (1, 2, 4)


@functools.cache
def on_four() -> list[dict[int, dict[str, Any]]]:
    return ranks.run(4, everything)


@pytest.mark.parametrize("tp", TP)
@pytest.mark.parametrize("what", DEVIATIONS)
def test_deviations_from_one_process_are_within_the_originals_tolerances(what: str, tp: int):
    _, tolerance = DEVIATIONS[what]
    for found in on_four():
        assert {name: error for name, error in found[tp][what].items() if not error < tolerance} == {}


@pytest.mark.parametrize("tp", TP)
@pytest.mark.parametrize("what", EXACT)
def test_initial_values_visibility_and_padding_are_exact(what: str, tp: int):
    for found in on_four():
        assert [name for name, is_exact in found[tp][what].items() if not is_exact] == []


@pytest.mark.parametrize("tp", TP)
def test_a_rank_has_the_place_that_megatron_gives_it(tp: int):
    n = 4
    for rank, found in enumerate(on_four()):
        first = rank - rank % tp
        assert found[tp]["places"] == {
            "tp": (rank % tp, tp),
            "data": (rank // tp, n // tp),
            "group of tp": [*range(first, first + tp)],
            "group of data": [*range(rank % tp, n, tp)],
        }
