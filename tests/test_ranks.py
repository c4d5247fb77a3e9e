"""Claims about the ranks that tests fork."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from tests import ranks

N_THREADS = 8


def compute_in_several_threads() -> list[str]:
    """The errors of threads that all begin to compute at the same time."""
    start, errors = threading.Barrier(N_THREADS), []

    def compute() -> None:
        start.wait()
        try:
            torch.ones(40_000)  # just enough elements for torch to ask how many threads there are
        except RuntimeError as error:
            errors.append(str(error))

    threads = [threading.Thread(target=compute) for _ in range(N_THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return errors


def fork_a_rank(folder: str) -> None:
    """Fork a rank that calls what is pickled in folder/call, from a process with a pool that takes long to replace."""
    torch.set_num_threads(64)  # a pool keeps the size that it is made with
    torch.get_num_threads()  # no main thread asks for the pool after this
    pid = ranks._fork(0, ranks.Group(1, folder, __name__, timeout_s=60, grace_s=5))
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))


@pytest.mark.full
def test_threads_of_a_forked_rank_may_compute_at_once(tmp_path):
    Path(tmp_path, "call").write_bytes(pickle.dumps((compute_in_several_threads, ())))
    script = "import sys; from tests.test_ranks import fork_a_rank; fork_a_rank(sys.argv[1])"
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=True, cwd=Path(__file__).parent.parent)
    assert torch.load(tmp_path / "0.result") == []
