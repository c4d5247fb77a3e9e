"""`dtmega replay` of runs with [run] exact: equal bits on another layout, a flipped bit, and what is refused."""

from __future__ import annotations

import contextlib
import io
import os
import re
import shutil
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dtmega import config
from dtmega.__main__ import main as command
from dtmega.checkpoint import resume
from dtmega.cli import replay
from dtmega.distributed import exit_codes
from dtmega.training import device_peaks, history
from dtmega.training.exact import machine
from dtmega.training.exact.record import NAME
from tests import ranks
from tests.layouts import DEBUG, train_debug_model, write_text

STEPS, CUT = 4, 2
KEYS: dict[str, Any] = {
    **DEBUG,
    "run.exact": True,
    "model.n_layers": 2,
    "train.steps": STEPS,
    "optim.warmup": 1,
    "eval.interval": 0,
    "eval.sample_tokens": 0,
    "checkpoint.interval": CUT,
    "train.drift_interval": 0,
}


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> dict[str, str]:
    return write_text(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def clean(data: dict[str, str], tmp_path_factory) -> Path:
    """A run on one process, with checkpoints after steps 2 and 4."""
    folder = tmp_path_factory.mktemp("clean")
    train_debug_model(1, KEYS | data, folder)
    return folder / "run"


def replayed(argv: list[str], processor: str = "") -> tuple[int, str]:
    """The exit code of `dtmega replay` on this rank, and what it prints.

    Args:
        argv: arguments of the command.
        processor: fake kind of this machine's processor; '' for the real one.
    """
    os.environ |= {"RANK": str(dist.get_rank()), "WORLD_SIZE": str(dist.get_world_size())}
    device_peaks.matmul_flops = lambda device, dtype: 1e12  # MFU is not looked at
    if processor:
        machine.kind_of_processor = lambda device: processor
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        code = command(["replay", *argv])
    return code, output.getvalue()


def content(folder: Path) -> dict[str, tuple[bytes, int]]:
    """Bytes and time of change of each file, and the time of change of each folder."""
    found: dict[str, tuple[bytes, int]] = {}
    for path in [folder, *folder.rglob("*")]:
        found[str(path)] = (path.read_bytes() if path.is_file() else b"", path.stat().st_mtime_ns)
    return found


def test_a_replay_on_a_pipeline_and_another_machine_is_equal_and_leaves_the_run_untouched(clean: Path):
    before = content(clean)
    argv = [str(clean), "--step", str(STEPS), "--mesh.pp", "2"]
    (code, output), (other_code, _) = ranks.run(2, replayed, argv, "an abacus")
    assert (code, other_code) == (exit_codes.DONE, exit_codes.DONE), output
    elsewhere = output.index("this is another machine than the run's: the kind of processor was ")
    assert elsewhere < output.index("equal in every bit: steps 3 to 4")
    assert "is 'an abacus'" in output
    assert content(clean) == before


FLIPPED_STEP, FLIPPED_RANK, HOST = 3, 2, "node-2"


def flip() -> None:
    """On one rank of four, whose host gets another name, flip a bit in a product of the second microbatch of a step."""
    if dist.get_rank() != FLIPPED_RANK:
        return
    honest = torch.nn.functional.linear
    n_products = 0

    def linear(*args: Any) -> torch.Tensor:
        nonlocal n_products
        n_products += 1
        product = honest(*args)
        # Two layers have 8 products: the 11th is that of the first layer's `up` in the second microbatch.
        if n_products == 8 + 3:
            with torch.no_grad():
                product.view(torch.int32).view(-1)[0] ^= 1
        return product

    torch.nn.functional.linear = linear
    socket.gethostname = lambda: HOST


def test_a_flipped_bit_on_one_of_four_ranks_is_named_on_one_process(data, clean: Path, tmp_path: Path):
    shutil.copytree(clean.parent, tmp_path, dirs_exist_ok=True)
    shutil.rmtree(tmp_path / "run" / "checkpoints" / resume.name(STEPS))
    train_debug_model(4, KEYS | data | {"mesh.dp_shard": 4, "train.exit_interval": FLIPPED_STEP}, tmp_path, plant=flip)
    ((code, output),) = ranks.run(1, replayed, [str(tmp_path / "run"), "--step", str(FLIPPED_STEP)])
    assert code == exit_codes.DIFFERS
    assert (
        "step 3, microbatch 6 of 8: its gradients differ from the run's, which rank 2 on node-2 computed"
        in output.splitlines()
    ), output


def test_a_step_without_a_checkpoint_before_it_is_refused_with_the_steps_that_have_one(clean: Path):
    for step in (CUT, STEPS + 1):
        with pytest.raises(ValueError, match=f"step {step} of .* cannot be replayed, .* expected one of 3 to 4 "):
            replay.source_of(clean, step)


def test_a_run_without_digests_or_without_exact_is_refused(clean: Path, tmp_path: Path):
    shutil.copy(clean / "config.toml", tmp_path)
    with pytest.raises(ValueError, match=re.escape(f"expected the digests of its steps in {tmp_path / NAME}")):
        replay.source_of(tmp_path, STEPS)
    text = (clean / "config.toml").read_text()
    (tmp_path / "config.toml").write_text(text.replace("exact = true", "exact = false"))
    with pytest.raises(ValueError, match=r"expected a run with \[run\] exact = true"):
        replay.source_of(tmp_path, STEPS)


@pytest.mark.parametrize("key", ["--optim.lr", "--run.dir=other", "--checkpoint.dir", "--batch.micro_batch_size"])
def test_a_key_of_the_recipe_or_of_where_a_run_writes_is_refused(key: str):
    replay.check_keys(["--mesh.pp", "2", "--pipeline.schedule=GPipe", "--data.path", "elsewhere"])
    with pytest.raises(ValueError, match=f"expected one of --mesh.*, .*, got {key.partition('=')[0]}"):
        replay.check_keys(["--mesh.pp", "2", key, "1"])


def started(folder: Path, recipes: dict[int, float]) -> None:
    """A starts.jsonl of a run that began anew after some steps, each time with another learning rate."""
    (folder / history.NAME).unlink(missing_ok=True)
    for step, lr in recipes.items():
        cfg = config.validate({"train": {"steps": 9}, "optim": {"lr": lr}}, "test")
        keys: dict[str, Any] = {"layout": {}, "device": torch.device("cpu"), "parameters": 1, "steps": 9}
        history.append(folder, step=step, attempt="", config=cfg.model_dump(), **keys)


def test_a_step_is_replayed_with_the_recipe_of_the_start_that_took_it(tmp_path: Path):
    started(tmp_path, {0: 0.1, 4: 0.2, 8: 0.3})
    rates = [replay.recipe_of(tmp_path, begin, step)["optim"]["lr"] for begin, step in ((2, 4), (4, 5), (4, 8))]
    assert rates == [0.1, 0.2, 0.2]
    with pytest.raises(ValueError, match=r"changed after step 4, .* kept: \[optim\] lr; expected a --step up to 4"):
        replay.recipe_of(tmp_path, 2, 5)
    started(tmp_path, {0: 0.1, 4: 0.1})
    assert replay.recipe_of(tmp_path, 2, 5)["optim"]["lr"] == 0.1


def test_numbers_in_words_are_the_runs_of_consecutive_ones():
    assert replay.spans([3, 4, 5, 9, 11, 12]) == "3 to 5, 9, 11 to 12"
