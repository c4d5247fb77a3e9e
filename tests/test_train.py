"""train.py as a user runs it, on a corpus and a model small enough for seconds."""

import contextlib
import io
import itertools
import json
import os
import re
import signal
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import numpy as np
import pytest
import tomli
import torch
import torch.distributed as dist

from dtmega import config, mesh, train
from dtmega.__main__ import main as command
from dtmega.config import help
from dtmega.data.indexed_files.record import ChatRecord
from dtmega.data.indexed_files.writer import IndexedWriter, text_of
from dtmega.data.tokenizers.chat import Chat, find_template
from dtmega.data.tokenizers.load import load_tokenizer
from dtmega.distributed import exit_codes
from dtmega.distributed.agreement import Startup
from dtmega.inference.trained import open_trained
from dtmega.ops.cpu import contention
from dtmega.training import history, start
from tests import ranks

ROOT = Path(__file__).resolve().parent.parent
VOCAB = 257  # the bytes and end-of-document


def arguments(run_dir: Path, corpus: str, **overrides: object) -> list[str]:
    """Keys are section__key."""
    keys = {
        "run__dir": run_dir,
        "model__vocab_size": VOCAB,
        "model__hidden_size": 32,
        "model__n_layers": 2,
        "model__n_heads": 4,
        "data__path": corpus,
        "data__tokenizer": "bytes",
        "data__seq_len": 32,
        "data__split": "8,1,1",
        "data__num_workers": 0,
        "batch__micro_batch_size": 4,
        "batch__global_batch_size": 8,
        "optim__lr": 1e-2,
        "train__steps": 10,
        "eval__interval": 5,
        "eval__steps": 2,
        "eval__sample_tokens": 4,
        "log__tensorboard": "false",
        "checkpoint__interval": 0,
        "precision__params": "float32",
    } | overrides
    flags = [word for k, v in keys.items() for word in ("--" + k.replace("__", "."), str(v))]
    return ["--config", str(ROOT / "tests" / "small.toml"), *flags]


def run(run_dir: Path, corpus: str, **overrides: object) -> int:
    """train.py in this process; returns the exit code."""
    try:
        return train.main(arguments(run_dir, corpus, **overrides))
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def metrics(run_dir: Path) -> list[dict]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def ending(run_dir: Path) -> dict:
    return json.loads((run_dir / "exit.json").read_text())


def losses(run_dir: Path) -> list[float]:
    return [line["loss"] for line in metrics(run_dir) if "loss" in line]


def test_a_run_learns_and_leaves_what_the_contract_names(tmp_path, corpus, capsys):
    assert run(tmp_path, corpus, train__steps=30, log__tensorboard="true", checkpoint__interval=10) == 0
    steps = [line for line in metrics(tmp_path) if "loss" in line]
    assert [line["step"] for line in steps] == list(range(1, 31))
    contract = {"step", "loss", "grad_norm", "lr", "tokens", "tokens_per_s", "mfu", "peak_memory_bytes", "step_time_s"}
    assert contract <= steps[0].keys()
    assert steps[-1]["tokens"] == 30 * 8 * 32
    validation = [line["val_loss"] for line in metrics(tmp_path) if "val_loss" in line]
    assert len(validation) == 1 + 30 // 5
    assert validation[-1] < validation[0] - 1
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {
        "config.toml",
        "metrics.jsonl",
        "starts.jsonl",
        "sample.json",
        "checkpoints",
        "tensorboard",
        "exit.json",
        ".lock",
    }
    assert [path.name for path in sorted((tmp_path / "checkpoints").glob("[!.]*"))] == [
        "step-00000020",
        "step-00000030",
    ]
    output = capsys.readouterr().out
    assert "ppl" in output
    sample = json.loads((tmp_path / "sample.json").read_text())
    assert (sample["step"], sample["text"][:4]) == (30, "def ")
    assert f"a sample:\n{sample['text']}\n" in output
    assert output.endswith(f"to look at it: dtmega report {tmp_path}\n")
    assert str(tmp_path) in output


