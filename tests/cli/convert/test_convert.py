"""`convert`, `inspect` and `[model] init_from` as a user runs them, on one trained run."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as plain_dcp
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer, BloomForCausalLM

from dtmega import config, families
from dtmega.__main__ import main as command
from dtmega.checkpoint.resume import open_checkpoint, state_of
from dtmega.checkpoint.weights import Weights
from dtmega.cli.convert import card
from dtmega.cli.convert.card import Row
from dtmega.config import Config
from dtmega.data.tokenizers.tokenizer_json import to_json
from dtmega.distributed import exit_codes
from tests.test_train import metrics, run

PADDED = {"model__pad_vocab_to_multiple": 8, "model__layer_norm_eps": 1e-4}


@pytest.fixture(scope="module")
def trained(tmp_path_factory, corpus) -> Path:
    """A run directory with a finished run of 10 steps."""
    folder = tmp_path_factory.mktemp("trained")
    assert run(folder / "run", corpus, **PADDED) == exit_codes.DONE
    return folder / "run"


@pytest.fixture(scope="module")
def apart(tmp_path_factory, corpus) -> Path:
    """A working directory in which `run` trained 60 steps, with its checkpoints, of every tenth, in `kept`."""
    folder = tmp_path_factory.mktemp("apart")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        keys = {"checkpoint__dir": "kept", "checkpoint__interval": 10, "checkpoint__keep": 9}
        keys |= {"train__steps": 60, "eval__interval": 0}
        assert run(Path("run"), corpus, **PADDED, **keys) == exit_codes.DONE
    assert not (folder / "run" / "checkpoints").exists()
    return folder


@pytest.fixture(scope="module")
def exported(trained) -> Path:
    assert (
        command(["convert", "--from", "dtmega", str(trained), "--to", "hf", str(trained.parent / "hf")])
        == exit_codes.DONE
    )
    return trained.parent / "hf"


def weights(path: Path) -> dict[str, torch.Tensor]:
    found = Weights(open_checkpoint(str(path)))
    return {name: found.read(name) for name in found.tensors}


def test_transformers_loads_the_export_and_gives_the_same_logits(trained, exported):
    cfg = config.read(trained / "config.toml")
    ours = families.build(cfg).eval()
    ours.init_buffers(cfg.run.seed)
    ours.load_state_dict(weights(trained), strict=False)
    theirs = BloomForCausalLM.from_pretrained(exported).eval()
    tokens = torch.arange(200, 232)[None]
    with torch.no_grad():
        assert theirs(tokens).logits == pytest.approx(ours(tokens)[..., : cfg.model.vocab_size], abs=1e-6)


def test_the_exported_tokenizer_gives_the_runs_ids(exported):
    tokenizer = AutoTokenizer.from_pretrained(exported)
    assert tokenizer("Bloom\x00é").input_ids == list("Bloom\x00é".encode())
    assert tokenizer.eos_token_id == BloomForCausalLM.from_pretrained(exported).config.eos_token_id == 256


def test_there_and_back_again_is_equal_to_the_bit_but_for_the_padding(trained, exported, capsys):
    back = exported.parent / "back"
    assert command(["convert", "--from", "hf", str(exported), "--to", "dtmega", str(back)]) == exit_codes.DONE
    before, after = weights(trained), weights(back)
    assert before.keys() == after.keys()
    for name, tensor in after.items():
        assert torch.equal(tensor, before[name][: len(tensor)]), name
    assert "written: " in capsys.readouterr().out


@pytest.mark.parametrize("source", ["hf", "checkpoint", "run"])
def test_a_run_that_starts_from_weights_starts_with_their_loss(tmp_path, trained, exported, corpus, source):
    path = {"hf": exported, "checkpoint": trained / "checkpoints" / "step-00000010", "run": trained}[source]
    assert run(tmp_path, corpus, **PADDED, model__init_from=path, train__steps=1) == exit_codes.DONE
    (last,) = [line["val_loss"] for line in metrics(trained) if "val_loss" in line and line["step"] == 10]
    assert metrics(tmp_path)[0]["val_loss"] == pytest.approx(last, rel=1e-6)
    assert metrics(tmp_path)[1]["step"] == 1


def test_weights_of_another_model_are_refused_with_both_values(tmp_path, exported, corpus, capsys):
    assert run(tmp_path, corpus, **PADDED | {"model__n_heads": 8}, model__init_from=exported) == exit_codes.REFUSED
    assert "n_heads" in capsys.readouterr().err
    assert run(tmp_path, corpus, model__init_from=tmp_path / "nothing") == exit_codes.REFUSED


def test_a_checkpoint_of_weights_only_is_not_resumed(tmp_path, exported, corpus, capsys):
    assert command(["convert", "--from", "hf", str(exported), "--to", "dtmega", str(tmp_path / "w")]) == exit_codes.DONE
    keys = {"model__layer_norm_eps": 1e-4, "checkpoint__resume": tmp_path / "w"}
    assert run(tmp_path / "run", corpus, **keys) == exit_codes.REFUSED
    assert "init_from" in capsys.readouterr().err


def test_a_folder_of_plain_dcp_becomes_a_checkpoint(tmp_path, trained, capsys):
    plain = {f"model.{name}": tensor for name, tensor in weights(trained).items()} | {"step": 3}
    plain |= {"model.head.weight": plain["model.embed.weight"], "optim.embed.weight.exp_avg": torch.ones(3)}
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        plain_dcp.save(plain, checkpoint_id=str(tmp_path / "plain"))
    finally:
        dist.destroy_process_group()
    arguments = ["--from", "dcp", str(tmp_path / "plain"), "--to", "dtmega", str(tmp_path / "ours")]
    config = ["--config", str(trained / "config.toml")]
    assert command(["convert", *arguments, *config]) == exit_codes.REFUSED
    assert "--prefix" in capsys.readouterr().err
    assert command(["convert", *arguments, *config, "--prefix", "model."]) == exit_codes.DONE
    assert "left out, as the model has no such parameter: head.weight" in capsys.readouterr().out
    to_hf = ["convert", *arguments[:3], "--to", "hf", str(tmp_path / "hf"), *config, "--prefix", "model."]
    assert command(to_hf) == exit_codes.DONE
    assert BloomForCausalLM.from_pretrained(tmp_path / "hf").config.n_layer == 2
    ours, before = weights(tmp_path / "ours"), weights(trained)
    assert ours.keys() == before.keys()
    assert all(torch.equal(ours[name], before[name]) for name in ours)


def most_probable(path: Path, prompt: str, n: int, cfg: Config) -> str:
    """The n bytes that a plain loop over forward passes with the weights of a checkpoint puts after the prompt."""
    model = families.build(cfg).eval()
    model.init_buffers(cfg.run.seed)
    model.load_state_dict(weights(path), strict=False)
    ids = list(prompt.encode())
    for _ in range(n):
        with torch.no_grad():
            ids.append(int(model(torch.tensor([ids]))[0, -1, :257].argmax()))
    return bytes(ids).decode(errors="replace")


@pytest.mark.parametrize(
    ("named", "of"),
    [
        ("run", "step-00000060"),
        ("kept", "step-00000060"),
        ("kept/step-00000060", "step-00000060"),
        ("kept/step-00000010", "step-00000010"),
    ],
)
def test_generate_takes_a_run_with_checkpoints_elsewhere_a_folder_of_them_and_any_single_one(
    apart, monkeypatch, capsys, named, of
):
    monkeypatch.chdir(apart)
    cfg = config.read(Path("run/config.toml"))
    expected = {path.name: most_probable(path, "ABCDEFGH", 4, cfg) for path in Path("kept").glob("step-000000[16]0")}
    assert len(set(expected.values())) == 2
    greedy = ["--prompt", "ABCDEFGH", "--tokens", "4", "--temperature", "0"]
    assert command(["generate", "--run", named, *greedy]) == exit_codes.DONE
    assert capsys.readouterr().out == expected[of] + "\n"


def test_inspect_convert_and_init_from_find_the_checkpoints_of_a_run_that_keeps_them_elsewhere(
    apart,
    corpus,
    monkeypatch,
    capsys,
):
    monkeypatch.chdir(apart)
    assert command(["inspect", "--quick", "run"]) == exit_codes.DONE
    assert "checkpoint  kept/step-00000060\n" in capsys.readouterr().out
    assert command(["convert", "--from", "dtmega", "run", "--to", "dtmega", "weights"]) == exit_codes.DONE
    before, after = weights(Path("kept", "step-00000060")), weights(Path("weights"))
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert run(Path("second"), corpus, **PADDED, model__init_from="run", train__steps=1) == exit_codes.DONE
    (last,) = [line["val_loss"] for line in metrics(Path("run")) if "val_loss" in line and line["step"] == 60]
    assert metrics(Path("second"))[0]["val_loss"] == pytest.approx(last, rel=1e-6)


def test_a_run_whose_checkpoint_folder_is_not_where_config_toml_says_is_refused_with_that_place(
    apart, monkeypatch, tmp_path, capsys
):
    monkeypatch.chdir(tmp_path)
    assert command(["inspect", str(apart / "run")]) == exit_codes.REFUSED
    assert (
        f"config.toml has its checkpoints in kept ([checkpoint] dir; relative to the working directory, {tmp_path})"
        in (capsys.readouterr().err)
    )


def test_generate_refuses_weights_without_a_tokenizer(apart, monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(apart)
    assert command(["convert", "--from", "dtmega", "run", "--to", "dtmega", str(tmp_path / "w")]) == exit_codes.DONE
    assert command(["generate", "--run", str(tmp_path / "w"), "--prompt", "a"]) == exit_codes.REFUSED
    assert "holds weights only, and no tokenizer" in capsys.readouterr().err


def test_inspect_says_what_there_is_and_that_it_is_intact(trained, capsys):
    assert command(["inspect", str(trained)]) == exit_codes.DONE
    output = capsys.readouterr().out
    parameters = sum(t.numel() for t in weights(trained).values())
    assert f"{parameters:,} parameters" in output
    assert "step        10: 80 samples, 2,560 tokens" in output
    assert "pp=1, dp_replicate=1, dp_shard=1" in output
    assert "every digest matches" in output


def test_inspect_names_what_is_damaged(tmp_path, trained, capsys):
    shutil.copytree(trained / "checkpoints" / "step-00000010", tmp_path / "step-00000010")
    path = tmp_path / "step-00000010" / "data-00000.bin"
    raw = bytearray(path.read_bytes())
    raw[1000] ^= 1
    path.write_bytes(raw)
    assert command(["inspect", str(tmp_path / "step-00000010")]) == exit_codes.DAMAGED
    assert "data-00000.bin: the bytes of 'model/embed.weight'" in capsys.readouterr().err


def test_inspect_shows_how_two_differ(tmp_path, trained, corpus, capsys):
    assert command(["inspect", str(trained), str(trained)]) == exit_codes.DONE
    assert "no differences" in capsys.readouterr().out
    run(tmp_path, corpus, **PADDED, train__steps=11)
    capsys.readouterr()
    assert command(["inspect", str(trained), str(tmp_path)]) == 1
    output = capsys.readouterr().out
    assert "config.train.steps: 10 | 11" in output
    assert "model/embed.weight: " in output
    assert "elements differ, by at most" in output


@pytest.mark.parametrize(
    ("source", "arguments", "message"),
    [
        ("dtmega", ["--dtype", "int8"], "--dtype is float64 or float32 or float16 or bfloat16; got 'int8'"),
        ("dtmega", ["--original", "x"], "--original is for a run with a [model] path; RUN is of name = 'bloom'"),
        ("dtmega", ["--allow-nonfinite", "x"], "the model has no tensor 'x'; it has embed.weight, "),
        ("dcp", [], "--from dcp needs --config NAME.toml"),
        ("hf", ["--config"], "n_heads=4, not 8"),
    ],
)
def test_what_cannot_be_converted_is_refused_with_the_option(
    tmp_path, trained, exported, capsys, source, arguments, message
):
    path = exported if source == "hf" else trained
    if arguments == ["--config"]:
        text = (trained / "config.toml").read_text()
        (tmp_path / "other.toml").write_text(re.sub("n_heads = .*", "n_heads = 8", text))
        arguments = ["--config", str(tmp_path / "other.toml")]
    argv = ["convert", "--from", source, str(path), "--to", "hf", str(tmp_path / "out"), *arguments]
    assert command(argv) == exit_codes.REFUSED
    assert message.replace("RUN", str(path)) in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("n_layers = 50", "other.toml) has n_layers=50, but "),
        ("hidden_size = 64", "'embed.weight' is [257, 32], the model's is [264, 64] (--config)"),
        ("vocab_size = 300", "'embed.weight' is [257, 32], the model's is [304, 32] (--config)"),
    ],
)
def test_a_folder_of_another_model_than_the_configuration_says_is_refused(tmp_path, trained, capsys, key, message):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        stored = weights(trained)
        stored["embed.weight"] = stored["embed.weight"][:257]  # without padding, as others store it
        plain_dcp.save(dict(stored), checkpoint_id=str(tmp_path / "plain"))
    finally:
        dist.destroy_process_group()
    text = (trained / "config.toml").read_text()
    (tmp_path / "other.toml").write_text(re.sub(f"{key.split()[0]} = .*", key, text, count=1))
    argv = ["--from", "dcp", str(tmp_path / "plain"), "--to", "dtmega", str(tmp_path / "out")]
    assert command(["convert", *argv, "--config", str(tmp_path / "other.toml")]) == exit_codes.REFUSED
    assert message in capsys.readouterr().err


def test_convert_names_the_formats_it_knows(capsys):
    assert command(["convert", "--from", "zip", "a", "--to", "hf", "b"]) == exit_codes.REFUSED
    assert "hf, dtmega, dcp" in capsys.readouterr().err


def spoilt(folder: Path, out: Path, values: dict[str, float]) -> Path:
    """A copy of an exported directory, in which these tensors have such a number at [2, 3], or at [3]."""
    shutil.copytree(folder, out)
    tensors = load_file(out / "model.safetensors")
    for name, value in values.items():
        tensors[name][(2, 3) if tensors[name].ndim == 2 else (3,)] = value
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    return out


@pytest.mark.parametrize("target", ["hf", "dtmega", "megatron"])
def test_a_number_that_is_not_finite_is_refused_by_its_tensor_place_and_value(tmp_path, exported, capsys, target):
    source = spoilt(exported, tmp_path / "in", {"transformer.word_embeddings.weight": float("nan")})
    argv = ["convert", "--from", "hf", str(source), "--to", target, str(tmp_path / "out")]
    assert command(argv) == exit_codes.REFUSED
    expected = f"{source}: 'embed.weight' has nan at [2, 3], expected finite numbers; --allow-nonfinite embed.weight"
    assert expected in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["in"]
    assert command([*argv, "--allow-nonfinite", "embed.weight"]) == exit_codes.DONE


@pytest.mark.parametrize("target", ["hf", "megatron"])
def test_a_finite_number_that_the_dtype_cannot_hold_is_refused(tmp_path, exported, capsys, target):
    # The first rows of these are read in parts, for the heads: the place is that of the whole tensor.
    name = "transformer.h.1.self_attention.query_key_value.bias"
    source = spoilt(exported, tmp_path / "in", {name: 65520.0})
    argv = ["convert", "--from", "hf", str(source), "--to", target, str(tmp_path / "out"), "--dtype"]
    assert command([*argv, "float16"]) == exit_codes.REFUSED
    error = capsys.readouterr().err
    ours = re.search(r"'(layers\.1\.\S+bias)' has 65520.0 at \[3\], which is inf in float16; choose a wider", error)
    assert ours
    assert [path.name for path in tmp_path.iterdir()] == ["in"]
    assert command([*argv, "bfloat16"]) == exit_codes.DONE
    shutil.rmtree(tmp_path / "out")
    assert command([*argv, "float16", "--allow-nonfinite", "embed.weight", ours[1]]) == exit_codes.DONE


def test_the_dtype_of_a_checkpoint_is_its_sources(tmp_path, exported, capsys):
    argv = ["convert", "--from", "hf", str(exported), "--to", "dtmega", str(tmp_path / "out"), "--dtype", "float16"]
    assert command(argv) == exit_codes.REFUSED
    assert "--dtype is for --to hf and megatron" in capsys.readouterr().err


def table_of(folder: Path) -> dict[str, str]:
    """Title -> text of the table in a model card."""
    rows = re.findall(r"(?m)^\| ([a-z ]+) \| (.*) \|$", (folder / "README.md").read_text())
    return dict(rows)


def test_the_card_of_an_export_tells_data_steps_and_the_losses_of_its_checkpoint(trained, exported):
    losses = {key: line[key] for line in metrics(trained) for key in ("loss", "val_loss", "test_loss") if key in line}
    said = table_of(exported)
    cfg = config.read(trained / "config.toml")
    assert said["written from"] == "`run`, 10 steps"
    assert said["data"] == f"`{Path(cfg.data.paths[0]).name}`"  # and not where it lies
    n_sequences = 10 * cfg.batch.global_batch_size
    S = cfg.data.seq_len
    assert said["training"] == f"10 steps, {n_sequences} sequences of {S} tokens: {n_sequences * S:,} tokens"
    for title, key in (("training", "loss"), ("validation", "val_loss"), ("test", "test_loss")):
        assert said[f"{title} loss"] == f"{losses[key]:.4f} after step 10"
    assert said["licence"] == "not known"
    # The same by the checkpoint's own path; and of an earlier step, the losses until then.
    path = str(trained / "checkpoints" / "step-00000010")
    checkpoint = open_checkpoint(path)
    state = state_of(checkpoint)
    assert dict(card.rows_of_run(checkpoint, state, cfg.data, path)[1:]).items() <= said.items()
    earlier = state.model_copy(update={"progress": state.progress._replace(step=7)})
    of_step_7 = next(line["loss"] for line in metrics(trained) if line["step"] == 7 and "loss" in line)
    assert (
        dict(card.rows_of_run(checkpoint, earlier, cfg.data, path))["training loss"] == f"{of_step_7:.4f} after step 7"
    )


README = b"---\nlicense: apache-2.0\ntags: [x]\n---\n# A model of strangers\n"


def test_an_export_of_weights_that_were_only_converted_has_the_readme_and_the_licence_of_its_source(exported, tmp_path):
    shutil.copytree(exported, tmp_path / "source")
    for file, content in {"README.md": README, "LICENSE": b"do as you like", "notes.txt": b"mine"}.items():
        (tmp_path / "source" / file).write_bytes(content)
    generation = b'{"eos_token_id": [3, 4], "temperature": 0.5}'
    (tmp_path / "source" / "generation_config.json").write_bytes(generation)
    assert (
        command(["convert", "--from", "hf", str(tmp_path / "source"), "--to", "hf", str(tmp_path / "out")])
        == exit_codes.DONE
    )
    carried = {"README.md": README, "LICENSE": b"do as you like", "generation_config.json": generation}
    assert {file: (tmp_path / "out" / file).read_bytes() for file in carried} == carried
    assert not (tmp_path / "out" / "notes.txt").exists()
    # Another tokenizer has other ends; the rest of the settings stays.
    (tmp_path / "own.json").write_text(to_json("bytes").replace("<|endoftext|>", "</s>"))
    options = ["--tokenizer", str(tmp_path / "own.json")]
    command(["convert", "--from", "hf", str(tmp_path / "source"), "--to", "hf", str(tmp_path / "bytes"), *options])
    other = json.loads((tmp_path / "bytes" / "generation_config.json").read_text())
    assert other == {"eos_token_id": 256, "bos_token_id": 256, "temperature": 0.5}


@pytest.mark.parametrize(
    ("readme", "licence"),
    [
        (README, "`apache-2.0`, according to the source's README"),
        (b"---\nlicense: [mit](https://evil)\n---\n", "not known"),
        (b"---\ntags: [a]\n---\nlicense: mit\n", "not known"),
        (b"\xff\xfe", "not known"),
        (b"license: mit\n" * 100_000, "not known"),
        (b"---\n" + b"\n" * 900_000, "not known"),  # which a pattern that goes back reads for hours
    ],
)
def test_a_card_names_the_licence_of_its_source_only_where_front_matter_does_in_a_plain_word(tmp_path, readme, licence):
    (tmp_path / "README.md").write_bytes(readme)
    rows = [Row("written from", card.code("a`b|c\n<img>" + 300 * "x"))]
    files = card.texts(tmp_path, rows, name="out `<b>`\n# two")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "README.md").write_bytes(files["README.md"])
    said = table_of(tmp_path / "out")
    assert said["licence"] == licence
    assert said["written from"] == "`a'b¦c\\n<img>" + 189 * "x" + "`"
    assert re.findall(r"(?m)^# .*", files["README.md"].decode()) == ["# out __b___n_ two"]
    assert files.get("README-source.md") == (readme if len(readme) < 2**20 else None)
    assert ("license: apache-2.0" in files["README.md"].decode()) == (readme == README)
