"""`convert --to megatron`, read by what the originals' loader asks for, and by nothing of dtmega."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from dtmega import config
from dtmega.__main__ import main as command
from dtmega.checkpoint.resume import open_checkpoint, state_of
from dtmega.checkpoint.weights import Weights
from dtmega.cli.convert import to_checkpoint
from dtmega.config.families.bert import BertKeys
from dtmega.config.families.gpt import GPTKeys
from dtmega.config.families.t5 import T5Keys
from dtmega.distributed import exit_codes
from dtmega.files import atomic
from dtmega.interop.formats.whole import as_ours, as_theirs
from dtmega.interop.megatron import write, write_core
from tests import core_files, hf_models, megatron_files
from tests.interop.hf.files.test_ours import Memory
from tests.interop.megatron.test_names import MODELS, H, V, drawn
from tests.megatron_files import Layout
from tests.plain_megatron import Plain

LAYOUTS = {"one rank": Layout(), "tp 2": Layout(2), "pp 2": Layout(1, 2), "tp 2, pp 2": Layout(2, 2)}


def as_laid_out(kind: str, layout: Layout) -> Layout:
    """T5's decoder begins on the second of two stages."""
    return layout._replace(split=1) if kind == "t5" and layout.pp > 1 else layout


def padded(weights: dict[str, Tensor], tp: int) -> dict[str, Tensor]:
    """Pad with rows of zeros up to the next multiple of 128 for each rank."""
    rows = -(-V // (128 * tp)) * 128 * tp - V
    by_token = {"embedding.word_embeddings.weight", "output_layer.weight", "lm_head.bias"}
    return {
        name: torch.cat([tensor, tensor.new_zeros(rows, *tensor.shape[1:])]) if name in by_token else tensor
        for name, tensor in weights.items()
    }


def written(
    folder: Path, kind: str, layout: Layout, dtype: torch.dtype = torch.float32, **options: Any
) -> dict[str, Tensor]:
    """Write the model of that kind, and return its weights."""
    form, model, build = MODELS[kind]
    weights = {name: tensor.to(dtype) for name, tensor in drawn(kind).items()}
    ours = as_ours(Memory(weights), form, model, build, "file")
    theirs = as_theirs(ours, form, model, build)
    write.write(folder, theirs, form.to_config(model), layout.tp, layout.pp, **options)
    return weights


def rank_file(folder: Path, layout: Layout, key: megatron_files.Key) -> dict[str, Any]:
    with megatron_files.their_classes():
        file = folder / "release" / megatron_files.rank_folder(layout, key) / "model_optim_rng.pt"
        return torch.load(file, weights_only=False)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("kind", MODELS)
def test_each_rank_finds_exactly_its_tensors_where_its_modules_ask_for_them(tmp_path: Path, kind: str, layout: Layout):
    layout = as_laid_out(kind, layout)
    weights = padded(written(tmp_path / "out", kind, layout), layout.tp)
    for key in megatron_files.keys(layout):
        expected = megatron_files.models(weights, key, layout, H, 3.0, old=False)["model"]
        there = dict(megatron_files.leaves(rank_file(tmp_path / "out", layout, key)["model"]))
        truth = dict(megatron_files.leaves(expected))
        assert there.keys() == truth.keys()
        assert all(torch.equal(there[path], tensor) for path, tensor in truth.items())
    found, _ = megatron_files.read(tmp_path / "out", layout, H)
    assert found.keys() == weights.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in weights.items())


