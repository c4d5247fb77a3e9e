"""Claims about what an encoder-decoder needs, by `two_stacks.py`: every layout is one process."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from dtmega import config, families, mesh
from dtmega.data.loader import StepBatch
from dtmega.data.objectives.rows import IGNORED
from dtmega.models.initial import init_weights
from dtmega.ops import optim
from dtmega.training.checks import check
from dtmega.training.parallelize import parallelize
from dtmega.training.step import train_step
from tests import ranks, two_stacks
from tests.two_stacks import S, T, V

CPU = torch.device("cpu")
SEQUENCES, STEPS, LR, CLIP = 8, 3, 1e-2, 1.0
EPS = 1e-3  # AdamW makes full steps of rounding otherwise
# Without these nothing of the first stack is trained, and its stages have no gradient to hand back.
FIRST_STACK = "embed.", "decoder_embed.", "head.", "position.", "encoder.", "norm."
# The last of four stages alone is trained, or the first alone, whose gradient comes through frozen ones.
ALL_BUT_LAST = (*FIRST_STACK, "decoder.0.")
ALL_BUT_FIRST = "embed.", "position.", "encoder.1.", "norm.", "decoder"
ZBV = {"pipeline": {"schedule": "ZBVZeroBubble"}}
# Name -> processes, keys, names of frozen parameters.
COUNTS = {"tokens": 20, "sequences": SEQUENCES}  # rows have 4, 3, 2, 1, 4, ... labels
LAYOUTS: dict[str, tuple[int, dict[str, Any], tuple[str, ...]]] = {
    "one process": (1, {}, ()),
    "pp 2": (2, {"mesh": {"pp": 2}}, ()),
    "pp 2, zero bubbles": (2, {"mesh": {"pp": 2}, "pipeline": {"schedule": "InterleavedZeroBubble"}}, ()),
    "pp 2, ZBV": (2, {"mesh": {"pp": 2}, **ZBV}, ()),
    "tp 2": (2, {"mesh": {"tp": 2, "sequence_parallel": False}}, ()),
    "FSDP": (2, {"mesh": {"dp_shard": 2}}, ()),
    "FSDP, frozen": (2, {"mesh": {"dp_shard": 2}}, FIRST_STACK),
    "pp 2, frozen": (2, {"mesh": {"pp": 2}}, FIRST_STACK),
    "pp 2, ZBV, frozen": (2, {"mesh": {"pp": 2}, **ZBV}, FIRST_STACK),
    "pp 2, ZBV, three stages frozen": (2, {"mesh": {"pp": 2}, **ZBV}, ALL_BUT_LAST),
    "pp 2, ZBV, the last stages frozen": (2, {"mesh": {"pp": 2}, **ZBV}, ALL_BUT_FIRST),
    "pp 3": (3, {"mesh": {"pp": 3}}, ()),
    "HSDP": (4, {"mesh": {"dp_replicate": 2, "dp_shard": 2}}, ()),
    "pp 2, FSDP, ZBV": (4, {"mesh": {"pp": 2, "dp_shard": 2}, **ZBV}, ()),
    "pp 2, FSDP, frozen": (4, {"mesh": {"pp": 2, "dp_shard": 2}}, FIRST_STACK),
}
if torch.__version__ < (2, 13):
    # Where several tensors go from stage to stage, its split backward adds up gradients of different ones.
    LAYOUTS = {name: layout for name, layout in LAYOUTS.items() if "ZBV" not in name and "zero" not in name}


def configured(keys: dict[str, Any]) -> config.Config:
    sections = {
        "run": {"device": "cpu"},
        "model": {"vocab_size": V, "hidden_size": 8, "n_layers": 2, "n_heads": 2},
        "data": {"seq_len": S},
        "batch": {"micro_batch_size": 1, "global_batch_size": SEQUENCES},
        "optim": {"lr": LR, "clip_grad": CLIP, "eps": EPS},
        "train": {"steps": STEPS},
        "compile": {"enable": False},
    }
    return config.validate(sections | keys, "test")


def rows(step: int) -> dict[str, Tensor]:
    """A global batch; labels, and so tokens, are not as many in each sequence, and places do not count up."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(V, (SEQUENCES, S), generator=generator)
    targets = torch.randint(V, (SEQUENCES, T + 1), generator=generator)
    labels = targets[:, 1:].clone()
    for i in range(SEQUENCES):
        labels[i, : i % T] = IGNORED
    return {
        "tokens": tokens,
        "places": torch.randint(S, (SEQUENCES, S), generator=generator),
        "targets": targets[:, :-1],
        "target_places": torch.randint(S, (SEQUENCES, T), generator=generator),
        "labels": labels,
        "kinds": torch.randint(2, (SEQUENCES,), generator=generator).float(),
    }


def microbatches(step: int, rank: int, size: int) -> list[dict[str, Tensor]]:
    mine = {name: t.chunk(size)[rank].split(1) for name, t in rows(step).items()}
    return [dict(zip(mine, parts, strict=True)) for parts in zip(*mine.values(), strict=True)]