def conversations(folder: Path, n: int, name: str = "chat", **chat_record: Any) -> str:
    """A prefix of conversations in bytes, each of 8 tokens."""
    tokenizer = load_tokenizer("bytes")
    made = {"template": "t", "train_on": "assistant", "end_ids": [ord("s")], "learned": 3 * n, "refused": {}}
    chat = ChatRecord.model_validate(made | chat_record)
    with IndexedWriter(folder / name, np.dtype("<u2")) as writer:
        for i in range(n):
            writer.add([*f"{i:05d}".encode(), *b"yes"], [5, 3])
        writer.about = text_of(tokenizer, writer, chat=chat)
    return str(folder / name)


def test_a_run_of_some_epochs_of_conversations_ends_with_their_last_whole_batch(tmp_path, capsys):
    # A row has room for 32 inputs, so for 4 conversations of 7 inputs. 8 of 10 parts of 210 make 42 rows, and 5.25
    # batches of 8 an epoch.
    chat = conversations(tmp_path, 210)
    keys = {"data__objective": "conversations", "train__steps": 0, "train__epochs": 2, "eval__prompt": ""}
    assert run(tmp_path / "run", chat, **keys, train__exit_interval=7) == 0
    assert "epochs: 2, 84 sequences, the last 4 left out, less than a batch" in capsys.readouterr().out
    assert run(tmp_path / "run", chat, **keys) == 0
    assert "train: 168 conversations in 42 rows, 88% full" in capsys.readouterr().out
    assert [line["step"] for line in metrics(tmp_path / "run") if "loss" in line] == list(range(1, 11))
    assert losses(tmp_path / "run")[-1] < losses(tmp_path / "run")[0] - 0.5
    assert run(tmp_path / "run", chat, **keys | {"train__epochs": 3}) == 0
    assert "train.epochs 2 → 3: 5 steps are left, not 0" in capsys.readouterr().out
    assert len(losses(tmp_path / "run")) == 15  # 126 sequences


def test_what_ends_a_learned_turn_ends_answers_and_the_texts_of_an_export(tmp_path):
    chat = conversations(tmp_path, 40)
    keys = {"data__objective": "conversations", "train__steps": 1, "eval__interval": 0, "eval__prompt": ""}
    assert run(tmp_path / "run", chat, **keys) == 0
    trained = open_trained(str(tmp_path / "run"), None, {}, Startup())
    assert trained.end_ids == [ord("s")]
    assert Chat(trained.tokenizer, find_template(trained.tokenizer), trained.end_ids).end_ids == {256, ord("s")}
    assert command(["convert", "--from", "dtmega", str(tmp_path / "run"), "--to", "hf", str(tmp_path / "hf")]) == 0
    assert json.loads((tmp_path / "hf" / "generation_config.json").read_text())["eos_token_id"] == [256, ord("s")]


def test_an_answer_ends_at_every_token_that_ends_a_learned_turn_in_any_of_the_sets(tmp_path, capsys):
    # Together the two sets have every token end a turn, so an answer has none.
    sets = [
        conversations(tmp_path, 40, name, end_ids=[*ids]) for name, ids in (("a", range(99)), ("b", range(99, 256)))
    ]
    keys = {"data__objective": "conversations", "train__steps": 1, "eval__interval": 0, "eval__prompt": ""}
    assert run(tmp_path / "run", json.dumps(sets), **keys) == 0
    assert open_trained(str(tmp_path / "run"), None, {}, Startup()).end_ids == [*range(256)]
    capsys.readouterr()
    assert command(["generate", str(tmp_path / "run"), "--chat", "--prompt", "Hi"]) == 0
    assert capsys.readouterr().out == "\n"


def test_sets_of_conversations_that_were_made_in_two_ways_are_refused_in_one_run(tmp_path, capsys):
    sets = [conversations(tmp_path, 40, name, train_on=name) for name in ("assistant", "last")]
    assert run(tmp_path / "run", json.dumps(sets), data__objective="conversations") == exit_codes.REFUSED
    assert "last.bin: expected conversations in template t with --train-on assistant" in capsys.readouterr().err


def test_an_epoch_of_running_text_has_each_token_once(tmp_path, corpus, capsys):
    assert run(tmp_path, corpus, train__steps=0, train__epochs=1, eval__interval=0) == 0
    n_tokens = int(re.findall(r"data: ([\d,]+) training tokens", capsys.readouterr().out)[0].replace(",", ""))
    assert len(losses(tmp_path)) == n_tokens // 32 // 8


