"""`train.py --dry-run`: the refusals of training, the memory of the plan, and nothing that is written."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dtmega import config, train
from dtmega.__main__ import main as command
from dtmega.data.indexed_files.writer import IndexedWriter
from dtmega.distributed import exit_codes, process
from dtmega.planning.answers import answer, dry_run, job
from dtmega.planning.counting.ledger import Span
from dtmega.planning.counting.role import Role
from dtmega.planning.plan import Plan
from tests.planning.small import KEYS, LAYOUT, ROOT
from tests.planning.test_plan_command import stand_in

MIB = 2**20


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> str:
    """Some documents of bytes."""
    prefix = str(tmp_path_factory.mktemp("corpus") / "text")
    with IndexedWriter(prefix, np.dtype(np.uint16)) as writer:
        for n in range(40):
            writer.add([(7 * n + i) % 256 for i in range(80)])
    return prefix


@pytest.fixture
def arguments(tmp_path: Path, corpus: str) -> list[str]:
    return [*KEYS, "--run.dir", str(tmp_path / "run"), "--data.path", corpus]


def dry(argv: list[str], capsys: Any) -> tuple[int, str, str]:
    code = train.main([*argv, "--dry-run"])
    out, err = capsys.readouterr()
    return code, out, err


@pytest.fixture
def planned(monkeypatch) -> Plan:
    """An invented plan, which `plan_job` answers whatever the run directory and the data."""
    laid_out = job.lay_out(config.load(KEYS), 2, job.machine_of("cuda"))
    held = {"parameters": 5 * MIB}
    span = Span("0B1", 3 * 2**30, {"parameters": 5 * MIB, "activations of layers.0": 3 * 2**30 - 5 * MIB}, 5 * MIB)
    role = Role(0, 4, held, [Span("0F0", 7 * MIB, held, 7 * MIB), span], [])
    plan = Plan(laid_out.cfg, laid_out.sizes, laid_out.machine.device, 4, None, [], {0: role}, 4)

    def answered(cfg: Any, sizes: Any, device: Any, on_role: Any, imbalance: float) -> Plan:
        cfg = cfg.model_copy(update={"run": plan.cfg.run, "data": plan.cfg.data})
        return stand_in(plan)(cfg, sizes, device, on_role, imbalance)

    monkeypatch.setattr(dry_run, "plan_job", answered)
    return plan


def test_a_dry_run_tells_the_bytes_of_the_plan(arguments: list[str], planned: Plan, capsys):
    code, out, err = dry([*arguments, *LAYOUT], capsys)
    assert (code, err) == (exit_codes.DONE, "dtmega: role 1 of 1\n")
    assert "  every rank: peak 3 GiB in backward of microbatch 1, 5 MiB between steps\n" in out


@pytest.mark.parametrize("is_there", [True, False])
def test_the_run_directory_is_not_touched(is_there: bool, arguments: list[str], planned: Plan, tmp_path: Path, capsys):
    run_dir = tmp_path / "run"
    if is_there:
        run_dir.mkdir()
        (run_dir / process.LOCK).touch()
        before = run_dir.stat().st_mtime_ns
    assert dry([*arguments, *LAYOUT], capsys)[0] == exit_codes.DONE
    assert dry([*arguments, *LAYOUT, "--mesh.tp", "3"], capsys)[0] == exit_codes.REFUSED
    if is_there:
        assert (run_dir.stat().st_mtime_ns, [path.name for path in run_dir.iterdir()]) == (before, [process.LOCK])
    else:
        assert not run_dir.exists()


@pytest.mark.parametrize(("memory", "code"), [("1TiB", exit_codes.DONE), ("3GiB", exit_codes.DOES_NOT_FIT)])
def test_a_run_that_does_not_fit_ends_with_4(memory: str, code: int, arguments: list[str], planned: Plan, capsys):
    assert dry([*arguments, *LAYOUT, "--memory", memory], capsys)[0] == code


REFUSED = {
    "heads": ["--world", "3", "--mesh.tp", "3"],
    "mesh": ["--world", "4", "--mesh.tp", "3"],
    "batch": ["--world", "16"],
    "batch of replicas": ["--world", "16", "--mesh.dp_replicate", "16", "--mesh.dp_shard", "1"],
    "schedule": ["--world", "8", "--mesh.pp", "8"],
    "key": ["--world", "2", "--mesh.tq", "2"],
    "value": ["--world", "2", "--mesh.tp", "two"],
    "recompute": ["--world", "2", "--mesh.pp", "2", "--recompute.mode", "selective", "--compile.enable", "true"],
    "fabric": ["--world", "2", "--fabric", "h100-ip"],
    "memory": ["--world", "2", "--memory", "80GiBs"],
    "imbalance": ["--world", "2", "--imbalance", "1.5"],
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_plan_is_refused_with_the_words_of_training(case: str, arguments: list[str], capsys):
    code, out, err = dry([*arguments, *REFUSED[case]], capsys)
    assert (code, out) == (exit_codes.REFUSED, "")
    assert command(["plan", *arguments, *REFUSED[case]]) == exit_codes.REFUSED
    assert capsys.readouterr().err.replace("dtmega plan: ", "dtmega: ") == err


MIXTURE = ["--world", "2", "--model.name", "moe", "--model.n_experts", "4", "--mesh.dp_shard", "2", "--mesh.ep", "2"]


def test_a_dry_run_plans_the_load_that_it_is_asked_for(arguments: list[str], monkeypatch, capsys):
    planned = []

    def keep(*_arguments: Any, imbalance: float) -> Plan:
        planned.append(imbalance)
        raise ValueError("enough")

    monkeypatch.setattr(dry_run, "plan_job", keep)
    dry([*arguments, *MIXTURE, "--imbalance", "1.5"], capsys)
    assert planned == [1.5]


def test_a_load_above_all_tokens_of_the_group_is_refused(arguments: list[str], capsys):
    code, _, err = dry([*arguments, *MIXTURE, "--imbalance", "3"], capsys)
    assert (code, "expected 1 (even) to ep=2" in err) == (exit_codes.REFUSED, True)


def test_a_load_that_is_no_number_is_refused(arguments: list[str], capsys):
    code, _, err = dry([*arguments, "--imbalance", "much"], capsys)
    assert (code, err) == (exit_codes.REFUSED, "dtmega: --imbalance much: expected a number of 1 or more (--dry-run)\n")


def test_missing_data_is_refused_as_in_training(arguments: list[str], capsys):
    elsewhere = [*arguments, "--data.path", "/nowhere/text"]
    assert train.main(elsewhere) == exit_codes.REFUSED
    _, in_training = capsys.readouterr()
    assert dry(elsewhere, capsys) == (exit_codes.REFUSED, "", in_training)
    assert "/nowhere/text" in in_training


def test_the_options_of_a_dry_run_are_no_keys_of_a_run(arguments: list[str], capsys):
    assert train.main([*arguments, "--memory", "80GiB"]) == exit_codes.REFUSED
    assert "--memory" in capsys.readouterr().err


def test_the_number_of_ranks_of_a_job_is_that_of_torchrun():
    with pytest.raises(ValueError, match="--world 4, but there are 2 processes"):
        dry_run.read_options({"--world": "4"}, [], 2)


def test_an_option_without_value_is_refused(arguments: list[str], capsys):
    code, out, err = dry([*arguments, "--world"], capsys)
    assert (code, out, err) == (exit_codes.REFUSED, "", "dtmega: --world needs a value (--dry-run)\n")


@pytest.mark.full
def test_under_torchrun_the_answer_is_printed_once(arguments: list[str], tmp_path: Path):
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    argv = [*launch, "train.py", *arguments, "--run.device", "cpu", "--dry-run"]
    done = subprocess.run(argv, check=False, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout.count("dry run: nothing was started")) == (0, 1), done.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.full
@pytest.mark.parametrize("after_s", [0.0, 1.0])
def test_ctrl_c_in_the_midst_of_a_role_leaves_in_one_line(after_s: float):
    argv = [sys.executable, "-m", "dtmega", "plan", *KEYS, *LAYOUT]
    running = subprocess.Popen(argv, cwd=ROOT, stderr=subprocess.PIPE, text=True, start_new_session=True)
    assert running.stderr is not None
    assert re.fullmatch("dtmega plan: role 1 of 1\n", running.stderr.readline())
    time.sleep(after_s)
    os.killpg(running.pid, signal.SIGINT)
    _, err = running.communicate(timeout=120)
    assert (running.returncode, err) == (130, "dtmega plan: interrupted\n")


def test_a_planned_checkpoint_has_the_bytes_of_the_one_that_the_run_writes(arguments: list[str], tmp_path: Path):
    laid_out = job.lay_out(config.load(KEYS), 1, job.machine_of("cpu"))
    planned_bytes = answer.answer_job(laid_out).checkpoint_bytes
    assert train.main([*arguments, "--train.steps", "1", "--run.device", "cpu", "--eval.interval", "0"]) == 0
    (written,) = (tmp_path / "run" / "checkpoints").glob("*/data-00000.bin")
    assert written.stat().st_size == planned_bytes
