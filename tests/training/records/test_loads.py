"""expert_loads.jsonl: the loads of a mixture's experts as a run writes them down, against counts of our own."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from dtmega import config, families, train
from dtmega.checkpoint import resume
from dtmega.data.objectives.rows import IGNORED
from dtmega.models.initial import init_weights
from dtmega.models.routing import Loads, Routing
from dtmega.report.loads import columns
from dtmega.training.records import loads
from dtmega.training.records.loads import LoadsFile
from tests.layouts import FAMILIES, write_text
from tests.resumed import Training, flags, train_all

STEPS, SAVED = 4, 3
# The weights stay as they were drawn, but for 1e-12.
KEYS: dict[str, Any] = FAMILIES["moe"] | {
    "model.n_layers": 3,
    "model.router_bias": False,
    "batch.micro_batch_size": 2,
    "optim.lr": 1e-12,
    "optim.min_lr": 0.0,
    "train.steps": STEPS,
    "train.drift_interval": 0,
    "eval.interval": 0,
    "eval.sample_tokens": 0,
    "log.num_zeros": False,
    "log.params_norm": False,
    "checkpoint.final": False,
}


def lines_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "expert_loads.jsonl").read_text().splitlines()]


@contextlib.contextmanager
def kept_batches(folder: Path) -> Iterator[None]:
    """The microbatches of each step are kept in the folder."""
    honest = train.train_step

    def noting(run: Any, batch: Any) -> Any:
        torch.save(batch.microbatches, folder / f"{len([*folder.glob('*.pt')]) + 1}.pt")
        return honest(run, batch)

    with patch.object(train, "train_step", noting):
        yield


@contextlib.contextmanager
def long_lines() -> Iterator[None]:
    """A line ends when it covers all steps, so that after the one of step 1 only a save ends a line."""
    with patch.object(loads, "LINES", 1):
        yield


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A run on one process, and one on two data ranks that goes on from its save, in the same folder, on two stages."""
    folder = tmp_path_factory.mktemp("loads")
    keys = KEYS | write_text(folder)
    saving = keys | {"checkpoint.interval": SAVED}
    saved = str(folder / "resumed" / "checkpoints" / resume.name(SAVED))
    train_all(
        [
            Training(1, keys, folder / "one process", partial(kept_batches, folder / "one process")),
            Training(2, saving | {"mesh.dp_shard": 2}, folder / "resumed", long_lines),
            Training(2, saving | {"mesh.pp": 2, "checkpoint.resume": saved}, folder / "resumed", long_lines),
        ]
    )
    return {name: folder / name for name in ("one process", "resumed")}


@pytest.fixture(scope="module")
def counted(ran: dict[str, Path]) -> list[dict[str, list[int]]]:
    """For each step: by layer, the tokens with a label that use each expert, in a forward of the model as it begins."""
    cfg = config.load(flags(KEYS, ran["one process"]))
    model = families.build(cfg)
    init_weights(model, cfg.run.seed)
    model.init_buffers(cfg.run.seed)
    chosen: dict[str, Tensor] = {}
    for name, module in model.named_modules():
        if name.endswith(".router"):
            module.register_forward_hook(lambda _, __, out, name=name: chosen.update({name: routed(out)}))
    steps = []
    for step in range(1, STEPS + 1):
        counts: dict[str, list[int]] = {}
        for microbatch in torch.load(ran["one process"] / f"{step}.pt"):
            with torch.no_grad():
                model(**microbatch)
            for name, experts in chosen.items():
                numbers = counts.setdefault(name.split(".")[1], [0] * 6)
                for label, used in zip(microbatch["labels"].flatten().tolist(), experts.tolist(), strict=True):
                    for expert in used if label != IGNORED else ():
                        numbers[expert] += 1
        steps.append(counts)
    return steps


def routed(routing: Routing) -> Tensor:
    return routing.experts


def test_the_loads_of_each_step_are_those_of_a_forward_with_the_same_tokens(ran, counted):
    found = lines_of(ran["one process"])
    assert [(line["first"], line["step"]) for line in found] == [(step, step) for step in range(1, STEPS + 1)]
    assert [line["loads"] for line in found] == counted
    assert [*counted[0]] == ["1", "2"]  # the first layer is dense
    assert any(label == IGNORED for label in torch.load(ran["one process"] / "1.pt")[0]["labels"].flatten())


def test_a_run_that_goes_on_from_an_earlier_checkpoint_on_another_layout_has_the_loads_of_each_step_once(ran, counted):
    found = lines_of(ran["resumed"])
    assert [(line["first"], line["step"]) for line in found] == [(1, 1), (2, 3), (4, 4)]
    assert [line["loads"] for line in found] == [counted[0], added(counted[1], counted[2]), counted[3]]


def test_the_report_reads_what_a_run_has_written(ran, counted):
    found = columns.read(ran["one process"])
    assert found is not None
    for layer in ("1", "2"):
        assert found.loads[int(layer)].T.tolist() == [counts[layer] for counts in counted]
    assert found.damaged_lines == 0


def added(first: dict[str, list[int]], second: dict[str, list[int]]) -> dict[str, list[int]]:
    return {layer: [a + b for a, b in zip(first[layer], second[layer], strict=True)] for layer in first}


def loads_at(step: int) -> Tensor:
    return torch.tensor([[0, 0, 0], [step, 0, step**2]], dtype=torch.float64)


def written(folder: Path, at_step: int, last: int, saved: int, skipped: int) -> LoadsFile:
    """The steps after at_step; a save after one of them, and one that is skipped."""
    of_run = Loads()
    file = LoadsFile(folder, of_run, at_step, print)
    for step in range(at_step + 1, last + 1):
        if step != skipped:
            of_run.add(loads_at(step))
            file.after_step(step)
        if step == saved:
            file.sync()
    return file


def test_a_line_covers_a_hundredth_of_the_steps_so_far_and_each_step_is_in_one_line(tmp_path: Path):
    written(tmp_path, 0, 900, saved=437, skipped=250).close()  # it goes on from the save
    written(tmp_path, 437, 2000, saved=1600, skipped=0).close()
    found = lines_of(tmp_path)
    first = 1
    for line in found:
        assert line["first"] == first
        steps = [step for step in range(first, line["step"] + 1) if step != 250]
        assert line["loads"] == {"1": [sum(steps), 0, sum(step**2 for step in steps)]}
        width = line["step"] - first + 1
        assert width == 1 or 100 * (width - 1) < line["step"] - 1
        assert 100 * width >= line["step"] or line["step"] in (437, 1600, 2000)
        first = line["step"] + 1
    assert first == 2001
    assert len(found) < 100 + 100 * 3 + 3  # 2,000 is 100 times e³


def test_the_counts_of_steps_in_which_the_file_cannot_be_opened_are_in_the_line_after_them(tmp_path: Path, capsys):
    path = tmp_path / "expert_loads.jsonl"
    of_run = Loads()
    file = LoadsFile(tmp_path, of_run, 0, print)
    for step in range(1, 4):
        path.mkdir() if step == 1 else None
        path.rmdir() if step == 3 else None
        of_run.add(loads_at(step))
        file.after_step(step)
    file.close()
    assert lines_of(tmp_path) == [{"first": 1, "step": 3, "loads": {"1": [1 + 2 + 3, 0, 1 + 4 + 9]}}]
    assert capsys.readouterr().out.count("WARNING: expert_loads.jsonl cannot be written: ") == 2
