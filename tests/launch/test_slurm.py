"""launch/slurm.sh and launch/slurm_tokenize.sh, with stand-ins for srun, scontrol and sbatch.

`benchmarks/clusters.sh slurm` runs both files on a real SLURM.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from dtmega.distributed.exit_codes import ATTEMPT, ExitStatus
from dtmega.training import history

LAUNCH = Path(__file__).resolve().parents[2] / "launch"
JOB = 4711
LOST = 15  # the script's exit code if its node is lost: SIGTERM

# Does to the run directory what the job step does: takes steps, and leaves an exit.json or none.
SRUN = """#!/bin/bash
printf '%s\\n' "$@" >>srun.log
[ -e step/starts ] || exit 1
rm -f run/exit.json
cat step/starts >>run/starts.jsonl
cat step/metrics >>run/metrics.jsonl
[ ! -e step/exit.json ] || cp step/exit.json run/exit.json
[ ! -e step/node_is_lost ] || kill -TERM $PPID
exit 1
"""
SCONTROL = """#!/bin/bash
echo "$@" >>scontrol.log
[ "$1" != show ] || echo node1
"""
SBATCH = """#!/bin/bash
printf '%s\\n' "$@" >>sbatch.log
echo --- >>sbatch.log
echo 12
"""


class Attempt(NamedTuple):
    """One attempt of a job.

    Attributes:
        code: code in the exit.json that it leaves. None: it leaves none. LOST: its node is lost, so the script ends.
        step: newest step in metrics.jsonl at its end.
        starts: whether it comes to write in the run directory.
    """

    code: int | None
    step: int = 5
    starts: bool = True


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch) -> Path:
    """A folder with a run directory and stand-ins for SLURM's commands."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "run").mkdir()
    for name, text in {"srun": SRUN, "scontrol": SCONTROL, "sbatch": SBATCH}.items():
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    return tmp_path


def prepare(cluster: Path, attempt: Attempt, monkeypatch) -> None:
    """Write what the stand-in for srun is to leave in the run directory, in the forms in which a run writes it."""
    folder = cluster / "step"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    if not attempt.starts:
        return
    status = ExitStatus()
    keys = {"config": {}, "layout": {}, "device": torch.device("cpu"), "parameters": 1, "steps": 9}
    history.append(folder, step=0, attempt=status.attempt, **keys)
    (folder / history.NAME).rename(folder / "starts")
    (folder / "metrics").write_text(json.dumps({"step": attempt.step, "loss": 1.5}) + "\n")
    if attempt.code == LOST:
        (folder / "node_is_lost").touch()
    elif attempt.code is not None:
        status.attach(folder, lambda: (attempt.step, "step-00000001"))
        status.set(attempt.code, 'a reason with "code": 75, "attempt": "4711-9"')
        status.write()


def run_job(cluster: Path, attempts: list[Attempt], monkeypatch) -> list[int | str]:
    """Run a job as SLURM does: again if it was requeued or its node was lost. Returns what each attempt came to.

    Args:
        cluster: folder with the run directory.
        attempts: attempts of the job, in order.
        monkeypatch: the fixture.
    """
    came_to: list[int | str] = []
    for restart, attempt in enumerate(attempts):
        monkeypatch.setenv(ATTEMPT, f"{JOB}-{restart}")
        prepare(cluster, attempt, monkeypatch)
        slurm = {
            "SLURM_JOB_ID": JOB,
            "SLURM_RESTART_COUNT": restart,
            "SLURM_JOB_NUM_NODES": 1,
            "SLURM_JOB_NODELIST": "n",
        }
        (cluster / "scontrol.log").unlink(missing_ok=True)
        environment = os.environ | {key: str(value) for key, value in slurm.items()}
        script = ["bash", LAUNCH / "slurm.sh", "run"]
        ended = subprocess.run(script, cwd=cluster, env=environment, capture_output=True, text=True, check=False)
        assert ended.stderr == ""
        log = cluster / "scontrol.log"
        if ended.returncode == -LOST:
            came_to.append("lost")
        elif log.exists() and f"requeue {JOB}\n" in log.read_text():
            came_to.append("requeued")
        else:
            return [*came_to, ended.returncode]
    return came_to


