"""Claims about which layers get adapters, and about the proof that each adapter learns."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from dtmega import config, families, mesh
from dtmega.checkpoint.starting import weights_beside
from dtmega.models import lora
from dtmega.models.llama import MLP
from dtmega.models.lora import linears
from dtmega.models.lora import proof as lora_proof
from dtmega.models.trainable import elements
from dtmega.ops import optim
from dtmega.ops.cpu import linear
from dtmega.plans import styles
from dtmega.training import choices, parallelize
from dtmega.training.random_text import blank_to_text
from tests import hf_models, layouts, ranks
from tests.hf_models import Case

SMALL = {"hidden_size": 16, "n_heads": 2, "n_layers": 2, "vocab_size": 32}


def configured(lora: dict[str, Any], model: dict[str, Any], **more: Any) -> config.Config:
    sections = {"train": {"steps": 1}, "lora": lora, "model": model, "data": {"tokenizer": "bytes"}, **more}
    return families.resolve(config.validate(sections, "test"))


def adapted(targets: Any, model: dict[str, Any]) -> set[str]:
    """Names of the layers that get adapters."""
    with torch.device("meta"):
        whole = families.build(configured({"rank": 2, "targets": targets}, model))
    return {name for name, layer in linears(whole).items() if hasattr(layer.module, "lora_a")}


def test_a_pattern_matches_the_whole_name_of_a_layer_or_its_end():
    model = {"name": "llama", **SMALL}
    assert adapted(["attn.q", "layers.1.mlp.*"], model) == {
        *("layers.0.attn.q", "layers.1.attn.q"),
        *("layers.1.mlp.gate", "layers.1.mlp.up", "layers.1.mlp.down"),
    }


def test_linears_are_all_linear_layers_of_the_blocks_and_all_else_is_frozen():
    with torch.device("meta"):
        whole = families.build(configured({"rank": 2}, {"name": "bloom", **SMALL}))
        plain = families.build(configured({}, {"name": "bloom", **SMALL}))
    trained = {name for name, parameter in whole.named_parameters() if parameter.requires_grad}
    layers = ("attn.qkv", "attn.out", "mlp.up", "mlp.down")
    assert trained == {f"layers.{i}.{layer}.lora_{x}" for i in range(2) for layer in layers for x in "ab"}
    d, r = 16, 2
    of_block = r * ((d + 3 * d) + (d + d) + (d + 4 * d) + (4 * d + d))
    # The embedding is the head, too, and is counted once.
    assert elements(whole.parameters()) == (2 * of_block, elements(plain.parameters()).trained)


def test_the_first_matrices_are_drawn_as_wide_as_in_peft_and_from_the_seed_and_the_second_are_zero():
    def drawn(seed: int) -> dict[str, torch.Tensor]:
        model = {"name": "llama", **SMALL, "hidden_size": 128, "ffn_hidden_size": 512}
        whole = families.build(configured({"rank": 32, "targets": ["mlp.up", "mlp.down"]}, model))
        lora.draw_adapters(whole, seed)
        return dict(lora.adapters(whole))

    first, again, other = drawn(1), drawn(1), drawn(2)
    assert len(first) == 8
    for name, matrix in first.items():
        assert torch.equal(matrix, again[name])
        if name.endswith("lora_b"):
            assert not matrix.any()
            continue
        assert not torch.equal(matrix, other[name])
        of_peft = torch.nn.init.kaiming_uniform_(torch.empty(32, matrix.shape[1]), a=math.sqrt(5))
        assert matrix.std().item() == pytest.approx(of_peft.std().item(), rel=0.1)


@pytest.mark.parametrize(("rank", "alpha"), [(2, 3.0), (16, 4.0)])
def test_an_adapter_adds_its_product_times_alpha_divided_by_the_rank(rank: int, alpha: float):
    keys = {"rank": rank, "alpha": alpha, "targets": ["mlp.up"]}
    whole = families.build(configured(keys, {"name": "llama", **SMALL}))
    (layer, _) = (found.module for name, found in linears(whole).items() if name.endswith("mlp.up"))
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter)
    x = torch.randn(3, 16)
    expected = x @ layer.weight.T + alpha / rank * (x @ layer.lora_a.T @ layer.lora_b.T)
    torch.testing.assert_close(layer(x), expected)


def test_adapters_without_weights_to_adapt_are_refused_with_the_keys():
    cfg = config.validate({"lora": {"rank": 2}, "train": {"steps": 1}}, "test")
    with pytest.raises(ValueError, match=r"\[lora\] rank = 2 without weights .* \(\[model\] init_from"):
        weights_beside(cfg, [], lambda _: None)


@pytest.mark.parametrize(
    ("targets", "words"),
    [
        (["q_projection"], "no linear layer has a name like 'q_projection'; expected q_proj, k_proj"),
        (["experts"], "MixtralExperts with weights [4, 96, 64]: experts have no adapters"),
        (["lm_head"], "'lm_head' matches lm_head, a Linear: expected linear layers inside the blocks"),
        (["q_proj", "embed_tokens"], "'embed_tokens' matches model.embed_tokens, a Embedding"),
    ],
)
def test_what_cannot_have_an_adapter_is_refused_by_name(targets: list[str], words: str):
    (path,) = hf_models.saved([Case("mixtral", tied=False)]).values()
    with pytest.raises(ValueError) as refused:
        adapted(targets, {"name": "hf", "path": path})
    assert words in str(refused.value)
    assert str(refused.value).endswith("([lora] targets)")


# Every family, a Llama with all that it can have beside, and a mixture whose routers' losses are of two layers.
LEARNING = {
    **layouts.FAMILIES,
    "qwen": layouts.FAMILIES["llama"] | layouts.QWEN,
    "routers": layouts.FAMILIES["moe"] | {"model.dense_layers": 0},
}


def proofs(n: int) -> dict[str, str]:
    """What each family's proof says on tp = n; '' if every adapter learns."""
    said: dict[str, str] = {}
    for name, keys in LEARNING.items():
        sections: dict[str, dict[str, Any]] = {"lora": {"rank": 2}, "mesh": {"tp": n}}
        for key, value in keys.items():
            section, _, key = key.partition(".")
            sections.setdefault(section, {})[key] = value
        sections["data"]["tokenizer"] = "bytes"
        cfg = config.validate(sections, "test")
        said[name] = proof(cfg, n)
    return said


