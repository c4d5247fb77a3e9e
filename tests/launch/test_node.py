"""Claims about launch/node.sh, with a script in place of Python and torchrun."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.launch.pages import ROOT

OLD = '{"code": 75, "reason": "a signal asked for it", "time": "2026-11-26T10:00:00+00:00"}'
NEW = '{"code": 2, "reason": "no", "time": "2026-11-26T11:00:00+00:00"}'
SAVED = '{"code": 75, "reason": "a signal asked for it", "time": "2026-11-26T11:00:00+00:00"}'


@pytest.fixture
def run(tmp_path) -> Path:
    """The folder of a run that has been started before."""
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "exit.json").write_text(OLD)
    (folder / "starts.jsonl").write_text("{}\n")
    return folder


def start(run: Path, torchrun: str, node: int = 0) -> subprocess.Popen[bytes]:
    """Start node.sh with these lines of Bash in place of torchrun; they run in the run's folder."""
    python = run.parent / "python"
    python.write_text(f"#!/bin/bash\necho \"$@\" >'{run}/arguments'\ncd '{run}'\n{torchrun}\n")
    python.chmod(0o755)
    environment = os.environ | {"PYTHON": str(python), "PET_NODE_RANK": str(node)}
    return subprocess.Popen([ROOT / "launch" / "node.sh", run, "--train.steps", "9"], env=environment)


@pytest.mark.parametrize(
    ("torchrun", "code"),
    [
        ("exit 0", 0),
        (f"echo '{NEW}' >exit.json; exit 1", 2),
        (f"echo '{SAVED}' >exit.json; exit 1", 75),
        ("exit 1", 1),  # the old file says 75, but is of another attempt
        ("rm exit.json; exit 1", 1),  # no rank came so far that it wrote a line in starts.jsonl
        ("rm exit.json; echo '{}' >>starts.jsonl; exit 1", 137),
    ],
)
def test_the_exit_code_is_that_of_this_attempt_in_exit_json(run, torchrun, code):
    assert start(run, torchrun).wait(20) == code
    arguments = (run / "arguments").read_text().split()
    assert arguments[-7:] == ["-m", "dtmega", "train", "--run.dir", str(run), "--train.steps", "9"]


def test_a_node_without_the_first_rank_waits_for_exit_json(run):
    assert start(run, f"(sleep 0.5; echo '{SAVED}' >exit.json) & exit 1", node=1).wait(20) == 75


@pytest.mark.parametrize(("at_the_signal", "code"), [("cp ../saved exit.json", 75), ("rm exit.json", 76)])
def test_a_signal_is_passed_on_and_the_script_waits_for_torchrun(run, at_the_signal, code):
    (run.parent / "saved").write_text(SAVED)
    process = start(run, f"trap 'sleep 0.3; {at_the_signal}; exit 1' TERM; touch ready; while :; do sleep 0.05; done")
    while not (run / "ready").exists():
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == code
