"""Megatron's names of tensors and its arguments, held against what its files have, written down once more here."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dtmega import config
from dtmega.config.families.bert import BertKeys
from dtmega.config.families.bloom import BloomKeys
from dtmega.config.families.gpt import GPTKeys
from dtmega.config.families.llama import LlamaKeys
from dtmega.config.families.t5 import T5Keys
from dtmega.interop import stored
from dtmega.interop.formats.format import Format
from dtmega.interop.formats.rules import directions
from dtmega.interop.formats.whole import as_ours
from dtmega.interop.megatron import forms, names
from dtmega.models.bert import Bert
from dtmega.models.bloom import Bloom
from dtmega.models.gpt import GPT
from dtmega.models.t5 import T5
from dtmega.models.ties import aliases
from tests.interop.formats.test_formats import Memory
from tests.plain_megatron import Plain

D, H, F, V, S, N = 8, 2, 24, 20, 10, 2
SIZES: dict[str, Any] = {"hidden_size": D, "n_heads": H, "ffn_hidden_size": F, "vocab_size": V, "n_layers": N}
T5_OF_MEGATRON: dict[str, Any] = {
    **{"positions": "learned", "norm": "layer", "bias": True, "scale_scores": True, "scale_head": False},
    **{"init": "normal", "activation": "gelu_tanh", "max_position_embeddings": S, "norm_eps": 1e-5},
}
MODELS: dict[str, tuple[Format, config.Model, Any]] = {
    "gpt": (forms.GPT_FORM, GPTKeys(**SIZES, max_position_embeddings=S), GPT),
    "gpt untied": (forms.GPT_FORM, GPTKeys(**SIZES, max_position_embeddings=S, tied=False), GPT),
    "bert": (forms.BERT_FORM, BertKeys(**SIZES, max_position_embeddings=S, gelu="tanh"), Bert),
    "t5": (forms.T5_FORM, T5Keys(**SIZES, **T5_OF_MEGATRON, n_decoder_layers=1), T5),
    "bloom": (forms.BLOOM_FORM, BloomKeys(**SIZES), Bloom),
}
# The args that a pre-training of each saves, with the defaults of January 2022.
ARGS: dict[str, Any] = {
    **{"num_layers": N, "hidden_size": D, "num_attention_heads": H, "ffn_hidden_size": F, "kv_channels": D // H},
    **{"padded_vocab_size": V, "max_position_embeddings": S, "layernorm_epsilon": 1e-5, "bias_gelu_fusion": True},
    **{"openai_gelu": False, "onnx_safe": None, "fp16": False, "apply_query_key_layer_scaling": True},
    **{"hidden_dropout": 0.1, "attention_dropout": 0.1, "init_method_std": 0.02},
}


def vectors(prefix: str) -> dict[str, Any]:
    """Shapes of a LayerNorm, whole on each rank."""
    return {f"{prefix}.weight": ((D,), None), f"{prefix}.bias": ((D,), None)}


def linear(prefix: str, rows: int, columns: int, cut: str = "") -> dict[str, Any]:
    """Shape, and the dim that tensor parallelism cuts."""
    dims = {"": (None, None), "column": (0, 0), "row": (1, None)}[cut]
    return {f"{prefix}.weight": ((rows, columns), dims[0]), f"{prefix}.bias": ((rows,), dims[1])}


def block(prefix: str, decodes: bool = False) -> dict[str, Any]:
    across = {}
    if decodes:
        across = {
            **linear(f"{prefix}.inter_attention.query", D, D, "column"),
            **linear(f"{prefix}.inter_attention.key_value", 2 * D, D, "column"),
            **linear(f"{prefix}.inter_attention.dense", D, D, "row"),
            **vectors(f"{prefix}.post_inter_attention_layernorm"),
        }
    return {
        **vectors(f"{prefix}.input_layernorm"),
        **linear(f"{prefix}.self_attention.query_key_value", 3 * D, D, "column"),
        **linear(f"{prefix}.self_attention.dense", D, D, "row"),
        **vectors(f"{prefix}.post_attention_layernorm"),
        **across,
        **linear(f"{prefix}.mlp.dense_h_to_4h", F, D, "column"),
        **linear(f"{prefix}.mlp.dense_4h_to_h", D, F, "row"),
    }


def stack(name: str, n: int, decodes: bool = False) -> dict[str, Any]:
    layers = [block(f"{name}.layers.{i}", decodes) for i in range(n)]
    return {key: value for layer in layers for key, value in layer.items()} | vectors(f"{name}.final_layernorm")


WORDS = {"embedding.word_embeddings.weight": ((V, D), 0)}
POSITIONS = {"embedding.position_embeddings.weight": ((S, D), None)}
FOR_HEAD = {"word_embeddings_for_head.weight": ((V, D), 0)}
# MEGATRON.md 4b: every tensor of a whole model -> its shape, and the dim that is cut.
TENSORS: dict[str, dict[str, Any]] = {
    "gpt": {**WORDS, **POSITIONS, **stack("encoder", N), **FOR_HEAD},
    "gpt untied": {**WORDS, **POSITIONS, **stack("encoder", N), "output_layer.weight": ((V, D), 0)},
    "bert": {
        **{**WORDS, **POSITIONS, "embedding.tokentype_embeddings.weight": ((2, D), None)},
        **{**stack("encoder", N), **FOR_HEAD, "lm_head.bias": ((V,), 0)},
        **{**linear("lm_head.dense", D, D), **vectors("lm_head.layernorm")},
        **{**linear("pooler.dense", D, D), **linear("binary_head", 2, D)},
    },
    "t5": {
        **{**WORDS, **POSITIONS, **stack("encoder", N), **stack("decoder", 1, decodes=True)},
        "decoder_embedding.word_embeddings.weight": ((V, D), 0),
        "decoder_embedding.position_embeddings.weight": ((S, D), None),
        **{**FOR_HEAD, "lm_head.bias": ((V,), 0)},
    },
    "bloom": {**WORDS, **vectors("embedding.word_embeddings.norm"), **stack("encoder", N), **FOR_HEAD},
}


@pytest.mark.parametrize("kind", MODELS)
def test_the_tensors_of_a_model_are_megatrons_by_name_shape_and_cut(kind: str):
    form, model, build = MODELS[kind]
    with torch.device("meta"):
        shapes = {name: tuple(p.shape) for p, known_as in aliases(build(model)) for name in known_as}
    theirs = directions((*form.rules, *form.rules_of(model)), shapes, form.heads(model)).theirs
    assert {name: (made.shape, names.cut_dim(name)) for name, made in theirs.items()} == TENSORS[kind]


def drawn(kind: str) -> dict[str, torch.Tensor]:
    """Weights of a whole model by Megatron's names, without copies; fp64."""
    generator = torch.Generator().manual_seed(7)
    return {
        name: torch.randn(shape, generator=generator, dtype=torch.float64) / 2
        for name, (shape, _) in TENSORS[kind].items()
        if not name.startswith(("word_embeddings_for_head", "decoder_embedding"))
    }


