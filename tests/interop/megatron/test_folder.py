"""`dtmega convert --from megatron` as a user runs it, on folders that tests/megatron_files.py writes by their sources.

What comes out has the logits of Megatron's model on one device (tests/plain_megatron.py), or is refused and leaves
nothing.
"""

from __future__ import annotations

import os
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import BloomForCausalLM

from dtmega import config, families
from dtmega.__main__ import main as command
from dtmega.checkpoint.resume import open_checkpoint, state_of
from dtmega.checkpoint.weights import Weights
from dtmega.distributed import exit_codes
from dtmega.interop import stored
from dtmega.interop.megatron import folder
from dtmega.train import main as train
from tests import deepspeed_files
from tests import megatron_files as theirs
from tests.megatron_files import Layout
from tests.plain_megatron import Plain, shapes
from tests.test_train import metrics

D, H, F, V, ROWS, S, L = 8, 2, 32, 22, 24, 10, 4


class Memory:
    """Tensors as a `Source`."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.held = tensors
        self.tensors = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}

    def read(self, name: str, index: Any = None) -> Tensor:
        return self.held[name][... if index is None else index]


ARGS = {"num_layers": L, "hidden_size": D, "num_attention_heads": H, "ffn_hidden_size": F, "padded_vocab_size": ROWS}
ARGS |= {"max_position_embeddings": S, "make_vocab_size_divisible_by": 6, "seq_length": 8, "train_iters": 20}
TWO_BY_TWO = Layout(tp=2, pp=2)
TOKENS = torch.arange(S * 2).view(2, S) % V


def drawn(kind: str, seed: int = 0) -> dict[str, Tensor]:
    """Weights of a whole model."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(shape, generator=generator) * 0.3 + (1 if "norm" in name and name.endswith("weight") else 0)
        for name, shape in shapes(kind, D, F, ROWS, S, L).items()
    }


def arguments(kind: str, version: float, layout: Layout) -> dict[str, Any]:
    fused = {} if version >= 3 else {"bias_gelu_fusion": True}
    told = {"bert_binary_head": True} if kind == "bert" else {}
    return theirs.arguments(version, layout, **ARGS, **fused, **told, world_size=2 * layout.tp * layout.pp)


def written(folder: Path, kind: str = "gpt", layout: Layout = TWO_BY_TWO, version: float = 3.0, **options: Any) -> Path:
    args = arguments(kind, version, layout)
    return theirs.write(folder, drawn(kind), H, layout, args=args | options.pop("args", {}), version=version, **options)


def convert(source: Path, out: Path, *options: str, to: str = "dtmega") -> int:
    return command(["convert", "--from", "megatron", str(source), "--to", to, str(out), *options])


def read(path: Path) -> tuple[config.Model, dict[str, Tensor]]:
    """The model of a checkpoint of ours, and its weights."""
    checkpoint = open_checkpoint(str(path))
    model = config.model_section(state_of(checkpoint).config["model"], str(path))
    weights = Weights(checkpoint)
    return model, {name: weights.read(name) for name in weights.tensors}


def logits(path: Path) -> dict[str, Tensor]:
    """The logits of our model with the weights of a checkpoint."""
    model, weights = read(path)
    built = families.of(model).build(model).eval()
    built.init_buffers(0)
    missing, unexpected = built.load_state_dict(weights, strict=False)
    assert not unexpected
    assert {name for name in missing if name in dict(built.named_parameters())} == set()
    places = torch.arange(S).expand(2, S)
    with torch.no_grad():
        if model.name == "bert":
            found = built(TOKENS, token_types=TOKENS % 2, places=places)
        elif model.name == "t5":
            found = built(TOKENS, TOKENS.flip(1), places=places, decoder_places=places)
        else:
            found = built(TOKENS)
    return found if isinstance(found, dict) else {"lm": found}


def expected(kind: str) -> dict[str, Tensor]:
    plain = Plain(drawn(kind), H, slopes=(2**-4, 2**-8) if kind == "bloom" else ())
    if kind == "bert":
        return plain.bert(TOKENS, TOKENS % 2)
    return plain.t5(TOKENS, TOKENS.flip(1)) if kind == "t5" else plain.decoder(TOKENS)


def assert_same_logits(path: Path, kind: str) -> None:
    found, there = logits(path), expected(kind)
    for name, logit in there.items():
        ours = found[name]
        torch.testing.assert_close(ours[..., :V], logit[..., :V] if name != "order" else logit, atol=2e-5, rtol=1e-5)