@pytest.mark.parametrize("kind", MODELS)
def test_the_arguments_pass_the_comparisons_of_the_loader(tmp_path: Path, kind: str):
    layout = as_laid_out(kind, Layout(2, 2))
    written(tmp_path / "out", kind, layout)
    content = rank_file(tmp_path / "out", layout, (1, 1))
    _, model, _ = MODELS[kind]
    compared: dict[str, Any] = {
        "num_layers": model.n_layers,
        "hidden_size": model.hidden_size,
        "num_attention_heads": model.n_heads,
    }
    compared |= {"make_vocab_size_divisible_by": 128, "padded_vocab_size": 256}
    compared |= {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}
    tokenizers = {"gpt": "GPT2BPETokenizer", "bloom": "PretrainedFromHF"}
    compared["tokenizer_type"] = tokenizers.get(model.name, "BertWordPieceLowerCase")
    if isinstance(model, GPTKeys | BertKeys | T5Keys):
        compared["max_position_embeddings"] = model.max_position_embeddings
    if kind == "t5":
        compared["pipeline_model_parallel_split_rank"] = 1
    said = vars(content["args"])
    assert {name: said[name] for name in compared} == compared
    assert (content["checkpoint_version"], content["iteration"]) == (3.0, 0)
    positions = said.get("position_embedding_type")
    assert (positions is not None and (positions.name, positions.value)) == (kind == "bloom" and ("alibi", 3))


def test_a_rank_reads_its_part_of_the_weights_and_nothing_else(tmp_path: Path):
    form, model, build = MODELS["gpt"]
    weights = drawn("gpt")
    theirs = as_theirs(as_ours(Memory(weights), form, model, build, "file"), form, model, build)
    asked: list[int] = []

    class Counted:
        tensors = theirs.tensors

        def read(self, name: str, index: Any = None) -> Tensor:
            part = theirs.read(name, index)
            asked.append(part.numel())
            return part

    write.write(tmp_path / "out", Counted(), form.to_config(model), 2, 1)
    cut = {name: megatron_files.shard(name, tensor, 0, 2, H, 3.0).numel() for name, tensor in weights.items()}
    # All tokens are on the first rank: the other has rows of padding.
    assert sum(asked) == weights["embedding.word_embeddings.weight"].numel() + 2 * sum(
        n for name, n in cut.items() if name != "embedding.word_embeddings.weight"
    )


def test_another_dtype_is_that_of_every_tensor_and_of_the_arguments(tmp_path: Path):
    written(tmp_path / "out", "gpt", Layout(), dtype=torch.bfloat16)
    content = rank_file(tmp_path / "out", Layout(), (0, 0))
    assert {tensor.dtype for _, tensor in megatron_files.leaves(content["model"])} == {torch.bfloat16}
    said = content["args"]
    assert (said.params_dtype, said.bf16, said.fp16) == (torch.bfloat16, True, False)


@pytest.mark.parametrize(("spec", "kind"), [("bert-cased:vocab.txt", "Case"), ("bert:vocab.txt", "LowerCase")])
def test_the_kind_of_a_wordpiece_tokenizer_is_that_of_its_spec(tmp_path: Path, spec: str, kind: str):
    written(tmp_path / "out", "bert", Layout(), tokenizer=spec)
    assert rank_file(tmp_path / "out", Layout(), (0, 0))["args"].tokenizer_type == f"BertWordPiece{kind}"


@pytest.mark.parametrize(
    ("kind", "tp", "pp", "message"),
    [
        ("gpt", 3, 1, r"tp=3 does not divide n_heads=2 \(--tp, \[model\] n_heads\)"),
        ("gpt", 1, 3, "pp=3 gives 3 stages to the 2 layers of the encoder"),
        ("t5", 1, 5, "pp=5 gives 3 stages to the 2 layers of the encoder"),
        ("t5", 1, 4, "pp=4 gives 2 stages to the 1 layers of the decoder"),
    ],
)
def test_a_layout_that_does_not_come_out_even_is_refused_before_anything_is_written(
    tmp_path: Path, kind: str, tp: int, pp: int, message: str
):
    with pytest.raises(ValueError, match=message):
        written(tmp_path / "out", kind, Layout(tp, pp))
    assert [*tmp_path.iterdir()] == []


