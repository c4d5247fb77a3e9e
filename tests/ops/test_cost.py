"""Counted models against published figures, closed forms, transformers and PyTorch's own FLOP counter."""

from __future__ import annotations

import json
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch.utils.flop_counter import FlopCounterMode

from dtmega import families
from dtmega.config import validate
from dtmega.config.families.bert import BertKeys
from dtmega.config.families.bloom import BloomKeys
from dtmega.config.families.hf import TransformersKeys
from dtmega.config.families.llama import LlamaKeys
from dtmega.interop import stored
from dtmega.ops import cost
from tests import closed_forms, hf_models
from tests.hf_models import Case
from tests.interop.hf.test_model import ALIKE, DISTINCT
from tests.models.test_moe import pair

BLOOM_176B = BloomKeys(vocab_size=250880, hidden_size=14336, n_layers=70, n_heads=112)
SEQ_LEN = 12


def counted(folder: Path, theirs: Any) -> list[cost.Piece]:
    """The pieces of a model of transformers, by its configuration."""
    folder.joinpath("config.json").write_text(json.dumps(theirs.to_dict()))
    return families.pieces(TransformersKeys(path=str(folder)))


def elements_of(theirs: Any) -> int:
    return sum(p.numel() for p in theirs.parameters())


def check_flops(found: Sequence[cost.Piece], theirs: Any) -> None:
    """Compare with the FLOPs that PyTorch counts in a step of a model of transformers."""
    with FlopCounterMode(display=False) as counter:
        theirs(torch.zeros(2, SEQ_LEN, dtype=torch.long), use_cache=False).logits.sum().backward()
    # It multiplies all S x S pairs, of which we count half, and angles by a product of matrices, which we do not.
    n_tokens, per_place = 2 * SEQ_LEN, sum(piece.attention_flops for piece in found)
    expected = cost.flops_per_token(found, SEQ_LEN) * n_tokens + per_place * SEQ_LEN * n_tokens
    of_angles = [flops for name, flops in counter.get_flop_counts().items() if name.endswith("rotary_emb")]
    assert expected == counter.get_total_flops() - sum(sum(flops.values()) for flops in of_angles)


@pytest.mark.parametrize(
    "keys",
    [{}, {"ffn_hidden_size": 100}, {"apply_residual_connection_post_layernorm": True}],
    ids=["as it is", "F 100", "post-layernorm"],
)
def test_the_pieces_of_a_bloom_are_the_closed_forms(keys: dict[str, Any]):
    model = BloomKeys(vocab_size=99, hidden_size=48, n_layers=3, n_heads=6, **keys)
    embed, *layers, head = families.pieces(model)
    assert [piece.name for piece in layers] == ["layers.0", "layers.1", "layers.2"]
    d, words = 48, 99 * 48
    assert embed == cost.Piece("embed", words + 2 * d, 0, 0)
    assert head == cost.Piece("head", 2 * d, 6 * words, 0, shared=words)
    for layer in layers:
        assert layer.elements == closed_forms.layer_elements(model)
        assert layer.flops_per_token(SEQ_LEN) == closed_forms.layer_flops_per_token(model, SEQ_LEN)
    assert cost.n_parameters([embed, *layers, head]) == closed_forms.elements(model)
    assert cost.flops_per_token([embed, *layers, head], SEQ_LEN) == closed_forms.flops_per_token(model, SEQ_LEN)


def test_rows_that_pad_the_vocabulary_are_there_but_do_not_multiply():
    model = BloomKeys(vocab_size=99, hidden_size=48, n_layers=1, n_heads=6)
    padded = families.pieces(model.model_copy(update={"pad_vocab_to_multiple": 64}))
    assert cost.n_parameters(padded) == closed_forms.elements(model) + (128 - 99) * 48
    assert cost.flops_per_token(padded, SEQ_LEN) == closed_forms.flops_per_token(model, SEQ_LEN)


CASES = [*(Case(name, tied=tied) for name in DISTINCT for tied in (True, False)), *(Case(name) for name in ALIKE)]
CASES += [Case("opt projected, post-layernorm"), Case("llama eager, biased"), Case("gptj")]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.name}{'-tied' if case.tied else ''}")
def test_pieces_of_transformers_have_its_parameters_and_the_flops_that_pytorch_counts(case: Case, tmp_path: Path):
    config = hf_models.plain(case).config
    config._attn_implementation = "eager"
    found = counted(tmp_path, config)
    theirs = transformers.AutoModelForCausalLM.from_config(config)
    assert cost.n_parameters(found) == elements_of(theirs)
    check_flops(found, theirs)


@pytest.mark.parametrize("freeze", [["*mlp*"], ["*embed_tokens*", "*layers*", "*.norm.*"]], ids=["mlp", "all but head"])
def test_pieces_with_frozen_weights_have_the_flops_that_pytorch_counts(freeze: list[str], tmp_path: Path):
    config = hf_models.plain(Case("llama eager, biased", tied=False)).config
    config._attn_implementation = "eager"
    config.save_pretrained(tmp_path)
    keys: dict[str, Any] = {"model": {"name": "hf", "path": str(tmp_path)}, "data": {"tokenizer": "bytes"}}
    keys["train"] = {"steps": 1, "freeze": freeze}
    found = families.pieces_of_run(families.resolve(validate(keys, "a test")))
    theirs = transformers.AutoModelForCausalLM.from_config(config)
    for name, parameter in theirs.named_parameters():
        parameter.requires_grad_(not any(fnmatchcase(name, pattern) for pattern in freeze))
    check_flops(found, theirs)