def proof(cfg: config.Config, n: int) -> str:
    world = mesh.start(torch.device("cpu"), mesh.resolve(cfg.mesh, n))
    try:
        parallelize.parallelize(cfg, world)
    except ValueError as error:
        return str(error)
    return ""


def test_every_adapter_of_every_family_learns_on_ranks_of_tp():
    assert ranks.run(2, proofs, 2) == [dict.fromkeys(LEARNING, "")] * 2


def around(n: int) -> str:
    """The proof for a model that uses the weight of a layer without calling the layer."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(F.linear(x, self.gate.weight)) * self.up(x))

    MLP.forward = forward  # this process ends with the test
    return proof(configured({"rank": 2}, {"name": "llama", **SMALL}), n)


def replaced(n: int) -> str:
    """The proof for a model whose layers are given another forward after their adapters."""

    def multiply(model: torch.nn.Module) -> None:
        for module in model.modules():
            if type(module) is torch.nn.Linear:
                module.forward = linear._forward.__get__(module)

    choices.multiplies_on_amx = lambda cfg, world: True
    linear.multiply_on_amx = multiply
    return proof(configured({"rank": 2}, {"name": "llama", **SMALL}), n)


@pytest.mark.parametrize(
    ("broken", "layers"), [(around, ["layers.0.mlp.gate", "layers.1.mlp.gate"]), (replaced, ["layers.0.attn.q"])]
)
def test_a_layer_that_would_train_nothing_is_refused(broken: Any, layers: list[str]):
    (said,) = ranks.run(1, broken, 1)
    assert said.startswith(f"no gradient comes to {layers[0]}.lora_b")
    assert all(layer in said for layer in layers)
    assert said.endswith("([lora] targets)")


def multiplied(n: int) -> str:
    choices.multiplies_on_amx = lambda cfg, world: True
    return proof(configured({"rank": 2}, {"name": "llama", **SMALL}), n)


def test_layers_with_adapters_keep_their_forward_beside_faster_products():
    assert ranks.run(1, multiplied, 1) == [""]


def test_the_clone_has_every_layer_that_has_an_adapter():
    assert lora_proof.everywhere(["model.layers.0.q", "model.layers.11.q", "layers.3.experts.7.up"]) == [
        "layers.*.experts.*.up",
        "model.layers.*.q",
    ]


def half(n: int) -> str:
    """The proof for a model in which no gradient comes to the first matrices."""
    multiply = lora.forward

    def forward(module: Any, x: torch.Tensor) -> torch.Tensor:
        kept = module._parameters["lora_a"]
        module._parameters["lora_a"] = kept.detach()
        out = multiply(module, x)
        module._parameters["lora_a"] = kept
        return out

    lora.forward = forward
    return proof(configured({"rank": 2}, {"name": "llama", **SMALL}), n)


def test_an_adapter_whose_first_matrix_does_not_learn_is_refused():
    (said,) = ranks.run(1, half, 1)
    assert said.startswith("no gradient comes to layers.0.attn.q.lora_a, layers.0.attn.k.lora_a")


def sharded(mesh: dict[str, int]) -> tuple[str, str]:
    """The proof on ranks whose sharded layers do not train B, and the same of layers that are right."""
    cfg = configured({"rank": 2}, {"name": "llama", **SMALL}, mesh=mesh)
    right, multiply = proof(cfg, math.prod(mesh.values())), styles.add_adapter

    def add(module: Any, out: torch.Tensor, reduced: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return multiply(module, out, reduced, b.detach())

    styles.add_adapter = add
    return right, proof(cfg, math.prod(mesh.values()))


@pytest.mark.parametrize(
    "mesh",
    [
        {"tp": 2},
        {"dp_shard": 2},
        {"pp": 2, "tp": 2},
        *(pytest.param(mesh, marks=pytest.mark.full) for mesh in ({"cp": 2, "tp": 2}, {"dp_shard": 2, "tp": 2})),
    ],
)
def test_an_adapter_that_would_learn_only_without_tp_is_refused_by_every_rank_of_a_layout_with_tp(mesh: dict[str, int]):
    said = ranks.run(math.prod(mesh.values()), sharded, mesh)
    assert len(set(said)) == 1
    right, wrong = said[0]
    assert right == ""
    assert wrong.startswith("no gradient comes to layers.0.attn.q.lora_b, layers.0.attn.k.lora_b") == ("tp" in mesh)


def without_a(module: Any, x: torch.Tensor) -> torch.Tensor:
    """A layer with an adapter whose first matrix gets no gradient."""
    return type(module).forward(module, x) + F.linear(F.linear(x, module.lora_a.detach()), module.lora_b)


def trained(sizes: dict[str, int]) -> list[list[str]]:
    """What three steps say of a model as it is, and of one in which a layer bypasses its adapter, or a half of it."""
    said = []
    for forward in (None, nn.Linear.forward, without_a):
        batch = {"micro_batch_size": 1, "global_batch_size": 2}
        cfg = configured({"rank": 2}, {"name": "llama", **SMALL}, mesh=sizes, batch=batch)
        world = mesh.start(torch.device("cpu"), mesh.resolve(cfg.mesh, dist.get_world_size()))
        model = parallelize.parallelize(cfg, world)
        (stage,) = model.stages.values()
        model.draw(1)
        lora.draw_adapters(stage, 1)
        layer: Any = stage.get_submodule("layers.1.mlp.up")
        if forward is not None:
            layer.forward = forward.__get__(layer)
        optimizer = optim.build_optimizer(model.named_parameters(), cfg.optim)
        rows = blank_to_text(model.objective.blank(cfg.data, 1), cfg.model.vocab_size)
        words = []
        for _ in range(3):
            optimizer.zero_grad()
            words.append(ranks.message(model.forward_backward, [rows], {"tokens": 2.0}, error=RuntimeError))
            optimizer.step()
        said.append(words)
    return said


@pytest.mark.parametrize("sizes", [{"dp_shard": 2}, {"dp_shard": 1, "dp_replicate": 2}])
def test_an_adapter_without_a_gradient_ends_the_run_on_every_rank_as_soon_as_it_should_have_one(sizes: dict[str, int]):
    right, message = "nothing was raised", "no gradient has come to 'layers.1.mlp.up.lora_{}', so that it would not"
    for learning, bypassed, half in ranks.run(2, trained, sizes):
        assert learning == [right] * 3
        assert all(words.startswith(message.format("b")) for words in bypassed)
        assert half[0] == right
        assert half[1].startswith(message.format("a"))
