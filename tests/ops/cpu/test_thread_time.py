"""thread_time.py: a clock that stands still in waits and goes on in work and in the wait for a core."""

from __future__ import annotations

import threading
import time

import pytest

from dtmega.ops.cpu.thread_time import ThreadTime


def work(seconds: float) -> None:
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def test_the_clock_stands_still_while_its_thread_sleeps():
    clock = ThreadTime()
    before_s = clock.busy_s()
    time.sleep(0.3)
    assert clock.busy_s() - before_s < 0.1
    clock.close()


def test_the_clock_goes_on_while_its_thread_computes():
    clock = ThreadTime()
    before_s = clock.busy_s()
    work(0.2)
    assert clock.busy_s() - before_s >= 0.19
    clock.close()


def test_the_clock_is_that_of_the_thread_that_made_it_whoever_reads_it():
    clock = ThreadTime()
    seen: list[float] = []
    work(0.2)
    other = threading.Thread(target=lambda: seen.append(clock.busy_s()))
    other.start()
    other.join()
    assert seen[0] >= 0.19
    clock.close()


def test_a_system_that_does_not_tell_gives_the_time_of_computing(monkeypatch: pytest.MonkeyPatch):
    def refuse(*_: object) -> int:
        raise FileNotFoundError

    monkeypatch.setattr("os.open", refuse)
    clock = ThreadTime()
    assert clock.busy_s() == pytest.approx(time.thread_time(), abs=0.05)
    clock.close()
