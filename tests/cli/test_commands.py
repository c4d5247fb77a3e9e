"""Claims about commands of `python -m dtmega` that refuse or fail: one line that names what is wrong, an exit code."""

from __future__ import annotations

import argparse
import contextlib
import errno
import io
import os
import resource
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from dtmega import __version__, config
from dtmega.__main__ import main as command
from dtmega.checkpoint.manifest import Damaged
from dtmega.checkpoint.resume import open_checkpoint, state_of
from dtmega.checkpoint.weights import Weights
from dtmega.cli import commands
from dtmega.cli.commands import endings
from dtmega.cli.convert import sources, to_checkpoint
from dtmega.config.families.bloom import BloomKeys
from dtmega.data.indexed_files.dataset import IndexedDataset
from dtmega.distributed import exit_codes
from dtmega.distributed.agreement import Startup
from dtmega.interop.hf.files import export as hf_export
from dtmega.models.generate import Sampling
from tests import ranks
from tests.distributed.test_process import free_port
from tests.interop.hf.files.test_ours import Memory
from tests.test_train import run

ROOT = Path(__file__).resolve().parents[2]


def refused(argv: list[str], capsys: Any) -> str:
    """The message of a command that its arguments alone end, with exit code 2."""
    with pytest.raises(SystemExit) as stop:
        command(argv)
    assert stop.value.code == exit_codes.REFUSED
    out, err = capsys.readouterr()
    assert out == ""
    return err


GENERATE = ["generate", "--run", "r", "--prompt", "p"]
SHARE = "expected a number above 0 and up to 1"
TOKENIZE = ["tokenize", "--input", "in.txt", "--tokenizer", "bytes"]


def test_the_version_is_that_of_the_package(capsys):
    with pytest.raises(SystemExit) as stop:
        command(["--version"])
    assert (stop.value.code, capsys.readouterr().out) == (exit_codes.DONE, f"dtmega {__version__}\n")


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        ([*GENERATE, "--tokens", "-3"], "generate: argument --tokens: expected a whole number of 1 or more, got '-3'"),
        ([*GENERATE, "--tokens", "0"], "generate: argument --tokens: expected a whole number of 1 or more, got '0'"),
        (
            [*GENERATE, "--tokens", "1.5"],
            "generate: argument --tokens: expected a whole number of 1 or more, got '1.5'",
        ),
        (
            [*GENERATE, "--seed", "-1"],
            f"generate: argument --seed: expected a whole number from 0 to {2**63 - 1}, got '-1'",
        ),
        ([*GENERATE, "--top-k", "-1"], "generate: argument --top-k: expected a whole number of 0 or more, got '-1'"),
        (
            [*GENERATE, "--seed", str(2**63)],
            f"generate: argument --seed: expected a whole number from 0 to {2**63 - 1}, got '{2**63}'",
        ),
        *(
            (
                [*GENERATE, "--temperature", text],
                f"generate: argument --temperature: expected 0, or a number from 1e-6 to 1e6, got '{text}'",
            )
            for text in ("nan", "inf", "-1", "9.9e-7", "1.1e6", "warm")
        ),
        (
            ["verify-plan", "DIR", "--tp", "0"],
            "verify-plan: argument --tp: expected a whole number of 1 or more, got '0'",
        ),
        *(
            (
                [*TOKENIZE, "--output", text],
                "tokenize: argument --output: expected a prefix such as data/mine, for data/mine.bin and .idx, "
                f"got '{text}'",
            )
            for text in ("out/", "", ".", "a/..")
        ),
        (
            [*TOKENIZE, "--output", "o", "--workers", "0"],
            "tokenize: argument --workers: expected a whole number of 1 or more, got '0'",
        ),
        *(
            (
                [*TOKENIZE, "--output", "o", "--split-documents", text],
                f"tokenize: argument --split-documents: expected blank-lines or a number of tokens, got '{text}'",
            )
            for text in ("0", "lines")
        ),
        *(
            ([*GENERATE, "--top-p", text], f"generate: argument --top-p: {SHARE}, got '{text}'")
            for text in ("0", "1.1", "nan", "much")
        ),
    ],
)
def test_a_value_that_cannot_be_is_refused_in_one_line_that_names_the_option(argv, line, capsys):
    assert refused(argv, capsys) == f"dtmega {line}\n"