CASES: dict[str, tuple[str, Layout, float, dict[str, Any]]] = {
    "GPT": ("gpt", TWO_BY_TWO, 3.0, {}),
    "GPT with virtual stages": ("gpt", Layout(2, 2, chunks=2), 3.0, {}),
    "GPT of version 0": ("gpt", Layout(2, 1), 0, {"old_names": True, "legacy": True}),
    "GPT of version 1": ("gpt", Layout(2, 1), 1.0, {"old_names": True, "legacy": True}),
    "GPT of version 2": ("gpt", Layout(2, 1), 2.0, {"old_names": True}),
    "GPT, a release": ("gpt", Layout(1, 1), 3.0, {"release": True}),
    "BERT": ("bert", TWO_BY_TWO, 3.0, {}),
    "BERT of version 0": ("bert", Layout(2, 1), 0, {"old_names": True, "legacy": True}),
    "T5, its stacks on two stages": ("t5", Layout(2, 2, split=1), 3.0, {}),
    "T5 of version 1": ("t5", Layout(2, 1), 1.0, {"old_names": True}),
}


@pytest.mark.parametrize("case", [case for case in CASES if CASES[case][0] in families.names()])
def test_what_was_converted_has_the_logits_of_megatrons_model_on_one_device(tmp_path: Path, case: str):
    kind, layout, version, options = CASES[case]
    written(tmp_path / "in", kind, layout, version, **options)
    assert convert(tmp_path / "in", tmp_path / "out", "--vocab-size", str(V)) == exit_codes.DONE
    assert_same_logits(tmp_path / "out", kind)
    assert read(tmp_path / "out")[0].vocab_size == V


def written_bloom(
    folder: Path, layout: Layout = TWO_BY_TWO, args: dict[str, Any] | None = None, **options: Any
) -> Path:
    """A checkpoint of Megatron-DeepSpeed's."""
    given = arguments("bloom", 3.0, layout) | (args or {})
    return deepspeed_files.write(folder, drawn("bloom"), H, L, layout, args=given, **options)


def test_blooms_layer_files_have_the_logits_of_its_model_on_one_device(tmp_path: Path, capsys):
    written_bloom(tmp_path / "in", original_vocab_size=V)
    assert convert(tmp_path / "in", tmp_path / "out") == exit_codes.DONE
    assert_same_logits(tmp_path / "out", "bloom")
    assert read(tmp_path / "out")[0].vocab_size == V
    assert "weights only: no file has a bf16 optimizer's state" in capsys.readouterr().out


def moments(kind: str) -> dict[str, tuple[Tensor, Tensor]]:
    first, second = drawn(kind, 1), drawn(kind, 2)
    return {name: (first[name], second[name].abs()) for name in first}


def checkpoint(path: Path) -> tuple[Any, dict[str, Tensor]]:
    """State and all tensors of a checkpoint of ours."""
    opened = open_checkpoint(str(path))
    return state_of(opened), {name: opened.read(name) for name in opened.tensors}


def of_kind(kind: str, weights: dict[str, Tensor], model: config.Model) -> dict[str, Tensor]:
    """Tensors by Megatron's names, by ours."""

    padded = model.model_copy(update={"vocab_size": ROWS, "pad_vocab_to_multiple": 1})
    ours = stored.of(model).read("megatron", Memory(weights), padded, kind)
    return {name: ours.read(name) for name in ours.tensors}


@pytest.mark.parametrize("dp", [1, 3])
def test_zeros_partitions_are_joined_to_fp32_weights_and_moments_of_the_whole_model(tmp_path: Path, dp: int):
    adam = moments("bloom")
    written_bloom(tmp_path / "in", adam=adam, dp=dp, dtype=torch.bfloat16)
    assert convert(tmp_path / "in", tmp_path / "out") == exit_codes.DONE
    state, tensors = checkpoint(tmp_path / "out")
    model = config.model_section(state.config["model"], "out")
    assert (state.progress.step, state.progress.samples, state.updates) == (7, 56, 7)
    for kind, of in {"model": 0, "optimizer/exp_avg": 1, "optimizer/exp_avg_sq": 2}.items():
        there = drawn("bloom") if of == 0 else {name: pair[of - 1] for name, pair in adam.items()}
        for name, tensor in of_kind("bloom", there, model).items():
            assert torch.equal(tensors[f"{kind}/{name}"], tensor), (kind, name)
    assert len(tensors) == 3 * len(of_kind("bloom", drawn("bloom"), model))


