"""Runs of models of transformers, back to what transformers loads: `convert`, `generate` and `init_from` on them."""

# transformers is imported where it is used: ranks import this file, and it would cost each of them seconds.
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from dtmega import config
from dtmega.__main__ import main as command
from dtmega.checkpoint.resume import open_checkpoint
from dtmega.checkpoint.weights import Weights
from dtmega.cli.convert import to_checkpoint
from dtmega.config.families.bloom import BloomKeys
from dtmega.config.families.hf import TransformersKeys
from dtmega.data.tokenizers.load import load_tokenizer
from dtmega.data.tokenizers.tokenizer_json import to_json
from dtmega.distributed import exit_codes
from dtmega.interop.hf.files import export as hf_export
from dtmega.interop.hf.files.export import export
from dtmega.interop.hf.files.tensors import INDEX
from tests import ranks
from tests.faults import FileEvents
from tests.interop.hf.files.test_ours import Memory
from tests.test_train import ROOT, metrics

FAMILIES = ["bloom", "gpt2", "llama", "qwen3", "gpt_neox", "opt", "mixtral", "qwen3_moe", "deepseek_v3"]


def original(folder: Path, name: str = "llama", tied: bool = True, **keys: Any) -> Path:
    """A model directory with other weights than those that `trained` gives it, and with dropout where it has some."""
    from tests import hf_models

    model = hf_models.plain(hf_models.Case(name, vocab=257, tied=tied))
    for key in [key for key in hf_models.NO_DROPOUT if hasattr(model.config, key)]:
        setattr(model.config, key, 0.25)
    for key, value in keys.items():
        setattr(model.config, key, value)
    model.save_pretrained(folder)
    return folder


def described(path: Path) -> config.Model:
    """The [model] section that a directory makes."""
    from dtmega import families

    asked = TransformersKeys(path=str(path))
    return families.of(asked).reread_directory(asked, "")


def trained(folder: Path, path: Path, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """A checkpoint as a run of the model in `path` leaves it, in `folder`; its tensors."""
    from transformers import AutoModelForCausalLM

    from dtmega.interop.hf import resolve as hf_resolve

    generator = torch.Generator().manual_seed(1)
    named = tensors_of(AutoModelForCausalLM.from_pretrained(path))  # of tied ones the embedding's name
    tensors = {name: torch.randn(p.shape, generator=generator).to(dtype) for name, p in named.items()}
    to_checkpoint.write(str(folder), Memory(tensors), described(path), hf_resolve.digest(str(path)))
    return tensors


def loaded(folder: Path) -> dict[str, torch.Tensor]:
    """The model that transformers makes of a directory, in which nothing is missing and nothing is too much."""
    from transformers import AutoModelForCausalLM

    found: Any = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    model, info = found
    assert not any(info.values())
    return tensors_of(model)


def tensors_of(model: Any) -> dict[str, torch.Tensor]:
    """Parameters, and buffers that are stored with them."""
    from tests import hf_models

    return {name: p.detach() for name, p in model.named_parameters()} | hf_models.stored_buffers(model)


def to_hf(source: Path, folder: Path, *options: str) -> int:
    return command(["convert", "--from", "dtmega", str(source), "--to", "hf", str(folder), *options])


def equal(ours: dict[str, torch.Tensor], truth: dict[str, torch.Tensor]) -> bool:
    same = all(ours[name].dtype == truth[name].dtype and torch.equal(ours[name], truth[name]) for name in truth)
    return ours.keys() == truth.keys() and same


def read_json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text())


def rewrite(path: Path, **changes: Any) -> None:
    """Set keys of a JSON file."""
    path.write_text(json.dumps(read_json(path) | changes))


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> Path:
    """`original`, a directory without a tokenizer, and `checkpoint`."""
    root = tmp_path_factory.mktemp("llama")
    trained(root / "checkpoint", original(root / "original"))
    return root


@pytest.fixture(scope="module")
def finished(tmp_path_factory, corpus) -> Path:
    """A run of GPT-2 that train.py did, from a directory with a tokenizer; it is beside it, as `original`."""
    root = tmp_path_factory.mktemp("run")
    write_tokenizer(original(root / "original", "gpt2", bos_token_id=256, eos_token_id=256))
    assert train_on(root / "original", root / "run", corpus) == exit_codes.DONE
    return root / "run"


