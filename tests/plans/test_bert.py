"""Claims about plans/bert.py: cut over tp, BERT computes what one process does. One group of processes per layout."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dtmega import plans
from dtmega.config.families.bert import BertKeys
from dtmega.data.objectives.rows import IGNORED
from dtmega.models.bert import Bert
from dtmega.plans import bert
from tests import ranks

B, S, V, D = 2, 12, 131, 48
CASES: dict[str, dict[str, Any]] = {
    "pre": {},
    "post, padded vocabulary": {"norm": "post", "pad_vocab_to_multiple": 48},
    "dropout, smoothing and z-loss": {
        "hidden_dropout": 0.1,
        "attention_dropout": 0.1,
        "label_smoothing": 0.1,
        "z_loss": 1e-3,
    },
}
CUT_OVER = {2: (True, False), 3: (True,)}  # ranks -> with and without sequence parallelism
LABELLED = {1: 130, 4: 5, 7: 70, 13: 99, 14: 2}  # places in a batch -> labels


def small(**keys: Any) -> Bert:
    """Values of parameters by their names, biases and norms too, so that a missing or doubled term shows."""
    cfg = BertKeys(vocab_size=V, hidden_size=D, n_layers=2, n_heads=6, **keys)
    model = Bert(cfg)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(torch.randn(p.shape, generator=torch.Generator().manual_seed(len(name))) * 0.2)
    model.init_buffers(seed=1)
    return model


def batch(labelled: dict[int, int] = LABELLED) -> dict[str, Tensor]:
    """Two samples of two segments, of which the second one ends in padding."""
    labels = torch.full((B, S), IGNORED)
    for place, label in labelled.items():
        labels.view(-1)[place] = label
    ends = torch.tensor([S, 7]).unsqueeze(1)
    places = torch.arange(S).repeat(B, 1)
    return {
        "tokens": torch.randint(V, (B, S), generator=torch.Generator().manual_seed(3)),
        "labels": labels,
        "sample_ids": torch.arange(B) + 5,
        "places": places,
        "token_types": ((places >= 4) & (places < ends)).long(),
        "swapped": torch.tensor([1, 0]),
        "document_ids": (places >= ends).long(),
    }


def cut(mesh: DeviceMesh, sequence_parallel: bool, **keys: Any) -> tuple[Bert, list[str]]:
    model = small(**keys)
    table = bert.plan(model.cfg, sequence_parallel)
    partial = plans.apply_plan(model, mesh, table)
    plans.shard_buffers(model, mesh, table)
    return model, partial


def total(model: Bert, rows: dict[str, Tensor]) -> Tensor:
    """Both sums, with weights of their own."""
    found = model(**rows)
    return found["lm"] / 5 + found["order"] / 2


def deviations(mesh: DeviceMesh, sequence_parallel: bool, rows: dict[str, Tensor], **keys: Any) -> dict[str, float]:
    """Errors of the loss and of every gradient, relative to the largest in it."""
    truth = small(**keys)
    expected = total(truth, rows)
    expected.backward()
    model, partial = cut(mesh, sequence_parallel, **keys)
    loss = total(model, rows)
    loss.backward()
    plans.sum_partial_gradients(model, partial, mesh)
    found = {"loss": abs(loss.item() / expected.item() - 1)}
    for (name, p), q in zip(model.named_parameters(), truth.parameters(), strict=True):
        assert isinstance(p.grad, DTensor)
        assert q.grad is not None
        found[name] = ((p.grad.full_tensor() - q.grad).abs().max() / q.grad.abs().max().clamp(min=1e-3)).item()
    return found


def without_labels(mesh: DeviceMesh, sequence_parallel: bool) -> dict[str, float]:
    rows = {name: t for name, t in batch().items() if name != "labels"}
    truth, (model, _) = small(pad_vocab_to_multiple=48), cut(mesh, sequence_parallel, pad_vocab_to_multiple=48)
    expected, found = truth(**rows), model(**rows)
    assert found["logits"].shape == (B, S, V)
    return {name: ((found[name] - expected[name]).norm() / expected[name].norm()).item() for name in expected}


class Wire(TorchDispatchMode):
    """Collectives in order: name and elements of the larger side."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            sides = [[t.numel() for t in tree_leaves(x) if isinstance(t, Tensor)] for x in args]
            self.seen.append((func.overloadpacket.__name__, max(sum(side) for side in sides)))
        return func(*args, **(kwargs or {}))


