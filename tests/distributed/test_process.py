"""process.py, and how mesh.py starts, with real launchers, signals and deaths, in small workers."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from uuid import uuid4

import pytest
import torch
import torch.distributed as dist

from dtmega import config, mesh
from dtmega.distributed import exit_codes, process
from tests import ranks

ROOT = Path(__file__).resolve().parents[2]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
START = """
import os, signal, sys, time
from datetime import timedelta
from pathlib import Path
import torch, torch.distributed as dist
from dtmega import config, mesh
from dtmega.distributed import exit_codes, process

def start(**keywords):
    return mesh.start(torch.device("cpu"), mesh.resolve(config.Mesh(), mesh.world_size()), **keywords)
"""
PATIENCE_S = 120.0


@contextmanager
def started(*argv: object, cwd: Path, **environment: str) -> Iterator[subprocess.Popen[str]]:
    """A process, and at the end its death and that of all it started. stderr goes to stdout."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("TORCHELASTIC", "MASTER", "RANK", "WORLD"))}
    mark = f"DTMEGA_TEST={uuid4().hex}"
    process = subprocess.Popen(
        [str(word) for word in argv],
        cwd=cwd,
        env=clean | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)} | environment | dict([mark.split("=")]),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()  # first, for an agent starts its workers again
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):  # gone, or not ours
                if mark.encode() in (folder / "environ").read_bytes().split(b"\0"):
                    os.kill(int(folder.name), signal.SIGKILL)
        process.communicate()


def script(folder: Path, text: str) -> Path:
    (folder / "worker.py").write_text(text)
    return folder / "worker.py"


def wait_for(what: Callable[[], object], process: subprocess.Popen[str] | None = None) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not what():
        assert time.monotonic() < deadline
        assert process is None or process.poll() is None, process.communicate()[0]
        time.sleep(0.02)


def alive(pid: int) -> bool:
    """Running; a zombie is not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


RESTART = r"""
world = start()
ones = torch.ones(1)
dist.all_reduce(ones)
attempt = len(Path("attempts").read_text()) if Path("attempts").exists() else 0
count = os.environ.get("TORCHELASTIC_RESTART_COUNT")
sys.stdout.write(f"rank {world.rank} attempt {attempt}: {ones.item():g} ranks, restart count {count}\n")
sys.stdout.flush()
dist.barrier()
if attempt < int(sys.argv[1]):
    if world.rank == 1:
        Path("attempts").write_text("x" * (attempt + 1))
        os._exit(1)
    time.sleep(600)  # not in a collective: this rank does not fail by itself
dist.barrier()
process.leave(exit_codes.DONE)
"""


@pytest.mark.full  # a job of two nodes says it below
@pytest.mark.parametrize("rendezvous", ["static", "standalone"])
def test_a_job_that_dies_on_each_attempt_starts_again_each_time(tmp_path, rendezvous):
    how = ["--standalone"] if rendezvous == "standalone" else ["--master-port", free_port()]
    command = [*TORCHRUN, *how, "--nproc-per-node", 2, "--max-restarts", 2, script(tmp_path, START + RESTART), 2]
    with started(*command, cwd=tmp_path) as agent:
        output, _ = agent.communicate(timeout=PATIENCE_S)
    assert agent.returncode == 0, output
    assert sorted(re.findall(r"rank . attempt .: . ranks", output)) == [
        f"rank {rank} attempt {attempt}: 2 ranks" for rank in range(2) for attempt in range(3)
    ]


# After the first death the nodes' counts differ, which a second one repeats.
@pytest.mark.parametrize("deaths", [1, pytest.param(2, marks=pytest.mark.full)])
def test_nodes_that_count_different_restarts_find_each_other_after_each_death(tmp_path, deaths):
    rendezvous = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--rdzv-id", "test"]
    command = [*TORCHRUN, *rendezvous, "--nnodes", 2, "--nproc-per-node", 1, "--max-restarts", deaths]
    command += [script(tmp_path, START + RESTART), deaths]
    with started(*command, cwd=tmp_path) as one, started(*command, cwd=tmp_path) as other:
        outputs = [agent.communicate(timeout=PATIENCE_S)[0] for agent in (one, other)]
    assert [one.returncode, other.returncode] == [0, 0], "\n".join(outputs)
    assert sorted(re.findall(r"rank \d attempt \d: 2 ranks, restart count \d", "\n".join(outputs))) == [
        *(f"rank 0 attempt {attempt}: 2 ranks, restart count 0" for attempt in range(deaths + 1)),
        *(f"rank 1 attempt {attempt}: 2 ranks, restart count {attempt}" for attempt in range(deaths + 1)),
    ]


@pytest.mark.full  # distributed/test_agreement.py says it of train.py
def test_ranks_started_by_hand_find_each_other_and_finish_with_0(tmp_path):
    hand = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    command = [sys.executable, script(tmp_path, START + RESTART), 0]
    with (
        started(*command, cwd=tmp_path, RANK="1", **hand) as one,
        started(*command, cwd=tmp_path, RANK="0", **hand) as zero,
    ):
        outputs = [process.communicate(timeout=PATIENCE_S)[0] for process in (zero, one)]
    assert outputs == [f"rank {rank} attempt 0: 2 ranks, restart count None\n" for rank in range(2)]
    assert [zero.returncode, one.returncode] == [0, 0]


def first_of_three(port: int) -> str:
    """The error that it raises after 2 s."""
    dist.destroy_process_group()
    os.environ |= {"RANK": "0", "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    with pytest.raises(ValueError, match="did not come") as caught:
        mesh.start(torch.device("cpu"), mesh.resolve(config.Mesh(), 3), timeout_s=2)
    return str(caught.value)


def test_a_rank_that_does_not_come_is_named():
    (message,) = ranks.run(1, first_of_three, free_port())
    assert message.startswith("ranks [1, 2] of 3 did not come in 2 s")


OWNER = """
import os, sys, time
from pathlib import Path
from dtmega.distributed import exit_codes, process
process.die_with_parent()
if os.environ.get("RANK", "0") == "0":
    claim = process.Claim(Path("."))