def test_with_a_file_of_zeros_missing_the_weights_are_those_of_the_layers_and_a_line_says_so(tmp_path: Path, capsys):
    written_bloom(tmp_path / "in", adam=moments("bloom"), dp=2, dtype=torch.bfloat16)
    name = "bf16_zero_pp_rank_1_mp_rank_03_optim_states.pt"
    (tmp_path / "in" / "global_step7" / name).unlink()
    assert convert(tmp_path / "in", tmp_path / "out") == exit_codes.DONE
    assert f"weights only: {name} is missing" in capsys.readouterr().out
    state, tensors = checkpoint(tmp_path / "out")
    assert not state.identity
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}


@pytest.mark.parametrize("options", [{}, {"masters": True, "dtype": torch.float16, "fused_adam": True}])
@pytest.mark.parametrize(
    ("kind", "layout", "version"),
    [
        ("gpt", Layout(2, 2, chunks=2), 3.0),
        ("bert", TWO_BY_TWO, 3.0),
        ("gpt", Layout(2, 1), 0),
        ("bloom", TWO_BY_TWO, 3.0),
    ],
)
def test_adams_moments_and_the_fp32_masters_are_those_of_their_weights(tmp_path, kind, layout, version, options):
    adam = moments(kind)
    args = {"fp16": True} | ({"position_embedding_type": "alibi", "embed_layernorm": True} if kind == "bloom" else {})
    written(tmp_path / "in", kind, layout, version, adam=adam, args=args, **options)
    assert convert(tmp_path / "in", tmp_path / "out", "--vocab-size", str(V)) == exit_codes.DONE
    state, tensors = checkpoint(tmp_path / "out")
    model = config.model_section(state.config["model"], "out")
    assert (state.progress.step, state.updates) == (7, 7)
    assert state.progress.samples == (56 if version else 7 * 4 * 2)
    assert (state.loss_scale is not None) == bool(options)
    for part, there in enumerate([drawn(kind), *({n: pair[i] for n, pair in adam.items()} for i in range(2))]):
        prefix = ("model", "optimizer/exp_avg", "optimizer/exp_avg_sq")[part]
        for name, tensor in of_kind(kind, there, model).items():
            assert torch.equal(tensors[f"{prefix}/{name}"], tensor), (prefix, name)


def file_of(folder: Path, rank: str = "mp_rank_00_000") -> Path:
    return folder / "iter_0000007" / rank / "model_optim_rng.pt"


def changed(path: Path, change: Callable[[Any], object]) -> None:
    """The file with what `change` did to its value, by torch's own loader."""
    with theirs.their_classes():
        content = torch.load(path, weights_only=False)
        change(content)
        torch.save(content, path)


def refused(source: Path, message: str, capsys: pytest.CaptureFixture[str], *options: str, to: str = "dtmega") -> None:
    """The command ends with 2, one line that says why, and leaves no OUT."""
    out = source.parent / "out"
    assert convert(source, out, *options, to=to) == exit_codes.REFUSED
    said = capsys.readouterr().err
    assert re.search(message, said), said
    assert len(said.splitlines()) == 1
    assert not out.exists()
    assert [path.name for path in source.parent.iterdir() if path.name.startswith(".tmp")] == []


def encoder(content: Any) -> dict[str, Tensor]:
    return content["model"]["language_model"]["encoder"]


def put(name: str, tensor: Tensor) -> Callable[[Any], object]:
    """Put a tensor into the encoder's."""
    return lambda content: encoder(content).update({name: tensor})


def without_first_layer(content: Any) -> None:
    for name in [name for name in encoder(content) if name.startswith("layers.0.")]:
        del encoder(content)[name]