N_CPUS = len(os.sched_getaffinity(0))
# Each command's shortest line and its longest one, and everything that is read from them.
LINES: list[tuple[str, dict[str, Any]]] = [
    (
        "tokenize --input a --tokenizer bytes --output o",
        {
            **{"input": ["a"], "tokenizer": "bytes", "output": "o", "json_key": None, "append_eod": False},
            **{"split_documents": None, "split_sentences": None, "kind": None, "workers": N_CPUS, "strict": False},
            **{"encoding": "", "overwrite": False, "chat": False, "chat_template": None, "train_on": None},
            **{"roles": None, "skip_empty": False, "part": None, "prepend_bos": False},
        },
    ),
    (
        "tokenize --input a b --tokenizer t --output o/p --part 3/12 --json-key body --append-eod --split-documents 1 "
        "--prepend-bos --split-sentences blocks --kind jsonl --workers 1 --strict --encoding Latin1 --overwrite "
        "--chat --chat-template turns --train-on last --roles human=user bot=assistant --skip-empty",
        {
            **{"input": ["a", "b"], "tokenizer": "t", "output": "o/p", "json_key": "body", "append_eod": True},
            **{"split_documents": 1, "split_sentences": "blocks", "kind": "jsonl", "workers": 1, "strict": True},
            **{"encoding": "iso8859-1", "overwrite": True, "chat": True, "chat_template": "turns"},
            **{"train_on": "last", "roles": [("human", "user"), ("bot", "assistant")], "skip_empty": True},
            **{"part": (3, 12), "prepend_bos": True},
        },
    ),
    ("merge --input a b --output o/p", {"input": ["a", "b"], "output": "o/p", "overwrite": False}),
    ("merge --input a --output o.bin --overwrite", {"input": ["a"], "output": "o", "overwrite": True}),
    (
        "generate --run r --prompt p",
        {
            **{"run": "r", "prompt": ["p"], "tokens": None, "temperature": None, "top_k": None, "top_p": None},
            **{
                "path": None,
                "seed": None,
                "step": None,
                "interactive": False,
                "chat": False,
                "chat_template": None,
                "prompts": None,
                "batch_size": 8,
                "pp": 1,
                "dp_replicate": 1,
                "dp_shard": -1,
                "ep": 1,
                "tp": 1,
            },
        },
    ),
    (
        f"generate --run r --prompt p --prompt - --tokens 1 --temperature 0.5 --top-k 0 --top-p 0.5 --step 0 "
        f"--interactive --mesh.pp 2 --mesh.dp_replicate 3 --mesh.dp_shard 4 --mesh.ep 2 --mesh.tp 5 --seed {2**63 - 1} "
        f"--prompts f --batch-size 3 --chat --chat-template turns",
        {
            **{"run": "r", "prompt": ["p", "-"], "tokens": 1, "temperature": 0.5, "top_k": 0, "top_p": 0.5},
            **{
                "path": None,
                "seed": 2**63 - 1,
                "step": 0,
                "interactive": True,
                "chat": True,
                "chat_template": "turns",
                "prompts": "f",
                "batch_size": 3,
                "pp": 2,
                "dp_replicate": 3,
                "dp_shard": 4,
                "ep": 2,
                "tp": 5,
            },
        },
    ),
    (
        "convert --from hf a --to dtmega b",
        {
            **{"source": ["hf", "a"], "target": ["dtmega", "b"], "config": "", "prefix": "", "tokenizer": ""},
            **{"original": "", "merge": False, "dtype": "", "vocab_size": 0, "average_copies": False, "tp": 1, "pp": 1},
            "allow_nonfinite": [],
            "format": "",
        },
    ),
    (
        "convert --from dcp a --to hf b --config c --prefix model. --tokenizer t --original d --merge --dtype bfloat16",
        {
            **{"source": ["dcp", "a"], "target": ["hf", "b"], "config": "c", "prefix": "model.", "tokenizer": "t"},
            **{
                "original": "d",
                "merge": True,
                "dtype": "bfloat16",
                "vocab_size": 0,
                "average_copies": False,
                "tp": 1,
                "pp": 1,
            },
            "allow_nonfinite": [],
            "format": "",
        },
    ),
    (
        "convert --from megatron a --to hf b --vocab-size 9 --average-copies",
        {
            **{"source": ["megatron", "a"], "target": ["hf", "b"], "config": "", "prefix": "", "tokenizer": ""},
            **{"original": "", "merge": False, "dtype": "", "vocab_size": 9, "average_copies": True, "tp": 1, "pp": 1},
            "allow_nonfinite": [],
            "format": "",
        },
    ),
    (
        "convert --from hf a --to megatron b --tp 4 --pp 2 --allow-nonfinite c d",
        {
            **{"source": ["hf", "a"], "target": ["megatron", "b"], "config": "", "prefix": "", "tokenizer": ""},
            **{"original": "", "merge": False, "dtype": "", "vocab_size": 0, "average_copies": False, "tp": 4, "pp": 2},
            "allow_nonfinite": ["c", "d"],
            "format": "",
        },
    ),
    (
        "plan --config a --mesh.tp -1 --world 4 --optim.lr=1e-3 --device cpu",
        {
            **{
                "config": "a",
                "keys": ["--mesh.tp", "-1", "--optim.lr=1e-3"],
                "world": 4,
                "device": "cpu",
                "imbalance": None,
            },
            **{"fabric": "", "memory": None, "reserve": None, "tokens": None, "json": None},
            **{"page": None, "search": False, "top": 10, "write": None, "calibrate": None},
        },
    ),
    ("inspect a", {"checkpoint": "a", "other": None, "quick": False}),
    ("inspect a b --quick", {"checkpoint": "a", "other": "b", "quick": True}),
    ("replay r --step 3", {"run": "r", "step": 3, "scratch": None, "keys": []}),
    (
        "replay r --step 3 --scratch s --mesh.pp 2",
        {"run": "r", "step": 3, "scratch": "s", "keys": ["--mesh.pp", "2"]},
    ),
    ("verify-plan d", {"directory": "d", "tp": 2, "ep": 0, "no_sequence_parallel": False, "generic": False}),
    (
        "verify-plan d --tp 1 --no-sequence-parallel --generic",
        {"directory": "d", "tp": 1, "ep": 0, "no_sequence_parallel": True, "generic": True},
    ),
]


