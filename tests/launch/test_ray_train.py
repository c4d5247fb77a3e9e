"""Claims about launch/ray_train.py. The ranks are small scripts here, and Ray is only what a rank asks it for.

`test_ray.py` has Ray itself.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.launch.fake_ray import launch
from tests.launch.pages import resumable_codes

IMPORTS = "import os, signal, sys, time\n"


@pytest.fixture
def launcher(monkeypatch, tmp_path) -> Any:
    """The module launch/ray_train.py; a rank is the script `train.py` in `tmp_path`."""
    module = launch("ray_train", monkeypatch)
    monkeypatch.setattr(module, "TRAIN", tmp_path / "train.py")
    monkeypatch.setattr(module, "POLL_S", 0.01)
    return module


def run_rank(launcher: Any, script: str, folder: Path, stopped: Callable[[], bool] = lambda: False) -> int:
    """The exit code of a rank that runs this script, unless Ray shall start it again."""
    launcher.TRAIN.write_text(IMPORTS + script, encoding="utf-8")
    stop = SimpleNamespace(requested=SimpleNamespace(remote=stopped))
    return launcher.run_rank({"arguments": ["--run.dir", "run"], "folder": str(folder), "stop": stop})


AGAIN = "Ray starts all ranks again"


def end_of_rank(launcher: Any, script: str, folder: Path) -> int | str:
    try:
        return run_rank(launcher, script, folder)
    except launcher.Ended:
        return AGAIN


def test_ray_starts_ranks_again_after_the_codes_of_which_the_page_says_so_and_gives_the_others_on(launcher, tmp_path):
    codes = resumable_codes() | {4: False}
    assert len(codes) > 7
    ends = {code: end_of_rank(launcher, f"sys.exit({code})", tmp_path) for code in codes}
    assert ends == {code: AGAIN if resumes else code for code, resumes in codes.items()}


def test_ray_starts_ranks_again_after_one_of_them_is_killed(launcher, tmp_path):
    assert end_of_rank(launcher, "os.kill(os.getpid(), signal.SIGKILL)", tmp_path) == AGAIN


def test_a_rank_that_the_driver_stops_gets_sigterm_and_is_not_started_again(launcher, tmp_path):
    ready = tmp_path / "ready"
    script = f"""
signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(75))
open({str(ready)!r}, "w").close()
time.sleep(60)
"""
    began = time.monotonic()
    assert run_rank(launcher, script, tmp_path, stopped=ready.exists) == 75
    assert time.monotonic() - began < 50


def test_a_rank_that_a_signal_kills_while_the_driver_stops_ends_as_in_a_shell(launcher, tmp_path):
    assert run_rank(launcher, "time.sleep(60)", tmp_path, stopped=lambda: True) == 128 + signal.SIGTERM


def test_a_rank_has_rays_variables_the_store_of_an_agent_and_the_folder_of_the_driver(launcher, monkeypatch, tmp_path):
    """With TORCHELASTIC_RUN_ID a rank dies with its parent (`process.die_with_parent`)."""
    ranks = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "1234"}
    for name, value in ranks.items():
        monkeypatch.setenv(name, value)
    folder = tmp_path / "clone"
    folder.mkdir()
    told = tmp_path / "told"
    script = f"import json; json.dump([dict(os.environ), os.getcwd(), sys.argv[1:]], open({str(told)!r}, 'w'))"
    assert run_rank(launcher, script, folder) == 0
    environment, working_folder, arguments = json.loads(told.read_text())
    agent = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RUN_ID": "one-run"}
    assert {name: environment.get(name) for name in ranks | agent} == ranks | agent
    assert (os.path.realpath(working_folder), arguments) == (os.path.realpath(folder), ["--run.dir", "run"])