def test_a_run_on_cores_that_others_use_says_so_once(tmp_path, corpus, capsys, monkeypatch):
    waited_s = itertools.count(0, 10**6)
    monkeypatch.setattr(contention, "_waited_s", lambda: next(waited_s))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert run(tmp_path, corpus, train__steps=contention.TO + 2, eval__interval=0, checkpoint__final="false") == 0
    assert capsys.readouterr().out.count("other processes use this machine's cores") == 1
    keys = {"eval__interval": 0, "train__exit_interval": contention.TO + 2}
    run(tmp_path / "cut", corpus, train__steps=2 * contention.TO + 4, **keys)
    assert capsys.readouterr().out.count("other processes use this machine's cores") == 1
    run(
        tmp_path / "cut", corpus, train__steps=2 * contention.TO + 4, **keys
    )  # goes on, perhaps beside others than before
    assert capsys.readouterr().out.count("other processes use this machine's cores") == 1


def test_the_resolved_config_runs_again_and_gives_the_same_losses(tmp_path, corpus):
    run(tmp_path / "a", corpus, batch__micro_batch_size=0)
    resolved = tmp_path / "a" / "config.toml"
    assert "micro_batch_size = 0\n" in resolved.read_text()  # so that it runs on another layout
    assert train.main(["--config", str(resolved), "--run.dir", str(tmp_path / "b")]) == 0
    assert losses(tmp_path / "b") == losses(tmp_path / "a")


def until_sigterm(argv: list[str]) -> tuple[int, str]:
    """Exit code and output of train.py on this rank, which gets SIGTERM in its fourth step."""
    honest, steps = train.train_step, []

    def train_step(*args):
        steps.append(None)
        if len(steps) == 4:
            os.kill(os.getpid(), signal.SIGTERM)
        return honest(*args)

    train.train_step = train_step
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1"}
    with contextlib.redirect_stdout(io.StringIO()) as output:
        code = train.main(argv)
    return code, output.getvalue()


# What is read ahead must not count; in the trainer itself nothing is.
@pytest.mark.parametrize("workers", [pytest.param(0, marks=pytest.mark.full), 1])
def test_a_run_stopped_by_sigterm_goes_on_with_the_bits_it_would_have_had(tmp_path, corpus, workers):
    keys = {"train__steps": 7, "eval__interval": 0, "log__interval": 1, "data__num_workers": workers}
    keys |= {"model__hidden_dropout": 0.1, "model__attention_dropout": 0.1, "batch__rampup": "[4, 4, 24]"}
    assert run(tmp_path / "whole", corpus, **keys | {"data__num_workers": 0}) == 0
    ((code, output),) = ranks.run(1, until_sigterm, arguments(tmp_path / "cut", corpus, **keys))
    assert code == exit_codes.PREEMPTED
    assert "stopped after step 4 of 7: a signal asked for it" in output
    assert len(losses(tmp_path / "cut")) == 4
    newest = f"{tmp_path}/cut/checkpoints/step-00000004"
    reason = "a signal asked for it"
    assert exit_codes.ExitRecord.read(tmp_path / "cut") == (75, reason, 4, newest, ANY)
    assert run(tmp_path / "cut", corpus, **keys) == 0
    assert losses(tmp_path / "cut") == losses(tmp_path / "whole")
    assert [line["step"] for line in metrics(tmp_path / "cut") if "loss" in line] == list(range(1, 8))


# test_resume.py says it of float32.
@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.full), "bfloat16"])
def test_exit_interval_saves_and_exits_and_the_same_command_goes_on(tmp_path, corpus, dtype):
    keys = {"precision__params": dtype, "eval__interval": 4}  # an evaluation comes just before each save
    run(tmp_path / "whole", corpus, **keys)
    for expected in (4, 8, 10):
        assert run(tmp_path / "cut", corpus, train__exit_interval=4, **keys) == 0
        assert len(losses(tmp_path / "cut")) == expected
    assert losses(tmp_path / "cut") == losses(tmp_path / "whole")
    begun = history.read(tmp_path / "cut")
    assert [(each.step, each.steps, each.device) for each in begun] == [(step, 10, "cpu") for step in (0, 4, 8)]
    assert begun[0].layout == {"processes": 1, "pp": 1, "dp_replicate": 1, "dp_shard": 1, "cp": 1, "tp": 1}
    assert begun[-1].config == tomli.loads((tmp_path / "cut" / "config.toml").read_text())


