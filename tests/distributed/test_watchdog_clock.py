"""Claims about when watchdog.py ends a process, why, and what it says: by a clock that only the test turns."""

from __future__ import annotations

import os
import re
import select
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]

from dtmega.distributed import exit_codes, watchdog
from dtmega.distributed.watchdog import SAVING, CodePlace, Watch
from tests.ranks import forks

REAL_S = 60.0  # the longest that a thread is waited for
# The store gives up and the process is ended from outside before torchrun's 30 s, and after any store that works.
REPORT_S = 10.0


class Clock:
    """Stands in for `time` and `select` in watchdog.py: seconds pass between two looks of the watch, by `run`.

    Attributes:
        code: the process would have ended with; None while it goes on.
        deeds: what the end of the process did, in order.
    """

    def __init__(self) -> None:
        self.now_s = 1000.0
        self.code: int | None = None
        self.deeds: list[Any] = []
        self._looks = threading.Semaphore(0)
        self._goes_on = threading.Semaphore(0)
        self._free = False

    def monotonic(self) -> float:
        return self.now_s

    time = monotonic

    def select(self, sockets: list[Any], *rest: Any) -> Any:
        self._looks.release()
        if not self._free:
            self._goes_on.acquire()
        return select.select(sockets, [], [], 0.1 if self._free else 0)

    def run(self, seconds: float) -> None:
        """Let the watch look every POLL_S until so many seconds have passed, or the process has ended."""
        for _ in range(round(seconds / watchdog.POLL_S)):
            if self.code is None:
                self.jump(watchdog.POLL_S)

    def jump(self, seconds: float) -> None:
        """Let seconds pass in which the watch did not look."""
        assert self._looks.acquire(timeout=REAL_S)
        self.now_s += seconds
        self._goes_on.release()
        assert self._looks.acquire(timeout=REAL_S)  # it has looked, or the process has ended
        self._looks.release()

    def leave(self, code: int) -> NoReturn:
        self.code = code
        self.deeds.append(code)
        self._looks.release()
        raise SystemExit  # of the thread

    def thread_ended(self, error: Any) -> None:
        """End the process, in place of `threading.excepthook`, with a code that nothing in exit_codes.py has."""
        if error.exc_type is not SystemExit:
            self.code = -1
            self._looks.release()

    def free(self) -> None:
        self._free = True
        self._goes_on.release()


@pytest.fixture
def clock(monkeypatch) -> Clock:
    made = Clock()
    faulthandler = SimpleNamespace(
        dump_traceback_later=lambda after_s, exit: made.deeds.append(("end", after_s, exit)),
        dump_traceback=lambda all_threads: made.deeds.append(("stacks", all_threads)),
    )
    monkeypatch.setattr(watchdog, "time", made)
    monkeypatch.setattr(watchdog, "select", made)
    monkeypatch.setattr(watchdog, "faulthandler", faulthandler)
    monkeypatch.setattr(watchdog.process, "leave", made.leave)
    monkeypatch.setattr(threading, "excepthook", made.thread_ended)
    return made


@pytest.fixture
def make(clock) -> Iterator[Any]:
    """Makes a Watch of that clock; the process group is of one unless it is shared."""
    with ExitStack() as closing:

        def made(grace_s: float = 20.0, timeout_s: float = 0.0, rank: int = 0) -> Watch:
            one = Watch(grace_s, timeout_s, rank)
            closing.callback(one.close)
            closing.callback(clock.free)
            return one

        yield made


def ask_to_leave() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def test_without_a_signal_and_without_a_limit_a_process_is_left_alone_and_not_kept_from_ending(clock, make):
    make(grace_s=1.0, timeout_s=0.0)
    clock.run(100)
    assert clock.code is None
    assert [thread.daemon for thread in threading.enumerate() if thread.name == "watch"] == [True]


def test_a_signal_gives_grace_s_to_come_to_the_save_and_not_more(clock, make, capsys):
    one = make(grace_s=20.0)
    one.beat(3, "forward")
    clock.run(100)
    ask_to_leave()
    clock.run(19.6)
    assert clock.code is None
    clock.run(0.8)
    assert clock.code == exit_codes.STUCK
    assert capsys.readouterr().err == (
        "rank 0: a signal came, and no step boundary in 20 s: leaving without a save, at step 3 in forward "
        "(exit code 76)\n"
    )
    assert clock.deeds == [("end", REPORT_S, True), exit_codes.STUCK]


