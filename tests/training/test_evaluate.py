"""evaluate.py, and the signals that end it: in training, before it and after it, on one rank and on several."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
from collections.abc import Callable, Iterator
from functools import partial, partialmethod
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.utils import counters

from dtmega import train
from dtmega.checkpoint.run import Checkpoints
from dtmega.data.loader import TrainBatches
from dtmega.distributed import exit_codes
from dtmega.distributed.agreement import Startup
from dtmega.inference.trained import open_trained
from dtmega.models.generate import Sampling, generate
from dtmega.training import evaluate
from dtmega.training.metrics import Metrics
from dtmega.training.sharded_model import ShardedModel
from tests import ranks
from tests.layouts import DEBUG, write_text
from tests.resumed import Record, Training, flags, train_all
from tests.test_faults import alone, replaced
from tests.test_train import run

STEPS = 6


@pytest.fixture(scope="module")
def keys(tmp_path_factory) -> dict[str, Any]:
    """The keys of a run with a long evaluation after its steps 0, 3 and 6."""
    sizes = {"model.n_layers": 1, "batch.micro_batch_size": 4}
    short = {"train.steps": STEPS, "eval.interval": 3, "eval.steps": 12, "eval.sample_tokens": 5}
    return DEBUG | write_text(tmp_path_factory.mktemp("text")) | sizes | short


@pytest.fixture(scope="module")
def truth(tmp_path_factory, keys) -> Record:
    """The result of a run that nothing happens to."""
    folder = tmp_path_factory.mktemp("truth")
    assert alone(keys, folder) == 0
    return Record(folder)


@contextlib.contextmanager
def signal_in_batch(n: int, number: int = signal.SIGTERM, rank: int = 0) -> Iterator[list[int]]:
    """A signal comes to a rank while it computes the n-th batch of all evaluations; counts the batches."""
    batches: list[int] = []
    honest = ShardedModel.losses

    def losses(self: ShardedModel, microbatches: Any) -> torch.Tensor:
        batches.append(len(batches) + 1)
        if len(batches) == n and dist.get_rank() == rank:
            os.kill(os.getpid(), number)
        return honest(self, microbatches)

    with replaced(ShardedModel, "losses", losses):
        yield batches


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def validations(folder: Path) -> list[dict[str, Any]]:
    return [line for line in lines(folder) if "val_loss" in line]


def same_numbers(folder: Path, truth: Record) -> bool:
    run = Record(folder)
    weights = all(torch.equal(run.final[name], weight) for name, weight in truth.final.items())
    return weights and run.series("loss") == truth.series("loss")


def test_an_evaluation_is_the_mean_over_its_tokens_however_many_samples_a_batch_has(tmp_path, corpus):
    found = []
    for size in (1, 2, 64):  # many samples of eight tokens are all prefix, and bear no loss
        keys = {"data__objective": "prefix-lm", "data__reset_attention_mask": "true", "data__seq_len": 8}
        keys |= {"train__steps": 1, "eval__interval": 1, "eval__sample_tokens": 0}
        keys |= {"batch__micro_batch_size": size, "batch__global_batch_size": size, "eval__steps": 64 // size}
        assert run(tmp_path / str(size), corpus, **keys) == 0
        found += [line["val_loss"] for line in lines(tmp_path / str(size)) if line["step"] == 0]
    assert found == [pytest.approx(found[-1], rel=1e-6)] * 3


def test_the_losses_of_routers_are_in_the_loss_of_training_and_not_in_that_of_an_evaluation(tmp_path, corpus):
    keys = {"model__name": "moe", "model__n_layers": 2, "model__balance_loss": 0.5}
    keys |= {"train__steps": 1, "eval__interval": 1, "eval__steps": 1, "eval__sample_tokens": 0}
    assert run(tmp_path, corpus, **keys) == 0
    (step,) = [line for line in lines(tmp_path) if "loss" in line]
    assert step["loss"] == pytest.approx(step["lm"] + 0.5 * 2 * step["balance"], rel=1e-6)
    evaluations = [line for line in lines(tmp_path) if "val_loss" in line]
    assert [line["val_loss"] for line in evaluations] == [line["val_lm"] for line in evaluations]
    assert all(line["val_balance"] >= 0.5 for line in evaluations)


def test_the_share_of_dropped_pairs_is_reported_and_is_in_no_loss(tmp_path, corpus):
    # Each token uses both experts, and each expert takes half of them.
    keys = {"model__name": "moe", "model__n_layers": 2, "model__n_experts": 2, "model__capacity_factor": 0.5}
    keys |= {"train__steps": 1, "eval__interval": 1, "eval__steps": 1, "eval__sample_tokens": 0}
    assert run(tmp_path, corpus, **keys) == 0
    steps = [line for line in lines(tmp_path) if "loss" in line]
    evaluations = [line for line in lines(tmp_path) if "val_loss" in line]
    assert [(line["dropped"], line["loss"]) for line in steps] == [(0.5, line["lm"]) for line in steps]
    assert [(e["val_dropped"], e["val_loss"]) for e in evaluations] == [(0.5, e["val_lm"]) for e in evaluations]
    assert (len(steps), len(evaluations)) == (1, 2)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_during_an_evaluation_ends_it_after_the_batch_and_the_step_is_saved(tmp_path, keys, truth, number):
    with signal_in_batch(12 + 2, number) as batches:
        assert alone(keys, tmp_path) == exit_codes.PREEMPTED
    assert len(batches) == 12 + 2
    assert [path.name for path in (tmp_path / "checkpoints").glob("step-*")] == ["step-00000003"]
    assert [line["step"] for line in lines(tmp_path) if "val_loss" in line] == [0]
    assert alone(keys, tmp_path) == 0
    assert same_numbers(tmp_path, truth)
    assert validations(tmp_path) == [line for line in truth.lines if "val_loss" in line]


def failed(*args: Any) -> None:
    raise RuntimeError("planted")


def test_a_validation_that_was_cut_short_is_begun_again_until_it_is_whole_and_stands_once(
    tmp_path, keys, truth, monkeypatch
):
    with signal_in_batch(12 + 2):
        assert alone(keys, tmp_path) == exit_codes.PREEMPTED
    with signal_in_batch(2):
        assert alone(keys, tmp_path) == exit_codes.PREEMPTED
    assert [line["step"] for line in validations(tmp_path)] == [0]
    with monkeypatch.context() as failing:
        failing.setattr(train, "check_learns", failed)
        with pytest.raises(RuntimeError, match="planted"):
            alone(keys, tmp_path)
    assert [line["step"] for line in validations(tmp_path)] == [0, 3]
    assert alone(keys, tmp_path) == 0
    assert same_numbers(tmp_path, truth)
    assert validations(tmp_path) == [line for line in truth.lines if "val_loss" in line]


def test_a_loss_before_the_cut_in_a_validation_of_several_sets_is_counted_once(tmp_path, corpus, capsys):
    keys: dict[str, Any] = {"train__steps": 6, "eval__interval": 1, "eval__steps": 2, "eval__sample_tokens": 0}
    keys |= {"data__validation": f'["second={corpus}"]', "train__stop_validation_rises": 3}
    keys |= {"optim__lr": 1e-30, "optim__min_lr": 0.0}  # no loss is below the first
    with signal_in_batch(4 + 4 + 3):  # in the second set, after step 2
        assert run(tmp_path, corpus, **keys) == exit_codes.PREEMPTED
    assert run(tmp_path, corpus, **keys) == 0
    assert "stop_validation_rises: 3 validations in a row, up to step 4," in capsys.readouterr().out


def test_a_signal_before_the_first_step_ends_the_run_and_the_same_command_starts_it(tmp_path, keys, truth, capsys):
    with signal_in_batch(2) as batches:
        assert alone(keys, tmp_path) == exit_codes.PREEMPTED
    assert len(batches) == 2
    assert lines(tmp_path) == []
    assert "stopped after step 0 of 6: a signal asked for it" in capsys.readouterr().out
    assert alone(keys, tmp_path) == 0
    assert same_numbers(tmp_path, truth)


@pytest.mark.parametrize("batch", [2 * 12 + 3, 3 * 12 + 3])
def test_a_signal_during_the_last_evaluations_leaves_a_run_that_the_same_command_finishes(tmp_path, keys, truth, batch):
    with signal_in_batch(batch):
        assert alone(keys, tmp_path) == exit_codes.PREEMPTED
    assert alone(keys, tmp_path) == 0
    ends = [line for line in lines(tmp_path) if line["step"] == STEPS and {"val_loss", "test_loss"} & line.keys()]
    assert ends == [line for line in truth.lines if line in ends]
    assert len(ends) == 2
    assert same_numbers(tmp_path, truth)


def test_a_signal_during_the_sample_ends_it_with_everything_saved(tmp_path, keys, capsys, monkeypatch):
    honest, tokens = evaluate.signalled, []

    def signalled(run: Any) -> bool:
        if run.watch._last.phase == "sample":
            tokens.append(None)
            if len(tokens) == 2:
                os.kill(os.getpid(), signal.SIGTERM)
        return honest(run)

    monkeypatch.setattr(evaluate, "signalled", signalled)
    assert alone(keys, tmp_path) == exit_codes.PREEMPTED
    assert len(tokens) == 2
    assert "a sample" not in capsys.readouterr().out
    assert [path.name for path in (tmp_path / "checkpoints").glob("step-*")] == ["step-00000006"]


@pytest.fixture(scope="module")
def layouts(tmp_path_factory, keys) -> dict[str, Path]:
    """Runs of several ranks to one of which a signal comes in the evaluation after step 3."""
    folder = tmp_path_factory.mktemp("layouts")
    each = {"tp 2": {"mesh.tp": 2}, "pp 2": {"mesh.pp": 2, "model.n_layers": 2}, "dp 2": {"mesh.dp_shard": 2}}
    plant: Callable[[], Any] = partial(signal_in_batch, 12 + 2, signal.SIGTERM, 1)
    cut = [Training(2, keys | more, folder / name, plant, exit_codes.PREEMPTED) for name, more in each.items()]
    train_all(cut)
    return {name: folder / name for name in each}


@pytest.mark.parametrize("layout", ["tp 2", "pp 2", "dp 2"])
def test_a_signal_to_one_rank_ends_the_evaluation_of_all_at_the_same_batch(layouts, layout):
    assert [path.name for path in (layouts[layout] / "checkpoints").glob("step-*")] == ["step-00000003"]
    assert [line["step"] for line in lines(layouts[layout]) if "val_loss" in line] == [0]


def close_and_signal(argv: list[str], owner: type, name: str) -> int:
    """A run that a signal stops, and a second signal while it closes what it has opened."""
    honest, calls = getattr(owner, name), []
    last = 2 if owner is TrainBatches else 1  # it is also closed before the first step, to begin at a sample

    def signalled_again(self: Any) -> Any:
        calls.append(None)
        if len(calls) == last:
            os.kill(os.getpid(), signal.SIGTERM)
        return honest(self)

    with signal_in_batch(12 + 2), replaced(owner, name, signalled_again):
        return train.main(argv)


@pytest.mark.parametrize("owner", [Metrics, Checkpoints, TrainBatches])
def test_a_second_signal_while_the_run_closes_does_not_change_its_exit_code(tmp_path, keys, owner):
    assert ranks.run(1, close_and_signal, flags(keys, tmp_path), owner, "close") == [exit_codes.PREEMPTED]


@contextlib.contextmanager
def another_draw_on_rank_1() -> Iterator[None]:
    """Let rank 1 draw another second token of the sample: the end of the document."""
    honest, draws = torch.multinomial, []

    def multinomial(*args: Any, **keywords: Any) -> torch.Tensor:
        draws.append(None)
        token = honest(*args, **keywords)
        return torch.zeros_like(token) if len(draws) == 2 and dist.get_rank() == 1 else token

    with replaced(torch, "multinomial", multinomial):
        yield


def test_a_rank_that_draws_another_token_takes_that_of_the_first(tmp_path, keys):
    short = keys | {"train.steps": 1, "eval.interval": 0, "eval.steps": 1, "mesh.dp_shard": 2}
    train_all([Training(2, short, tmp_path, another_draw_on_rank_1)])
    assert "a sample:" in (tmp_path / "stdout-0").read_text()


def test_a_sample_is_of_tokens_that_the_tokenizer_has_though_the_model_has_more(tmp_path, keys, capsys):
    more = {"model.vocab_size": 4096, "train.steps": 1, "eval.interval": 0, "eval.steps": 1}
    assert alone(keys | more, tmp_path) == 0
    shown = capsys.readouterr().out.partition("a sample:\n")[2].partition("\nwritten:")[0]
    assert len(re.findall(r"w\d+", shown)) == keys["eval.sample_tokens"]  # what it has no word for is left out


def test_the_sample_of_a_run_that_goes_on_from_prefixes_is_of_a_prompt_that_is_one(tmp_path, corpus, capsys):
    keys = {"data__objective": "prefix-lm", "model__init_std": 0.3, "train__steps": 1, "eval__interval": 0}
    assert run(tmp_path, corpus, **keys, eval__prompt="a prompt", eval__sample_tokens=8) == 0
    shown = capsys.readouterr().out.partition("a sample:\n")[2].partition("\nwritten:")[0]
    used = open_trained(str(tmp_path), None, {}, Startup())
    said = {}
    for is_prefix in (True, False):
        sampling = Sampling(257, frozenset([256]), seed=used.cfg.run.seed, prompt_is_prefix=is_prefix)
        new = generate(used.model, used.tokenizer.encode("a prompt"), 8, sampling)
        said[is_prefix] = "a prompt" + used.tokenizer.decode(new)
    assert shown == said[True] != said[False]


def test_a_prompt_longer_than_the_model_can_read_is_said_and_fails_no_finished_run(tmp_path, corpus, capsys):
    of_gpt = {"model__name": "gpt", "model__max_position_embeddings": 32, "eval__prompt": "x" * 40}
    assert run(tmp_path, corpus, train__steps=1, eval__interval=0, **of_gpt) == 0
    said = "no sample of [eval] prompt: the prompt has 40 tokens, and the model positions for 32\n"
    assert said in capsys.readouterr().out


def test_a_sample_compiles_nothing(tmp_path, keys, monkeypatch):
    graphs = []
    honest = evaluate.show_sample
    # Which graphs there are, Dynamo decides; what a backend makes of them takes long.
    monkeypatch.setattr(nn.Module, "compile", partialmethod(nn.Module.compile, backend="eager"))

    def counted(*args: Any) -> bool:
        graphs.append(counters["stats"]["unique_graphs"])
        shown = honest(*args)
        graphs.append(counters["stats"]["unique_graphs"])
        return shown

    monkeypatch.setattr(train, "show_sample", counted)
    torch._dynamo.reset()
    assert alone(keys | {"compile.enable": True, "train.steps": 1, "eval.interval": 0, "eval.steps": 1}, tmp_path) == 0
    assert graphs[0] == graphs[1] > 0