def write_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").write_text(to_json("bytes"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>", "model_max_length": 77}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}!")


def train_on(path: Path, run_dir: Path, data: str, **overrides: object) -> int:
    from dtmega import train

    keys = {
        "run__dir": run_dir,
        "model__path": path,
        "data__path": data,
        "data__seq_len": 32,
        "data__split": "8,1,1",
        "data__num_workers": 0,
        "batch__global_batch_size": 2,
        "optim__lr": 1e-2,
        "train__steps": 2,
        "precision__params": "float32",
        "eval__steps": 2,
        "eval__sample_tokens": 0,
        "log__tensorboard": "false",
        "checkpoint__interval": 0,
    } | overrides
    flags = [word for k, v in keys.items() for word in ("--" + k.replace("__", "."), str(v))]
    try:
        return train.main(["--config", str(ROOT / "configs" / "hf.toml"), *flags])
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("family", FAMILIES)
def test_each_family_loads_back_to_the_bit_with_nothing_missing(tmp_path, family, tied):
    truth = trained(tmp_path / "checkpoint", original(tmp_path / "original", family, tied))
    assert to_hf(tmp_path / "checkpoint", tmp_path / "out") == exit_codes.DONE
    assert equal(loaded(tmp_path / "out"), truth)
    # As save_pretrained calls them: a head that is the embedding is not there, GPT-NeoX's has another name, and experts
    # are one by one.
    stored = [load_file(tmp_path / folder / "model.safetensors").keys() for folder in ("out", "original")]
    assert stored[0] == stored[1]
    assert read_json(tmp_path / "out" / "config.json") == read_json(tmp_path / "original" / "config.json")


def test_what_the_trainer_saves_is_what_transformers_loads(tmp_path, finished):
    from transformers import AutoTokenizer

    assert to_hf(finished, tmp_path / "out") == exit_codes.DONE
    checkpoint = Weights(open_checkpoint(str(finished)))
    assert equal(loaded(tmp_path / "out"), {name: checkpoint.read(name) for name in checkpoint.tensors})
    assert not equal(loaded(tmp_path / "out"), loaded(finished.parent / "original"))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer("Bloom\x00é").input_ids == list("Bloom\x00é".encode())
    assert (tokenizer.eos_token_id, tokenizer.model_max_length) == (256, 77)
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "hello"}], tokenize=False)
    assert chat == "hello!"


LLAMA = {"architectures": ["LlamaForCausalLM"]}


def write_on_two_ranks(root: str) -> list[str]:
    place = {"rank": dist.get_rank(), "size": 2, "barrier": dist.barrier, "max_file_bytes": 70_000}
    source = Memory(torch.load(Path(root, "tensors.pt")))
    export(source, Path(root, "two"), LLAMA, Path(root, "original"), None, **place)
    return source.asked


def test_two_ranks_write_what_one_writes_and_each_reads_its_part(tmp_path, llama):
    shutil.copytree(llama / "original", tmp_path / "original")
    checkpoint = Weights(open_checkpoint(str(llama / "checkpoint")))
    tensors = {name: checkpoint.read(name) for name in checkpoint.tensors}
    torch.save(tensors, tmp_path / "tensors.pt")
    alone: dict[str, Any] = {"rank": 0, "size": 1, "barrier": lambda: None, "max_file_bytes": 70_000}
    export(Memory(tensors), tmp_path / "one", LLAMA, llama / "original", None, **alone)
    first, second = ranks.run(2, write_on_two_ranks, str(tmp_path))
    assert sorted(first + second) == sorted(tensors)
    assert first
    assert second
    one, two = ({file.name: file.read_bytes() for file in (tmp_path / n).iterdir()} for n in ("one", "two"))
    assert one == two
    assert INDEX in one
    assert equal(loaded(tmp_path / "two"), tensors)


def test_weights_are_written_in_the_dtype_that_is_asked_for_and_config_json_says_so(tmp_path, llama):
    shutil.copytree(llama / "original", tmp_path / "original")
    before = read_json(llama / "original" / "config.json")
    rewrite(tmp_path / "original" / "config.json", torch_dtype="float16")  # as transformers 4 called it
    options = ["--dtype", "bfloat16", "--original", str(tmp_path / "original")]
    assert to_hf(llama / "checkpoint", tmp_path / "out", *options) == exit_codes.DONE
    assert read_json(tmp_path / "out" / "config.json") == before | {"dtype": "bfloat16", "torch_dtype": "bfloat16"}
    checkpoint = Weights(open_checkpoint(str(llama / "checkpoint")))
    truth = {name: checkpoint.read(name).bfloat16() for name in checkpoint.tensors}
    assert equal(loaded(tmp_path / "out"), truth)