def test_a_signal_that_does_not_ask_to_leave_neither_begins_the_grace_nor_takes_it_back(clock, make):
    before = signal.signal(signal.SIGWINCH, lambda number, frame: None)
    try:
        make(grace_s=1.0)
        os.kill(os.getpid(), signal.SIGWINCH)
        clock.run(10)
        assert clock.code is None
        ask_to_leave()
        clock.run(0.6)
        os.kill(os.getpid(), signal.SIGWINCH)
        clock.run(0.8)
    finally:
        signal.signal(signal.SIGWINCH, before)
    assert clock.code == exit_codes.STUCK


def test_other_phases_and_a_second_signal_do_not_give_the_grace_anew(clock, make):
    one = make(grace_s=20.0)
    ask_to_leave()
    clock.run(10)
    one.beat(4, "evaluation")
    ask_to_leave()
    clock.run(10.4)
    assert clock.code == exit_codes.STUCK
    assert one.signals == [signal.SIGTERM, signal.SIGTERM]


def test_a_save_has_no_limit_and_the_grace_begins_again_after_it(clock, make):
    one = make(grace_s=20.0)
    ask_to_leave()
    clock.run(15)
    one.beat(3, SAVING)
    clock.run(200)
    assert clock.code is None
    one.beat(3, "leaving")
    clock.run(19.6)
    assert clock.code is None
    clock.run(0.8)
    assert clock.code == exit_codes.STUCK


def test_a_save_that_comes_and_goes_between_two_looks_gives_the_grace_anew_too(clock, make):
    one = make(grace_s=20.0)
    ask_to_leave()
    clock.run(15)
    one.beat(3, SAVING)
    one.beat(3, "leaving")
    clock.run(19.6)
    assert clock.code is None
    clock.run(0.8)
    assert clock.code == exit_codes.STUCK


@pytest.mark.parametrize("phase", ["forward", SAVING])
def test_without_a_beat_for_timeout_s_a_process_hangs_whatever_it_does(clock, make, capsys, phase):
    one = make(timeout_s=30.0)
    clock.run(20)
    one.beat(7, phase)
    clock.run(29.6)
    assert clock.code is None
    clock.run(0.8)
    assert clock.code == exit_codes.HUNG
    first, table = capsys.readouterr().err.splitlines()
    assert first == f"rank 0: nothing for 30 s, at step 7 in {phase} (exit code 77)"
    assert table == f"rank 0: step 7 in {phase}, for 30 s"
    assert clock.deeds == [("end", REPORT_S, True), ("stacks", True), exit_codes.HUNG]


def test_a_beat_of_the_same_place_counts_as_life(clock, make):
    one = make(timeout_s=30.0)
    for _ in range(5):
        one.beat(7, "evaluation")
        clock.run(29)
    assert clock.code is None


def test_time_in_which_the_watch_itself_stood_still_counts_as_a_second(clock, make):
    make(timeout_s=30.0)
    for _ in range(20):
        clock.jump(1000)
    assert clock.code is None
    clock.run(10.4)
    assert clock.code == exit_codes.HUNG


def test_after_it_is_closed_nothing_ends_the_process_and_its_sockets_are_closed(clock, make):
    before = len(os.listdir("/proc/self/fd"))
    one = Watch(1.0, 1.0, 0)
    clock.free()
    one.close()
    assert "watch" not in [thread.name for thread in threading.enumerate()]
    assert clock.code is None
    assert len(os.listdir("/proc/self/fd")) == before


def test_where_a_silent_rank_is_in_the_code_is_published_once_after_half_of_the_limit(clock, make, capsys):
    class Counting(HashStore):
        def set(self, key: str, value: str) -> None:
            written.append(key)
            super().set(key, value)

    written: list[str] = []
    one = make(timeout_s=30.0)
    one.share(Counting(), 1)
    one.beat(7, "data")
    clock.run(14.6)
    assert written == ["beat/0", "beat/0"]
    clock.run(0.8)
    assert written[2:] == ["place/0"]
    clock.run(10)
    one.beat(8, "data")
    assert written[3:] == ["beat/0"]
    clock.run(15.4)
    assert written[4:] == ["place/0"]
    clock.run(15)
    assert clock.code == exit_codes.HUNG
    _, table = capsys.readouterr().err.splitlines()
    place = r"\w+ \(threading\.py:\d+\), called by jump \(test_watchdog_clock\.py:\d+\)"
    assert re.fullmatch(rf"rank 0 together: step 8 in data, for 30 s, in {place}", table)


