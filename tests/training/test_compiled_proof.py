"""Claims about compiled blocks after an evaluation, and about the proof that a compiled run makes before it begins."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partialmethod
from typing import Any, cast
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from dtmega import config, mesh, train
from dtmega.ops.shards import local
from dtmega.plans import products
from dtmega.training import compiled_proof
from dtmega.training.parallelize import parallelize
from dtmega.training.random_text import blank_to_text
from dtmega.training.sharded_model import ShardedModel
from tests import ranks
from tests.planning import real_step
from tests.resumed import flags

SMALL = {
    "model.vocab_size": 31,
    "model.hidden_size": 16,
    "model.n_heads": 4,
    "model.n_layers": 1,
    "data.seq_len": 8,
    "batch.micro_batch_size": 2,
    "train.steps": 9,
    "precision.params": "float32",
    "compile.enable": True,
}
MIXTURE = {
    "model.name": "moe",
    "model.n_kv_heads": 2,
    "model.n_layers": 1,
    "model.n_experts": 4,
    "model.expert_ffn_hidden_size": 12,
    "model.shared_experts": 1,
    "model.router_z_loss": 0.05,
}
MIXED = "tp 2 x dp_shard 2, ep 2"
# Every axis, each with what breaks a block's graph on it: FSDP's hooks, and an exchange of experts' rows.
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    MIXED: (4, MIXTURE | {"mesh.tp": 2, "mesh.dp_shard": 2, "mesh.ep": 2}),
    "tp 2": (2, {"mesh.tp": 2}),
    "dp_shard 2": (2, {"mesh.dp_shard": 2}),
    "pp 2, recompute": (2, {"mesh.pp": 2, "model.n_layers": 2, "recompute.mode": "full"}),
    "cp 2": (2, {"mesh.cp": 2}),
    "dp_replicate 2": (2, {"mesh.dp_replicate": 2}),
}
# Four ranks take a minute to compile a mixture; plans/test_regions.py has regions of which parts are compiled.
NAMES = [pytest.param(MIXED, marks=pytest.mark.full), *(name for name in LAYOUTS if name != MIXED)]
BACKENDS = ["aot_eager", pytest.param("inductor", marks=pytest.mark.full)]


def built(keys: dict[str, Any], backend: str) -> tuple[config.Config, mesh.World, ShardedModel]:
    cfg, sizes = real_step.settled(real_step.nested(SMALL | keys), dist.get_world_size())
    world = mesh.start(torch.device("cpu"), sizes, ep=cfg.mesh.ep)
    torch._dynamo.reset()
    with patch.object(nn.Module, "compile", partialmethod(nn.Module.compile, backend=backend)):
        model = parallelize(cfg, world)
    model.draw(1)
    return cfg, world, model


def gradients(cfg: config.Config, model: ShardedModel) -> dict[str, Tensor]:
    """The gradients of a step after an evaluation, this rank's shards."""
    rows = blank_to_text(model.objective.blank(cfg.data, cfg.batch.micro_batch_size), cfg.model.vocab_size)
    model.losses([rows, rows])
    model.forward_backward([rows, rows], {kind.per: 32.0 for kind in model.objective.sums})
    return {name: local(p.grad).clone() for name, p in model.named_parameters() if p.grad is not None}


@contextmanager
def ends_that_go_by_their_own_mode() -> Iterator[None]:
    """The fault that a graph's break made visible: a region's end forgets that the region's products were compiled."""
    honest = products.again

    def again(out: Any, entered: Tensor) -> Any:
        region = getattr(entered, "region", None)
        if region is not None:
            region.feeds = False
        return honest(out, entered)

    with patch.object(products, "again", again):
        yield


def left_behind(model: ShardedModel) -> dict[str, Tensor]:
    """Gradients, buffers, and the state of torch's generator."""
    left = {f"gradient of {name}": p.grad for name, p in model.named_parameters() if p.grad is not None}
    for number, stage in model.stages.items():
        left |= {f"{name} of stage {number}": buffer.clone() for name, buffer in stage.named_buffers()}
    return left | {"generator": torch.get_rng_state()}


