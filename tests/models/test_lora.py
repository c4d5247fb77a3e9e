"""Claims about which layers get adapters, and about the proof that each adapter learns."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from dtmega import config, families, mesh
from dtmega.checkpoint.starting import weights_beside
from dtmega.models import lora
from dtmega.models.llama import MLP
from dtmega.models.lora import linears
from dtmega.models.lora import proof as lora_proof
from dtmega.models.trainable import elements
from dtmega.ops.cpu import linear
from dtmega.training import parallelize
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


# Every family, and a Llama with all that it can have beside.
LEARNING = {**layouts.FAMILIES, "qwen": layouts.FAMILIES["llama"] | layouts.QWEN}


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

    parallelize.multiplies_on_amx = lambda cfg, world: True
    parallelize.multiply_on_amx = multiply
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
    parallelize.multiplies_on_amx = lambda cfg, world: True
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
