"""Claims about two stacks on a layout: copies, messages and refusals; their numbers are in test_parity.py."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from dtmega import config, families, mesh
from dtmega.config.families.t5 import T5Keys
from dtmega.data.loader import StepBatch
from dtmega.data.objectives.rows import IGNORED
from dtmega.models.initial import init_weights
from dtmega.models.t5 import T5
from dtmega.ops import optim
from dtmega.plans import apply_plan, shard_buffers, t5
from dtmega.training.checks import check
from dtmega.training.parallelize import parallelize
from dtmega.training.step import train_step
from tests import ranks
from tests.models.test_contract import NO_PARAMETERS, differences, whole
from tests.models.test_t5 import MEGATRON
from tests.plans.test_bert import Wire

CPU = torch.device("cpu")
V, S, T, SEQUENCES, STEPS, LR, CLIP = 131, 12, 6, 12, 2, 1e-2, 1.0
EPS = 1e-3  # AdamW makes full steps of rounding otherwise
FORMS: dict[str, dict[str, Any]] = {
    "t5": {"kv_channels": 4, "gated": True, "activation": "gelu_tanh", "inner_dropout": 0.1},
    "megatron": {**MEGATRON, "max_position_embeddings": S, "pad_vocab_to_multiple": 48},
}
# Both stacks are cut in two. Other layouts are in test_parity.py; here every gradient is compared by itself.
INSIDE = {"mesh": {"pp": 3}, "pipeline": {"stages": [[0, 1], [2, 3], [4]]}}
# Name -> processes, form, keys.
LAYOUTS: dict[str, tuple[int, str, dict[str, Any]]] = {
    "pp 3, cut inside": (3, "t5", INSIDE),
    "megatron, pp 3, cut inside": (3, "megatron", INSIDE),
    "tp 2": (2, "t5", {"mesh": {"tp": 2}}),
}
EVERY = ["pp 3, cut inside", *(pytest.param(n, marks=pytest.mark.full) for n in LAYOUTS if n != "pp 3, cut inside")]


def configured(form: str, keys: dict[str, Any], steps: int = STEPS) -> config.Config:
    sizes = {"vocab_size": V, "hidden_size": 48, "n_layers": 3, "n_decoder_layers": 2, "n_heads": 6}
    dropout = {"hidden_dropout": 0.1, "attention_dropout": 0.1}
    sections = {
        "run": {"device": "cpu"},
        "data": {"seq_len": S},
        "batch": {"micro_batch_size": 1, "global_batch_size": SEQUENCES},
        "optim": {"lr": LR, "clip_grad": CLIP, "eps": EPS},
        "train": {"steps": steps},
        "compile": {"enable": False},
    }
    cfg = config.validate(sections | keys, "test")
    model = T5Keys(ffn_hidden_size=96, **sizes, **dropout, **FORMS[form])
    data = cfg.data.model_copy(update={"decoder_seq_len": T})
    return cfg.model_copy(update={"model": model, "data": data})


def rows(step: int) -> dict[str, Tensor]:
    """A global batch, in which all samples but the first have padding on both sides, and so other numbers of labels."""
    generator = torch.Generator().manual_seed(step)
    number = torch.arange(SEQUENCES).unsqueeze(1)
    text = torch.arange(S) < S - number
    decoder_text = torch.arange(T) < T - number % 4
    said = torch.randint(V, (SEQUENCES, T + 1), generator=generator)
    return {
        "tokens": torch.randint(V, (SEQUENCES, S), generator=generator).where(text, 0),
        "decoder_tokens": said[:, :-1].where(decoder_text, 0),
        "labels": said[:, 1:].where(decoder_text, IGNORED),
        "sample_ids": step * SEQUENCES + number.squeeze(1),
        "places": torch.arange(S).expand(SEQUENCES, S).contiguous(),
        "decoder_places": torch.arange(T).expand(SEQUENCES, T).contiguous(),
        "document_ids": (~text).long(),
        "decoder_document_ids": (~decoder_text).long(),
    }


def microbatches(step: int, rank: int, size: int) -> list[dict[str, Tensor]]:
    mine = {name: t.chunk(size)[rank].split(1) for name, t in rows(step).items()}
    return [dict(zip(mine, parts, strict=True)) for parts in zip(*mine.values(), strict=True)]


def truth(form: str) -> dict[str, Any]:
    """A plain loop in torch on the whole batch at once."""
    model = T5(configured(form, {}).model)
    init_weights(model, seed=0)
    model.init_buffers(seed=configured(form, {}).run.seed)
    trained = list(model.parameters())
    groups = [
        {"params": [p for p in trained if (p.ndim > 1) is cut], "weight_decay": cut * 0.1} for cut in (True, False)
    ]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.95), eps=EPS)
    found: dict[str, Any] = {"steps": []}
    for step in range(STEPS):
        batch = rows(step)
        optimizer.zero_grad()
        loss = model(**batch)["lm"] / (batch["labels"] != IGNORED).sum()
        loss.backward()
        if step == 0:
            found["gradients"] = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        norm = nn.utils.clip_grad_norm_(trained, CLIP)
        optimizer.step()
        found["steps"].append({"loss": loss.item(), "grad_norm": norm.item()})
    found["weights"] = {name: p.detach().clone() for name, p in model.named_parameters()}
    found["sum"] = model.eval()(**rows(0))["lm"].item()
    return found


def train(layouts: list[str]) -> dict[str, Any]:
    """The findings of this rank on each of these layouts."""
    return {name: trained(*LAYOUTS[name][1:]) for name in layouts}


def started(cfg: config.Config) -> Any:
    """A run, as far as a step needs it."""
    world = mesh.start(CPU, mesh.resolve(cfg.mesh, torch.distributed.get_world_size()))
    check(cfg, world.sizes, CPU)
    model = parallelize(cfg, world)
    model.draw(seed=0)
    optimizer = optim.build_optimizer(list(model.named_parameters()), cfg.optim)
    parts = {"cfg": cfg, "world": world, "model": model, "optimizer": optimizer}
    return SimpleNamespace(**parts, spikes=None, watch=Mock(), phases=Mock(), loss_scale=None)


def trained(form: str, keys: dict[str, Any]) -> dict[str, Any]:
    run = started(configured(form, keys))
    world, model = run.world, run.model
    found: dict[str, Any] = {"steps": [], "tied": {tied.name: tied.stages for tied in model.tied}}
    for step in range(STEPS):
        mine = microbatches(step, world.data_rank, world.data_size)
        if step == 0:
            model.forward_backward(mine, {"tokens": int((rows(0)["labels"] != IGNORED).sum())})
            found["gradients"] = whole({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
        outcome = train_step(run, StepBatch(0, SEQUENCES, mine))
        found["steps"].append({"loss": outcome.loss, "grad_norm": outcome.grad_norm})
        model.check_copies()
    found["weights"] = whole({n: p.detach() for n, p in model.owned().items()})
    totals = model.losses(microbatches(0, world.data_rank, world.data_size))
    torch.distributed.all_reduce(totals, group=world.groups["loss"])
    return found | {"sum": totals.item()}


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest) -> dict[str, tuple[dict[str, Any], list[dict[str, Any]]]]:
    """Layout -> the truth, and what each rank found; of those that are asked for, in one group for each size."""
    asking = [item for item in request.session.items if item.path == request.path and "results" in item.fixturenames]
    asked = {getattr(item, "callspec", NO_PARAMETERS).params.get("layout", "pp 3, cut inside") for item in asking}
    truths = {form: truth(form) for form in {LAYOUTS[name][1] for name in asked}}
    found = {}
    for n in {LAYOUTS[name][0] for name in asked}:
        names = [name for name in LAYOUTS if name in asked and LAYOUTS[name][0] == n]
        of_ranks = ranks.run(n, train, names)
        found |= {name: (truths[LAYOUTS[name][1]], [rank[name] for rank in of_ranks]) for name in names}
    return found


@pytest.mark.parametrize("layout", EVERY)
def test_loss_gradients_and_weights_of_a_layout_are_those_of_one_process(results: Any, layout: str):
    expected, of_ranks = results[layout]
    for here in of_ranks:
        for step, values in zip(here["steps"], expected["steps"], strict=True):
            assert {name: e for name in values if not (e := differences(step[name], values[name])) < 1e-5} == {}
        assert differences(here["sum"], expected["sum"]) < 1e-5
        # The bias of keys has no gradient but of rounding: a softmax does not see it.
        seen = {name: t for name, t in here["gradients"].items() if not name.endswith("k.bias")}
        errors = {name: differences(t, expected["gradients"][name]) for name, t in seen.items()}
        assert {name: e for name, e in errors.items() if not e < 1e-5} == {}
        names = here["weights"]
        stepped = [torch.cat([of[name].flatten() for name in names]) for of in (here["weights"], expected["weights"])]
        assert differences(*stepped) < 1e-5
    for kind in ("gradients", "weights"):
        assert {name for here in of_ranks for name in here[kind]} == expected[kind].keys()


def test_stages_share_the_words_and_each_stack_its_relative_bias(results: Any):
    _, of_ranks = results["pp 3, cut inside"]
    found = {name: stages for here in of_ranks for name, stages in here["tied"].items()}
    assert found == {"embed.weight": [0, 1, 2], "encoder_bias.weight": [0, 1], "decoder_bias.weight": [1, 2]}


def gathers(n_decoder_layers: int) -> int:
    """The number of all-gathers of whole sequences of the encoder, in forward."""
    tp = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    sizes = {"vocab_size": V, "hidden_size": 48, "n_heads": 6}
    model = T5(T5Keys(**sizes, n_layers=1, n_decoder_layers=n_decoder_layers))
    init_weights(model, seed=0)
    model.init_buffers(seed=0)
    table = t5.plan(model.cfg)
    apply_plan(model, tp, table)
    shard_buffers(model, tp, table)
    with Wire() as wire:
        model(**rows(0))
    return sum(what == ("_allgather_base_", SEQUENCES * S * 48) for what in wire.seen)


def test_the_encoders_output_is_gathered_once_for_all_layers_of_the_decoder():
    in_the_encoder = 2  # its attention and its feed-forward
    for found in ranks.run(2, gathers, 1), ranks.run(2, gathers, 3):
        assert found == [in_the_encoder + 1] * 2


def twenty_steps() -> list[dict[str, bool]]:
    keys = {"mesh": {"pp": 4}, "pipeline": {"stages": [[0], [1, 2], [3], [4]]}}
    run = started(configured("t5", keys, steps=20))
    found = []
    for step in range(20):
        train_step(run, StepBatch(0, 4, microbatches(step, 0, 1)[:4]))
        found.append({tied.name: tied.equal() for tied in run.model.tied})
    return found


@pytest.mark.full  # test_parity.py compares the copies of three stages after each step
def test_after_twenty_steps_on_four_stages_all_copies_are_equal_to_the_bit():
    seen = set()
    for of_rank in ranks.run(4, twenty_steps):
        assert all(all(equal.values()) for equal in of_rank)
        seen |= {name for equal in of_rank for name in equal}
    assert seen == {"embed.weight", "encoder_bias.weight", "decoder_bias.weight"}


@pytest.mark.parametrize(
    ("data", "named"),
    [
        ({"seq_len": 16}, r"seq_len=16 is more than the 12 positions of the model \(\[data\] seq_len, "),
        ({"decoder_seq_len": 14}, r"decoder_seq_len=14 is more than the 12 positions of the model"),
        ({"decoder_seq_len": 5}, r"tp=2 does not divide decoder_seq_len=5 \(\[mesh\] tp, \[data\] decoder_seq_len\)"),
    ],
)
def test_both_sequences_must_fit_the_model_and_the_mesh(data: dict[str, Any], named: str):
    cfg = configured("megatron", {"mesh": {"tp": 2}})
    cfg = cfg.model_copy(update={"data": cfg.data.model_copy(update=data)})
    with pytest.raises(ValueError, match=named):
        families.named("t5").check(cfg, {"tp": 2, "cp": 1, "pp": 1})


@pytest.mark.parametrize("schedule", ["InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"])
@pytest.mark.parametrize(("form", "reason"), [("t5", "its relative bias"), ("megatron", "the decoder begins there")])
def test_a_backward_in_two_parts_is_refused_for_each_form_with_its_reason(schedule: str, form: str, reason: str):
    keys = {"mesh": {"pp": 2}, "pipeline": {"schedule": schedule}}
    with pytest.raises(ValueError, match=rf"{reason}: .*\(\[pipeline\] schedule, \[model\] name\)"):
        families.named("t5").check(configured(form, keys), {"tp": 1, "cp": 1, "pp": 2})
