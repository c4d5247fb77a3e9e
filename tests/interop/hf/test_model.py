"""File model.py: a model of transformers cut into stages is the whole one, of every family that can be cut."""

from __future__ import annotations

import copy
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dtmega import families
from dtmega.config.families.hf import TransformersKeys
from dtmega.interop.hf.families import KNOWN, LAYER_KEYS
from dtmega.interop.hf.model import HF, blocks_of, fused_cut
from dtmega.ops.optim.muon import Cut
from tests import hf_models
from tests.hf_models import Case

# Each has something to lose at a boundary that no other one has.
DISTINCT = ["llama", "bloom", "gpt2", "gpt_neox", "opt", "gemma3_text", "granite", "smollm3", "xglm"]
ALIKE = ["mistral", "qwen2", "qwen3", "arcee", "ernie4_5", "exaone4", "starcoder2", "gemma", "gemma2", "olmo", "olmo2"]
ALIKE += [
    "gptj",
    "codegen",
    "mpt",
    "gpt_bigcode",
    "stablelm",
    "olmo3",
    "phi",
    "phi3",
    "cohere",
    "cohere2",
    "glm",
    "glm4",
]
CASES = [Case(name, tied=tied) for name in DISTINCT for tied in (True, False)]
CASES += [Case("qwen2 sliding"), Case("opt projected, post-layernorm")]
CASES += [Case(name) for name in (*ALIKE, *hf_models.MIXTURES)]


def built(case: Case, folder: Path) -> tuple[HF, HF]:
    """The model under the house's contract, with values, of three layers; and the same untouched."""
    plain = hf_models.plain(case).config
    key = next(key for key in LAYER_KEYS if key in plain.to_dict())
    three = {**plain.to_dict(), key: 3}
    for by_layer in ("layer_types", "no_rope_layers"):
        if plain.to_dict().get(by_layer):
            three[by_layer] = (2 * getattr(plain, by_layer))[:3]
    folder.joinpath("config.json").write_text(json.dumps(three))
    torch.manual_seed(0)
    whole = HF(TransformersKeys(path=str(folder), label_smoothing=0.1))
    for p in whole.parameters():
        torch.nn.init.normal_(p, std=0.2)
    return whole.train(), copy.deepcopy(whole).train()


def test_every_family_that_can_be_cut_has_a_case():
    assert {name for name, known in KNOWN.items() if known.ends is not None} == {*DISTINCT, *ALIKE, *hf_models.MIXTURES}


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.name}{'-tied' if case.tied else ''}")
def test_three_stages_one_after_another_are_the_whole_and_hold_each_block_once(case: Case, tmp_path: Path):
    whole, truth = built(case, tmp_path)
    longest = {"bloom": None, "mpt": whole.hf.config.to_dict().get("max_seq_len")}
    assert whole.longest == longest.get(case.family, getattr(whole.hf.config, "max_position_embeddings", None))
    stages = [copy.deepcopy(whole) for _ in range(3)]
    pieces = families.of(whole.cfg).pieces(whole)
    embed, *layers, head = [piece.name for piece in pieces]
    held = [[embed, layers[0]], [layers[1]], [layers[2], head]]
    for stage, names in zip(stages, held, strict=True):
        stage.keep(names)
        there = sum(piece.elements + piece.shared for piece in pieces if piece.name in names)
        assert sum(p.numel() for p in stage.parameters()) == there
    tokens = torch.arange(26).view(2, 13)
    labels = torch.where(tokens % 5 == 0, -100, tokens + 1)
    carried = {}
    for stage in stages[:2]:
        carried = stage(tokens, **carried)
        assert carried.keys() == {"hidden"}
    expected = truth.hf(tokens).logits
    torch.testing.assert_close(stages[2](tokens, **carried), expected, rtol=1e-4, atol=1e-5)
    # The last one has the sum of the losses, in training with the smoothing of [model].
    for training, smoothing in ((True, 0.1), (False, 0.0)):
        stages[2].train(training)
        options = {"reduction": "sum", "label_smoothing": smoothing}
        loss = torch.nn.functional.cross_entropy(expected.flatten(0, 1), labels.flatten(), **options)
        torch.testing.assert_close(stages[2](tokens, labels, **carried), {"lm": loss}, rtol=1e-4, atol=1e-5)
    names = Counter(stage.full_name(name) for stage in stages for name, _ in stage.named_parameters())
    # A tied weight is on both ends, under one name.
    twice = [truth.full_name(first) for first, _ in truth.ties]
    assert names == Counter([*dict(truth.hf.named_parameters()), *twice])
    assert bool(twice) is case.tied
    for i, stage in enumerate(stages):
        (block,) = stage.blocks()
        same = zip(block.parameters(), blocks_of(truth.hf)[i].parameters(), strict=True)
        assert all(torch.equal(p, q) for p, q in same)


