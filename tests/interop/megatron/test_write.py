"""`convert --to megatron`, read by what the originals' loader asks for, and by nothing of dtmega."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dtmega import config
from dtmega.__main__ import main as command
from dtmega.checkpoint.resume import open_checkpoint, state_of
from dtmega.checkpoint.weights import Weights
from dtmega.cli.convert import to_checkpoint
from dtmega.distributed import exit_codes
from dtmega.files import atomic
from dtmega.formats.whole import as_ours, as_theirs
from dtmega.interop.megatron import write
from tests import hf_models, megatron_files
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
    if isinstance(model, config.GPT | config.Bert | config.T5):
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
    assert command(["convert", *there, "--tp", "2", "--pp", "2"]) == exit_codes.DONE
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
    if isinstance(again, config.T5):
        sizes["kv_channels"] = again.head_dim  # which their arguments say
    assert again == model.model_copy(update=sizes)