@pytest.mark.parametrize("name", [name for name in commands.COMMANDS if name != "train"])
def test_the_help_of_each_command_has_examples_that_its_options_take(name: str, capsys):
    lines = commands.examples(name)
    assert lines
    for line in lines:
        words = shlex.split(line.partition(" < ")[0].partition("dtmega ")[2])
        assert commands.parse(words).command == name
    with pytest.raises(SystemExit):
        commands.parse([name, "--help"])
    assert "examples:\n  " + "\n  ".join(lines) in capsys.readouterr().out


@pytest.mark.parametrize(("line", "expected"), LINES)
def test_each_option_is_read_into_its_own_name_and_has_its_default(line: str, expected: dict[str, Any]):
    assert vars(commands.parse(line.split())) == {"command": line.split()[0]} | expected


@pytest.mark.parametrize("options", [["--quick"], []])
@pytest.mark.parametrize("code", [exit_codes.DONE, 1])
def test_inspect_hands_on_its_options_and_the_exit_code(monkeypatch, options: list[str], code: int):
    asked: list[Any] = []

    def inspect(path: str, other: str | None, verify: bool) -> int:
        asked.append((path, other, verify))
        return code

    monkeypatch.setattr("dtmega.cli.convert.inspect.show", inspect)
    assert command(["inspect", "a", "b", *options]) == code
    assert asked == [("a", "b", not options)]


