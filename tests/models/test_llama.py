"""models/llama.py against transformers' Llama, Mistral and Qwen3: numbers, weights both ways, and what is refused."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedConfig,
    Qwen3Config,
)
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from dtmega import config, families
from dtmega.__main__ import main as command
from dtmega.cli.convert import recognise
from dtmega.config.families.llama import LlamaKeys
from dtmega.distributed import exit_codes
from dtmega.interop import stored
from dtmega.interop.formats.format import Format
from dtmega.interop.formats.llama import LLAMA, MISTRAL, QWEN3
from dtmega.models.generate import Sampling, generate
from dtmega.models.initial import init_weights
from dtmega.models.llama import Llama, Rotation, rotary_frequencies
from dtmega.ops import attention_rule as rule
from tests.interop.hf.files.test_ours import Memory
from tests.test_train import metrics, run

V, S = 131, 77
SIZES: dict[str, Any] = {"vocab_size": V, "hidden_size": 48, "n_layers": 2, "n_heads": 6, "ffn_hidden_size": 80}
THEIRS: dict[str, Any] = {
    "vocab_size": V,
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "intermediate_size": 80,
}
# Of the 4 frequencies of 8 channels, the first is high, the second between, the others are low.
SCALED = {"rope_factor": 8.0, "rope_low_freq_factor": 1.0, "rope_high_freq_factor": 4.0, "rope_original_length": 300}
THEIR_SCALED = {
    **{"rope_type": "llama3", "rope_theta": 500.0, "original_max_position_embeddings": 300},
    **{"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
}
FEW: dict[str, Any] = {"rms_norm_eps": 1e-5, "max_position_embeddings": 4096, "num_key_value_heads": 2}
ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}
# Kind -> class of its config in transformers, keys of [model], and of config.json. Windows are shorter than a sequence.
KINDS: dict[str, tuple[type[PreTrainedConfig], dict[str, Any], dict[str, Any]]] = {
    "Llama 2": (
        LlamaConfig,
        {"max_position_embeddings": 512},
        {"max_position_embeddings": 512, "rms_norm_eps": 1e-5},
    ),
    "Llama 3.1": (
        LlamaConfig,
        {"n_kv_heads": 2, "rope_theta": 500.0, "rms_norm_eps": 1e-2, **SCALED},
        {
            **{"num_key_value_heads": 2, "rms_norm_eps": 1e-2, "max_position_embeddings": 4096},
            **{"rope_parameters": THEIR_SCALED},
        },
    ),
    "Llama 3.2": (
        LlamaConfig,
        {"n_kv_heads": 1, "rope_theta": 500.0, "tied": True},
        {
            **{"num_key_value_heads": 1, "rms_norm_eps": 1e-5, "tie_word_embeddings": True},
            **{"max_position_embeddings": 4096, **ROPE},
        },
    ),
    "Mistral": (
        MistralConfig,
        {"n_kv_heads": 2, "rope_theta": 500.0, "window": 20},
        FEW | ROPE | {"sliding_window": 20},
    ),
    "Qwen3": (
        Qwen3Config,
        {"n_kv_heads": 2, "rope_theta": 500.0, "qk_norm": True, "kv_channels": 16, "tied": True},
        FEW | ROPE | {"head_dim": 16, "tie_word_embeddings": True},
    ),
    "Qwen3 with windows": (
        Qwen3Config,
        {"n_kv_heads": 2, "rope_theta": 500.0, "qk_norm": True, "window": 20, "window_layers": [0, 2], "n_layers": 3},
        FEW
        | ROPE
        | {"head_dim": 8, "num_hidden_layers": 3, "use_sliding_window": True, "sliding_window": 20}
        | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    ),
}


def section(kind: str) -> LlamaKeys:
    return LlamaKeys(**SIZES | KINDS[kind][1])


def their_config(kind: str) -> Any:
    of_transformers, _, theirs = KINDS[kind]
    return of_transformers(**THEIRS | theirs)


def small(cfg: LlamaKeys) -> Llama:
    model = families.of(cfg).build(cfg)
    assert isinstance(model, Llama)
    init_weights(model, seed=1)
    model.init_buffers(1)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():  # norms, too, so that one at the wrong place shows
            p.add_(torch.randn(p.shape, generator=generator) * 0.1)
    return model


def by_their_names(cfg: LlamaKeys, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    _, source = stored.of(cfg).as_stored("hf", Memory(tensors), cfg)
    return {name: source.read(name) for name in source.tensors}


def pair(kind: str) -> tuple[Llama, Any]:
    """The same weights in both."""
    ours = small(section(kind))
    theirs: Any = AutoModelForCausalLM.from_config(their_config(kind))
    weights = by_their_names(ours.cfg, {name: p.detach() for name, p in ours.named_parameters()})
    missing, unknown = theirs.load_state_dict(weights, strict=False)
    assert (missing, unknown) == (["lm_head.weight"] if ours.cfg.tied else [], [])
    return ours, theirs


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(V, (2, S), generator=generator)
    return tokens, tokens.roll(-1, dims=1)


def error(ours: Tensor, truth: Tensor) -> float:
    return ((ours - truth).norm() / truth.norm()).item()


@pytest.mark.parametrize("kind", KINDS)
def test_logits_loss_and_every_gradient_equal_those_of_transformers(kind):
    ours, theirs = pair(kind)
    tokens, labels = batch()
    logits = theirs(tokens).logits
    assert error(ours(tokens), logits) < 1e-5
    loss = ours(tokens, labels)["lm"]
    truth = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    assert loss.item() == pytest.approx(truth.item(), rel=1e-6)
    loss.backward()
    truth.backward()
    gradients = by_their_names(ours.cfg, {name: p.grad for name, p in ours.named_parameters() if p.grad is not None})
    expected = {name: p.grad for name, p in theirs.named_parameters()}
    assert gradients.keys() == expected.keys()
    wrong = {name: error(gradients[name], grad) for name, grad in expected.items() if grad is not None}
    assert max(wrong.values()) < 1e-5, wrong


def test_documents_in_one_row_give_what_transformers_gives_for_each_alone():
    ours, theirs = pair("Llama 3.1")
    tokens, _ = batch()
    positions = torch.cat([torch.arange(30), torch.arange(S - 30)]).expand_as(tokens)
    documents = (torch.arange(S) >= 30).long().expand_as(tokens)
    truth = torch.cat([theirs(tokens[:, :30]).logits, theirs(tokens[:, 30:]).logits], dim=1)
    assert error(ours(tokens, position_ids=positions, document_ids=documents), truth) < 1e-5


def test_queries_and_keys_are_turned_by_the_positions_that_are_given():
    ours, theirs = pair("Llama 2")
    tokens, _ = batch()
    positions = (torch.arange(S) ** 2 // 20).expand_as(tokens)
    truth = theirs(tokens, position_ids=positions, attention_mask=torch.ones_like(tokens)).logits
    assert error(ours(tokens, position_ids=positions), truth) < 1e-5
    assert error(ours(tokens), truth) > 1e-2


def test_the_frequencies_of_llama_3_1_are_those_of_transformers():
    cfg = LlamaKeys(hidden_size=4096, n_heads=32, rope_theta=500_000.0, rope_factor=8.0)
    rope = THEIR_SCALED | {"rope_theta": 500_000.0, "original_max_position_embeddings": 8192}
    theirs = LlamaRotaryEmbedding(LlamaConfig(max_position_embeddings=131_072, rope_parameters=rope))
    torch.testing.assert_close(rotary_frequencies(cfg), theirs.inv_freq, rtol=1e-6, atol=0)


def test_a_rotation_in_bf16_is_exact_but_for_the_rounding_of_its_result():
    x = torch.randn(1, 8, 2, 16, generator=torch.Generator().manual_seed(0)).bfloat16()
    angles = torch.arange(4000, 4008)[:, None, None] * rotary_frequencies(LlamaKeys(hidden_size=32, n_heads=2))
    turned = Rotation(angles.cos(), angles.sin())(x)
    pairs = torch.complex(*x.double().chunk(2, dim=-1)) * torch.polar(torch.ones_like(angles), angles)
    truth = torch.cat([pairs.real, pairs.imag], dim=-1)
    assert turned.dtype == torch.bfloat16
    assert ((turned - truth).abs() <= 2**-8 * truth.abs() + 1e-6).all()


def test_changing_a_token_leaves_earlier_outputs_bit_equal_and_changes_the_later_ones():
    model = small(section("Llama 3.1")).eval()
    tokens, _ = batch()
    before = model(tokens)
    i = S // 2
    tokens[:, i] = (tokens[:, i] + 1) % V
    after = model(tokens)
    assert torch.equal(after[:, :i], before[:, :i])
    assert (after[:, i:] != before[:, i:]).any(-1).all()


def test_initial_values_are_normal_and_smaller_where_the_residual_is_written_to():
    cfg = LlamaKeys(vocab_size=512, hidden_size=64, n_layers=8, n_heads=4, n_kv_heads=2, init_std=0.5)
    model = families.of(cfg).build(cfg)
    init_weights(model, seed=1)
    stds = {name: p.std().item() for name, p in model.named_parameters() if p.ndim == 2}
    writing = {name for name in stds if name.endswith(("attn.out.weight", "mlp.down.weight"))}
    assert len(writing) == 16
    for name, std in stds.items():
        assert std == pytest.approx(0.5 / 4 if name in writing else 0.5, rel=0.1), name
    assert all((p == 1).all() for p in model.parameters() if p.ndim == 1)


@pytest.mark.parametrize("labelled", [True, False])
def test_a_kernel_is_asked_for_where_there_is_a_loss(monkeypatch, labelled):
    asked = []

    def attention_rule(*args, fused, **keys):
        asked.append(fused)
        return rule.attention_rule(*args, **keys)

    monkeypatch.setattr("dtmega.models.llama.attention_rule", attention_rule)
    tokens, labels = batch()
    small(section("Llama 2"))(tokens, labels if labelled else None)
    assert asked == [labelled]


def test_attention_is_given_queries_keys_and_values_in_the_order_of_their_products(monkeypatch):
    found: list[Tensor] = []

    def attention(q: Tensor, k: Tensor, v: Tensor, rule: Any) -> Tensor:
        found.extend((q, k, v))
        return q

    monkeypatch.setattr("dtmega.models.llama.attention", attention)
    tokens = torch.zeros(2, S, dtype=torch.int64)
    small(section("Llama 2"))(tokens=tokens, labels=tokens)
    # [B, S, H, K] in memory: a kernel that keeps the order of its inputs hands on what needs no copy.
    assert found
    assert all(x.shape == (2, 6, S, 8) and x.transpose(1, 2).is_contiguous() for x in found)


@pytest.mark.parametrize("kind", ["Llama 3.1", "Qwen3 with windows"])
def test_a_block_compiles_as_one_graph_to_the_same_numbers(kind: str):
    tokens, labels = batch()
    model = small(section(kind))
    compiled = copy.deepcopy(model)
    for block in compiled.blocks():
        block.compile(fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(tokens, labels)["lm"], model(tokens, labels)["lm"])


@pytest.mark.parametrize("kind", ["Llama 3.2", "Qwen3 with windows"])
def test_a_sample_is_what_transformers_generates(kind: str):
    ours, theirs = pair(kind)
    new = generate(ours, [1, 2, 3], 20, Sampling(V, frozenset([V - 1]), temperature=0))
    theirs.generation_config.eos_token_id = theirs.generation_config.pad_token_id = V - 1
    truth = theirs.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=20, do_sample=False)
    assert new == [token for token in truth[0, 3:].tolist() if token != V - 1]


# ---------------------------------------------------------------------------------------------------------- directories


def export(model: Llama, folder: Path) -> None:
    weights = Memory({name: p.detach() for name, p in model.named_parameters()})
    stored.of(model.cfg).export(weights, folder, model.cfg, None, rank=0, size=1, barrier=lambda: None)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_exported_is_the_model_in_transformers_and_again_here(tmp_path, kind):
    model = small(section(kind)).eval()
    export(model, tmp_path)
    loaded: Any = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    theirs, info = loaded
    assert not any(info.values())
    tokens, _ = batch()
    assert error(model(tokens), theirs(tokens).logits) < 1e-5
    source, described = recognise.open_folder(tmp_path, None)
    resolved = {"n_kv_heads": model.cfg.kv_heads, "kv_channels": model.cfg.head_dim}
    assert described.model_dump() == model.cfg.model_dump() | resolved
    for name, parameter in model.named_parameters():
        assert torch.equal(source.read(name), parameter), name


def test_a_run_goes_to_transformers_which_goes_on_as_it_does_and_a_run_starts_from_there(tmp_path, corpus, capsys):
    keys = {"model__name": "llama", "model__n_kv_heads": 2, "model__pad_vocab_to_multiple": 8}
    exported = str(tmp_path / "hf")
    assert run(tmp_path / "run", corpus, **keys) == exit_codes.DONE
    assert command(["convert", "--from", "dtmega", str(tmp_path / "run"), "--to", "hf", exported]) == exit_codes.DONE
    capsys.readouterr()
    greedy = ["--prompt", "ABCDEFGH", "--tokens", "4", "--temperature", "0"]
    assert command(["generate", "--run", str(tmp_path / "run"), *greedy]) == exit_codes.DONE
    prompt = torch.tensor([list(b"ABCDEFGH")])
    theirs: Any = AutoModelForCausalLM.from_pretrained(exported)
    new = theirs.generate(prompt, max_new_tokens=4, do_sample=False, pad_token_id=256)[0, 8:].tolist()
    assert capsys.readouterr().out == "ABCDEFGH" + bytes(new).decode(errors="replace") + "\n"
    assert run(tmp_path / "next", corpus, **keys, model__init_from=exported, train__steps=1) == exit_codes.DONE
    (last,) = [line["val_loss"] for line in metrics(tmp_path / "run") if "val_loss" in line and line["step"] == 10]
    assert metrics(tmp_path / "next")[0]["val_loss"] == pytest.approx(last, rel=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_what_transformers_saves_is_the_same_model_here(tmp_path, kind):
    ours, theirs = pair(kind)
    theirs.save_pretrained(tmp_path)
    source = stored.of(ours.cfg).folder(tmp_path, ours.cfg)
    for name, parameter in ours.named_parameters():
        assert torch.equal(source.read(name), parameter), name


@pytest.mark.parametrize("form", [LLAMA, MISTRAL, QWEN3], ids=lambda form: form.kind)
def test_what_config_json_leaves_out_is_what_transformers_takes(form: Format):
    plain = {"model_type": form.kind, **THEIRS, "num_hidden_layers": 30}
    if form is not LLAMA:
        plain["num_key_value_heads"] = 2
    theirs: Any = AutoConfig.for_model(**plain)
    model = LlamaKeys(**form.section(plain, "config.json"))
    assert model.kv_heads == theirs.num_key_value_heads
    assert model.head_dim == theirs.head_dim
    assert (model.window or None) == getattr(theirs, "sliding_window", None)
    assert model.tied == theirs.tie_word_embeddings
    assert model.init_std == theirs.initializer_range
    assert model.rms_norm_eps == theirs.rms_norm_eps
    assert model.max_position_embeddings == theirs.max_position_embeddings
    assert {"rope_theta": model.rope_theta, "rope_type": "default"} == theirs.rope_parameters


@pytest.mark.parametrize(
    "entries",
    [
        {"use_sliding_window": False, "max_window_layers": 1},
        {"use_sliding_window": True, "max_window_layers": 1},
        {"use_sliding_window": True, "max_window_layers": 0},
        {"use_sliding_window": True, "sliding_window": None, "max_window_layers": 1},
        {"use_sliding_window": True, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
        {"use_sliding_window": True, "layer_types": ["full_attention"] * 3},
    ],
)
def test_the_layers_with_a_window_are_those_of_transformers(entries: dict[str, Any]):
    sizes = THEIRS | FEW | {"num_hidden_layers": 3, "head_dim": 8, "sliding_window": 20}
    plain = {"model_type": "qwen3", **sizes, **entries}
    theirs: Any = AutoConfig.for_model(**plain)
    model = LlamaKeys(**QWEN3.section(plain, "config.json"))
    expected = [theirs.sliding_window if kind == "sliding_attention" else 0 for kind in theirs.layer_types]
    assert [model.window_of(layer) for layer in range(3)] == expected
    assert model == LlamaKeys(**QWEN3.section({**theirs.to_dict(), **sizes, **entries}, "config.json"))


@pytest.mark.parametrize(
    ("kind", "changed", "message"),
    [
        (
            "Mistral",
            {"layer_types": ["sliding_attention", "full_attention"]},
            "expected 2 entries, each sliding_attention",
        ),
        ("Mistral", {"sliding_window": None, "layer_types": 1}, "expected 2 entries, each full_attention by"),
        ("Mistral", {"num_key_value_heads": None}, "has no 'num_key_value_heads'"),
        ("Qwen3", {"layer_types": ["sliding_attention"] * 2}, "expected 2 entries, each full_attention by"),
        ("Qwen3", {"use_sliding_window": True, "layer_types": [["a"], 1]}, "each sliding_attention or full_attention"),
        ("Qwen3", {"max_window_layers": "2"}, "has max_window_layers='2', expected a number"),
        ("Qwen3", {"attention_bias": True}, "has attention_bias=True, expected False"),
        ("Qwen3", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "scales rotary positions by"),
    ],
)
def test_what_no_class_of_ours_computes_is_refused(kind: str, changed: dict[str, Any], message: str):
    form = {"Mistral": MISTRAL, "Qwen3": QWEN3}[kind]
    plain = {"model_type": form.kind, **THEIRS, **FEW, "sliding_window": 20, **changed}
    with pytest.raises(ValueError, match=message):
        form.section(plain, "config.json")


def test_a_mistral_without_a_window_is_read_and_written_as_a_llama(tmp_path: Path):
    MistralForCausalLM(MistralConfig(**THEIRS | FEW, sliding_window=None)).save_pretrained(tmp_path / "in")
    source, model = recognise.open_folder(tmp_path / "in", None)
    written, tensors = stored.of(model).as_stored("hf", source, model)
    assert written["architectures"] == ["LlamaForCausalLM"]
    assert tensors.tensors.keys() == load_file(tmp_path / "in" / "model.safetensors").keys()


def test_windows_in_some_layers_without_norms_of_heads_have_no_class():
    model = LlamaKeys(**SIZES, window=8, window_layers=[1])
    with pytest.raises(ValueError, match="hf has no model like this one of name = 'llama': expected window=0"):
        stored.of(model).as_stored("hf", Memory({}), model)


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_rotary_positions_are_read_as_either_version_of_transformers_writes_them(key):
    said = dict(THEIR_SCALED)
    plain = {"model_type": "llama", **THEIRS, key: said}
    if key == "rope_scaling":
        plain["rope_theta"] = said.pop("rope_theta")
    assert LLAMA.section(plain, "config.json").items() >= (SCALED | {"rope_theta": 500.0}).items()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"hidden_act": "gelu"}, "config.json has hidden_act='gelu', expected 'silu'"),
        ({"attention_bias": True}, "config.json has attention_bias=True, expected False"),
        ({"head_dim": 16}, r"kv_channels=16, not 8 \(\[model\] kv_channels\)"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "scales rotary positions by {'rope_type': 'yarn'}, expected"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 2.0}}, "with factor, low_freq_factor"),
        ({"rope_parameters": {**THEIR_SCALED, "factor": 4.0}}, r"rope_factor=4.0, not 8.0 \(\[model\] rope_factor\)"),
        ({"rope_parameters": {"rope_theta": 9.0}}, r"rope_theta=9.0, not 500.0"),
        ({"num_key_value_heads": 3}, r"n_kv_heads=3, not 2 \(\[model\] n_kv_heads\)"),
        ({"tie_word_embeddings": True}, r"tied=True, not False"),
        ({"rms_norm_eps": 0.5}, r"rms_norm_eps=0.5, not 0.01"),
    ],
)
def test_a_directory_of_another_llama_is_refused_with_what_differs(tmp_path, changed, message):
    cfg = section("Llama 3.1")
    their_config("Llama 3.1").save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changed))
    save_file({"a": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=message):
        stored.of(cfg).folder(tmp_path, cfg)


# -------------------------------------------------------------------------------------------------------- configuration


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"n_kv_heads": 3}, "n_kv_heads=3 does not divide n_heads=8"),
        ({"hidden_size": 24}, "a head has an odd number of channels: 3"),
        ({"window_layers": [1]}, r"window_layers=\[1\] without a window: expected window > 0"),
        (
            {"window": 4, "window_layers": [4]},
            r"window_layers=\[4\]: expected rising numbers from 0 to n_layers - 1 = 3",
        ),
        ({"window": 4, "window_layers": [2, 1]}, r"window_layers=\[2, 1\]: expected rising numbers"),
        ({"window": 4, "window_layers": [0, 1, 2, 3]}, r"are all layers: expected \[\]"),
        ({"rope_low_freq_factor": 4.0}, "rope_low_freq_factor=4.0 is not below rope_high_freq_factor=4.0"),
        ({"hidden_dropout": 0.1}, "hidden_dropout"),
        ({"layer_norm_eps": 1e-4}, "layer_norm_eps"),
    ],
)
def test_what_a_llama_cannot_be_or_has_no_key_for_is_refused(keys, message):
    with pytest.raises(ValueError, match=message):
        config.model_section({"name": "llama", **keys}, "test")


def test_the_feed_forward_is_that_of_the_published_sizes_where_it_is_left_open():
    assert [LlamaKeys(hidden_size=d, n_heads=d // 128).ffn for d in (4096, 5120, 6656)] == [11008, 13824, 17920]
