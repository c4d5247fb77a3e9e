"""Claims about ops/cpu/contention.py; the system's account of waiting is a folder that the test writes."""

from __future__ import annotations

import pytest
import torch

from dtmega.ops.cpu import contention
from dtmega.ops.cpu.contention import FROM, TO, Contention

CPU = torch.device("cpu")


@pytest.fixture
def waits(tmp_path, monkeypatch):
    """Set how many seconds each of two threads has waited for a core so far."""
    monkeypatch.setattr(contention, "THREADS", tmp_path)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    now = iter(range(0, 1000, 10))  # seconds
    monkeypatch.setattr(contention.time, "perf_counter", lambda: next(now))

    def write(*seconds: float) -> None:
        for number, waited_s in enumerate(seconds):
            (tmp_path / str(number)).mkdir(exist_ok=True)
            (tmp_path / str(number) / "schedstat").write_text(f"123456789 {int(waited_s * 1e9)} 77\n")

    return write


def said(waits, before: tuple[float, ...], after: tuple[float, ...], device: torch.device = CPU) -> str:
    """What is said in the 13 steps of a run, of which the last 10 take 10 seconds."""
    looks = Contention(device)
    waits(*before)
    lines = [looks.after_step(n) for n in range(1, FROM + 1)]
    waits(*after)
    lines += [looks.after_step(n) for n in range(FROM + 1, TO + 1)]
    assert not any(lines[:-1])
    return lines[-1]


def test_a_run_whose_threads_wait_for_cores_is_told_how_many_threads_to_take(waits):
    line = said(waits, before=(100, 0), after=(104, 1))
    assert "in each second, threads of this run waited 0.5 s" in line
    assert "OMP_NUM_THREADS=1 in front" in line


@pytest.mark.parametrize("case", ["its cores are free", "one thread", "a GPU", "nobody knows"])
def test_else_nothing_is_said(waits, monkeypatch, case):
    if case == "one thread":
        monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    after = (100.0, 2.0) if case == "its cores are free" else (104.0, 1.0)
    if case == "nobody knows":
        monkeypatch.setattr(contention, "THREADS", contention.THREADS / "gone")
    assert said(waits, (100, 0), after, torch.device("cuda" if case == "a GPU" else "cpu")) == ""