def test_a_checkpoint_outlives_no_line_of_metrics_and_no_configuration_in_a_power_cut(tmp_path, corpus, monkeypatch):
    """The test notes, at each rename of a checkpoint, the files and folders of it that have been synced."""
    synced: dict[str, str] = {}
    published: list[tuple[int, dict[str, str]]] = []
    fsync, rename = os.fsync, os.rename

    def noted_fsync(fd: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{fd}"))
        inside = sorted(entry.name for entry in path.iterdir()) if path.is_dir() else path.read_bytes()
        synced[path.name] = str(inside)
        fsync(fd)

    def noted_rename(old: Path, new: Path) -> None:
        if new.name.startswith("step-"):
            published.append((int(new.name[5:]), dict(synced)))
        rename(old, new)

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(os, "rename", noted_rename)
    folder = tmp_path / "runs" / "a"
    assert run(folder, corpus, checkpoint__interval=4, checkpoint__keep=9) == 0
    assert [step for step, _ in published] == [4, 8, 10]
    for step, there in published:
        assert f'"step": {step}, "loss"' in there["metrics.jsonl"]
        assert "'runs'" in there[tmp_path.name]
        assert "'a'" in there["runs"]
        assert all(f"'{name}'" in there["a"] for name in ("checkpoints", "config.toml", "metrics.jsonl"))


def test_a_finished_run_only_evaluates_again(tmp_path, corpus, capsys):
    run(tmp_path, corpus)
    before = metrics(tmp_path)
    assert run(tmp_path, corpus) == 0
    assert "nothing to train" in capsys.readouterr().out
    assert metrics(tmp_path) == before


def test_a_named_older_checkpoint_is_where_the_run_goes_on_and_newer_ones_are_kept_aside(tmp_path, corpus):
    run(tmp_path, corpus, checkpoint__interval=4, checkpoint__keep=9)
    before = losses(tmp_path)
    older = tmp_path / "checkpoints" / "step-00000004"
    assert run(tmp_path, corpus, checkpoint__resume=older) == 0
    assert losses(tmp_path) == before
    aside = sorted(path.name for path in (tmp_path / "checkpoints" / "superseded-1").iterdir())
    assert aside == ["step-00000008", "step-00000010"]


def test_a_named_run_goes_on_from_its_newest_checkpoint_in_another_directory(tmp_path, corpus):
    first, second = tmp_path / "first", tmp_path / "second"
    run(first, corpus, checkpoint__interval=4, checkpoint__keep=9, train__steps=8)
    run(tmp_path / "whole", corpus)
    assert run(second, corpus, checkpoint__resume=first) == 0
    assert losses(second) == losses(tmp_path / "whole")[8:]
    assert sorted(path.name for path in (first / "checkpoints").glob("step-*")) == ["step-00000004", "step-00000008"]


def test_microbatches_do_not_change_the_numbers(tmp_path, corpus):
    curves = []
    short = {"train__steps": 5, "eval__interval": 0, "model__hidden_dropout": 0.1}
    for size in (8, 4, 1):
        run(tmp_path / str(size), corpus, batch__micro_batch_size=size, **short)
        curves.append(losses(tmp_path / str(size)))
    for curve in curves[1:]:
        assert curve == pytest.approx(curves[0], rel=1e-5)


def test_bf16_follows_fp32_within_its_rounding(tmp_path, corpus):
    run(tmp_path / "fp32", corpus, eval__interval=0)
    run(tmp_path / "bf16", corpus, eval__interval=0, precision__params="bfloat16")
    # bf16 has 8 bits: 2^-9 per rounding; ten steps at this learning rate amplify it to about 1e-2.
    assert losses(tmp_path / "bf16") == pytest.approx(losses(tmp_path / "fp32"), rel=2e-2)
    assert losses(tmp_path / "bf16") != losses(tmp_path / "fp32")


def test_params_left_to_the_machine_are_settled_once_and_kept(tmp_path, corpus, monkeypatch, capsys):
    keys = {"precision__params": "auto", "train__exit_interval": 5}
    run(tmp_path / "whole", corpus, precision__params="bfloat16")
    monkeypatch.setattr(mesh, "has_fast_bfloat16", lambda device: True)
    run(tmp_path / "cut", corpus, **keys)
    assert "computed in bfloat16: bfloat16 is fast here ([precision] params = 'auto')" in capsys.readouterr().out
    assert 'params = "bfloat16"' in (tmp_path / "cut" / "config.toml").read_text()
    monkeypatch.setattr(mesh, "has_fast_bfloat16", lambda device: False)  # it goes on elsewhere
    run(tmp_path / "cut", corpus, **keys)
    said = capsys.readouterr().out
    assert "computed in bfloat16: as it began" in said
    assert "changed since the checkpoint" not in said
    assert losses(tmp_path / "cut") == losses(tmp_path / "whole")
    run(tmp_path / "elsewhere", corpus, **keys | {"train__steps": 1})
    assert 'params = "float32"' in (tmp_path / "elsewhere" / "config.toml").read_text()


def params_of_a_group(argv: list[str]) -> str:
    """The dtype that this rank computes in, where only the machine of rank 0 is fast in bfloat16."""
    mesh.has_fast_bfloat16 = lambda device: dist.get_rank() == 0
    with contextlib.ExitStack() as closing:
        begun, _ = train.begin(argv, Startup(), closing, exit_codes.ExitStatus())
        return begun.cfg.precision.params


def test_params_left_to_machines_that_differ_are_rank_0s_on_all_ranks(tmp_path, corpus):
    argv = arguments(tmp_path, corpus, precision__params="auto")
    assert ranks.run(2, params_of_a_group, argv) == ["bfloat16", "bfloat16"]


def test_masks_change_the_loss_and_train(tmp_path, corpus):
    short = {"train__steps": 4, "eval__interval": 0}
    run(tmp_path / "plain", corpus, **short)
    for key in ("eod_mask_loss", "reset_position_ids", "reset_attention_mask"):
        assert run(tmp_path / key, corpus, **short, **{f"data__{key}": "true"}) == 0
        # ALiBi has no positions that could start again.
        assert (losses(tmp_path / key) == losses(tmp_path / "plain")) == (key == "reset_position_ids"), key


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"model__n_head": 4}, "did you mean --model.n_heads?"),
        ({"model__n_heads": 5}, "n_heads=5 does not divide hidden_size=32"),
        ({"optim__lr": "fast"}, "--optim.lr"),
        ({"model__vocab_size": 256}, "vocab_size=256 is smaller than the 257 ids"),
        ({"data__path": "no/such"}, "no/such"),
        ({"data__seq_len": 100_000}, "seq_len"),
        ({"data__tokenizer": "nonsense"}, "nonsense"),
        (
            {"checkpoint__resume": "no/such"},
            "no/such is neither a checkpoint nor a run directory with one ([checkpoint]",
        ),
        (
            {"checkpoint__resume": "latest"},
            "with one; the newest checkpoint of this run is 'auto' ([checkpoint] resume)",
        ),
        ({"run__device": "cuda"}, "has 0"),
    ],
)
def test_what_cannot_be_is_one_message_and_exit_code_2_before_any_process_group(
    tmp_path, corpus, capsys, overrides, message
):
    if torch.cuda.is_available() and "run__device" in overrides:
        overrides, message = {"run__device": "tpu"}, "tpu"
    assert run(tmp_path / "run", corpus, **overrides) == 2
    assert message in capsys.readouterr().err
    assert not dist.is_initialized()
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"mesh__tp": 2}, "does not make 1 process, "),
        ({"mesh__pp": 2, "mesh__dp_shard": 1}, "!= 1"),
        ({"pipeline__draw": "x.svg"}, "there is no pipeline for [pipeline] draw"),
    ],
)
def test_a_mesh_that_cannot_be_is_refused_in_the_same_way(tmp_path, corpus, capsys, overrides, message):
    assert run(tmp_path / "run", corpus, **overrides) == 2
    assert message in capsys.readouterr().err