def truth(frozen: tuple[str, ...]) -> dict[str, Any]:
    """A plain loop in torch on the whole batch at once."""
    model = two_stacks.TwoStacks(configured({}).model)
    init_weights(model, seed=0)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(frozen))
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if (p.ndim > 1) is cut], "weight_decay": cut * 0.1} for cut in (True, False)
    ]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.95), eps=EPS)
    found: dict[str, Any] = {"steps": [], "tokens": []}
    for step in range(STEPS):
        batch = rows(step)
        n_tokens = (batch["labels"] != -100).sum().item()
        optimizer.zero_grad()
        sums = model(**batch)
        means = {"lm": sums["lm"] / n_tokens, "kind": sums["kind"] / SEQUENCES, "right": sums["right"] / SEQUENCES}
        loss = means["lm"] + 0.5 * means["kind"]
        loss.backward()
        if step == 0:
            found["gradients"] = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        norm = nn.utils.clip_grad_norm_(trained, CLIP)
        optimizer.step()
        found["steps"].append({"loss": loss.item(), "grad_norm": norm.item()} | {n: t.item() for n, t in means.items()})
    found["weights"] = {name: p.detach().clone() for name, p in model.named_parameters()}
    sums = model(**rows(0))
    found["sums"] = torch.stack([sums[name] for name in ("lm", "kind", "right")]).detach()
    return found


def train(layouts: list[str]) -> dict[str, Any]:
    """The findings of this rank on each of these layouts."""
    return {name: trained(*LAYOUTS[name][1:]) for name in layouts}


def trained(keys: dict[str, Any], frozen: tuple[str, ...]) -> dict[str, Any]:
    family = dataclasses.replace(two_stacks.FAMILY, frozen=frozen)
    families.BUILT_IN["bloom"] = lambda: family
    cfg = configured(keys)
    world = mesh.start(CPU, mesh.resolve(cfg.mesh, torch.distributed.get_world_size()))
    check(cfg, world.sizes, CPU)
    model = parallelize(cfg, world)
    model.draw(seed=0)
    optimizer = optim.build_optimizer(model.named_parameters(), cfg.optim)
    parts = {"cfg": cfg, "world": world, "model": model, "optimizer": optimizer}
    run: Any = SimpleNamespace(**parts, spikes=None, watch=Mock(), phases=Mock(), loss_scale=None)
    found: dict[str, Any] = {"steps": [], "tied": {tied.name: tied.stages for tied in model.tied}}
    for step in range(STEPS):
        mine = microbatches(step, world.data_rank, world.data_size)
        if step == 0:
            model.forward_backward(mine, COUNTS)
            found["gradients"] = whole({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
        outcome = train_step(run, StepBatch(0, SEQUENCES, mine))
        found["steps"].append({"loss": outcome.loss, "grad_norm": outcome.grad_norm} | outcome.means)
        model.check_copies()
    found["weights"] = whole({n: p.detach() for n, p in model.owned().items()})
    totals = model.losses(microbatches(0, world.data_rank, world.data_size))
    torch.distributed.all_reduce(totals, group=world.groups["loss"])
    return found | {"sums": totals.tolist()}


def whole(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {n: t.full_tensor() if isinstance(t, DTensor) else t.clone() for n, t in tensors.items()}


def differences(found: Any, expected: Any) -> float:
    """The largest difference, relative to what is compared."""
    if isinstance(found, Tensor):
        return ((found - expected).norm() / expected.norm().clamp(min=1e-9)).item()
    return abs(found - expected) / max(abs(expected), 1e-3)


NO_PARAMETERS = SimpleNamespace(params={})


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest) -> dict[str, tuple[dict[str, Any], list[dict[str, Any]]]]:
    """Layout -> the truth, and what each rank found; of those that are asked for, in one group for each size."""
    asking = [item for item in request.session.items if item.path == request.path and "results" in item.fixturenames]
    asked = {getattr(item, "callspec", NO_PARAMETERS).params.get("layout", "pp 3") for item in asking}
    truths = {frozen: truth(frozen) for frozen in {LAYOUTS[name][2] for name in asked}}
    found = {}
    for n in {LAYOUTS[name][0] for name in asked}:
        names = [name for name in LAYOUTS if name in asked and LAYOUTS[name][0] == n]
        of_ranks = ranks.run(n, train, names)
        found |= {name: (truths[LAYOUTS[name][2]], [rank[name] for rank in of_ranks]) for name in names}
    return found


# Each repeats what others have: a loop of stages, parameters of FSDP that have no gradient, a V. test_parity.py has
# copies of shards.
REPEATING = {"pp 2, zero bubbles", "FSDP, frozen", "pp 2, FSDP, ZBV", "pp 2, frozen", "HSDP"}


@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=pytest.mark.full if name in REPEATING else ()) for name in LAYOUTS]
)
def test_every_loss_gradient_and_weight_is_that_of_one_process(results: Any, layout: str):
    expected, of_ranks = results[layout]
    for here in of_ranks:
        for step, values in zip(here["steps"], expected["steps"], strict=True):
            assert {name: e for name in values if not (e := differences(step[name], values[name])) < 1e-6} == {}
        assert differences(torch.tensor(here["sums"]), expected["sums"]) < 1e-6
        errors = {name: differences(t, expected["gradients"][name]) for name, t in here["gradients"].items()}
        assert {name: e for name, e in errors.items() if not e < 1e-6} == {}
        stepped = [
            torch.cat([of[name].flatten() for name in here["weights"]]) for of in (here["weights"], expected["weights"])
        ]
        assert differences(*stepped) < 1e-6
    for kind in ("gradients", "weights"):
        assert {name for here in of_ranks for name in here[kind]} == expected[kind].keys()


def test_three_stages_hold_the_table_of_positions_and_a_vocabulary_with_three_names(results: Any):
    _, of_ranks = results["pp 3"]
    for here in of_ranks:
        assert here["tied"] == {"embed.weight": [0, 1, 2], "position.weight": [0, 1, 2]}
