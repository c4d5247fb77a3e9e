"""Claims about what [model] path names: what is refused, with the key to change; initial values; what the run says."""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tomli
import torch
import torch.distributed as dist
import transformers
from safetensors.torch import load_file, save_file

from dtmega import config, families, mesh, train
from dtmega.config.families.hf import TransformersKeys
from dtmega.interop.hf import resolve as hf_resolve
from dtmega.interop.hf.directory import read_config
from dtmega.interop.hf.initial import draws_of
from dtmega.interop.hf.model import HF
from dtmega.models.initial import init_weights
from dtmega.training.checks import check
from tests import hf_models, layouts
from tests.hf_models import Case

LLAMA = Case("llama", tied=False)


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """A tiny LLaMA with weights in one file and a tokenizer, and a text in its words."""
    home = tmp_path_factory.mktemp("llama")
    hf_models.build(LLAMA).save_pretrained(home)
    (home / "text").mkdir()
    layouts.write_text(home / "text")
    (home / "text" / "tokenizer.json").rename(home / "tokenizer.json")
    return home


@pytest.fixture
def home(made: Path, tmp_path: Path) -> Path:
    """A copy that a test may spoil."""
    return Path(shutil.copytree(made, tmp_path / "llama"))


def run(home: Path, run_dir: Path, **overrides: object) -> int:
    """train.py in this process; returns the exit code. Keys are section__key."""
    keys: dict[str, object] = {
        "model__path": home,
        "data__path": home / "text" / "text",
        "data__seq_len": 16,
        "data__split": "8,1,1",
        "data__num_workers": 0,
        "batch__global_batch_size": 2,
        "optim__lr": 1e-2,
        "optim__warmup": 0,
        "train__steps": 1,
        "eval__interval": 0,
        "eval__steps": 1,
        "eval__sample_tokens": 0,
        "precision__params": "float32",
        "log__tensorboard": "false",
        "run__dir": run_dir,
        "run__device": "cpu",
    }
    keys |= overrides
    name = str(keys.pop("config", layouts.ROOT / "configs" / "hf.toml"))
    flags = [word for k, v in keys.items() for word in ("--" + k.replace("__", "."), str(v))]
    try:
        return train.main(["--config", name, *flags])
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def said(home: Path, **changes: object) -> None:
    """Change config.json; None takes a key out."""
    file = home / "config.json"
    plain = {k: v for k, v in json.loads(file.read_text()).items() if k not in changes}
    file.write_text(json.dumps(plain | {k: v for k, v in changes.items() if v is not None}))


def instead(home: Path, name: str) -> None:
    """The config.json of another family."""
    hf_models.build(Case(name)).config.save_pretrained(home)


def tensors(home: Path, change: Callable[[dict[str, Any]], object]) -> None:
    file = home / "model.safetensors"
    found = load_file(file)
    change(found)
    save_file(found, file)


def pickled(home: Path) -> None:
    torch.save(load_file(home / "model.safetensors"), home / "pytorch_model.bin")
    (home / "model.safetensors").unlink()