def test_a_disk_that_fills_up_in_the_middle_of_a_file_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write_all = atomic._WholeWrites.write
    n_written: list[int] = []

    def write_until_full(self: Any, data: Any) -> None:
        n_written.append(len(data))
        if sum(n_written) > 10_000:
            raise OSError(28, "No space left on device")
        write_all(self, data)

    monkeypatch.setattr(atomic._WholeWrites, "write", write_until_full)
    with pytest.raises(OSError, match="No space"):
        written(tmp_path / "out", "gpt", Layout())
    assert [*tmp_path.iterdir()] == []


# ------------------------------------------------------------------------------------------------------ the command


def test_a_gpt2_of_transformers_computes_in_megatron_what_it_computed(tmp_path: Path):
    theirs: Any = hf_models.build(hf_models.Case("gpt2")).eval()
    theirs.save_pretrained(tmp_path / "hf")
    out = tmp_path / "out"
    arguments = ["--from", "hf", str(tmp_path / "hf"), "--to", "megatron", str(out), "--tp", "2", "--pp", "2"]
    arguments += ["--format", "legacy"]
    assert command(["convert", *arguments]) == exit_codes.DONE
    n_heads = theirs.config.n_head
    weights, said = megatron_files.read(out, Layout(2, 2), n_heads)
    assert isinstance(said, argparse.Namespace)
    tokens = torch.tensor([3, 1, 4, 1, 5, 9, 2, 6])
    with torch.no_grad():
        expected = theirs(tokens[None]).logits[0]
    found = Plain(weights, n_heads).decoder(tokens[None])["lm"][0, :, : theirs.config.vocab_size]
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_a_checkpoint_becomes_a_folder_for_their_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    form, model, build = MODELS["bloom"]
    weights = {name: tensor.float() for name, tensor in drawn("bloom").items()}
    to_checkpoint.write(str(tmp_path / "ours"), as_ours(Memory(weights), form, model, build, "file"), model)
    arguments = ["convert", "--from", "dtmega", str(tmp_path / "ours"), "--to", "megatron", str(tmp_path / "out")]
    assert command([*arguments, "--tp", "2", "--dtype", "float16"]) == exit_codes.DONE
    found, said = megatron_files.read(tmp_path / "out", Layout(2), H)
    assert found.keys() == weights.keys()
    assert all(torch.equal(found[name][: len(tensor)], tensor.half()) for name, tensor in weights.items())
    assert said.embed_layernorm
    assert command([*arguments, "--tp", "2"]) == exit_codes.REFUSED
    assert "exists already; expected a new folder" in capsys.readouterr().err
    assert command([*arguments[:4], "--to", "hf", str(tmp_path / "hf"), "--tp", "2"]) == exit_codes.REFUSED
    assert "--tp=2 and --pp=1 are for --to megatron" in capsys.readouterr().err
    assert not (tmp_path / "hf").exists()


@pytest.mark.parametrize("kind", MODELS)
def test_what_was_written_for_two_by_two_ranks_is_read_back_to_the_bit(tmp_path: Path, kind: str):
    form, model, build = MODELS[kind]
    weights = {name: tensor.float() for name, tensor in drawn(kind).items()}
    source = as_ours(Memory(weights), form, model, build, "file")
    to_checkpoint.write(str(tmp_path / "ours"), source, model)
    there = ["--from", "dtmega", str(tmp_path / "ours"), "--to", "megatron", str(tmp_path / "out")]
    assert command(["convert", *there, "--format", "legacy", "--tp", "2", "--pp", "2"]) == exit_codes.DONE
    back = ["--from", "megatron", str(tmp_path / "out"), "--to", "dtmega", str(tmp_path / "back")]
    assert command(["convert", *back, "--vocab-size", str(V)]) == exit_codes.DONE
    checkpoint = open_checkpoint(str(tmp_path / "back"))
    found = Weights(checkpoint)
    assert found.tensors.keys() == source.tensors.keys()
    assert all(
        torch.equal(found.read(name)[: shape[0]], source.read(name)) for name, (_, shape) in source.tensors.items()
    )
    again = config.model_section(state_of(checkpoint).config["model"], "back")
    sizes = {"pad_vocab_to_multiple": 256}
    if isinstance(again, T5Keys):
        sizes["kv_channels"] = again.head_dim  # which their arguments say
    assert again == model.model_copy(update=sizes)