def wire(mesh: DeviceMesh, sequence_parallel: bool) -> list[list[tuple[str, int]]]:
    """The traffic of the two heads on the last hidden state: forward, backward."""
    model, _ = cut(mesh, sequence_parallel)
    assert model.head is not None
    assert model.order is not None
    here = S // mesh.size() if sequence_parallel else S
    hidden = torch.randn(B, here, D, requires_grad=True)
    with Wire() as forward:
        loss = model.head(hidden, batch()["labels"]) + model.order(hidden).sum()
    with Wire() as backward:
        loss.backward()
    return [forward.seen, backward.seen]


def compiled() -> dict[str, Any]:
    """Two batches of other numbers of labels, through blocks that are compiled without their arithmetic."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    model, _ = cut(mesh, True, hidden_dropout=0.1)
    truth = small(hidden_dropout=0.1)
    for block in model.layers.values():
        block.compile(fullgraph=True, backend="aot_eager")
    pairs = [(total(model, rows), total(truth, rows)) for rows in (batch(), batch({3: 7}))]
    errors = [abs(ours.item() / expected.item() - 1) for ours, expected in pairs]
    return {"errors": errors, "graphs": torch._dynamo.utils.counters["stats"]["unique_graphs"]}


def everything() -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    found: dict[str, Any] = {}
    for sp in CUT_OVER[mesh.size()]:
        for case, keys in CASES.items():
            found[f"{case}, {sp}"] = deviations(mesh, sp, batch(), **keys)
        found[f"no labels in the batch, {sp}"] = deviations(mesh, sp, batch({}))
        found[f"without labels, {sp}"] = without_labels(mesh, sp)
        found[f"wire, {sp}"] = wire(mesh, sp)
        found[f"partial, {sp}"] = cut(mesh, sp, norm="post")[1]
    return found


@functools.cache
def on(tp: int) -> list[dict[str, Any]]:
    return ranks.run(tp, everything)


over_layouts = pytest.mark.parametrize(("tp", "sp"), [(tp, sp) for tp, several in CUT_OVER.items() for sp in several])


@pytest.mark.parametrize("case", [*CASES, "no labels in the batch"])
@over_layouts
def test_both_losses_and_every_gradient_equal_one_process(tp: int, sp: bool, case: str):
    for found in on(tp):
        errors = dict(found[f"{case}, {sp}"])
        assert errors.pop("loss") < 1e-6
        assert {name: e for name, e in errors.items() if not e < 1e-5} == {}


@over_layouts
def test_without_labels_the_logits_of_both_heads_are_those_of_one_process(tp: int, sp: bool):
    for found in on(tp):
        errors = found[f"without labels, {sp}"]
        assert errors.keys() == {"logits", "order"}
        assert max(errors.values()) < 1e-6


@over_layouts
def test_the_heads_gather_once_and_sum_the_gradient_of_labelled_tokens_only(tp: int, sp: bool):
    n = len(LABELLED)
    loss = ("allgather_", tp * 3 * n)  # three numbers a token of the fused loss
    hidden, first = ("_allgather_base_", B * S * D), ("_allgather_base_", B * tp * D)
    for found in on(tp):
        assert found[f"wire, {sp}"] == [[hidden, loss, first] if sp else [loss], [("allreduce_", n * D)]]


@over_layouts
def test_partial_sums_are_gradients_of_what_saw_a_part_of_the_sequence_and_of_nothing_in_the_heads(tp: int, sp: bool):
    ends = ["positions.weight", "types.weight", "embed_norm.weight", "embed_norm.bias"]
    of_a_layer = [
        *("attn_norm.weight", "attn_norm.bias", "attn.out.bias"),
        *("mlp_norm.weight", "mlp_norm.bias", "mlp.down.bias"),
    ]
    expected = [*ends, *(f"layers.{i}.{name}" for i in range(2) for name in of_a_layer)]
    for found in on(tp):
        assert found[f"partial, {sp}"] == (expected if sp else [])


@pytest.mark.full  # plans/test_plans.py compiles BLOOM's blocks, ops/test_attention.py a rule with padding
def test_blocks_compile_without_graph_breaks_to_one_graph_whatever_is_masked():
    for found in ranks.run(2, compiled):
        assert found["graphs"] == 1
        assert max(found["errors"]) < 1e-6