NOTHING: Callable[[Path], object] = lambda home: None  # noqa: E731
REFUSED: dict[str, tuple[Callable[[Path], object], dict[str, object], str]] = {
    "no path": (NOTHING, {"model__path": ""}, "needs a directory with config.json ([model] path)"),
    "a path for bloom": (
        NOTHING,
        {"config": "bloom.toml", "batch__global_batch_size": 4},
        "'path' in [model] is for name = 'hf', not for 'bloom'",
    ),
    "no config.json": (lambda home: (home / "config.json").unlink(), {}, "has no config.json ([model] path)"),
    "an id of the hub": (
        NOTHING,
        {"model__path": "meta-llama/Llama-3.2-1B"},
        "hf download meta-llama/Llama-3.2-1B --local-dir Llama-3.2-1B ([model] path)",
    ),
    "no json": (lambda home: (home / "config.json").write_text("{"), {}, "([model] path)"),
    "code": (
        lambda home: said(home, model_type="mine", auto_map={"AutoModel": "m.M"}),
        {},
        "config.json has auto_map, code of its own: custom (remote) code is not run) ([model] path)",
    ),
    "adapters": (
        lambda home: (home / "config.json").rename(home / "adapter_config.json"),
        {},
        "holds adapters of peft (adapter_config.json), not a model: add them to the weights of their base first",
    ),
    "a pipe": (lambda home: ((home / "config.json").unlink(), os.mkfifo(home / "config.json")), {}, "a regular file"),
    "a rope that is a text": (lambda home: said(home, rope_parameters="linear"), {}, "rope"),
    "no such family": (lambda home: said(home, model_type="lama"), {}, "has model_type='lama'; expected a model of"),
    "a family that is a list": (lambda home: said(home, model_type=[]), {}, "has model_type=[]; expected the name of"),
    "nesting": (lambda home: (home / "config.json").write_text('{"a":' * 9**5), {}, "JSON of at most 64 levels"),
    "layers without end": (
        lambda home: said(home, num_hidden_layers=10**9),
        {},
        "has num_hidden_layers=1000000000, but 21 tensors are stored beside it ([model] path)",
    ),
    "layers without end or weights": (
        lambda home: (said(home, num_hidden_layers=10**9), (home / "model.safetensors").unlink()),
        {},
        "has num_hidden_layers=1000000000, but 0 tensors are stored beside it ([model] path)",
    ),
    "weights elsewhere": (
        lambda home: said(home, transformers_weights="../other.safetensors"),
        {},
        "has transformers_weights='../other.safetensors': expected a directory whose files have the usual names",
    ),
    "a loss of routers": (
        lambda home: said(home, output_router_logits=True),
        {},
        "a product of means over a microbatch, which would change with the layout",
    ),
    "two layers more": (
        lambda home: said(home, num_hidden_layers=1),
        {},
        "LlamaForCausalLM has no place for model.layers.1.input_layernorm.weight, model.layers.1.mlp.down_proj.weight, "
        "model.layers.1.mlp.gate_proj.weight and 6 more ([model] path)",
    ),
    "another head": (
        lambda home: said(home, tie_word_embeddings=True),
        {},
        "'model.embed_tokens.weight' and 'lm_head.weight' are stored with different values, but config.json ties them",
    ),
    "a list": (lambda home: (home / "config.json").write_text("[]"), {}, "expected a JSON object, got list"),
    "a wrong value": (lambda home: said(home, hidden_size="wide"), {}, "hidden_size"),
    "no decoder": (
        lambda home: (home / "config.json").write_text('{"model_type": "blt", "num_hidden_layers": 1}'),
        {},
        "that the trainer can train: AttributeError: 'BltConfig' object has no attribute",
    ),
    "bert": (lambda home: instead(home, "bert"), {}, "model_type 'bert' of"),
    "t5": (lambda home: instead(home, "t5"), {}, "is not a causal language model"),
    "length": (
        lambda home: said(home, max_position_embeddings=15),
        {},
        "seq_len=16 is more than the max_position_embeddings=15 of",
    ),
    "hidden_size": (NOTHING, {"model__hidden_size": 65}, "config.json gives 64; leave it out ([model] hidden_size)"),
    "n_layers": (NOTHING, {"model__n_layers": 3}, "config.json gives 2; leave it out ([model] n_layers)"),
    "vocab_size": (NOTHING, {"model__vocab_size": 128}, "config.json gives 131; leave it out ([model] vocab_size)"),
    "z_loss": (NOTHING, {"model__z_loss": 1e-4}, "key 'z_loss' in [model] is for name = 'bloom' or "),
    "positions": (NOTHING, {"data__reset_position_ids": "true"}, "[data] reset_position_ids is not for name = 'hf'"),
    "masks": (NOTHING, {"data__reset_attention_mask": "true"}, "[data] reset_attention_mask is not for name = 'hf'"),
    "no tokenizer": (lambda home: (home / "tokenizer.json").unlink(), {}, "has no tokenizer.json: AutoTokenizer"),
    "more ids": (
        NOTHING,
        {"data__tokenizer": "bytes"},
        "vocab_size=131 is smaller than the 257 ids of tokenizer 'bytes'",
    ),
    "pickles": (
        pickled,
        {},
        "but pytorch_model.bin: a pickle, which can run code; re-save it as safetensors, with AutoModelForCausalLM.",
    ),
    "a gguf": (
        lambda home: (home / "model.safetensors").rename(home / "q4.gguf"),
        {},
        "but q4.gguf, which is for inference; download the model as safetensors, or convert it with AutoModel",
    ),
    "a gguf alone": (
        lambda home: ((home / "model.safetensors").rename(home / "q4.gguf"), (home / "config.json").unlink()),
        {},
        "has no config.json, but q4.gguf, which is for inference",
    ),
    "a pointer of Git LFS": (
        lambda home: (home / "model.safetensors").write_text(
            "version https://git-lfs.github.com/spec/v1\noid sha256:0\n"
        ),
        {},
        "model.safetensors is a pointer of Git LFS, not the file: run `git lfs pull`",
    ),
    "a link that leads nowhere": (
        lambda home: ((home / "model.safetensors").unlink(), (home / "model.safetensors").symlink_to("../blobs/0")),
        {},
        "model.safetensors cannot be read (it is a link to ../blobs/0, which is not there) ([model] path)",
    ),
    "no tensor": (
        lambda home: tensors(home, lambda found: found.pop("model.norm.weight")),
        {},
        "has no 'model.norm.weight' in its safetensors files ([model] path)",
    ),
    "another shape": (
        lambda home: tensors(home, lambda found: found.update({"model.norm.weight": torch.ones(63)})),
        {},
        "model.safetensors is [63], but config.json gives [64] ([model] path)",
    ),
    "half a file": (
        lambda home: os.truncate(home / "model.safetensors", 4000),
        {},
        "([model] path)",
    ),
    "no such file": (
        lambda home: (home / "model.safetensors").rename(home / "other.safetensors"),
        {},
        "holds neither model.safetensors nor model.safetensors.index.json, the names that transformers looks for; "
        "other.safetensors is not read ([model] path)",
    ),
    "nothing to start with": (
        lambda home: (home / "model.safetensors").unlink(),
        {"model__init_from": "nowhere"},
        "nowhere is neither a checkpoint nor a run directory with one",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_directory_or_the_keys_do_not_allow_is_one_message_and_exit_code_2(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
):
    spoil, overrides, message = REFUSED[name]
    spoil(home)
    capsys.readouterr()
    assert run(home, tmp_path / "run", **overrides) == 2
    (line,) = (line for line in capsys.readouterr().err.splitlines() if line.startswith("dtmega: "))
    assert message in line
    assert not (tmp_path / "run" / "config.toml").exists()


@pytest.mark.parametrize(
    ("name", "world", "keys", "message"),
    [
        ("llama", 3, {"tp": 3}, r"tp=3 does not divide num_attention_heads=4.* \(\[mesh\] tp\)"),
        ("gpt_neo", 2, {"tp": 2}, "no plan for model_type 'gpt_neo'"),
        ("gpt_neo", 2, {"pp": 2}, r"needs to know the ends of a model, and 'gpt_neo' is none of .* \(\[mesh\] pp\)"),
        ("llama", 4, {"pp": 4}, "4 stages cannot be cut from n_layers=2"),
    ],
)
def test_a_layout_that_the_model_cannot_have_is_refused(
    tmp_path: Path, name: str, world: int, keys: dict[str, int], message: str
):
    instead(tmp_path, name)
    cfg = resolved(tmp_path, mesh=keys, batch={"micro_batch_size": 1, "global_batch_size": 8})
    with pytest.raises(ValueError, match=message):
        check(cfg, mesh.resolve(cfg.mesh, world), torch.device("cpu"))


def test_of_the_models_of_transformers_only_the_proved_classes_keep_every_bit(tmp_path: Path):
    keys = {"run": {"exact": True}, "batch": {"micro_batch_size": 1, "global_batch_size": 1}}
    instead(tmp_path, "llama")
    cfg = resolved(tmp_path, **keys)
    check(cfg, mesh.resolve(cfg.mesh, 1), torch.device("cpu"))
    instead(tmp_path, "mistral")
    cfg = resolved(tmp_path, **keys)
    with pytest.raises(ValueError, match=r"'mistral' is not proved .* one of llama \(\[run\] exact, \[model\] path\)"):
        check(cfg, mesh.resolve(cfg.mesh, 1), torch.device("cpu"))


def resolved(home: Path, **sections: dict[str, Any]) -> config.Config:
    there = {"model": {"name": "hf", "path": str(home)}, "data": {"seq_len": 16, "tokenizer": "bytes"}}
    return families.resolve(config.validate({**there, "train": {"steps": 1}, **sections}, "test"))


def test_a_run_whose_config_json_has_changed_is_not_gone_on_with(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert run(home, tmp_path / "run") == 0
    said(home, transformers_version="4.0", dtype="bfloat16")  # which change no number
    assert run(home, tmp_path / "run", train__steps=2) == 0
    said(home, rope_theta=None, rope_parameters={"rope_type": "default", "rope_theta": 5e5})
    capsys.readouterr()
    assert run(home, tmp_path / "run", train__steps=3) == 2
    assert "the digest of config.json in [model] path was '" in capsys.readouterr().err


def test_a_run_says_which_dropout_is_off_and_where_its_values_come_from(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    said(home, attention_dropout=0.1)
    assert run(home, tmp_path / "a") == 0
    out = capsys.readouterr().out
    assert f"{home}: without its dropout (attention_dropout=0.1)" in out
    assert "has no weights" not in out
    moved = home.rename(tmp_path / "weights")
    home.mkdir()
    for name in ("config.json", "tokenizer.json"):
        shutil.copy(moved / name, home / name)
    shutil.copytree(moved / "text", home / "text")
    assert run(home, tmp_path / "b") == 0
    assert f"{home} has no weights: initial values are drawn from [run] seed" in capsys.readouterr().out
    assert run(home, tmp_path / "c", model__init_from=moved) == 0
    assert "has no weights" not in capsys.readouterr().out
    first = [json.loads((tmp_path / x / "metrics.jsonl").read_text().splitlines()[0])["loss"] for x in "abc"]
    assert first[0] == first[2] != first[1]


# Key of [model] -> what it may not be, beside what config.json says of the tiny LLaMA.
OWN = {"vocab_size": 130, "hidden_size": 65, "n_layers": 3, "n_heads": 2, "ffn_hidden_size": 256}
FREE = ("name", "path", "init_from", "label_smoothing")


@pytest.mark.parametrize("key", TransformersKeys.model_fields)
def test_each_key_of_model_is_what_config_json_says_or_free(home: Path, key: str):
    assert (key in OWN) + (key in FREE) == 1
    if key in FREE:
        return
    said_by = resolved(home).model
    again = resolved(home, model={"name": "hf", "path": str(home), key: getattr(said_by, key)})
    assert getattr(again.model, key) == getattr(said_by, key)
    with pytest.raises(ValueError, match=rf"\[model\] {key}=.*, but .*config.json gives"):
        resolved(home, model={"name": "hf", "path": str(home), key: OWN[key]})


def test_code_beside_a_model_that_transformers_has_is_ignored_with_a_note(home: Path):
    before, digest = resolved(home), hf_resolve.digest(str(home))
    for name in ("modeling_mine", "configuration_mine"):
        (home / f"{name}.py").write_text(f"from pathlib import Path\nPath({str(home / 'ran')!r}).touch()\n")
    said(home, auto_map={"AutoConfig": "configuration_mine.Mine", "AutoModelForCausalLM": "modeling_mine.Mine"})
    cfg = resolved(home)
    assert (cfg, hf_resolve.digest(str(home))) == (before, digest)
    assert type(HF(cfg.model).hf) is transformers.LlamaForCausalLM
    note = f"{home}/config.json has auto_map, code of its own: custom (remote) code is not run"
    assert families.of(cfg.model).notes(cfg.model) == [note]
    assert not (home / "ran").exists()


def test_the_digest_is_of_every_key_of_config_json_but_of_those_that_change_no_number(home: Path):
    (home / "model.safetensors").unlink()
    before = json.loads((home / "config.json").read_text())
    digest = hf_resolve.digest(str(home))
    assert len(digest) == 12
    free = {"transformers_version": "4.0", "architectures": ["A"], "dtype": "float16", "torch_dtype": "float16"}
    free |= {"use_cache": False, "_name_or_path": "elsewhere"}
    for key, value in free.items():
        (home / "config.json").write_text(json.dumps({**before, key: value}))
        assert hf_resolve.digest(str(home)) == digest, key
    (home / "config.json").write_text(json.dumps(dict(reversed(before.items()))))
    assert hf_resolve.digest(str(home)) == digest
    numbers = {key: value for key, value in before.items() if isinstance(value, int | float)}
    others = {key: not value if isinstance(value, bool) else 2 * value for key, value in numbers.items()}
    others |= {"attention_dropout": 0.5, "pad_token_id": 3, "hidden_act": "gelu", "of nobody": 1}
    others |= {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}
    del others["use_cache"]
    assert len(others) > 18
    for key, value in others.items():
        (home / "config.json").write_text(json.dumps({**before, key: value}))
        assert hf_resolve.digest(str(home)) != digest, key


SAID = {
    "bloom": 0,
    "gpt2": 100,
    "llama": 96,
    "mistral": 96,
    "qwen2": 96,
    "qwen3": 96,
    "gpt_neox": 96,
    "opt": 96,
}


@pytest.mark.parametrize("name", SAID)
def test_sizes_are_those_of_transformers(tmp_path: Path, name: str):
    theirs = hf_models.build(Case(name))
    if name == "gpt2":
        theirs.config.n_inner = 100
        theirs = type(theirs)(theirs.config)
    theirs.config.save_pretrained(tmp_path)
    found = resolved(tmp_path).model
    assert (found.vocab_size, found.hidden_size, found.n_layers, found.n_heads) == (131, 64, 2, 4)
    assert found.ffn_hidden_size == SAID[name]


def test_a_sequence_as_long_as_the_positions_and_a_tokenizer_that_is_named_are_taken(home: Path):
    said(home, max_position_embeddings=16)
    assert resolved(home).data.tokenizer == "bytes"
    own = resolved(home, data={"seq_len": 16}).data.tokenizer
    assert own == str(home / "tokenizer.json")
    with pytest.raises(ValueError, match=r"seq_len=17 is more than the max_position_embeddings=16 of"):
        resolved(home, data={"seq_len": 17})


def test_notes_are_of_dropout_that_would_be_there_and_of_weights_that_are_not(tmp_path: Path):
    instead(tmp_path, "gpt2")
    said(tmp_path, summary_first_dropout=0.0)
    cfg = resolved(tmp_path)
    drawn = f"{tmp_path} has no weights: initial values are drawn from [run] seed"
    family = families.of(cfg.model)
    assert family.notes(cfg.model) == [drawn]
    said(tmp_path, resid_pdrop=0.1, embd_pdrop=0.0, attn_pdrop=0.25)
    assert family.notes(cfg.model) == [
        f"{tmp_path}: without its dropout (resid_pdrop=0.1, attn_pdrop=0.25)",
        drawn,
    ]
    assert family.notes(cfg.model.model_copy(update={"init_from": "elsewhere"}))[1:] == []
    built = HF(cfg.model)
    assert {m.p for m in built.modules() if isinstance(m, torch.nn.Dropout)} == {0.0}
    assert {p.dtype for p in built.parameters()} == {torch.float32}


@pytest.mark.parametrize(
    ("plain", "is_causal"),
    [
        ({"model_type": "bert", "is_decoder": True}, True),
        ({"model_type": "bert"}, False),
        ({"model_type": "gpt_neox", "is_decoder": False}, True),
        ({"model_type": "bart", "is_decoder": True}, False),  # has a causal head, and an encoder
        ({"model_type": "bart", "is_decoder": True, "is_encoder_decoder": False}, True),
        ({"model_type": "vit"}, False),
        ({"model_type": "t5"}, False),
    ],
)
def test_what_the_trainer_trains_has_a_causal_head_and_no_encoder(
    tmp_path: Path, plain: dict[str, Any], is_causal: bool
):
    (tmp_path / "config.json").write_text(json.dumps(plain))
    if is_causal:
        assert read_config(str(tmp_path)).model_type == plain["model_type"]
    else:
        with pytest.raises(ValueError, match=r"is not a causal language model, .* \(\[model\] path\)"):
            read_config(str(tmp_path))


def test_without_transformers_the_message_says_what_to_install(home: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ValueError, match=r"^\[model\] name = 'hf' needs transformers, .* pip install -e '.\[hf\]'$"):
        resolved(home)


WIDE = {"vocab_size": 512, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2}
WIDE |= {"num_attention_heads": 4}


def wide() -> Iterator[tuple[str, Any]]:
    """Configurations of families, wide enough that a std says something, and with one that is not the usual."""
    more: dict[str, dict[str, Any]] = {
        "gpt2": {"n_positions": 64, "initializer_range": 0.03},
        "opt": {"ffn_dim": 512, "max_position_embeddings": 64, "init_std": 0.03, "word_embed_proj_dim": 256},
        "gptj": {"n_positions": 64, "rotary_dim": 8},
        "qwen3": {"head_dim": 64, "initializer_range": 0.03},
        "gemma": {"head_dim": 64, "num_key_value_heads": 2},  # whose norms have weights that start with 0
        "mixtral": {"num_local_experts": 4},  # whose weights have three dims
    }
    names = {"bloom": "Bloom", "gpt2": "GPT2", "llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2"}
    names |= {"qwen3": "Qwen3", "gpt_neox": "GPTNeoX", "opt": "OPT", "gptj": "GPTJ"}
    names |= {"gemma": "Gemma", "mixtral": "Mixtral"}
    for name, prefix in names.items():
        yield name, getattr(transformers, f"{prefix}Config")(**{**WIDE, **more.get(name, {})}, pad_token_id=None)


@pytest.mark.parametrize(("name", "theirs"), list(wide()), ids=[name for name, _ in wide()])
def test_initial_values_are_distributed_as_the_family_has_them(tmp_path: Path, name: str, theirs: Any):
    theirs.save_pretrained(tmp_path)
    torch.manual_seed(0)
    expected = dict(transformers.AutoModelForCausalLM.from_config(theirs, dtype=torch.float32).named_parameters())
    stage = HF(resolved(tmp_path).model)
    init_weights(stage, seed=0)
    ours = {stage.full_name(n): p for n, p in stage.named_parameters()}
    assert ours.keys() == expected.keys()
    wrong = {}
    for n, p in ours.items():
        if p.ndim < 2 and not torch.equal(p, expected[n]):
            wrong[n] = (p.flatten()[:3].tolist(), expected[n].flatten()[:3].tolist())
        elif p.ndim >= 2 and not (abs(p.std() / expected[n].std() - 1) < 0.05 and abs(p.mean()) < 0.05 * p.std()):
            wrong[n] = (p.std().item(), expected[n].std().item())
    assert wrong == {}


def test_a_family_without_heads_trains_from_weights_and_is_refused_without(tmp_path: Path):
    transformers.MambaConfig(hidden_size=64, num_hidden_layers=2).save_pretrained(tmp_path)
    cfg = resolved(tmp_path)
    assert cfg.model.n_heads == 0
    assert config.validate(tomli.loads(cfg.to_toml()), "config.toml of a run") == cfg
    with pytest.raises(ValueError, match=r"A_log' of .* cannot be drawn alike on every layout, .* Start from weights"):
        check(cfg, mesh.resolve(cfg.mesh, 1), torch.device("cpu"))
    with_weights = cfg.model_copy(update={"model": cfg.model.model_copy(update={"init_from": "elsewhere"})})
    check(with_weights, mesh.resolve(cfg.mesh, 1), torch.device("cpu"))


def test_a_stored_buffer_computes_in_float32_as_it_does_in_transformers_or_bf16_is_refused(tmp_path: Path):
    def checked(name: str, params: str) -> None:
        home = tmp_path / name
        hf_models.plain(hf_models.Case(name, tied=False)).config.save_pretrained(home)
        of_weights = {"name": "hf", "path": str(home), "init_from": "elsewhere"}
        cfg = resolved(home, model=of_weights, precision={"params": params})
        check(cfg, mesh.resolve(cfg.mesh, 1), torch.device("cpu"))

    checked("deepseek_v3", "bfloat16")
    checked("apertus", "float32")
    with pytest.raises(
        ValueError, match=r"act_fn.beta' of 'apertus' is a stored buffer, .* expected float32 \(\[precision\] params\)"
    ):
        checked("apertus", "bfloat16")


def test_a_model_within_a_model_draws_as_its_own_class_does():
    cfg = transformers.Gemma3Config(**hf_models.NESTED)
    with torch.device("meta"):
        found = draws_of(transformers.Gemma3ForConditionalGeneration(cfg))
    # Siglip's rule, and Gemma's.
    assert found["model.vision_tower.embeddings.position_embedding.weight"] == (0.0, 1 / math.sqrt(48))
    assert found["model.language_model.layers.0.mlp.up_proj.weight"] == (0.0, 0.02)
    assert found["model.language_model.norm.weight"] == (0.0, 0.0)


def test_initial_values_that_the_family_draws_in_a_way_of_its_own_are_refused_before_anything_starts(tmp_path: Path):
    sizes = {**WIDE, "num_hidden_layers": 4, "num_experts": 4, "num_experts_per_tok": 2, "pad_token_id": None}
    transformers.Qwen3NextConfig(**sizes).save_pretrained(tmp_path)
    cfg = resolved(tmp_path)
    with pytest.raises(ValueError, match=r"'model.layers.0.linear_attn.A_log' of .* \(\[model\] path, "):
        check(cfg, mesh.resolve(cfg.mesh, 1), torch.device("cpu"))
    with_weights = cfg.model_copy(update={"model": cfg.model.model_copy(update={"init_from": "elsewhere"})})
    check(with_weights, mesh.resolve(cfg.mesh, 1), torch.device("cpu"))