FUSED = ["bloom", "gpt_neox", "gpt2", "codegen", "mpt", "gpt_bigcode", "gpt_bigcode multi-head", "phi3", "glm", "glm4"]


def fused_parts(model: Any, suffix: str) -> tuple[Any, list[Tensor]]:
    """The fused layer of the first block whose name ends so, and the parts of its weight."""
    facts = KNOWN[model.config.model_type]
    block: Any = blocks_of(model)[0]
    for path, module in block.named_modules():
        name = path.rpartition(".")[2]
        if name in facts.fused and name.endswith(suffix):
            cut = Cut(*fused_cut(facts.fused[name], module, facts, model.config))
            return module, cut.views(module.weight)
    raise AssertionError(f"no fused layer ends in {suffix}")


QKV = {"bloom": "query_key_value", "gpt_neox": "query_key_value", "gpt2": "c_attn", "codegen": "qkv_proj"}
QKV |= {"mpt": "Wqkv", "gpt_bigcode": "c_attn", "gpt_bigcode multi-head": "c_attn", "phi3": "qkv_proj"}


def test_every_family_with_fused_weights_has_a_case():
    assert {Case(name).family for name in FUSED} == {name for name, facts in KNOWN.items() if facts.fused}


@torch.no_grad()
@pytest.mark.parametrize("name", QKV)
def test_q_k_and_v_of_a_fused_weight_are_told_apart(name: str):
    plain = hf_models.plain(Case(name))
    model = type(plain)._from_config(plain.config, attn_implementation="eager").eval()
    fused, parts = fused_parts(model, QKV[name])
    whole = fused.weight.clone()

    def probabilities() -> Tensor:
        return model(torch.arange(3, 12)[None], output_attentions=True).attentions[0]

    before = probabilities()
    of_scores = []
    for part in parts:
        part.add_(torch.randn(part.shape))
        if not torch.equal(probabilities(), before):
            of_scores.append(part)
        fused.weight.copy_(whole)
    # v is in no score. If all of q is 0, so is every score, whatever k is; and the other way round.
    assert (len(parts), len(of_scores)) == (3, 2)
    for zeros, other in (of_scores, of_scores[::-1]):
        zeros.zero_()
        without = probabilities()
        other.add_(torch.randn(other.shape))
        assert torch.equal(probabilities(), without)
        fused.weight.copy_(whole)


@torch.no_grad()
@pytest.mark.parametrize("name", ["phi3", "glm", "glm4"])
def test_gates_and_values_of_a_fused_weight_are_told_apart(name: str):
    model = hf_models.plain(Case(name))
    fused, parts = fused_parts(model, "gate_up_proj")
    whole = fused.weight.clone()
    mlp: Any = blocks_of(model)[0].mlp
    x = torch.randn(1, 5, 64)
    assert len(parts) == 2
    for part in parts:
        part.zero_()
        assert not mlp(x).any()
        fused.weight.copy_(whole)


def test_a_tied_or_untied_head_and_the_embeddings_of_transformers_are_not_muons(tmp_path: Path):
    for tied in (True, False):
        whole, _ = built(Case("gpt2", tied=tied), tmp_path)
        found = whole.matrices()
        assert {name.rpartition(".h.")[2].partition(".")[2] for name in found} == {
            *("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight"),
        }
        assert found["transformer.h.0.attn.c_attn.weight"] == (1, (64, 64, 64))


def test_a_mixture_whose_experts_are_stacked_is_refused_by_muon(tmp_path: Path):
    whole, _ = built(Case("mixtral"), tmp_path)
    with pytest.raises(
        ValueError, match=r"experts.gate_up_proj' is \[4, 96, 64\]: expected 2 dims, or another optimizer"
    ):
        whole.matrices()