# The first attempt of each job makes a new step, so it counts for nothing.
JOBS = {
    **{f"code {code}": ([Attempt(code)], [code]) for code in (0, 1, 2, 3, 4, 5)},
    "signals": ([Attempt(75)] * 5 + [Attempt(76)] * 5, ["requeued"] * 10),
    "hangs": ([Attempt(77)] * 6, ["requeued"] * 4 + [77]),
    "killed attempts": ([Attempt(None)] * 6, ["requeued"] * 4 + [1]),
    "lost nodes": ([Attempt(LOST)] * 6, ["lost"] * 5 + [77]),
    "losses of all kinds, and a signal": (
        [Attempt(77), Attempt(77), Attempt(LOST), Attempt(75), Attempt(None), Attempt(77)],
        ["requeued", "requeued", "lost", "requeued", "requeued", 77],
    ),
    "hangs with new steps": ([Attempt(77, step) for step in range(1, 6)], ["requeued"] * 5),
    "lost nodes with new steps": ([Attempt(LOST, step) for step in range(1, 6)], ["lost"] * 5),
    "a new step after hangs": (
        [Attempt(77, step) for step in (5, 5, 5, 5, 6, 5, 6, 6, 6)],
        ["requeued"] * 8 + [77],
    ),
    "an attempt that did not start": ([Attempt(75), Attempt(75, starts=False)], ["requeued", 1]),
    "a first attempt that did not start": ([Attempt(0, starts=False)], [1]),
}


@pytest.mark.parametrize("name", JOBS)
def test_a_job_is_requeued_after_signals_always_after_losses_three_times_and_after_errors_never(
    cluster, monkeypatch, name
):
    attempts, came_to = JOBS[name]
    assert run_job(cluster, attempts, monkeypatch) == came_to


def test_nodes_that_still_end_an_attempt_cannot_join_the_rendezvous_of_the_next_one(cluster, monkeypatch):
    run_job(cluster, [Attempt(75), Attempt(0)], monkeypatch)
    words = (cluster / "srun.log").read_text().splitlines()
    names = [after for word, after in pairwise(words) if word == "--rdzv-id"]
    assert names == [f"{JOB}-{restart}" for restart in range(2)]


def test_a_job_whose_start_is_refused_trusts_no_file_of_the_job_that_runs(cluster, monkeypatch):
    other = json.dumps({"code": 75, "reason": "", "step": 9, "attempt": "4710-0"})
    (cluster / "run" / "exit.json").write_text(other)
    assert run_job(cluster, [Attempt(0, starts=False)], monkeypatch) == [1]
    assert (cluster / "run" / "exit.json").read_text() == other


def test_a_new_job_does_not_count_the_losses_of_an_older_one(cluster, monkeypatch):
    for _ in range(3):
        assert run_job(cluster, [Attempt(77)] * 3, monkeypatch) == ["requeued"] * 3


def test_exit_json_has_the_name_that_the_launcher_gave_the_attempt_or_one_of_its_own(tmp_path, monkeypatch):
    names = []
    for given in ("4711-2", "", ""):
        monkeypatch.setenv(ATTEMPT, given)
        status = ExitStatus()
        status.attach(tmp_path, lambda: (3, ""))
        status.set(75, "a signal asked for it")
        status.write()
        names.append(json.loads((tmp_path / "exit.json").read_text())["attempt"])
    assert names[0] == "4711-2"
    assert all(names)
    assert len({*names}) == 3


def test_the_array_has_a_task_for_each_part_and_the_merge_waits_for_all_of_them(cluster):
    script = ["bash", LAUNCH / "slurm_tokenize.sh", "12", "my data.jsonl", "t.json", "out/mine", "--append-eod"]
    subprocess.run(script, cwd=cluster, check=True, capture_output=True)
    array, merge = (job.splitlines() for job in (cluster / "sbatch.log").read_text().split("---\n")[:2])
    assert array[array.index("--array") + 1] == "0-11"
    assert merge[merge.index("--dependency") + 1] == "afterok:12"
    tasks = [run_wrapped(array[-1], cluster, {"SLURM_ARRAY_TASK_ID": str(i)}) for i in range(2)]
    first = ["-m", "dtmega", "tokenize", "--input", "my data.jsonl", "--tokenizer", "t.json", "--output", "out/mine"]
    assert tasks == [[*first, "--workers", "8", "--append-eod", "--part", f"{i}/12"] for i in range(2)]
    merged = ["-m", "dtmega", "merge", "--input", "out/mine.part-*", "--output", "out/mine"]
    assert run_wrapped(merge[-1], cluster, {}) == merged


def run_wrapped(command: str, cluster: Path, variables: dict[str, str]) -> list[str]:
    """The arguments that a job's command gives to Python."""
    python = cluster / "bin" / "python"
    python.write_text("#!/bin/bash\nprintf '%s\\n' \"$@\"\n")
    python.chmod(0o755)
    ran = subprocess.run(["sh", "-c", command], env=os.environ | variables, capture_output=True, text=True, check=True)
    return ran.stdout.splitlines()


@pytest.mark.parametrize("file", sorted(path.name for path in LAUNCH.glob("*.sh")))
def test_a_file_for_the_shell_has_no_mistake_that_shellcheck_finds(file):
    if not shutil.which("shellcheck"):
        pytest.skip("needs shellcheck")
    checked = subprocess.run(["shellcheck", LAUNCH / file], capture_output=True, text=True, check=False)
    assert checked.stdout == ""