def measured(keys: dict[str, Any], backend: str) -> dict[str, Any]:
    """The finding of a proof, what the proof has changed, and how far the next step's gradients are from eager ones."""
    cfg, _, model = built(keys | {"compile.enable": False}, backend)
    eager = gradients(cfg, model)
    cfg, world, model = built(keys, backend)
    before = left_behind(model)
    finding = compiled_proof.unlike_eager(cfg, world, model, lambda: None)
    after = left_behind(model)
    changed = [name for name, value in after.items() if name not in before or not torch.equal(before[name], value)]
    compiled = gradients(cfg, model)
    far = {name: float((compiled[name] - g).norm() / (g.norm() + 1e-6)) for name, g in eager.items()}
    return {"finding": finding, "changed": changed, "far": far, "alike": compiled.keys() == eager.keys()}


def finding_of_fault(backend: str) -> str:
    cfg, world, model = built(LAYOUTS[MIXED][1], backend)
    with ends_that_go_by_their_own_mode():
        return compiled_proof.unlike_eager(cfg, world, model, lambda: None)[0]


def every_layout(n: int, backend: str) -> dict[str, Any]:
    found: dict[str, Any] = {name: measured(keys, backend) for name, (size, keys) in LAYOUTS.items() if size == n}
    return found | ({"fault": finding_of_fault(backend)} if n == LAYOUTS[MIXED][0] else {})


@functools.cache
def on_ranks(n: int, backend: str) -> list[dict[str, Any]]:
    return ranks.run(n, every_layout, n, backend, timeout_s=600.0)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", NAMES)
def test_compiled_blocks_have_the_gradients_of_eager_blocks_after_an_evaluation(name: str, backend: str):
    for found in on_ranks(LAYOUTS[name][0], backend):
        assert found[name]["alike"]
        assert {parameter: far for parameter, far in found[name]["far"].items() if not far < 1e-5} == {}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", NAMES)
def test_blocks_that_are_compiled_rightly_are_proven_and_nothing_is_left_behind(name: str, backend: str):
    for found in on_ranks(LAYOUTS[name][0], backend):
        assert (found[name]["finding"], found[name]["changed"]) == (("", ""), [])


@pytest.mark.full
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_gradient_that_compiled_blocks_lose_is_found_and_all_ranks_name_it_alike(backend: str):
    findings = {found["fault"] for found in on_ranks(LAYOUTS[MIXED][0], backend)}
    assert len(findings) == 1
    assert findings.pop().startswith("'layers.0': the gradient of mixture.shared.gate.weight is ")