@pytest.mark.parametrize("no_sequence_parallel", [True, False])
@pytest.mark.parametrize("generic", [True, False])
def test_verify_plan_hands_on_its_options_and_the_exit_code(monkeypatch, no_sequence_parallel: bool, generic: bool):
    asked: list[Any] = []

    def verify(directory: Path, axis: str, tp: int, *, sequence_parallel: bool, generic: bool) -> int:
        asked.append((directory, axis, tp, sequence_parallel, generic))
        return 1

    monkeypatch.setattr("dtmega.interop.hf.tp.command.verify_directory", verify)
    flags = ["--no-sequence-parallel"] * no_sequence_parallel + ["--generic"] * generic
    assert command(["verify-plan", "d", "--tp", "3", *flags]) == 1
    assert asked == [(Path("d"), "tp", 3, not no_sequence_parallel, generic)]


def test_a_folder_of_transformers_is_named_as_such_by_generate(tmp_path, capsys):
    (tmp_path / "config.json").write_text("{}")
    assert command(["generate", str(tmp_path), "--prompt", "a"]) == exit_codes.REFUSED
    assert "but a model of transformers (config.json)" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["0", "1e-6", "0.8", "1e6"])
def test_a_temperature_in_its_bounds_is_taken(text, capsys):
    assert command([*GENERATE, "--temperature", text]) == exit_codes.REFUSED  # there is no run
    assert "neither a checkpoint nor a run directory" in capsys.readouterr().err