def test_latent_attention_costs_the_flops_that_pytorch_counts():
    ours, theirs, _ = pair("DeepSeek-V3")
    theirs.set_experts_implementation("eager")  # PyTorch counts no grouped products
    check_flops(families.pieces(ours.cfg), theirs)


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_the_pieces_of_a_bert_have_the_parameters_and_the_flops_of_transformers(norm: str):
    model = BertKeys(vocab_size=131, hidden_size=48, n_layers=2, n_heads=6, max_position_embeddings=SEQ_LEN, norm=norm)
    found = families.pieces(model)
    described = stored.of(model).formats["hf"][norm == "pre"].to_config(model)
    theirs = getattr(transformers, described["architectures"][0])
    theirs = theirs(theirs.config_class(**described, attn_implementation="eager"))
    assert cost.n_parameters(found) == elements_of(theirs)
    with FlopCounterMode(display=False) as counter:
        out = theirs(torch.ones(2, SEQ_LEN, dtype=torch.long))
        (out.prediction_logits.sum() + out.seq_relationship_logits.sum()).backward()
    # It gives logits of every token. Pairs of tokens are all seen, and all counted.
    assert 2 * SEQ_LEN * cost.flops_per_token(found, SEQ_LEN, labelled=1.0) == counter.get_total_flops()
    left_out = cost.flops_per_token(found, SEQ_LEN) - cost.flops_per_token(found, SEQ_LEN, labelled=0.25)
    assert left_out == 0.75 * 6 * (48 * 48 + 131 * 48)


def test_llama_3_8b_has_its_published_number_of_parameters(tmp_path: Path):
    """https://huggingface.co/meta-llama/Meta-Llama-3-8B, its config.json; 8.03 B on its card, each weight once."""
    sizes = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32}
    config = transformers.LlamaConfig(vocab_size=128256, num_key_value_heads=8, **sizes)
    found = counted(tmp_path, config)
    assert cost.n_parameters(found) == 8_030_261_248
    # GQA: queries and outputs D^2, keys and values D^2 / 4; gated MLP 3 DF; the head VD.
    matrices = 32 * (2.5 * 4096**2 + 3 * 4096 * 14336) + 128256 * 4096
    assert cost.flops_per_token(found, 8192) == 6 * matrices + 32 * 6 * 8192 * 4096


@pytest.mark.parametrize("window", [1, 5, 12, 100])
def test_attention_in_a_window_costs_the_keys_that_a_token_sees_on_average(window: int):
    sizes: dict[str, Any] = {"vocab_size": 99, "hidden_size": 48, "n_heads": 6, "n_kv_heads": 2, "kv_channels": 16}
    found = families.pieces(LlamaKeys(**sizes, n_layers=2, window=window, window_layers=[1]))
    for layer, most in ((found[1], SEQ_LEN), (found[2], window)):
        # The mean of the keys before a token and those with it, as the S / 2 of a causal query is.
        keys = sum((min(i, most) + min(i + 1, most)) / 2 for i in range(SEQ_LEN))
        attention = layer.flops_per_token(SEQ_LEN) - layer.matmul_flops
        assert attention == pytest.approx(12 * 6 * 16 * keys / SEQ_LEN, abs=1)


def test_of_experts_those_that_a_token_visits_are_counted(tmp_path: Path):
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.MixtralConfig(
        vocab_size=131, num_key_value_heads=2, num_local_experts=8, num_experts_per_tok=2, **sizes
    )
    found = counted(tmp_path, config)
    attention, router, expert = 3 * 64 * 64, 8 * 64, 3 * 64 * 96
    assert {piece.elements for piece in found[1:-1]} == {attention + router + 8 * expert + 2 * 64}
    assert {piece.matmul_flops for piece in found[1:-1]} == {6 * (attention + router + 2 * expert)}


def test_latent_attention_counts_its_own_lengths_of_queries_and_values(tmp_path: Path):
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4}
    lengths = {"qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 20, "kv_lora_rank": 16, "q_lora_rank": 24}
    config = transformers.DeepseekV3Config(vocab_size=131, first_k_dense_replace=1, **sizes, **lengths)
    assert counted(tmp_path, config)[1].attention_flops == 3 * 4 * (16 + 8 + 20)


def test_megatrons_formula_gives_the_tflops_of_blooms_log():
    # bigscience train/tr11-176B-ml/chronicles.md, iteration 12695: 105.22 s, batch 2048, 384 GPUs, "TFLOPs: 149.02"
    flops = closed_forms.megatron_flops_per_token(BLOOM_176B, 2048) * 2048 * 2048
    assert round(flops / 105.22 / 384 / 1e12, 2) == 149.02


def test_model_flops_are_below_megatrons_hardware_flops():
    ours = cost.flops_per_token(families.pieces(BLOOM_176B), 2048)
    assert 0.7 < ours / closed_forms.megatron_flops_per_token(BLOOM_176B, 2048) < 0.75


@pytest.mark.parametrize(
    ("device_name", "tflops"),
    [
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA A100 80GB PCIe", 312),
        ("NVIDIA L40S", 362),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H100 NVL", 835),
        ("NVIDIA H200", 989),
        ("NVIDIA H200 NVL", 835),
        ("NVIDIA GH200 480GB", 989),
        ("NVIDIA B200", 2250),
        ("NVIDIA GB200", 2500),
        ("AMD Instinct MI300X", 1307),
    ],
)
def test_a_device_name_finds_its_own_peak(device_name: str, tflops: int):
    assert cost.peak_flops(device_name, "bfloat16") == tflops * 1e12


def test_a_device_that_is_not_in_the_table_has_no_peak():
    assert cost.peak_flops("NVIDIA H20", "bfloat16") is None


def test_a_dtype_that_is_not_in_the_table_has_no_peak():
    assert cost.peak_flops("NVIDIA H100 80GB HBM3", "float32") is None