@pytest.mark.parametrize("kind", ["gpt", "bert", "t5", "bloom"])
def test_a_model_computes_of_megatrons_weights_what_megatron_computes(kind: str):
    form, model, build = MODELS[kind]
    weights = {name: tensor.float() for name, tensor in drawn(kind).items()}
    truth = Plain(weights, H, slopes=(1 / 16, 1 / 256) if kind == "bloom" else ())
    source = as_ours(Memory(weights), form, model, build, "file")
    ours = build(model).eval()
    ours.init_buffers(0)
    ours.load_state_dict({name: source.read(name) for name in source.tensors}, strict=False)
    tokens = torch.tensor([[3, 1, 4, 1, 5, 9, 2]])
    types = torch.tensor([[0, 0, 0, 0, 1, 1, 1]])
    if kind == "bert":
        found = ours(tokens, token_types=types)
        expected = truth.bert(tokens, types)
    elif kind == "t5":
        found = {"lm": ours(tokens, tokens[:, 2:])}
        expected = truth.t5(tokens, tokens[:, 2:])
    else:
        found = {"lm": ours(tokens)}
        expected = truth.decoder(tokens)
    assert found.keys() == expected.keys()
    for name, logits in expected.items():
        torch.testing.assert_close(found[name], logits, rtol=1e-5, atol=1e-5)