Path(f"pid-{os.environ.get('RANK', '0')}.tmp").write_text(str(os.getpid()))
os.rename(f"pid-{os.environ.get('RANK', '0')}.tmp", f"pid-{os.environ.get('RANK', '0')}")
time.sleep(600)
"""


def test_no_worker_outlives_an_agent_that_was_killed_and_the_run_directory_is_free_again(tmp_path):
    with started(*TORCHRUN, "--standalone", "--nproc-per-node", 2, script(tmp_path, OWNER), cwd=tmp_path) as agent:
        wait_for(lambda: len([*tmp_path.glob("pid-?")]) == 2, agent)
        pids = [int(path.read_text()) for path in tmp_path.glob("pid-?")]
        assert all(map(alive, pids))
        os.kill(agent.pid, signal.SIGKILL)
        wait_for(lambda: not any(map(alive, pids)))
        process.Claim(tmp_path).close()


def test_a_worker_whose_agent_dies_before_it_can_ask_for_the_signal_kills_itself(monkeypatch):
    parents, killed = iter([4711, 1]), []
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "test")
    monkeypatch.setattr(process.ctypes, "CDLL", lambda _: type("Libc", (), {"prctl": staticmethod(lambda *_: 0)}))
    monkeypatch.setattr(os, "getppid", lambda: next(parents))
    monkeypatch.setattr(os, "kill", lambda *what: killed.append(what))
    process.die_with_parent()
    assert killed == [(os.getpid(), signal.SIGKILL)]


def test_a_second_writer_is_refused_with_the_first_one_s_name_until_that_is_killed(tmp_path):
    with started(sys.executable, script(tmp_path, OWNER), cwd=tmp_path) as first:
        wait_for((tmp_path / "pid-0").exists, first)
        who = re.escape(f"{tmp_path} is being written by process {first.pid} on {socket.gethostname()} since 20")
        with pytest.raises(ValueError, match=who + r"[-0-9: +]+ \(\[run\] dir\)$"):
            process.Claim(tmp_path, patience_s=0.1)
        first.kill()
        process.Claim(tmp_path).close()


def test_a_claim_waits_for_an_orphan_to_die(tmp_path):
    orphan = process.Claim(tmp_path)
    threading.Timer(0.5, orphan.close).start()
    process.Claim(tmp_path, patience_s=PATIENCE_S).close()


def test_what_a_writer_starts_does_not_inherit_its_claim(tmp_path):
    claim = process.Claim(tmp_path)
    with subprocess.Popen(["sleep", "600"], close_fds=False) as child:
        claim.close()
        try:
            process.Claim(tmp_path, patience_s=0).close()
        finally:
            child.kill()


def test_a_directory_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"cannot write .*: Not a directory \(\[run\] dir\)"):
        process.Claim(tmp_path / "file" / "run")


def test_a_file_system_without_locks_is_used_and_said(tmp_path, monkeypatch, capsys):
    def flock(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    process.Claim(tmp_path).close()
    assert "cannot be locked (No locks available)" in capsys.readouterr().err


def test_leaving_keeps_the_code_when_nobody_reads_the_output_any_more(tmp_path):
    worker = (
        "import sys\nfrom dtmega.distributed import exit_codes, process\n"
        "sys.stdin.readline()\nprint('x')\nprocess.leave(exit_codes.PREEMPTED)\n"
    )
    with started(sys.executable, script(tmp_path, worker), cwd=tmp_path, PYTHONUNBUFFERED="") as process:
        assert process.stdout is not None
        assert process.stdin is not None
        process.stdout.close()
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.wait(PATIENCE_S) == exit_codes.PREEMPTED
        process.stdout = None