def test_only_the_first_rank_that_reports_a_hang_shows_the_table(clock, make, capsys):
    store = HashStore()
    make(timeout_s=30.0, rank=1).share(store, 2)
    store.add("hung", 1)  # by rank 0
    clock.run(31)
    assert clock.code == exit_codes.HUNG
    assert capsys.readouterr().err == "rank 1: nothing for 30 s, at step 0 in start (exit code 77)\n"


def test_a_rank_whose_process_is_stopped_is_named_in_the_report_and_in_the_record(clock, make, capsys, monkeypatch):
    """Ranks 0 and 1 are in the same phase; rank 1 comes into it 5 s later, and only rank 0's watch looks."""
    monkeypatch.setattr(watchdog, "place_of", lambda frame: CodePlace(True, "a collective"))
    store, one = HashStore(), make(timeout_s=30.0)
    one.share(store, 3)
    one.beat(7, "data")
    clock.run(5)
    for rank in (1, 2):
        store.set(f"beat/{rank}", f"7 0 {clock.now_s} data")
    clock.run(20)
    store.set("beat/2", f"7 0 {clock.now_s} data")  # it comes so late that its place is not due yet
    clock.run(6)
    assert clock.code == exit_codes.HUNG
    named = (
        "rank 1 hanging: step 7 in data, for 25 s, in a process that does not answer: it is stopped, or its machine is "
        "gone"
    )
    assert capsys.readouterr().err.splitlines() == [
        "rank 0: nothing for 30 s, at step 7 in data (exit code 77)",
        "rank 2 as far as others: step 7 in data, for 5 s",
        named,
        "rank 0 waiting: step 7 in data, for 30 s, in a collective",
    ]
    assert one._exit_status.reason == f"nothing for 30 s; {named}"
    assert ("stacks", True) not in clock.deeds


def test_the_record_is_that_of_the_first_rank_which_names_who_hangs(clock, make):
    class Slow(HashStore):
        def wait(self, keys: list[str], timeout: Any) -> None:
            store.set(keys[0], "77 rank 0: nothing for 30 s; rank 1 behind")

    store, one = Slow(), make(timeout_s=30.0, rank=2)
    one.share(store, 3)
    store.add("hung", 1)  # by rank 0
    clock.run(31)
    assert one._exit_status.reason == "rank 0: nothing for 30 s; rank 1 behind"


@pytest.mark.parametrize("error", [RuntimeError("Broken pipe"), TypeError("not foreseen")])
def test_a_report_that_fails_does_not_change_the_exit_code(clock, make, capsys, error):
    class Gone(HashStore):
        def set(self, key: str, value: str) -> None:
            if key == "place/0":
                raise RuntimeError("Broken pipe")

        def check(self, keys: list[str]) -> bool:
            raise error

        def add(self, key: str, value: int) -> int:
            raise RuntimeError("Broken pipe")

    make(timeout_s=30.0).share(Gone(), 2)
    clock.run(31)
    assert clock.code == exit_codes.HUNG
    if isinstance(error, RuntimeError):
        assert capsys.readouterr().err.endswith("\nthe store does not say who is behind: Broken pipe\n")


def hang_in_the_report() -> None:
    class Mute(HashStore):
        def check(self, keys: list[str]) -> bool:
            time.sleep(600)
            return True

    watchdog.REPORT_S = 0.2
    Watch(20.0, 0.3, 0).share(Mute(), 2)
    time.sleep(600)


def test_a_report_that_hangs_too_is_ended_with_code_1(tmp_path):
    (ended,) = forks().fork(1, str(tmp_path), hang_in_the_report, (), timeout_s=30.0, grace_s=0.0)
    assert (ended.code, ended.late) == (1, False)