def test_the_names_whose_rows_older_versions_have_in_another_order():
    every = {name: names.qkv_parts(name) for tensors in TENSORS.values() for name in tensors}
    three = {name for name in every if ".query_key_value." in name}
    two = {name for name in every if ".key_value." in name}
    assert every == {name: 3 if name in three else 2 if name in two else 1 for name in every}
    assert three
    assert two


def test_the_names_with_a_row_for_each_token():
    rows = {name: names.by_token(name) for tensors in TENSORS.values() for name in tensors}
    assert rows == {name: shape[0] == V for tensors in TENSORS.values() for name, (shape, _) in tensors.items()}


def test_a_name_of_nothing_is_refused():
    with pytest.raises(ValueError, match=r"router\.weight' is not the name of a tensor"):
        names.cut_dim("encoder.layers.0.mlp.router.weight")


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("language_model.embedding.word_embeddings.weight", "embedding.word_embeddings.weight"),
        ("language_model.encoder.layers.12.mlp.dense_4h_to_h.bias", "encoder.layers.12.mlp.dense_4h_to_h.bias"),
        ("language_model.decoder.layers.0.inter_attention.query.bias", "decoder.layers.0.inter_attention.query.bias"),
        ("language_model.transformer.layers.1.attention.dense.bias", "encoder.layers.1.self_attention.dense.bias"),
        ("language_model.transformer.final_layernorm.bias", "encoder.final_layernorm.bias"),
        ("language_model.tokentype_embeddings.weight", "embedding.tokentype_embeddings.weight"),
        ("language_model.pooler.dense.bias", "pooler.dense.bias"),
        ("word_embeddings_for_head.weight", "word_embeddings_for_head.weight"),
        ("lm_head.dense.weight", "lm_head.dense.weight"),
    ],
)
def test_a_path_in_a_file_of_any_version_has_todays_name(path: str, name: str):
    assert names.flat_name(path) == name


def test_the_layer_files_of_deepspeed_have_the_places_that_bloom_gave_them():
    prefixes = {number: names.layer_file_prefix(number, n_layers=2) for number in range(8)}
    layers = {3: "encoder.layers.0.", 4: "encoder.layers.1."}
    assert {n: prefix for n, prefix in prefixes.items() if prefix} == {
        **{1: "embedding.", **layers, 6: "encoder.final_layernorm."}
    }


OF_BLOOM = {"position_embedding_type": "alibi", "embed_layernorm": True}