def nested(depth: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for _ in range(depth):
        found = {"a": found}
    return found


def set_arg(name: str, value: Any) -> Callable[[Any], object]:
    return lambda content: setattr(content["args"], name, value)


CHANGES: dict[str, tuple[str, Callable[[Any], object], str]] = {
    "a layer that is missing in a stage": (
        "mp_rank_00_001",
        without_first_layer,
        r"mp_rank_00_001/model_optim_rng.pt has no encoder.layers.0, but 1 others",
    ),
    "a tensor that one rank does not have": (
        "mp_rank_01_000",
        lambda content: encoder(content).pop("layers.1.mlp.dense_h_to_4h.bias"),
        "mp_rank_01_000/model_optim_rng.pt: 'encoder.layers.1.mlp.dense_h_to_4h.bias' is in this file or in that",
    ),
    "a tensor that no rank of the stage has": (
        "mp_rank_0[01]_001",
        lambda content: encoder(content).pop("final_layernorm.bias"),
        "has no 'encoder.final_layernorm.bias'",
    ),
    "a tensor that no model has": (
        "mp_rank_0[01]_000",
        put("adapter.weight", torch.ones(1)),
        "'encoder.adapter.weight' is not the name of a tensor in Megatron's",
    ),
    "experts": (
        "mp_rank_0[01]_000",
        put("layers.0.mlp.local_experts.0.dense_h_to_4h.weight", torch.ones(1)),
        "'encoder.layers.0.mlp.local_experts.0.dense_h_to_4h.weight' is not the name of a tensor in Megatron's",
    ),
    "a shard of another shape": (
        "mp_rank_01_001",
        put("layers.0.mlp.dense_h_to_4h.bias", torch.ones(7)),
        r"'encoder.layers.2.mlp.dense_h_to_4h.bias' is \[16\] of torch.float32 in .* but \[7\] of torch.float32 in",
    ),
    "weights that are integers": (
        "mp_rank_0[01]_001",
        put("final_layernorm.bias", torch.ones(8).int()),
        "'encoder.final_layernorm.bias' is of torch.int32, expected one of",
    ),
    "a copy of the embedding that differs": (
        "mp_rank_01_001",
        lambda content: content["model"]["word_embeddings_for_head"]["weight"].view(-1)[0].add_(1),
        "'embed.weight' and 'head.weight' are stored with different values",
    ),
    "other arguments in one file": ("mp_rank_01_001", set_arg("num_layers", 5), "num_layers=4, but .*num_layers=5"),
    "arguments of another layout": (
        "mp_rank*",
        set_arg("tensor_model_parallel_size", 4),
        "tensor_model_parallel_size=4 in its",
    ),
    "arguments of more stages": (
        "mp_rank*",
        set_arg("pipeline_model_parallel_size", 4),
        "pipeline_model_parallel_size=4 in its",
    ),
    "arguments of more layers than there are": ("mp_rank*", set_arg("num_layers", 6), "has no 'encoder.layers.4"),
    "arguments of a billion layers": ("mp_rank*", set_arg("num_layers", 10**9), "n_layers=1000000000, but 53 tensors"),
    "arguments of another vocabulary": (
        "mp_rank*",
        set_arg("padded_vocab_size", 48),
        "padded_vocab_size=48, but an embedding of 24 rows",
    ),
    "a version of tomorrow": (
        "mp_rank_00_000",
        lambda content: content.update(checkpoint_version=4.0),
        "checkpoint_version=4.0, expected one of 0, 1, 2, 3",
    ),
    "another iteration in one file": (
        "mp_rank_00_001",
        lambda content: content.update(iteration=8),
        "has 7 as iteration, but",
    ),
    "no model": ("mp_rank_00_001", lambda content: content.pop("model"), "expected 'model', or 'model0'"),
    "virtual stages with a gap": (
        "mp_rank_00_001",
        lambda content: content.update(model2=content.pop("model")),
        "expected 'model', or 'model0'",
    ),
    "dicts without end": (
        "mp_rank_00_000",
        lambda content: content["model"].update(language_model=nested(12)),
        "expected tensors by name in dicts that are nested at most 8 deep",
    ),
    "an older name beside today's": (
        "mp_rank_00_000",
        lambda content: content["model"]["language_model"].update(
            transformer={"layers.0.input_layernorm.bias": torch.ones(8)}
        ),
        "'encoder.layers.0.input_layernorm.bias' is there twice",
    ),
    "two names of one tensor's bytes": (
        "mp_rank_00_000",
        lambda content: encoder(content).update(
            {"layers.0.input_layernorm.bias": encoder(content)["layers.0.input_layernorm.weight"]}
        ),
        "two tensors share the bytes",
    ),
    "positions that no model here has": (
        "mp_rank*",
        set_arg("position_embedding_type", "rope"),
        "position_embedding_type='rope'",
    ),
}


@pytest.mark.parametrize("case", CHANGES)
def test_a_checkpoint_whose_files_do_not_fit_together_is_refused_and_leaves_nothing(tmp_path: Path, case: str, capsys):
    ranks, change, message = CHANGES[case]
    written(tmp_path / "in")
    for path in (tmp_path / "in" / "iter_0000007").glob(ranks):
        changed(path / "model_optim_rng.pt", change)
    refused(tmp_path / "in", message, capsys)


def remove(path: str) -> Callable[[Path], object]:
    return lambda folder: shutil.rmtree(folder / path)


FOLDERS: dict[str, tuple[Callable[[Path], object], str]] = {
    "a shard that is missing": (remove("iter_0000007/mp_rank_01_000"), "no file of tensor rank 1 and stage 0"),
    "the last stage is missing": (
        lambda folder: [shutil.rmtree(path) for path in (folder / "iter_0000007").glob("*_001")],
        "pipeline_model_parallel_size=2 in its arguments, but the files have 1",
    ),
    "a shard that is there twice": (
        lambda folder: shutil.copytree(folder / "iter_0000007/mp_rank_00_000", folder / "iter_0000007/mp_rank_00"),
        "are of the same rank",
    ),
    "a folder of another name": (lambda folder: (folder / "iter_0000007/mp_rank_x").mkdir(), "expected a name such as"),
    "a folder of a rank of experts": (
        lambda folder: (folder / "iter_0000007/mp_rank_00_000").rename(folder / "iter_0000007/mp_rank_00_000_000"),
        "expected a name such as",
    ),
    "a file that is missing": (lambda folder: file_of(folder).unlink(), "model_optim_rng.pt: No such file"),
    "a link": (
        lambda folder: file_of(folder).rename(folder / "x") and file_of(folder).symlink_to(folder / "x"),
        "is a link",
    ),
    "a tracker that names nothing": (
        lambda folder: (folder / "latest_checkpointed_iteration.txt").write_text("8"),
        "says '8', and there is no such checkpoint",
    ),
    "a tracker that leads out of the folder": (
        lambda folder: [
            (folder.parent / "other").mkdir(),
            (folder / "latest_checkpointed_iteration.txt").write_text("../other"),
        ],
        "says '../other', and there is no such checkpoint",
    ),
    "no tracker, and several checkpoints": (
        lambda folder: [(folder / "latest_checkpointed_iteration.txt").unlink(), (folder / "release").mkdir()],
        "several checkpoints: iter_0000007, release; name one",
    ),
    "nothing": (lambda folder: [shutil.rmtree(folder), folder.mkdir()], "no folder such as iter_0001000"),
}


@pytest.mark.parametrize("case", FOLDERS)
def test_a_folder_that_is_not_whole_is_refused_with_what_is_missing(tmp_path: Path, case: str, capsys):
    change, message = FOLDERS[case]
    written(tmp_path / "in")
    change(tmp_path / "in")
    refused(tmp_path / "in", message, capsys)


@pytest.mark.parametrize(
    ("file", "message"),
    [
        (
            "layer_04-model_01-model_states.pt",
            "layer_04-model_01-model_states.pt is missing from a model with 4 layers",
        ),
        (
            "layer_08-model_0[01]-model_states.pt",
            "layer_08-model_00-model_states.pt is missing from a model with 4 layers",
        ),
        ("layer_*-model_01-model_states.pt", "tensor_model_parallel_size=2 in its arguments, but the files have 1"),
        ("mp_rank_*", "no arguments of its run, so describe the model: --config NAME.toml"),
    ],
)
def test_a_layers_file_that_is_missing_is_named(tmp_path: Path, file: str, message: str, capsys):
    written_bloom(tmp_path / "in")
    for path in (tmp_path / "in" / "global_step7").glob(file):
        path.unlink()
    refused(tmp_path / "in", message, capsys)


def drift(content: Any, by: float) -> None:
    tensor = encoder(content)["layers.0.self_attention.dense.bias"]
    tensor.view(-1)[0].add_(tensor.abs().max() * by)


def test_copies_that_drifted_a_little_are_reported_and_rank_0s_are_taken(tmp_path: Path, capsys):
    written(tmp_path / "in")
    changed(file_of(tmp_path / "in", "mp_rank_01_001"), lambda content: drift(content, 5e-4))
    assert convert(tmp_path / "in", tmp_path / "out") == exit_codes.DONE
    line = r"copies of 1 tensor .* 'encoder.layers.2.self_attention.dense.bias': by [45]\.\de-04 of its largest"
    assert re.search(f"{line} value; those of rank 0 are used", capsys.readouterr().out)
    assert torch.equal(
        read(tmp_path / "out")[1]["layers.2.attn.out.bias"], drawn("gpt")["encoder.layers.2.self_attention.dense.bias"]
    )


def test_copies_that_drifted_far_are_refused_unless_their_mean_is_asked_for(tmp_path: Path, capsys):
    written(tmp_path / "in")
    changed(file_of(tmp_path / "in", "mp_rank_01_001"), lambda content: drift(content, 0.5))
    refused(tmp_path / "in", "most of all .* expected at most 1e-03; --average-copies takes their mean", capsys)
    assert convert(tmp_path / "in", tmp_path / "out", "--average-copies") == exit_codes.DONE
    assert "their mean is used" in capsys.readouterr().out
    there = drawn("gpt")["encoder.layers.2.self_attention.dense.bias"]
    other = there.clone()
    other[0] += there.abs().max() * 0.5
    torch.testing.assert_close(read(tmp_path / "out")[1]["layers.2.attn.out.bias"], (there + other) / 2)


def test_a_copy_that_is_not_a_number_is_too_far(tmp_path: Path, capsys):
    written(tmp_path / "in")
    changed(file_of(tmp_path / "in", "mp_rank_01_001"), lambda content: drift(content, float("nan")))
    refused(tmp_path / "in", "by nan of its largest value", capsys)


def test_a_master_that_does_not_round_to_its_weight_is_refused(tmp_path: Path, capsys):
    written(tmp_path / "in", layout=Layout(2, 1), adam=moments("gpt"), masters=True, dtype=torch.bfloat16)
    changed(
        file_of(tmp_path / "in", "mp_rank_01"),
        lambda content: content["optimizer"]["fp32_from_fp16_params"][1][2].add_(0.1),
    )
    message = (
        "the fp32 master that should be of 'encoder.layers.0.self_attention.query_key_value.bias' does not round to it"
    )
    refused(tmp_path / "in", message, capsys)


def test_a_moment_that_is_not_finite_is_refused(tmp_path: Path, capsys):
    adam = moments("gpt")
    name = "embedding.word_embeddings.weight"
    adam[name][1][2, 3] = float("inf")
    written(tmp_path / "in", layout=Layout(2, 1), adam=adam)
    refused(tmp_path / "in", r"exp_avg_sq of 'embed.weight' has inf at \[2, 3\], expected finite numbers", capsys)


def test_moments_that_are_not_whole_are_left_out_with_the_reason(tmp_path: Path, capsys):
    written(tmp_path / "in", layout=Layout(2, 1), adam=moments("gpt"))
    changed(file_of(tmp_path / "in", "mp_rank_01"), lambda content: content["optimizer"]["state"].pop(3))
    assert convert(tmp_path / "in", tmp_path / "out") == exit_codes.DONE
    assert re.search("weights only: the optimizer's state has no moments of '", capsys.readouterr().out)
    assert not checkpoint(tmp_path / "out")[0].identity


def test_files_without_arguments_need_a_configuration(tmp_path: Path, capsys):
    theirs.write(tmp_path / "in", drawn("gpt"), H, Layout(2, 1), version=0, old_names=True, legacy=True)
    refused(tmp_path / "in", "has no arguments of its run, so describe the model: --config NAME.toml", capsys)
    toml = tmp_path / "of.toml"
    sizes = f"vocab_size = {V}\nhidden_size = {D}\nn_layers = {L}\nn_heads = {H}\nmax_position_embeddings = {S}\n"
    toml.write_text(f'[model]\nname = "gpt"\n{sizes}\n[train]\nsteps = 1\n')
    assert convert(tmp_path / "in", tmp_path / "out", "--config", str(toml)) == exit_codes.DONE
    assert_same_logits(tmp_path / "out", "gpt")
    assert read(tmp_path / "out")[0].vocab_size == V


def test_a_configuration_of_another_model_than_the_arguments_say_is_refused(tmp_path: Path, capsys):
    written(tmp_path / "in")
    toml = tmp_path / "of.toml"
    sizes = f"vocab_size = {V}\nhidden_size = {D}\nn_layers = {L}\nn_heads = 4\nmax_position_embeddings = {S}\n"
    toml.write_text(f'[model]\nname = "gpt"\n{sizes}\n[train]\nsteps = 1\n')
    refused(tmp_path / "in", r"n_heads=2, not 4 \(\[model\] n_heads\)", capsys, "--config", str(toml))


def test_without_a_word_on_the_vocabulary_the_padded_size_is_kept_and_said(tmp_path: Path, capsys):
    written(tmp_path / "in")
    assert convert(tmp_path / "in", tmp_path / "out") == exit_codes.DONE
    assert f"vocabulary: the padded size {ROWS} is kept" in capsys.readouterr().out
    assert read(tmp_path / "out")[0].padded_vocab_size == ROWS == read(tmp_path / "out")[0].vocab_size


def test_more_ids_than_rows_or_other_ids_than_the_files_say_are_refused(tmp_path: Path, capsys):
    written_bloom(tmp_path / "in", original_vocab_size=V)
    refused(tmp_path / "in", "is of a tokenizer with 22 ids, got 21", capsys, "--vocab-size", "21")
    written(tmp_path / "gpt")
    refused(tmp_path / "gpt", "an embedding of 24 rows, too few for 25 ids", capsys, "--vocab-size", "25")
    refused(tmp_path / "gpt", "an embedding of 24 rows, too few for 257 ids", capsys, "--tokenizer", "bytes")


def test_a_number_of_ids_that_is_given_counts_before_that_of_the_tokenizer(tmp_path: Path):
    written(tmp_path / "in")
    assert convert(tmp_path / "in", tmp_path / "out", "--vocab-size", str(V), "--tokenizer", "bytes") == exit_codes.DONE
    assert read(tmp_path / "out")[0].vocab_size == V


@pytest.mark.parametrize(("kind", "ids", "multiple"), [("gpt", 22, 12), ("gpt", 7, 24), ("bert", 24, 12)])
def test_rows_of_padding_are_as_many_as_there(tmp_path: Path, kind: str, ids: int, multiple: int):
    written(tmp_path / "in", kind)
    assert convert(tmp_path / "in", tmp_path / "out", "--vocab-size", str(ids)) == exit_codes.DONE
    model = read(tmp_path / "out")[0]
    assert (model.vocab_size, model.padded_vocab_size) == (ids, ROWS)
    assert model.model_dump()["pad_vocab_to_multiple"] == multiple


def test_bloom_becomes_a_directory_that_transformers_loads_with_the_same_logits(tmp_path: Path, capsys):
    written_bloom(tmp_path / "in", original_vocab_size=V)
    assert convert(tmp_path / "in", tmp_path / "out", to="hf") == exit_codes.DONE
    assert "no tokenizer is written: name one with --tokenizer" in capsys.readouterr().out
    loaded = BloomForCausalLM.from_pretrained(tmp_path / "out").eval()
    with torch.no_grad():
        torch.testing.assert_close(loaded(TOKENS).logits, expected("bloom")["lm"][..., :V], atol=2e-5, rtol=1e-5)


def test_a_bert_of_two_forms_of_gelu_and_a_t5_have_no_class_of_transformers(tmp_path: Path, capsys):
    written(tmp_path / "in", "bert")
    refused(tmp_path / "in", "one form of GELU in the feed-forward and in the head.*5e-4", capsys, to="hf")
    written(tmp_path / "t5", "t5", Layout(2, 1))
    refused(tmp_path / "t5", "Hugging Face's T5 has positions=relative", capsys, to="hf")


def trained(given: list[str]) -> int:
    try:
        return train(given)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def test_a_run_goes_on_with_a_checkpoints_weights_moments_and_counts_if_it_is_told_to(tmp_path, corpus, capsys):
    sizes = {"padded_vocab_size": 264, "max_position_embeddings": 32}
    weights = {name: torch.randn(shape) * 0.02 for name, shape in shapes("gpt", D, F, 264, 32, L).items()}
    adam = {name: (torch.randn_like(tensor) * 1e-3, torch.rand_like(tensor) * 1e-6) for name, tensor in weights.items()}
    args = arguments("gpt", 3.0, TWO_BY_TWO) | sizes
    theirs.write(tmp_path / "in", weights, H, TWO_BY_TWO, args=args, adam=adam)
    assert convert(tmp_path / "in", tmp_path / "out", "--tokenizer", "bytes") == exit_codes.DONE
    line = f"--checkpoint.resume {tmp_path}/out --checkpoint.allow_changed_data true continues the run"
    assert line in capsys.readouterr().out
    keys = {"config": tmp_path / "out/config.toml", "run.dir": tmp_path / "run", "data.path": corpus, "train.steps": 9}
    keys |= {"data.tokenizer": "bytes", "data.num_workers": 0, "eval.interval": 0, "log.interval": 1}
    keys |= {"checkpoint.resume": tmp_path / "out", "data.split": "8,1,1"}
    given = [word for key, value in keys.items() for word in (f"--{key}", str(value))]
    assert trained(given) == exit_codes.REFUSED
    assert "on data that cannot be compared with these" in capsys.readouterr().err
    assert trained([*given, "--checkpoint.allow_changed_data", "true"]) == exit_codes.DONE
    first, *_, last = [step for step in metrics(tmp_path / "run") if "loss" in step]
    assert (first["step"], last["step"]) == (8, 9)
    state, tensors = checkpoint(tmp_path / "run")
    assert (state.progress.samples, state.updates) == (56 + 2 * 8, 9)
    # One step of beta1 = 0.9 and beta2 = 0.999 moves the second moments by a thousandth each.
    before = checkpoint(tmp_path / "out")[1]["optimizer/exp_avg_sq/layers.0.attn.qkv.weight"]
    torch.testing.assert_close(tensors["optimizer/exp_avg_sq/layers.0.attn.qkv.weight"], before, rtol=0.5, atol=2e-7)


def test_the_configuration_beside_the_weights_is_of_the_arguments_in_the_files(tmp_path: Path):
    args = {
        "train_samples": 800,
        "train_iters": 100,
        "lr_decay_style": "cosine",
        "weight_decay": 0.2,
        "bf16": True,
        "save": "/x",
    }
    args |= {"data_path": ["0.3", "/data/a", "0.7", "/data/b"], "num_workers": 0, "tensorboard_dir": "/y"}
    written(tmp_path / "in", args=args, adam=moments("gpt"))
    assert convert(tmp_path / "in", tmp_path / "out", "--vocab-size", str(V)) == exit_codes.DONE
    cfg = config.read(tmp_path / "out" / "config.toml")
    assert cfg.model == read(tmp_path / "out")[0]
    assert (cfg.train.samples, cfg.train.steps, cfg.optim.schedule, cfg.optim.weight_decay) == (800, 0, "cosine", 0.2)
    assert (cfg.batch.global_batch_size, cfg.precision.params, cfg.data.path) == (8, "bfloat16", ["/data/a", "/data/b"])
    assert (cfg.mesh.tp, cfg.mesh.pp, cfg.checkpoint.dir) == (1, 1, "")
    assert (cfg.data.order, cfg.data.order_samples) == ("megatron-lm", 800)
    recorded = checkpoint(tmp_path / "out")[0].config
    assert recorded["optim"]["weight_decay"] == 0.2
    assert recorded.keys() == {"model", "batch", "optim", "train", "precision"}


def test_what_a_checkpoint_says_nothing_about_is_not_guessed(tmp_path: Path, capsys):
    """A tokenizer above all: the configuration beside the tensors is a draft."""
    written(tmp_path / "in", args={"tokenizer_type": "SentencePieceTokenizer"})
    assert convert(tmp_path / "in", tmp_path / "out") == exit_codes.DONE
    assert (
        "# tokenizer =   # missing: the vocabulary of SentencePieceTokenizer"
        in (tmp_path / "out/config.toml").read_text()
    )
    capsys.readouterr()
    assert command(["generate", "--run", str(tmp_path / "out"), "--prompt", "x"]) == exit_codes.REFUSED
    assert "holds weights only, and no tokenizer" in capsys.readouterr().err


@pytest.mark.parametrize("path", ["in/iter_0000007", "in"])
def test_the_folder_of_one_checkpoint_and_the_one_above_are_both_taken(tmp_path: Path, path: str):
    written(tmp_path / "in", layout=Layout(1, 1))
    (tmp_path / "in" / "latest_checkpointed_iteration.txt").unlink()
    assert convert(tmp_path / path, tmp_path / "out") == exit_codes.DONE


def test_damage_and_attacks_run_nothing_and_are_refused(tmp_path: Path, capsys):
    """Bits are flipped in a file with everything in it; tensors of the older format have no checksum."""
    written(tmp_path / "in", layout=Layout(1, 1), adam=moments("gpt"), legacy=True)
    path = file_of(tmp_path / "in", "mp_rank_00")
    good = path.read_bytes()
    start = good.index(b"torch_rng_state")  # behind it are elements of tensors alone
    generator = random.Random(0)
    codes: dict[int, int] = {}
    for number in range(100):
        damaged = bytearray(good)
        damaged[generator.randrange(start)] ^= 1 << generator.randrange(8)
        path.write_bytes(damaged)
        code = convert(tmp_path / "in", tmp_path / "out" / str(number)) if number % 25 == 0 else opened(tmp_path / "in")
        codes[code] = codes.get(code, 0) + 1
    assert codes.keys() == {exit_codes.DONE, exit_codes.REFUSED}
    assert codes[exit_codes.REFUSED] > 30


def opened(path: Path) -> int:
    try:
        folder.open_folder(path)
    except ValueError:
        return exit_codes.REFUSED
    return exit_codes.DONE


def test_a_shard_that_calls_a_function_is_refused_and_the_function_is_not_called(tmp_path: Path, capsys):
    class Attack:
        def __reduce__(self) -> Any:
            return os.system, (f"touch {tmp_path}/called",)

    written(tmp_path / "in")
    changed(file_of(tmp_path / "in"), lambda content: content.update(rng_state=Attack()))
    refused(tmp_path / "in", r"refused: the pickle asks for 'posix system'", capsys)
    assert not (tmp_path / "called").exists()
