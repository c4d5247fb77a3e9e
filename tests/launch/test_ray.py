"""Claims about launch/ray_train.py and launch/tokenize_ray.py on Ray itself, in a network namespace that has `lo` only.

`make test-extras` runs them; they are skipped without Ray, or where such a namespace cannot be made.
`benchmarks/clusters/ray.sh` has two nodes, and kills ranks and workers of Ray.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from tests.launch.pages import ROOT
from tests.layouts import write_text
from tests.resumed import KEYS, LAYOUTS, Record, flags, train_all, whole

LAYOUT = "dp 2"
# The namespace of the processes ends all of Ray with the driver.
ALONE = ["unshare", *([] if os.geteuid() == 0 else ["--map-root-user"]), "--net", "--pid", "--fork", "--kill-child"]
LOOPBACK = [*ALONE, "--mount-proc", "bash", "-c", 'ip link set lo up && "$@"; exit $?', "bash"]
TIMEOUT_S = 900


def can_be_alone() -> bool:
    try:
        return subprocess.run([*LOOPBACK, "true"], capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False


pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("ray") is None or importlib.util.find_spec("pandas") is None, reason="needs ray[train]"
    ),
    pytest.mark.skipif(not can_be_alone(), reason="needs a network namespace of its own"),
]


def start(script: str, *arguments: object, log: Path) -> subprocess.Popen[bytes]:
    """Start a script of launch/ on a Ray of its own."""
    ray = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_TMPDIR": tempfile.gettempdir(), "GLOO_SOCKET_IFNAME": "lo"}
    environment = os.environ | ray | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [*LOOPBACK, sys.executable, str(ROOT / "launch" / script), *map(str, arguments)]
    with log.open("ab") as file:
        return subprocess.Popen(command, env=environment, cwd=ROOT, stdout=file, stderr=file)


def children(pid: int) -> list[int]:
    """Process ids of the children of a process."""
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_two_ranks_on_ray_stop_at_a_signal_with_75_and_go_on_to_the_losses_of_torchrun_to_the_bit(tmp_path):
    keys = KEYS | write_text(tmp_path) | LAYOUTS[LAYOUT][1] | {"model.n_layers": 2, "train.steps": 60}
    train_all([whole(LAYOUT, tmp_path / "truth", keys)])
    run, log = tmp_path / "run", tmp_path / "log"
    arguments = ("--ranks", 2, "--storage", tmp_path / "storage", "--", *flags(keys, run))
    driver = start("ray_train.py", *arguments, log=log)
    while not (run / "metrics.jsonl").exists() or len((run / "metrics.jsonl").read_text().splitlines()) < 12:
        assert driver.poll() is None, log.read_text()
        time.sleep(0.1)
    # The first process of the namespace is the shell, whose only child is the driver.
    shell = children(driver.pid)[0]
    os.kill(children(shell)[0], signal.SIGTERM)
    assert driver.wait(TIMEOUT_S) == 75, log.read_text()
    assert json.loads((run / "exit.json").read_text())["step"] < 60
    assert start("ray_train.py", *arguments, log=log).wait(TIMEOUT_S) == 0, log.read_text()
    ours, theirs = Record(run), Record(tmp_path / "truth")
    assert all(ours.series(key) == theirs.series(key) for key in ("loss", "grad_norm"))


def test_a_corpus_in_three_parts_by_ray_is_byte_identical_to_one_go(tmp_path):
    text = tmp_path / "text.jsonl"
    lines = [json.dumps({"text": "a document " * (number % 50)}) for number in range(2000)]
    text.write_text("\n".join(lines), encoding="utf-8")
    options = ("--input", text, "--tokenizer", "stdlib-8k", "--append-eod", "--output")
    alone = [sys.executable, "-m", "dtmega", "tokenize", *map(str, options), str(tmp_path / "alone")]
    subprocess.run(alone, cwd=ROOT, check=True)
    log = tmp_path / "log"
    code = start("tokenize_ray.py", "--parts", 3, *options, tmp_path / "parts", log=log).wait(TIMEOUT_S)
    assert code == 0, log.read_text()
    for suffix in ("bin", "idx", "meta.json"):
        assert (tmp_path / f"parts.{suffix}").read_bytes() == (tmp_path / f"alone.{suffix}").read_bytes()