@pytest.fixture(scope="module")
def finished(tmp_path_factory, corpus) -> Path:
    """A run directory of one step."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    assert run(folder, corpus, train__steps=1, eval__interval=0) == exit_codes.DONE
    return folder


@pytest.fixture
def text(tmp_path) -> Path:
    (tmp_path / "in.txt").write_text("some text")
    return tmp_path / "in.txt"


@pytest.mark.parametrize("place", ["the run", "its checkpoint"])
def test_generate_draws_with_its_options_from_the_weights_of_the_run(finished, place, capsys, monkeypatch):
    asked: dict[str, Any] = {}

    def generate(model: torch.nn.Module, prompts: list[list[int]], n: int, sampling: Sampling) -> list[list[int]]:
        asked.update(sampling=sampling, prompts=prompts, n=n, weights=dict(model.named_parameters()))
        return [[33, 10]]

    monkeypatch.setattr("dtmega.models.show.generate_together", generate)
    weights = Weights(open_checkpoint(str(finished)))
    folder = finished if place == "the run" else finished / "checkpoints" / "step-00000001"
    options = ["--tokens", "7", "--temperature", "0.5", "--top-k", "3", "--top-p", "0.25", "--seed", "9"]
    assert command(["generate", "--run", str(folder), "--prompt", "hi", *options]) == exit_codes.DONE
    assert capsys.readouterr().out == "hi!\n\n"
    loaded = asked.pop("weights")
    sampling = Sampling(257, frozenset([256]), seed=9, temperature=0.5, top_k=3, top_p=0.25)
    assert asked == {"prompts": [[104, 105]], "n": 7, "sampling": sampling}
    assert loaded.keys() == weights.tensors.keys()
    assert all(torch.equal(loaded[name], weights.read(name)) for name in loaded)


def test_generate_reads_the_configuration_of_a_run_from_its_config_toml(finished, tmp_path, monkeypatch):
    asked: dict[str, Any] = {}
    names = ("model", "prompts", "n", "sampling")
    monkeypatch.setattr(
        "dtmega.models.show.generate_together", lambda *args: asked.update(zip(names, args, strict=True)) or [[]]
    )
    shutil.copytree(finished, tmp_path / "run")
    toml = tmp_path / "run" / "config.toml"
    toml.write_text(toml.read_text().replace('tokenizer = "bytes"', 'tokenizer = "stdlib-8k"'))
    assert command(["generate", "--run", str(tmp_path / "run"), "--prompt", "hi"]) == exit_codes.DONE
    assert asked["sampling"].vocab_size > 8000
    assert (asked["n"], asked["sampling"].seed) == (128, 0)


# By name, as `errno` has them: what the user of a command has named wrongly. All others are of the machine.
WRONG_PATH = ["ENOENT", "ENOTDIR", "EISDIR", "EEXIST", "ENOTEMPTY", "ELOOP", "ENAMETOOLONG", "EACCES", "EPERM", "EROFS"]
BROKEN = ["ENOSPC", "EFBIG", "EIO", "EDQUOT", "EMFILE", "ENOMEM", "ETIMEDOUT", "ESTALE"]
ENDS: list[tuple[BaseException, int, str]] = [
    (ValueError("no such thing"), exit_codes.REFUSED, "no such thing"),
    (config.ConfigError("no such key"), exit_codes.REFUSED, "no such key"),
    (Damaged("not intact"), exit_codes.DAMAGED, "not intact"),
    (KeyboardInterrupt(), 130, "interrupted"),
    (OSError("no number"), 1, "no number"),
    *((OSError(getattr(errno, name), "a reason", "a/file"), 2, "a/file: a reason") for name in WRONG_PATH),
    *((OSError(getattr(errno, name), "a reason"), 1, "a reason") for name in BROKEN),
]


@pytest.mark.parametrize(("error", "code", "line"), ENDS, ids=repr)
def test_what_ends_a_command_early_is_its_exit_code_and_one_line(monkeypatch, capsys, error, code, line):
    def raising(*args: Any, **options: Any) -> int:
        raise error

    monkeypatch.setattr("dtmega.cli.convert.inspect.show", raising)
    monkeypatch.setattr("dtmega.data.preparing.tokenize.write", raising)
    assert one_line(code, ["inspect", "a"], capsys) == f"dtmega inspect: {line}\n"
    said = one_line(code, [*TOKENIZE, "--output", "o"], capsys)
    assert said == f"dtmega tokenize: {line}; nothing was written to o\n"


def test_the_recorded_configuration_of_a_checkpoint_of_weights_only_is_refused(tmp_path, finished, capsys):
    assert (
        command(["convert", "--from", "dtmega", str(finished), "--to", "dtmega", str(tmp_path / "w")])
        == exit_codes.DONE
    )
    said = one_line(exit_codes.REFUSED, ["generate", "--run", str(tmp_path / "w"), "--prompt", "p"], capsys)
    assert said.endswith("/w holds weights only, and no tokenizer: name a run, or a checkpoint of one\n")


def one_line(code: int, argv: list[str], capsys: Any) -> str:
    capsys.readouterr()
    assert command(argv) == code
    err = capsys.readouterr().err
    assert err.endswith("\n")
    assert err.count("\n") == 1, err
    return err


def test_a_place_that_cannot_be_written_is_one_line_and_exit_code_2(tmp_path, finished, text, capsys):
    (tmp_path / "file").touch()
    place = str(tmp_path / "file" / "out")
    tokenize = ["tokenize", "--input", str(text), "--tokenizer", "bytes", "--output"]
    assert f"{tmp_path}/file" in one_line(exit_codes.REFUSED, [*tokenize, place], capsys)
    for kind in ("hf", "dtmega"):
        argv = ["convert", "--from", "dtmega", str(finished), "--to", kind, place]
        assert one_line(exit_codes.REFUSED, argv, capsys).startswith(f"dtmega convert: {tmp_path}/file")
    assert (tmp_path / "file").read_bytes() == b""


@pytest.mark.parametrize("argv", [["inspect"], ["convert", "--to", "hf", "out", "--from", "dtmega"], [*GENERATE[:-2]]])
def test_what_is_not_there_is_one_line_and_exit_code_2(tmp_path, argv, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    argv = [*argv, "nothing"] if argv[0] != "generate" else ["generate", "--prompt", "p", "--run", "nothing"]
    assert "nothing is neither a checkpoint nor" in one_line(exit_codes.REFUSED, argv, capsys)
    assert not any(tmp_path.iterdir())


def test_a_folder_that_is_no_dcp_is_one_line_and_exit_code_2(tmp_path, finished, capsys):
    argv = ["convert", "--from", "dcp", str(tmp_path), "--to", "dtmega", str(tmp_path / "out")]
    said = one_line(exit_codes.REFUSED, [*argv, "--config", str(finished / "config.toml")], capsys)
    assert said == f"dtmega convert: {tmp_path}/.metadata: No such file or directory\n"


def test_one_text_file_is_refused_with_the_cures_and_each_of_them_trains(tmp_path, capsys):
    (tmp_path / "play.txt").write_text("First Citizen:\nBefore we proceed any further, hear me speak.\n\n" * 100)
    prefix = str(tmp_path / "play")
    tokenize = ["tokenize", "--input", f"{prefix}.txt", "--tokenizer", "bytes", "--output", prefix, "--workers", "1"]
    keys = {"train__steps": 2, "eval__interval": 0, "eval__steps": 1}
    assert command(tokenize) == exit_codes.DONE
    assert run(tmp_path / "whole", prefix, **keys) == exit_codes.REFUSED
    said = capsys.readouterr().err
    for words in ("0 of 1 document.", "tokenize --split-documents", "[data] split = '1,0,0'"):
        assert words in said
    assert run(tmp_path / "train-only", prefix, **keys, data__split="1,0,0") == exit_codes.DONE
    for where in ("blank-lines", "500"):
        assert command([*tokenize, "--split-documents", where, "--overwrite"]) == exit_codes.DONE
        assert run(tmp_path / where, prefix, **keys) == exit_codes.DONE


@contextlib.contextmanager
def room_for(n_bytes: int) -> Iterator[None]:
    """No file can become larger: the kernel's own error in the middle of a write, as a full disk gives."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("kind", ["hf", "dtmega"])