def test_a_checkpoint_of_another_model_is_refused_with_the_key(tmp_path, corpus, capsys):
    run(tmp_path, corpus)
    assert run(tmp_path, corpus, model__hidden_size=64) == 2
    refusal = capsys.readouterr().err
    assert "[model] hidden_size was 32, is 64" in refusal
    assert exit_codes.ExitRecord.read(tmp_path) == (2, ANY, 10, f"{tmp_path}/checkpoints/step-00000010", ANY)
    assert refusal.endswith(f"dtmega: {ending(tmp_path)['reason']}\n")


def test_ids_outside_the_vocabulary_name_the_file(tmp_path, capsys):
    prefix = tmp_path / "wrong"
    with IndexedWriter(prefix, np.dtype(np.uint16)) as writer:
        for _ in range(100):
            writer.add([1] * 50 + [999])
    assert run(tmp_path / "run", str(prefix)) == 2
    assert "wrong.bin" in capsys.readouterr().err


def poison(monkeypatch, steps: set[int], value: float) -> None:
    """The loss of these steps is multiplied by `value`."""
    honest = start.parallelize
    calls = []

    def build(*args):
        model = honest(*args)
        forward = model.stages[0].forward

        def poisoned(*inputs, **keywords):
            found = forward(*inputs, **keywords)
            if torch.is_grad_enabled():
                calls.append(None)
                if len(calls) in steps:
                    found["lm"] = found["lm"] * value
            return found

        monkeypatch.setattr(model.stages[0], "forward", poisoned)
        return model

    monkeypatch.setattr(start, "parallelize", build)