def lossy(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
    """A compiler whose code passes back no gradient through the first output of a graph."""

    def run(*args: Any) -> Any:
        first, *others = graph(*args)
        return (first.detach() + 0 * sum(arg.sum() for arg in args if arg.requires_grad), *others)

    return run


def proven_with_lossy() -> tuple[str, str]:
    cfg, world, model = built({}, cast("Any", lossy))
    return compiled_proof.unlike_eager(cfg, world, model, lambda: None)


def test_gradients_that_a_compiler_loses_are_found_by_the_first_of_them():
    ((wrong, unproven),) = ranks.run(1, proven_with_lossy)
    assert unproven == ""
    assert wrong.startswith("'layers.0': the gradient of input 0 is ")


def without_memory() -> tuple[tuple[str, str], list[str]]:
    """The texts of a proof in which no block can be compared, and the names of what it has changed."""
    cfg, world, model = built({}, "eager")
    before = left_behind(model)
    with patch.object(compiled_proof, "_compare", side_effect=RuntimeError("no memory")):
        texts = compiled_proof.unlike_eager(cfg, world, model, lambda: None)
    return texts, [name for name, value in left_behind(model).items() if not torch.equal(before[name], value)]


WRONG = "'layers.0': output 0 is 1"


def run_with_finding(monkeypatch, tmp_path, corpus: str, enable: Any, wrong: str, unproven: str = "") -> int:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("dtmega.training.start.compiling", lambda cfg, device: True)
    monkeypatch.setattr(nn.Module, "compile", lambda module: None)  # whatever is said, nothing needs to be compiled
    monkeypatch.setattr(compiled_proof, "unlike_eager", lambda *_: (wrong, unproven))
    keys = SMALL | {"model.vocab_size": 257, "train.steps": 1, "eval.interval": 0, "batch.global_batch_size": 2}
    data = {"data.path": corpus, "data.tokenizer": "bytes", "compile.enable": enable}
    return train.main(flags(keys | data, tmp_path / "run"))


def test_a_run_that_must_compile_is_refused_with_the_block_and_the_key(monkeypatch, tmp_path, corpus, capsys):
    assert run_with_finding(monkeypatch, tmp_path, corpus, True, WRONG) == 2
    said = "torch.compile changes block 'layers.0': output 0 is 1 ([compile] enable = false)"
    assert said in "".join(capsys.readouterr())


def test_a_run_that_may_compile_says_so_in_one_line_and_runs_eagerly(monkeypatch, tmp_path, corpus, capsys):
    assert run_with_finding(monkeypatch, tmp_path, corpus, "auto", WRONG) == 0
    said = "blocks run eagerly, because torch.compile changes block 'layers.0': output 0 is 1 ([compile] enable"
    assert capsys.readouterr().out.count(said) == 1


def test_blocks_that_cannot_be_compared_stay_compiled_and_one_line_says_so(monkeypatch, tmp_path, corpus, capsys):
    monkeypatch.setattr(compiled_proof, "run_eagerly", lambda model: pytest.fail("blocks run eagerly"))
    assert run_with_finding(monkeypatch, tmp_path, corpus, True, "", "'layers.0' in torch.float64: no kernel") == 0
    said = "compiled blocks could not be compared with eager ones: 'layers.0' in torch.float64: no kernel"
    assert capsys.readouterr().out.count(said) == 1
    assert not list((tmp_path / "cache").rglob("compiled-*"))


def test_a_block_that_fails_in_the_wider_dtype_is_named_and_nothing_is_left_behind():
    ((texts, changed),) = ranks.run(1, without_memory)
    assert texts == ("", "'layers.0' in torch.float64: RuntimeError: no memory")
    assert changed == []


def test_what_was_proven_is_remembered_for_the_same_key_only(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert not compiled_proof.is_proven("a")
    compiled_proof.remember("a")
    assert compiled_proof.is_proven("a")
    assert not compiled_proof.is_proven("b")


def test_the_key_follows_all_that_compiled_code_depends_on(monkeypatch):
    world: Any = type("World", (), {"device": torch.device("cpu"), "sizes": {"tp": 1}})()
    keys: dict[str, Any] = {"train.steps": 1}

    def key(digest: str = "", **more: Any) -> str:
        cfg = config.validate(real_step.nested(keys | {k.replace("__", "."): v for k, v in more.items()}), "test")
        return compiled_proof.key_of(cfg, world, digest)

    changes = [
        {"model__hidden_size": 128},
        {"data__seq_len": 128},
        {"batch__micro_batch_size": 2},
        {"precision__params": "bfloat16"},
        {"recompute__mode": "full"},
        {"digest": "other"},
    ]
    found = [key(), *(key(**change) for change in changes)]
    world.sizes = {"tp": 2}
    found.append(key())
    monkeypatch.setattr(torch, "__version__", "other")
    found.append(key())
    monkeypatch.setattr(compiled_proof, "__version__", "other")
    found.append(key())
    assert len({*found}) == len(found)
    assert key() == found[-1]
    assert key(optim__lr=1.0) == found[-1]