# ------------------------------------------------------------------------------------------------- megatron-core's form


def a_gpt2() -> Any:
    """A GPT-2 of transformers, with biases that are not 0."""
    model: Any = hf_models.build(hf_models.Case("gpt2")).eval()
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def a_llama(**values: Any) -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_key_value_heads=2, vocab_size=131, **values))


def to_core(folder: Path, model: Any, *options: str) -> int:
    model.save_pretrained(folder / "hf")
    where = ["--from", "hf", str(folder / "hf"), "--to", "megatron", str(folder / "out")]
    return command(["convert", *where, *options])


def a_qwen3() -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4}
    windows = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}
    return Qwen3ForCausalLM(Qwen3Config(**sizes, **windows, head_dim=32, num_key_value_heads=2, vocab_size=131))


@pytest.mark.parametrize("kind", ["gpt2", "llama", "tied llama", "qwen3"])
def test_core_has_megatron_cores_names_with_all_layers_in_one_stack(tmp_path: Path, kind: str):
    model = {"gpt2": a_gpt2, "qwen3": a_qwen3}.get(kind, lambda: a_llama(tie_word_embeddings=kind == "tied llama"))()
    assert to_core(tmp_path, model) == exit_codes.DONE
    found, others, common = core_files.read(tmp_path / "out" / "release")
    if kind == "gpt2":
        expected = core_files.of_gpt2(model.state_dict(), model.config.n_head)
    else:
        expected = core_files.of_llama(model.state_dict(), 4, 2, tied=kind == "tied llama")
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        n_padding = 256 - 131 if name in ("embedding.word_embeddings.weight", "output_layer.weight") else 0
        padding = tensor.new_zeros(n_padding, *tensor.shape[1:])
        assert torch.equal(found[name], torch.cat([tensor, padding])), name
    n_layers = model.config.num_hidden_layers
    # Each linear layer, attention and norm of heads of Transformer Engine asks for a state of each layer, and the last
    # norm for one.
    assert len(others) == (7 if kind == "qwen3" else 5) * n_layers + 1
    assert f"decoder.layers.mlp.linear_fc1._extra_state/shard_{n_layers - 1}_{n_layers}" in others
    assert (common["checkpoint_version"], common["iteration"]) == (3.0, 0)
    said = common["args"]
    assert (said.num_layers, said.hidden_size, said.padded_vocab_size) == (n_layers, 64, 256)
    positions, eps = ("learned_absolute", 1e-5) if kind == "gpt2" else ("rope", 1e-6)
    assert (said.position_embedding_type, said.norm_epsilon) == (positions, eps)
    assert said.untie_embeddings_and_output_weights == (kind in ("llama", "qwen3"))
    if kind == "qwen3":
        assert (said.qk_layernorm, said.kv_channels, said.window_size) == (True, 32, (4, 0))
        assert said.window_attn_skip_freq == [0, 1, 1]
    assert (tmp_path / "out" / "latest_checkpointed_iteration.txt").read_text() == "release"
    metadata = json.loads((tmp_path / "out" / "release" / "metadata.json").read_text())
    assert metadata == {
        **{"sharded_backend": "torch_dist", "sharded_backend_version": 1},
        **{"common_backend": "torch", "common_backend_version": 1},
    }