def test_a_disk_that_fills_up_ends_convert_with_exit_code_1_and_the_file_and_leaves_nothing(
    tmp_path, finished, kind, capsys
):
    argv = ["convert", "--from", "dtmega", str(finished), "--to", kind, str(tmp_path / "out")]
    with room_for(1000):
        said = one_line(endings.BROKEN, argv, capsys)
    assert said.startswith(f"dtmega convert: {tmp_path}/.tmp-out/")
    assert said.endswith(f": {os.strerror(errno.EFBIG)}\n")
    assert not any(tmp_path.iterdir())


def test_a_disk_that_fills_up_ends_tokenize_with_exit_code_1_and_leaves_nothing(tmp_path, capsys):
    (tmp_path / "in.txt").write_text("a" * 2000)
    argv = ["tokenize", "--input", str(tmp_path / "in.txt"), "--tokenizer", "bytes", "--output", str(tmp_path / "out")]
    with room_for(1000):
        said = one_line(endings.BROKEN, [*argv, "--workers", "1"], capsys)
    assert said == f"dtmega tokenize: {os.strerror(errno.EFBIG)}; nothing was written to {tmp_path}/out\n"
    assert [path.name for path in tmp_path.iterdir()] == ["in.txt"]


def test_a_full_stdout_is_an_error_but_not_one_of_what_was_written(tmp_path, text, capsys, monkeypatch):
    argv = ["tokenize", "--input", str(text), "--tokenizer", "bytes", "--output", str(tmp_path / "out")]
    with contextlib.suppress(OSError), open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert command([*argv, "--workers", "1"]) == endings.BROKEN
    assert capsys.readouterr().err == f"dtmega tokenize: {os.strerror(errno.ENOSPC)}\n"
    assert IndexedDataset(tmp_path / "out").n_tokens == len("some text")


def test_a_reader_of_the_output_who_leaves_ends_a_command_without_a_word(finished):
    argv = [sys.executable, "-m", "dtmega", "inspect", "--quick", str(finished)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    reader, writer = os.pipe()
    os.close(reader)
    ended = subprocess.run(argv, check=False, env=environment, stdout=writer, stderr=subprocess.PIPE)
    os.close(writer)
    assert (ended.returncode, ended.stderr) == (endings.BROKEN, b"")


def test_tokenize_starts_without_torch_and_writes_out_letters_that_the_terminal_does_not_have(text):
    argv = ["--input", str(text), "--tokenizer", "bytes", "--workers", "1", "--output", str(text.parent / "é")]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "ascii"}
    command_line = [sys.executable, "-X", "importtime", "-m", "dtmega", "tokenize", *argv]
    ended = subprocess.run(command_line, check=False, env=environment, capture_output=True)
    assert ended.returncode == exit_codes.DONE
    assert b"/\\xe9.bin" in ended.stdout
    imported = {line.rpartition(b"|")[2].strip() for line in ended.stderr.splitlines()}
    assert b"dtmega.data.preparing.tokenize" in imported
    assert b"torch" not in imported