def test_too_many_skipped_steps_in_a_row_stop_the_run(tmp_path, corpus, monkeypatch):
    poison(monkeypatch, set(range(3, 100)), float("nan"))
    with pytest.raises(RuntimeError, match=r"4 steps in a row .* samples 40 to 47"):
        run(tmp_path, corpus, batch__micro_batch_size=8, train__max_skipped=3)
    reason = "RuntimeError: 4 steps in a row had a loss or gradient that is not finite"
    told = exit_codes.ExitRecord.read(tmp_path)
    assert told is not None
    assert told.reason.startswith(reason)
    assert told == (1, ANY, 6, "", ANY)


def test_an_error_before_the_first_step_is_told_too(tmp_path, corpus, monkeypatch):
    assert run(tmp_path, corpus, train__steps=2, eval__interval=0) == 0
    monkeypatch.setattr(train, "check_same_batch", lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run(tmp_path, corpus, eval__interval=0)
    newest = f"{tmp_path}/checkpoints/step-00000002"
    why = "ZeroDivisionError: division by zero"
    assert exit_codes.ExitRecord.read(tmp_path) == (1, why, 2, newest, ANY)
    monkeypatch.setattr(start, "Metrics", lambda *args, **keywords: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run(tmp_path, corpus, eval__interval=0)
    assert exit_codes.ExitRecord.read(tmp_path) == (1, why, 2, newest, ANY)
    with pytest.raises(ZeroDivisionError):
        run(tmp_path, corpus, eval__interval=0, checkpoint__resume="none")
    assert exit_codes.ExitRecord.read(tmp_path) == (1, why, 0, "", ANY)


def test_generate_continues_a_prompt_from_the_last_checkpoint(tmp_path, corpus, capsys):
    run(tmp_path, corpus, train__steps=60, eval__interval=0, eval__sample_tokens=0)
    capsys.readouterr()
    prompt = "ABCDEFGH"
    assert command(["generate", "--run", str(tmp_path), "--prompt", prompt, "--tokens", "4", "--temperature", "0"]) == 0
    assert capsys.readouterr().out.strip() == "ABCDEFGHIJKL"  # the corpus counts


def test_generate_without_a_run_says_so(tmp_path, capsys):
    assert command(["generate", "--run", str(tmp_path), "--prompt", "x"]) == 2
    assert "neither a checkpoint nor a run directory" in capsys.readouterr().err


def test_help_lists_every_key(capsys):
    with pytest.raises(SystemExit) as stop:
        train.main(["--help"])
    assert stop.value.code == 0
    output = capsys.readouterr().out
    for group in help.groups_of(config.Config):
        assert all(f"--{group.section}.{key} " in output for key in group.fields)