@pytest.fixture
def four(monkeypatch) -> Iterator[tuple[SimpleNamespace, list[Watch]]]:
    """The time, and the watches of four ranks that share a store, all at step 7 in "data"."""
    now = SimpleNamespace(time=lambda: now.s, monotonic=time.monotonic, s=1000.0)
    monkeypatch.setattr(watchdog, "time", now)
    store = HashStore()
    with ExitStack() as closing:
        watches = []
        for rank in range(4):
            watches.append(Watch(60.0, 0.0, rank))
            closing.callback(watches[-1].close)
            watches[-1].share(store, 4)
            watches[-1].beat(7, "data")
        yield now, watches


def test_a_report_is_read_over_a_connection_that_no_beat_can_block(clock, make):
    class Blocked(HashStore):
        def clone(self) -> HashStore:  # pyright: ignore[reportIncompatibleMethodOverride]
            return reader

    reader, one = HashStore(), make(rank=1)
    reader.set("beat/1", f"7 1 {clock.now_s - 6} data")
    reader.set("beat/2", f"7 1 {clock.now_s - 5} data")
    one.share(Blocked(), 3)
    assert one.who_is_behind().splitlines() == [
        "rank 0 behind: nothing heard since the start",
        "ranks 1, 2 in front: step 7 in data, for 6 s",
    ]


def test_ranks_are_as_long_where_they_are_as_the_longest_of_them(four):
    now, watches = four
    for one in watches:
        now.s += 10
        one.beat(8, "data")
    now.s += 5
    assert watches[3].who_is_behind() == "ranks 0, 1, 2, 3 together: step 8 in data, for 35 s"


def test_a_beat_of_a_clock_that_is_ahead_is_not_negative(four):
    now, watches = four
    now.s -= 100
    assert watches[0].who_is_behind() == "ranks 0, 1, 2, 3 together: step 7 in data, for 0 s"


def test_the_furthest_is_who_is_in_the_later_step_then_who_has_come_to_more_phases_of_it(four):
    _, watches = four
    for _ in range(3):
        watches[1].beat(7, "forward")  # in step 7
    watches[2].beat(8, "data")
    watches[3].beat(8, "data")
    watches[3].beat(8, "forward")
    assert re.sub(r", for \d+ s", "", watches[0].who_is_behind()).splitlines() == [
        "rank 0 behind: step 7 in data",
        "rank 1 behind: step 7 in forward",
        "rank 2 behind: step 8 in data",
        "rank 3 in front: step 8 in forward",
    ]


def published(one: Watch, place: CodePlace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "place_of", lambda frame: place)
    one._publish_place()


def test_ranks_that_came_equally_far_and_all_wait_or_all_do_not_are_not_told_apart(four, monkeypatch):
    _, watches = four
    for one in watches[:3]:
        published(one, CodePlace(True, f"collective {one.rank // 2}"), monkeypatch)
    assert re.sub(r", for \d+ s", "", watches[0].who_is_behind()).splitlines() == [
        "rank 3 as far as others: step 7 in data",
        "ranks 0, 1 as far as others: step 7 in data, in collective 0",
        "rank 2 as far as others: step 7 in data, in collective 1",
    ]


def test_a_rank_whose_place_is_not_known_is_not_said_to_hang(four, monkeypatch):
    _, watches = four
    published(watches[0], CodePlace(True, "a collective"), monkeypatch)
    published(watches[1], CodePlace(False, "a loop"), monkeypatch)
    assert re.sub(r", for \d+ s", "", watches[0].who_is_behind()).splitlines() == [
        "ranks 2, 3 as far as others: step 7 in data",
        "rank 1 hanging: step 7 in data, in a loop",
        "rank 0 waiting: step 7 in data, in a collective",
    ]


@pytest.mark.parametrize("earlier", [(6, 0), (7, 1)])
def test_a_place_of_an_earlier_beat_is_not_shown(four, monkeypatch, earlier):
    _, watches = four
    step, nth = earlier
    for _ in range(nth + 1):
        watches[0].beat(step, "data")
    published(watches[0], CodePlace(False, "there"), monkeypatch)
    assert "there" in watches[0].who_is_behind()
    for _ in range(2 if step == 7 else 1):
        watches[0].beat(7, "data")
    assert "there" not in watches[0].who_is_behind()