def test_a_stored_buffer_keeps_its_dtype_because_transformers_computes_with_it_in_float32(tmp_path):
    truth = trained(tmp_path / "checkpoint", original(tmp_path / "original", "deepseek_v3", tied=False))
    assert to_hf(tmp_path / "checkpoint", tmp_path / "out", "--dtype", "bfloat16") == exit_codes.DONE
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    found = loaded(tmp_path / "out")
    assert torch.equal(found[name], truth[name])
    assert {tensor.dtype for n, tensor in found.items() if n != name} == {torch.bfloat16}


def test_the_class_that_was_trained_is_named_where_the_original_is_of_a_base_model(tmp_path, llama):
    shutil.copytree(llama / "original", tmp_path / "original")
    rewrite(tmp_path / "original" / "config.json", architectures=["LlamaModel"])
    assert to_hf(llama / "checkpoint", tmp_path / "out", "--original", str(tmp_path / "original")) == exit_codes.DONE
    assert read_json(tmp_path / "out" / "config.json")["architectures"] == ["LlamaForCausalLM"]


COPIED = ["generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"]
COPIED += ["added_tokens.json", "chat_template.jinja", "chat_template.json", "vocab.json", "merges.txt", "vocab.txt"]
COPIED += ["tekken.json", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model"]


def test_what_is_of_the_tokenizer_is_copied_byte_by_byte_and_nothing_else(tmp_path, llama):
    import transformers
    from transformers import tokenization_utils_base as base

    known = {value for name, value in vars(base).items() if name.endswith("_FILE")}
    for kind in ("GPT2", "Bert", "T5", "Llama", "XLMRoberta"):
        known |= {*getattr(transformers, f"{kind}Tokenizer").vocab_files_names.values()}
    assert known <= {*COPIED}
    shutil.copytree(llama / "original", tmp_path / "original")
    strange = ["modeling_llama.py", "pytorch_model.bin", "extra.safetensors", "README.md", "training_args.bin"]
    for name in [*strange, *COPIED]:
        (tmp_path / "original" / name).write_text(f'{{"of": "{name}"}}  ')
    assert to_hf(llama / "checkpoint", tmp_path / "out", "--original", str(tmp_path / "original")) == exit_codes.DONE
    of_people = {"README.md", "README-source.md"}
    assert {f.name for f in (tmp_path / "out").iterdir()} == {"config.json", "model.safetensors", *COPIED, *of_people}
    for name in COPIED:
        assert (tmp_path / "out" / name).read_text() == f'{{"of": "{name}"}}  '
    assert (tmp_path / "out" / "README-source.md").read_text() == '{"of": "README.md"}  '


def test_a_file_of_the_original_that_cannot_be_read_is_refused_before_anything_is_written(
    tmp_path, llama, monkeypatch, capsys
):
    shutil.copytree(llama / "original", tmp_path / "original")
    (tmp_path / "original" / "vocab.txt").touch()

    def broken(path: Path) -> bytes:
        if path.name == "vocab.txt":
            raise PermissionError(13, "Permission denied")
        return path.read_bytes()

    monkeypatch.setattr(hf_export, "read_regular", broken)
    assert to_hf(llama / "checkpoint", tmp_path / "out", "--original", str(tmp_path / "original")) == exit_codes.REFUSED
    assert "original/vocab.txt: Permission denied (--original)" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["original"]


def test_the_tokenizer_that_the_original_has_leaves_its_other_files_as_they_are(tmp_path, finished):
    own = finished.parent / "original"
    assert to_hf(finished, tmp_path / "out", "--tokenizer", str(own / "tokenizer.json")) == exit_codes.DONE
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (own / name).read_bytes()


def test_another_tokenizer_takes_the_place_of_the_originals_with_its_end_of_document(tmp_path, finished):
    from transformers import AutoTokenizer

    (tmp_path / "own.json").write_text(to_json("bytes").replace("<|endoftext|>", "</s>"))
    assert to_hf(finished, tmp_path / "out", "--tokenizer", str(tmp_path / "own.json")) == exit_codes.DONE
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert (tokenizer.eos_token, tokenizer.eos_token_id) == ("</s>", 256)
    assert not (tmp_path / "out" / "chat_template.jinja").exists()
    before = {
        file: read_json(finished.parent / "original" / file) for file in ("config.json", "generation_config.json")
    }
    for file in before:
        ends = {"bos_token_id": 256, "eos_token_id": 256}
        assert read_json(tmp_path / "out" / file) == {**before[file], **ends}


def test_a_tokenizer_that_the_original_does_not_have_is_written(tmp_path, llama):
    assert to_hf(llama / "checkpoint", tmp_path / "out", "--tokenizer", "bytes") == exit_codes.DONE
    assert (tmp_path / "out" / "tokenizer.json").read_text() == to_json("bytes")
    assert read_json(tmp_path / "out" / "config.json")["eos_token_id"] == 256
    before = read_json(llama / "original" / "config.json")["eos_token_id"]
    assert before == 2


def test_a_vocabulary_of_wordpieces_is_written_with_the_special_tokens_by_which_bert_finds_them(tmp_path):
    from transformers import AutoTokenizer

    alone: dict[str, Any] = {"rank": 0, "size": 1, "barrier": lambda: None}
    bert = {"model_type": "bert", "type_vocab_size": 2}
    shipped = to_json("stdlib-wordpiece")
    export(Memory({"w": torch.ones(2)}), tmp_path / "out", bert, None, shipped, token_ids={"eos_token_id": 3}, **alone)
    theirs, ours = AutoTokenizer.from_pretrained(tmp_path / "out"), load_tokenizer("stdlib-wordpiece")
    found = theirs("def f(x):", "pass")
    assert found.input_ids == [2, *ours.encode("def f(x):"), 3, *ours.encode("pass"), 3]
    assert found.token_type_ids == [0] * (len(found.input_ids) - 2) + [1, 1]
    assert theirs.encode("[MASK]") == [2, 4, 3]
    assert (theirs.mask_token, theirs.unk_token_id, theirs.pad_token_id) == ("[MASK]", 1, 0)
    assert read_json(tmp_path / "out" / "config.json")["pad_token_id"] == 0


@pytest.mark.parametrize("target", ["hf", "dtmega"])
def test_an_original_that_has_changed_or_is_gone_is_refused_and_another_may_be_named(tmp_path, capsys, target):
    trained(tmp_path / "checkpoint", original(tmp_path / "original"))
    arguments = ["convert", "--from", "dtmega", str(tmp_path / "checkpoint"), "--to", target, str(tmp_path / "out")]
    shutil.copytree(tmp_path / "original", tmp_path / "moved")
    rewrite(tmp_path / "original" / "config.json", rms_norm_eps=0.1)
    assert command(arguments) == exit_codes.REFUSED
    message = capsys.readouterr().err
    assert "original/config.json has changed since training: its digest is" in message
    assert "--original DIR" in message
    shutil.rmtree(tmp_path / "original")
    assert command(arguments) == exit_codes.REFUSED
    message = capsys.readouterr().err
    assert "original is not a folder with a config.json" in message
    assert "--original DIR" in message
    assert command([*arguments, "--original", str(tmp_path / "moved")]) == exit_codes.DONE
    assert (tmp_path / "out").is_dir()


def test_a_run_of_bloom_has_no_original(tmp_path, capsys):
    to_checkpoint.write(str(tmp_path / "checkpoint"), Memory({"norm.bias": torch.ones(8)}), BloomKeys())
    assert to_hf(tmp_path / "checkpoint", tmp_path / "out", "--original", str(tmp_path)) == exit_codes.REFUSED
    assert "--original is for a run with a [model] path" in capsys.readouterr().err


def test_a_folder_with_something_in_it_is_not_overwritten(tmp_path, llama, capsys):
    (tmp_path / "file").touch()
    assert to_hf(llama / "checkpoint", tmp_path) == exit_codes.REFUSED
    assert "exists already; expected a new folder" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def exported(here: str, original: str, tensors: dict[str, torch.Tensor], max_file_bytes: int) -> list[str]:
    """The operations of an export on files, in order; writes to one file count once."""
    events = FileEvents(Path(here), rank=0, die_at=-1)
    alone: dict[str, Any] = {"rank": 0, "size": 1, "barrier": lambda: None, "max_file_bytes": max_file_bytes}
    export(Memory(tensors), Path(here, "out"), LLAMA, Path(original), None, **alone)
    return list(dict.fromkeys(name for name in events.names if not name.startswith(("half", "close"))))


@pytest.mark.parametrize(
    ("max_file_bytes", "weights", "index"),
    [
        (10_000, ["model.safetensors"], []),
        (100, ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"], [INDEX]),
    ],
)
def test_files_of_an_export_are_on_the_disk_before_its_folder_has_its_name(
    tmp_path, llama, max_file_bytes, weights, index
):
    tensors = {"lm_head.weight": torch.ones(4, 8), "model.norm.weight": torch.ones(8)}
    here = tmp_path / "here"
    (events,) = ranks.run(1, exported, str(here), str(llama / "original"), tensors, max_file_bytes)
    expected = ["mkdir .tmp-out"]
    for name in weights:
        expected += [f"create part-{name}", f"write part-{name}", f"fsync part-{name}", f"rename part-{name} to {name}"]
    for name in ("generation_config.json", "config.json", *index):
        expected += [f"create {name}", f"write {name}", f"fsync {name}"]
    assert events == [*expected, "fsync .tmp-out", "rename .tmp-out to out", "fsync here"]


@pytest.mark.parametrize("source", ["run", "checkpoint", "weights", "export"])
def test_a_run_that_starts_from_weights_starts_with_their_loss(tmp_path, finished, corpus, capsys, source):
    path = {"run": finished, "checkpoint": finished / "checkpoints" / "step-00000002"}.get(source, tmp_path / source)
    target = {"weights": "dtmega", "export": "hf"}.get(source)
    if target:
        assert command(["convert", "--from", "dtmega", str(finished), "--to", target, str(path)]) == exit_codes.DONE
    keys = {"model__init_from": path, "train__steps": 1, "optim__lr": 1e-12}
    assert train_on(finished.parent / "original", tmp_path / "next", corpus, **keys) == exit_codes.DONE
    after, before = (
        [line["val_loss"] for line in metrics(run) if "val_loss" in line] for run in (tmp_path / "next", finished)
    )
    assert after[-1] == pytest.approx(before[-1], rel=1e-6)
    assert after[-1] != pytest.approx(before[0], rel=1e-3)
    assert "initial values are drawn" not in capsys.readouterr().out


def test_generate_prints_what_transformers_own_generation_gives(tmp_path, finished, capsys):
    from transformers import AutoModelForCausalLM

    assert to_hf(finished, tmp_path / "out") == exit_codes.DONE
    capsys.readouterr()
    # GPT-2 here has 64 positions: a sample ends there.
    for n, length in ((5, 5), (100, 61)):
        assert (
            command(["generate", "--run", str(finished), "--prompt", "abc", "--tokens", str(n), "--temperature", "0"])
            == 0
        )
        theirs: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
        inputs = torch.tensor([list(b"abc")])
        new = theirs.generate(inputs, max_new_tokens=length, do_sample=False, pad_token_id=0)[0, 3:].tolist()
        assert len(new) == length
        assert capsys.readouterr().out == "abc" + bytes(new).decode(errors="replace") + "\n"


def test_generate_refuses_a_directory_that_has_changed(tmp_path, finished, capsys):
    shutil.copytree(finished, tmp_path / "run")
    shutil.copytree(finished.parent / "original", tmp_path / "original")
    rewrite(tmp_path / "original" / "config.json", layer_norm_epsilon=0.1)
    settings = tmp_path / "run" / "config.toml"
    settings.write_text(settings.read_text().replace(str(finished.parent / "original"), str(tmp_path / "original")))
    assert command(["generate", "--run", str(tmp_path / "run"), "--prompt", "abc"]) == exit_codes.REFUSED
    assert "has changed since training" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            {"model_type": "deepseek_v4"},
            r"'model.layers.0.mlp.gate.tid2eid' is int64, and stored numbers are expected to be floats",
        ),
        ({"model_type": "llama", "quantization_config": {"quant_method": "fp8"}}, "says that weights are quantised"),
    ],
)
def test_a_model_of_other_tensors_than_a_checkpoint_holds_is_refused(tmp_path, keys, message):
    sizes = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 96}
    (tmp_path / "config.json").write_text(json.dumps(sizes | keys))
    with pytest.raises(ValueError, match=message):
        described(tmp_path)