def test_the_arguments_of_a_llama_are_those_with_which_megatron_lm_makes_it(tmp_path: Path):
    scaled = {"rope_type": "llama3", "rope_theta": 500_000.0, "factor": 32.0, "low_freq_factor": 1.0}
    scaled |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    model = a_llama(rope_parameters=scaled, max_position_embeddings=131_072)
    assert to_core(tmp_path, model, "--dtype", "bfloat16") == exit_codes.DONE
    tensors, _, common = core_files.read(tmp_path / "out" / "release")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    expected = {
        **{"group_query_attention": True, "num_query_groups": 2, "kv_channels": 16, "ffn_hidden_size": 96},
        **{"swiglu": True, "normalization": "RMSNorm", "add_bias_linear": False, "qk_layernorm": False},
        **{"rotary_base": 500_000, "rotary_percent": 1.0, "rotary_interleaved": False},
        **{"use_rope_scaling": True, "rope_scaling_factor": 32.0, "max_position_embeddings": 131_072},
        **{"hidden_dropout": 0.0, "attention_dropout": 0.0, "tokenizer_type": "HuggingFaceTokenizer"},
        **{"tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 1, "params_dtype": torch.bfloat16},
        **{"bf16": True, "ckpt_format": "torch_dist", "consumed_train_samples": 0},
    }
    said = vars(common["args"])
    assert {name: said[name] for name in expected} == expected
    back = ["--from", "megatron", str(tmp_path / "out"), "--to", "hf", str(tmp_path / "back"), "--vocab-size", "131"]
    assert command(["convert", *back]) == exit_codes.DONE
    again = LlamaForCausalLM.from_pretrained(tmp_path / "back").state_dict()
    assert all(torch.equal(again[name], tensor.bfloat16()) for name, tensor in model.state_dict().items())


def test_a_layer_of_a_core_checkpoint_is_in_memory_at_a_time(tmp_path: Path):
    model = a_llama()
    assert to_core(tmp_path, model) == exit_codes.DONE
    release = tmp_path / "out" / "release"
    sizes = {file.name: file.stat().st_size for file in release.glob("*.distcp")}
    assert sizes.keys() == {f"__{i}_0.distcp" for i in range(1 + model.config.num_hidden_layers)}
    assert b"tmp" not in (release / ".metadata").read_bytes()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--tp", "2"], "--tp=2 and --pp=1 are for --format legacy; what --format core writes"),
        (["--format", "core", "--pp", "2"], "--tp=1 and --pp=2 are for --format legacy"),
        (["--format", "legacy"], "--format legacy is not for a model of name = 'llama', expected core"),
    ],
)
def test_what_a_format_does_not_have_is_refused(
    tmp_path: Path, options: list[str], message: str, capsys: pytest.CaptureFixture[str]
):
    assert to_core(tmp_path, a_llama(), *options) == exit_codes.REFUSED
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("kind", ["bloom", "bert", "t5"])
def test_core_is_refused_for_families_that_megatron_core_does_not_hold(
    tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
):
    form, model, build = MODELS[kind]
    weights = {name: tensor.float() for name, tensor in drawn(kind).items()}
    to_checkpoint.write(str(tmp_path / "ours"), as_ours(Memory(weights), form, model, build, "file"), model)
    there = ["--from", "dtmega", str(tmp_path / "ours"), "--to", "megatron", str(tmp_path / "out")]
    assert command(["convert", *there, "--format", "core"]) == exit_codes.REFUSED
    message = f"--format core is not for a model of name = '{kind}', expected legacy (--format, [model] name)"
    assert message in capsys.readouterr().err
    assert command(["convert", *there]) == exit_codes.DONE
    assert (tmp_path / "out" / "release" / "mp_rank_00").is_dir()


def test_a_scaling_of_frequencies_that_megatron_lm_has_no_flag_for_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    scaled = {"rope_type": "llama3", "rope_theta": 10_000.0, "factor": 8.0, "low_freq_factor": 2.0}
    scaled |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    model = a_llama(rope_parameters=scaled, max_position_embeddings=131_072)
    assert to_core(tmp_path, model) == exit_codes.REFUSED
    assert "rope_low_freq_factor=1.0, which no flag changes; got 2.0" in capsys.readouterr().err


def test_a_disk_that_fills_up_while_tensors_are_written_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(write_core.FileSystemWriter, "finish", full)
    model = a_llama()
    assert to_core(tmp_path, model) != exit_codes.DONE
    assert "No space left on device" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf"]
