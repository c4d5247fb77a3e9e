"""Packing changes no number: conversations that share rows have the loss and the gradients of each of them alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from dtmega import config, families, mesh
from dtmega.data.indexed_files.conversations import Conversation
from dtmega.data.objectives.conversations import ConversationRows
from dtmega.data.objectives.rows import IGNORED
from dtmega.ops.shards import full_tensor
from dtmega.training.checks import check
from dtmega.training.parallelize import parallelize
from tests import hf_models, ranks
from tests.hf_models import Case

V, S = 131, 24
LENGTHS = ((9, 4, 12), (14, 11), (20,), (7, 7, 9))  # of the conversations in each of four rows
WIDE = {"vocab_size": V, "hidden_size": 48, "n_heads": 4, "n_layers": 2, "init_std": 0.2}
OWN: dict[str, dict[str, Any]] = {
    "bloom": {"name": "bloom", **WIDE},
    "gpt": {"name": "gpt", "max_position_embeddings": S, **WIDE},
    "llama": {"name": "llama", "n_kv_heads": 2, "ffn_hidden_size": 64, **WIDE},
}
THEIRS = ("llama", "gemma3_text", "mixtral")
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "dp_shard 2": (2, {"dp_shard": 2}),
    "tp 2": (2, {"tp": 2}),
    "pp 2": (2, {"pp": 2}),
    "cp 2": (2, {"cp": 2, "cp_form": "gather"}),
    "cp 2, heads": (2, {"cp": 2, "cp_form": "heads"}),
    "HSDP 2 x 2": (4, {"dp_replicate": 2, "dp_shard": 2}),
}
ALONE: tuple[int, dict[str, Any]] = (1, {})
LIGHT = [("bloom", "dp_shard 2"), ("gpt", "pp 2"), ("hf llama", "tp 2"), ("llama", "cp 2")]
TOLERANCE = 1e-5


class Table(NamedTuple):
    """Conversations by the number of their row."""

    rows: list[list[Conversation]]

    n_tokens = 0
    n_samples = 0
    note = ""

    def __getitem__(self, g: int) -> list[Conversation]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self.rows[g]


def conversations() -> list[list[Conversation]]:
    generator = np.random.default_rng(0)
    found: list[list[Conversation]] = []
    for lengths in LENGTHS:
        row: list[Conversation] = []
        for n in lengths:
            tokens = generator.integers(3, V, n).astype(np.uint16)
            row.append(Conversation(tokens, np.arange(n) >= n // 2))
        found.append(row)
    return found


def rows_of(packed: bool) -> dict[str, Tensor]:
    rows = conversations()
    if not packed:
        rows = [[conversation] for row in rows for conversation in row]
    data = config.Data(objective="conversations", seq_len=S)
    return ConversationRows(Table(rows), data, padding_id=0)[range(len(rows))]


class Outcome(NamedTuple):
    loss: float
    gradients: dict[str, Tensor]


def configured(model: Mapping[str, Any], sizes: Mapping[str, Any], pack: bool = True) -> config.Config:
    sections = {
        "model": model,
        "data": {"objective": "conversations", "pack": pack, "seq_len": S, "tokenizer": "bytes"},
        "batch": {"micro_batch_size": 1, "global_batch_size": 4},
        "train": {"steps": 1},
        "compile": {"enable": False},
        "precision": {"params": "float32"},
        "mesh": {"dp_shard": 1, **sizes},
    }
    return families.resolve(config.validate(sections, "test"))


def outcomes(models: list[dict[str, Any]], sizes: Mapping[str, Any], packed: bool) -> list[Outcome]:
    """The sum of losses, and the gradients of its mean, with each model."""
    found: list[Outcome] = []
    for keys in models:
        cfg = configured(keys, sizes)
        world = mesh.start(torch.device("cpu"), mesh.resolve(cfg.mesh, dist.get_world_size()))
        check(cfg, world.sizes, world.device)
        model = parallelize(cfg, world)
        model.draw(seed=0)
        rows = rows_of(packed)
        n_labels = float((rows["labels"] != IGNORED).sum())
        n_mine = len(rows["labels"]) // world.data_size
        mine = range(world.data_rank * n_mine, (world.data_rank + 1) * n_mine)
        microbatches = [{name: row[i : i + 1] for name, row in rows.items()} for i in mine]
        totals = model.forward_backward(microbatches, {"tokens": n_labels})
        dist.all_reduce(totals, group=world.groups["loss"])
        gradients = {}
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                gradients[name] = full_tensor(parameter.grad).clone()
        found.append(Outcome(totals.item(), gradients))
    return found


def compare(found: Outcome, truth: Outcome) -> None:
    assert found.loss == pytest.approx(truth.loss, rel=TOLERANCE)
    largest = max(float(gradient.abs().max()) for gradient in truth.gradients.values())
    assert found.gradients
    for name, gradient in found.gradients.items():
        assert torch.allclose(gradient, truth.gradients[name], rtol=0, atol=TOLERANCE * largest), name


@pytest.fixture(scope="module")
def models() -> dict[str, dict[str, Any]]:
    """Name -> section [model]."""
    cases = {name: Case(name) for name in THEIRS}
    folders = hf_models.saved([*cases.values()])
    return OWN | {f"hf {name}": {"name": "hf", "path": folders[case]} for name, case in cases.items()}


@pytest.fixture(scope="module")
def alone(models: dict[str, dict[str, Any]]) -> dict[str, Outcome]:
    """One conversation in a row, on one process."""
    (found,) = ranks.run(1, outcomes, [*models.values()], ALONE[1], False)
    return dict(zip(models, found, strict=True))


def test_each_conversation_of_a_row_and_the_padding_after_it_are_a_document_with_positions_of_its_own():
    rows = rows_of(True)
    for row, lengths in enumerate(LENGTHS):
        inside = [n - 1 for n in lengths]  # the last token of each is only a label
        parts = [*inside, S - sum(inside)]
        assert rows["document_ids"][row].tolist() == [number for number, n in enumerate(parts) for _ in range(n)]
        assert rows["position_ids"][row].tolist() == [place for n in parts for place in range(n)]


def test_packed_conversations_have_the_loss_and_gradients_of_each_alone(models, alone):
    (found,) = ranks.run(1, outcomes, [*models.values()], ALONE[1], True)
    for name, outcome in zip(models, found, strict=True):
        compare(outcome, alone[name])


def cases() -> list[Any]:
    found: list[Any] = []
    for family in [*OWN, *(f"hf {name}" for name in THEIRS)]:
        for layout in LAYOUTS:
            marks = () if (family, layout) in LIGHT else pytest.mark.full
            found.append(pytest.param(family, layout, marks=marks))
    return found


@pytest.mark.parametrize(("family", "layout"), cases())
def test_packed_conversations_have_the_same_loss_and_gradients_on_each_layout(models, alone, family, layout):
    n, sizes = LAYOUTS[layout]
    for (outcome,) in ranks.run(n, outcomes, [models[family]], sizes, True):
        compare(outcome, alone[family])


@pytest.mark.parametrize(("kind", "remedy"), [("opt", "its mask ignores the positions"), ("bloom", "name = 'bloom'")])
def test_a_model_that_would_let_conversations_see_each_other_is_refused_with_the_remedy(kind: str, remedy: str):
    case = Case(kind)
    model = {"name": "hf", "path": hf_models.saved([case])[case]}
    cfg = configured(model, {})
    with pytest.raises(ValueError, match=f"conversations of '{kind}' cannot share a row: .*{remedy}.*pack=false"):
        check(cfg, mesh.resolve(cfg.mesh, 1), torch.device("cpu"))
    alone = configured(model, {}, pack=False)
    check(alone, mesh.resolve(alone.mesh, 1), torch.device("cpu"))
