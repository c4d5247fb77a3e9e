"""Commands, files and links that the README and the pages of docs/ show are there."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import pytest
import tokenizers
import tomli
import torch
import transformers

from dtmega import config, families, mesh
from dtmega.cli import commands as dtmega_commands
from dtmega.data.loader import TrainBatches
from dtmega.planning.answers import dry_run
from dtmega.training.checks import check
from dtmega.training.choices import with_micro_batch_size
from tests import hf_models
from tools import configuration_page

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = {path.name: path.read_text(encoding="utf-8") for path in sorted((ROOT / "docs").glob("*.md"))}
GUIDE = "\n".join([README, *PAGES.values()])


def test_the_configuration_shown_is_the_file():
    (block,) = re.findall(r"```toml\n(.*?)```", PAGES["running.md"], flags=re.DOTALL)
    assert block == (ROOT / "configs" / "bloom.toml").read_text(encoding="utf-8")


def test_the_commands_shown_are_targets_of_the_makefile():
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE))
    assert set(re.findall(r"^make (\w+)", GUIDE, flags=re.MULTILINE)) <= targets


def test_the_targets_of_the_makefile_install_extras_that_are_there():
    stamps = [f".venv/installed{name}" for name in ("", "-test", "-bench", "-extras")]
    dry = ["make", "--dry-run", "--always-make", *stamps]
    printed = subprocess.run(dry, cwd=ROOT, capture_output=True, text=True, check=True, timeout=60).stdout
    lists = re.findall(r"^.venv/bin/pip install .* -e '\.\[(.*)\]'$", printed, flags=re.MULTILINE)
    installed = [set(extras.split(",")) for extras in lists]
    known = tomli.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    assert len(installed) == len(stamps)
    # `data`, `docs`, `hf`, `megatron` and `peft` come with other extras; `make mutants` installs its own.
    assert set().union(*installed) == known.keys() - {"data", "docs", "hf", "megatron", "mutants", "peft"}


def commands(program: str) -> list[str]:
    """The lines of all shell blocks that begin so, each once and without its comment."""
    blocks = re.findall(r"```sh\n(.*?)```", GUIDE, flags=re.DOTALL)
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    found = [re.sub(r"\s+# .*", "", line) for line in lines if line.startswith(program)]
    assert found
    return list(dict.fromkeys(found))


def starts(argv: list[str], world: int) -> config.Config:
    """Through configuration, mesh and batches, as `train.py` does on each of so many processes."""
    asked = families.resolve(config.load(argv))
    sizes = mesh.resolve(asked.mesh, world)
    cfg = with_micro_batch_size(asked, sizes)
    check(cfg, sizes, torch.device("cpu"))
    TrainBatches(cast(Any, None), cfg.data, cfg.batch, *mesh.data_coordinate(sizes, 0)).close()
    return cfg


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    """A DIR of the README: a tiny LLaMA."""
    home = tmp_path_factory.mktemp("llama")
    model = hf_models.build(hf_models.Case("llama", tied=False))
    model.config.max_position_embeddings = 512
    model.save_pretrained(home)
    (home / "tokenizer.json").touch()
    return home


def test_the_readme_is_read_in_one_go():
    assert len(README.splitlines()) <= 120


# Those that are whole: "..." and "$S" stand for more.
LAUNCHED = [line for line in commands("torchrun ") + commands("python train.py ") if not re.search(r"\$|\.\.\.", line)]


@pytest.mark.parametrize("command", [line for line in LAUNCHED if " -m dtmega " not in line])
def test_a_training_command_passes_configuration_mesh_and_batches(command: str, directory: Path):
    words = shlex.split(command.replace("DIR", str(directory)))
    script = next(i for i, word in enumerate(words) if word.endswith(".py"))
    flag = "--nproc-per-node"
    world = int(words[words.index(flag) + 1]) if flag in words else 1
    if words[script] == "train.py":
        given, keys = dry_run.separate(words[script + 1 :])
        starts(keys, int(given.get("--world", world)))
    else:
        assert (ROOT / words[script]).is_file()


@pytest.mark.parametrize(
    "command",
    [
        line
        for line in [*commands("python -m dtmega "), *commands("dtmega "), *LAUNCHED]
        if re.search(r"dtmega (?!train)", line)
    ],
)
def test_a_command_of_the_package_has_the_options_that_it_is_given(command: str):
    words = shlex.split(re.sub(r" [|<>] .*", "", command.partition("dtmega ")[2]))
    assert dtmega_commands.parse(words).command == words[0]


@pytest.mark.full
def test_the_five_commands_of_fine_tuning_run_one_after_another(tmp_path: Path):
    conversations = ROOT / "dtmega" / "data" / "preparing" / "shipped-chat.jsonl"
    shutil.copy(conversations, tmp_path / "chat.jsonl")
    _chatting_directory(tmp_path / "DIR", conversations)
    block = re.findall(r"```sh\n(.*?)```", PAGES["fine-tuning.md"], flags=re.DOTALL)[0]
    lines = block.replace("\\\n", " ").splitlines()
    assert len(lines) == 5
    outputs = []
    for line in lines:
        words = shlex.split(line.replace("train.py", str(ROOT / "train.py")))
        command = [sys.executable, *words[1:]]
        done = subprocess.run(
            command, check=False, cwd=tmp_path, input="Hello\n", capture_output=True, text=True, timeout=600
        )
        assert done.returncode == 0, done.stderr
        outputs.append(done.stdout)
    assert "400 conversations" in outputs[0]
    converted = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "chat")
    before = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "DIR")
    assert not torch.equal(converted.get_input_embeddings().weight, before.get_input_embeddings().weight)


def _chatting_directory(home: Path, text: Path) -> None:
    """Write a tiny Llama, and a tokenizer that has a chat template of its own."""
    ends = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=500, special_tokens=ends, initial_alphabet=alphabet)
    bpe.train_from_iterator(text.read_text(encoding="utf-8").splitlines(), trainer)
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token=ends[0], bos_token=ends[0])
    tokenizer.chat_template = (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    )
    tokenizer.save_pretrained(home)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    model_config = transformers.LlamaConfig(**sizes, vocab_size=500, max_position_embeddings=512)
    transformers.LlamaForCausalLM(model_config).save_pretrained(home)


def test_no_command_presumes_that_the_package_is_on_pypi():
    assert re.findall(r"pip install '?dtmega", GUIDE) == []


@pytest.mark.parametrize("axis", ["tp", "dp_shard", "dp_replicate"])
@pytest.mark.parametrize("world", [1, 2, 4, 8])
def test_the_first_configuration_trains_as_it_is_on_any_power_of_two_up_to_8(world: int, axis: str):
    cfg = starts(["--config", "bloom.toml", "--mesh.dp_shard", "1", f"--mesh.{axis}", str(world)], world)
    share = cfg.batch.global_batch_size // (1 if axis == "tp" else world)
    assert cfg.batch.micro_batch_size == min(4, share)


def test_ci_runs_the_readmes_test_command_and_nothing_else():
    commands = [
        line
        for line in (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()
        if line and not line.startswith(("#", "set ", "cd "))
    ]
    assert commands == ["exec make test"]


def test_links_of_the_readme_lead_somewhere():
    for link in re.findall(r"\]\(([^)#]+)[^)]*\)", README):
        assert link.startswith("http") or (ROOT / link).exists(), link


def test_the_page_of_keys_is_that_of_the_configuration():
    assert configuration_page.PAGE.read_text(encoding="utf-8") == configuration_page.page()


def test_every_page_is_in_the_site():
    listed = set(re.findall(r"(\S+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), flags=re.MULTILINE))
    assert {page for page in listed if not page.startswith("log/")} == set(PAGES)


def test_every_file_and_test_that_a_page_names_exists():
    rooms = "benchmarks|configs|docs|dtmega|examples|tests|tools"
    in_rooms = rf"[`/]((?:{rooms})/[a-z0-9_/]+\.(?:py|md|toml))(::(\w+))?"
    for name, _, function in re.findall(in_rooms, GUIDE) + re.findall(r"`(launch/[a-z_]+\.\w+)()()`", GUIDE):
        assert (ROOT / name).is_file(), name
        if function:
            assert f"def {function}(" in (ROOT / name).read_text(encoding="utf-8"), f"{name}::{function}"