class Live:
    """A run that goes on: what is being saved is published after rank 0 has looked for the newest checkpoint."""

    def __init__(self, run: Path, saving: Path) -> None:
        self.run, self.saving = run, saving

    def __call__(self) -> None:
        honest, rank = sources.open_checkpoint, dist.get_rank()

        def open_checkpoint(path: str) -> Any:
            while rank == 1 and not (self.run / "rank 0 has looked").exists():
                time.sleep(0.01)
            if rank == 1:
                self.saving.rename(self.run / "checkpoints" / "step-00000002")
            checkpoint = honest(path)
            if rank == 0:
                (self.run / "rank 0 has looked").touch()
            return checkpoint

        sources.open_checkpoint = open_checkpoint


def rank_1_raises(function: str, error: Exception) -> None:
    module = hf_export if function == "export" else sources

    def raising(*args: Any, **options: Any) -> None:
        raise error

    if dist.get_rank() == 1:
        setattr(module, function, raising)


def convert_on_a_rank(argv: list[str], port: int, plant: Callable[[], object]) -> tuple[int, str]:
    """Run as one of two processes that were started by hand: rank 0 holds the store, and takes it with it."""
    plant()
    hf_export.export = partial(hf_export.export, max_file_bytes=12_000)  # so that both write
    os.environ.update(RANK=str(dist.get_rank()), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.barrier()
    dist.destroy_process_group()
    with contextlib.redirect_stderr(io.StringIO()) as said:
        return command(argv), said.getvalue()


def convert_on_two(source: Path, target: Path, plant: Callable[[], object] = tuple) -> tuple[list[int], list[str]]:
    """Exit codes and lines."""
    argv = ["convert", "--from", "dtmega", str(source), "--to", "hf", str(target)]
    results = ranks.run(2, convert_on_a_rank, argv, free_port(), plant)
    return [code for code, _ in results], [said for _, said in results if said]


def test_what_all_ranks_of_a_conversion_find_is_said_by_one(finished):
    codes, said = convert_on_two(finished, finished)
    assert codes == [exit_codes.REFUSED, exit_codes.REFUSED]
    assert said == [f"dtmega convert: {finished} exists already; expected a new folder, or an empty one\n"]


@pytest.mark.parametrize(
    ("function", "error", "code"),
    [
        ("open_checkpoint", Damaged("not intact"), exit_codes.DAMAGED),
        ("export", ValueError("not intact"), exit_codes.REFUSED),  # when rank 0 waits to write already
        ("export", OSError(errno.EIO, "not intact"), endings.BROKEN),
    ],
)
def test_what_one_rank_of_a_conversion_refuses_ends_all_with_its_line_and_nothing_is_written(
    tmp_path, finished, function, error, code
):
    ended = convert_on_two(finished, tmp_path / "out", partial(rank_1_raises, function, error))
    assert ended == ([code, code], ["dtmega convert: rank 1: not intact\n"])
    assert not any(tmp_path.iterdir())


def other_weights_on_rank_1(path: Path) -> None:
    """It reads those of `path`, under the name that rank 0 has found."""
    honest = sources.open_checkpoint

    def open_checkpoint(found: str) -> Any:
        checkpoint = honest(str(path))
        checkpoint.path = found
        return checkpoint

    if dist.get_rank() == 1:
        sources.open_checkpoint = open_checkpoint


def changed(weights: Weights) -> Memory:
    return Memory({name: weights.read(name) + 1 for name in weights.tensors})


def test_ranks_that_see_other_weights_under_one_name_write_nothing(tmp_path, finished):
    checkpoint = open_checkpoint(str(finished))
    to_checkpoint.write(
        str(tmp_path / "other"), changed(Weights(checkpoint)), BloomKeys(**state_of(checkpoint).config["model"])
    )
    plant = partial(other_weights_on_rank_1, tmp_path / "other")
    codes, said = convert_on_two(finished, tmp_path / "out", plant)
    assert codes == [exit_codes.REFUSED, exit_codes.REFUSED]
    assert [line.count(f"the ranks do not have the same source: {checkpoint.path} is") for line in said] == [1]
    assert not (tmp_path / "out").exists()


def test_a_conversion_sends_a_heartbeat_before_each_tensor(tmp_path, finished, monkeypatch):
    heartbeats: list[Startup] = []

    def heartbeat(self: Startup) -> None:
        heartbeats.append(self)

    monkeypatch.setattr(Startup, "heartbeat", heartbeat)
    argv = ["convert", "--from", "dtmega", str(finished), "--to", "dtmega", str(tmp_path / "out")]
    assert command(argv) == exit_codes.DONE
    assert len(heartbeats) == len(Weights(open_checkpoint(str(finished))).tensors)


def test_ranks_write_the_one_checkpoint_that_rank_0_has_found_though_the_run_goes_on(tmp_path, finished):
    checkpoint = open_checkpoint(str(finished))
    model = BloomKeys(**state_of(checkpoint).config["model"])
    weights = Weights(checkpoint)
    first, second = tmp_path / "run" / "checkpoints" / "step-00000001", tmp_path / "saving"
    first.parent.mkdir(parents=True)
    to_checkpoint.write(str(first), weights, model)
    to_checkpoint.write(str(second), changed(weights), model)
    live = Live(tmp_path / "run", second)
    assert convert_on_two(tmp_path / "run", tmp_path / "out", live) == ([exit_codes.DONE, exit_codes.DONE], [])
    assert (tmp_path / "run" / "checkpoints" / "step-00000002").is_dir()
    assert (
        command(["convert", "--from", "dtmega", str(first), "--to", "hf", str(tmp_path / "alone")]) == exit_codes.DONE
    )
    assert len([*(tmp_path / "out").glob("*.safetensors")]) > 1
    written, truth = stored(tmp_path / "out"), stored(tmp_path / "alone")
    assert written.keys() == truth.keys()
    assert all(torch.equal(written[name], truth[name]) for name in truth)


def stored(folder: Path) -> dict[str, torch.Tensor]:
    """The content of all files of a directory together."""
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


# Options with a text that is no path: names, and what the model reads.
NO_PATHS = {
    *("prompt", "tasks", "prefix", "dtype", "allow_nonfinite", "json_key", "set", "allow_missing", "memory", "reserve"),
}


def test_a_script_whose_urls_hold_credentials_is_not_translated(tmp_path, capsys):
    script = tmp_path / "a.sh"
    script.write_text("pretrain_gpt.py --num-layers 2 --save s3://u:SECRET@b/x\n")
    assert command(["from-megatron", str(script)]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert "a URL in the command holds credentials" in said.err
    assert "SECRET" not in said.err


@pytest.mark.parametrize("name", [name for name in commands.COMMANDS if name != "train"])
def test_every_path_of_a_command_is_checked(name: str):
    parser = argparse.ArgumentParser()
    commands.module_of(name).add_arguments(parser)
    texts = {a.dest for a in parser._actions if a.type is None and a.nargs != 0 and a.choices is None}
    assert texts <= NO_PATHS


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ("tokenize --input a.txt --tokenizer bytes --output s3:/b/x", "--output: expected s3://b/x"),
        ("tokenize --input a.txt --tokenizer bytes --output memory://b/x", "--output: expected a local path"),
        ("convert --from hf a --to hf s3:/b/x", "--to: expected s3://b/x"),
        ("report runs/a --output gs:/x.html", "--output: expected gs://x.html"),
        ("generate memory://u:SECRET@h/x --prompt a", "RUN: memory://***@h/x is given with credentials"),
        ("from-megatron https://SECRET@h/x", "source: https://***@h/x is given with credentials"),
        ("generate runs/a --whatever s3://SECRET@h/x", "s3://***@h/x"),
    ],
)
def test_paths_meant_as_urls_and_urls_with_credentials_are_refused_in_one_line(argv, words, capsys):
    with pytest.raises(SystemExit):
        command(argv.split())
    said = capsys.readouterr().err
    assert words in said
    assert "SECRET" not in said
    assert said.count("\n") == 1