@pytest.mark.parametrize(
    ("form", "args", "expected"),
    [
        (forms.GPT_FORM, {}, {"layer_norm_eps": 1e-5, "tied": True, "query_key_layer_scaling": False}),
        (
            forms.GPT_FORM,
            {"fp16": True, "layernorm_epsilon": 1e-6},
            {"query_key_layer_scaling": True, "layer_norm_eps": 1e-6},
        ),
        (forms.GPT_FORM, {"ffn_hidden_size": None, "kv_channels": None}, {"ffn_hidden_size": 0}),  # before version 3
        (forms.BERT_FORM, {}, {"norm": "pre", "gelu": "tanh", "head_gelu": "erf"}),
        (forms.BERT_FORM, {"bias_gelu_fusion": False}, {"gelu": "erf", "head_gelu": "erf"}),
        (forms.BERT_FORM, {"bias_gelu_fusion": None}, {"gelu": "erf", "head_gelu": "erf"}),  # before October 2020
        (forms.BERT_FORM, {"bias_gelu_fusion": False, "openai_gelu": True}, {"gelu": "tanh", "head_gelu": "tanh"}),
        (forms.BERT_FORM, {"apply_residual_connection_post_layernorm": True}, {"norm": "pre", "gelu": "tanh"}),
        (forms.T5_FORM, {}, {"activation": "gelu_tanh", "norm_eps": 1e-5, "scale_head": False}),
        (forms.T5_FORM, {"bias_gelu_fusion": False}, {"activation": "gelu_erf"}),
        (forms.T5_FORM, {"kv_channels": 6}, {"kv_channels": 6}),
        (forms.BLOOM_FORM, OF_BLOOM, {"hidden_size": D, "vocab_size": V}),
    ],
)
def test_the_model_that_arguments_describe(form: Format, args: dict[str, Any], expected: dict[str, Any]):
    section = form.section(ARGS | args, "file")
    assert section == section | expected
    kinds = {id(its): type(model) for its, model, _ in MODELS.values()}
    kinds[id(form)].model_validate(section)


@pytest.mark.parametrize(
    ("form", "args", "message"),
    [
        (forms.GPT_FORM, {"num_layers": None}, "file has no 'num_layers'"),
        (forms.GPT_FORM, {"bias_gelu_fusion": False}, "the GELU with erf .* differ by up to 5e-4"),
        (
            forms.GPT_FORM,
            {"kv_channels": 3},
            "kv_channels=3 of 2 heads, expected hidden_size / num_attention_heads, 8 / 2",
        ),
        (forms.GPT_FORM, {"position_embedding_type": "rotary"}, "='rotary', expected one of None, 'absolute'"),
        (forms.GPT_FORM, {"swiglu": True}, "file has swiglu=True, expected False"),
        (forms.GPT_FORM, {"apply_residual_connection_post_layernorm": True}, "post_layernorm=True, expected False"),
        (forms.BERT_FORM, {"bert_binary_head": False}, "file has bert_binary_head=False, expected True"),
        (forms.BLOOM_FORM, OF_BLOOM | {"glu_activation": "geglu"}, "file has glu_activation='geglu', expected None"),
        (forms.BLOOM_FORM, {"position_embedding_type": "absolute"}, "='absolute', expected one of 'alibi'"),
    ],
)
def test_arguments_of_another_model_are_refused(form: Format, args: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        form.section(ARGS | args, "file")


@pytest.mark.parametrize("kind", MODELS)
def test_a_model_is_described_by_arguments_that_describe_it(kind: str):
    form, model, _ = MODELS[kind]
    described = form.to_config(model)
    again = type(model).model_validate(form.section(described, "file"))
    resolved = {"kv_channels": D // H} if kind == "t5" else {}
    assert again == model.model_copy(update=resolved)


@pytest.mark.parametrize(
    ("form", "model", "message"),
    [
        (
            forms.GPT_FORM,
            GPTKeys(**SIZES, glu="geglu"),
            "Megatron orders the rows of a gated feed-forward by its ranks",
        ),
        (forms.BERT_FORM, BertKeys(**SIZES, head_gelu="tanh"), "expected head_gelu='erf', got 'tanh'"),
    ],
)
def test_a_model_that_megatron_does_not_have_is_refused(form: Format, model: config.Model, message: str):
    with pytest.raises(ValueError, match=message):
        form.to_config(model)


def test_a_model_of_no_form_of_a_program_is_refused_with_the_keys_that_would_make_it_one():
    with pytest.raises(ValueError, match=r"expected norm='pre' \(\[model\] name, \[model\] norm\)"):
        stored.of(BertKeys()).form(BertKeys(norm="post"), "megatron")
    with pytest.raises(ValueError, match=r"megatron has no model like this one of name = 'llama'"):
        stored.of(LlamaKeys()).form(LlamaKeys(), "megatron")
