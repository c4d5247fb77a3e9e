"""Claims about agreement.py: how ranks meet, wait, and say why not; by two ranks in this process that share a store."""

from __future__ import annotations

import errno
import json
import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]

from dtmega import mesh
from dtmega.distributed import agreement, exit_codes
from dtmega.distributed.agreement import Refused, Startup


@pytest.fixture
def pair(monkeypatch) -> list[Startup]:
    """Two ranks in this process that have met; a test that lets one of them wait in vain shortens its time."""
    store = HashStore()
    monkeypatch.setattr(mesh, "rendezvous", lambda timeout_s: store)
    made = [Startup(60.0), Startup(60.0)]
    for rank, one in enumerate(made):
        one.rank, one.size = rank, 2
    both(made, lambda one: take(one, {}))
    return made


def take(one: Startup, same: Mapping[str, Any]) -> None:
    with one.step("step") as step:
        step.must_match = same


def both(pair: list[Startup], do: Callable[[Startup], object]) -> list[Exception | None]:
    """The error that `do` raised on each rank."""
    raised: list[Exception | None] = [None, None]

    def caught(rank: int) -> None:
        try:
            do(pair[rank])
        except Exception as error:
            raised[rank] = error

    threads = [threading.Thread(target=caught, args=[rank]) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return raised


def late(items: Iterable[int]) -> None:
    for _ in items:
        time.sleep(0.1)


@pytest.mark.parametrize("how", ["in a step", "in the middle of one"])
def test_who_works_longer_than_the_timeout_is_waited_for_and_nobody_hangs(pair, monkeypatch, how):
    monkeypatch.setattr(agreement, "HEARTBEAT_S", 0.05)
    beats = [0, 0]

    def beat(rank: int) -> None:
        beats[rank] += 1

    def do(one: Startup) -> None:
        one.on_heartbeat, one.timeout_s = partial(beat, one.rank), 0.8
        with one.step("step"):
            # 1.8 s, which is longer than timeout_s by more than a poll.
            late(one.with_heartbeats(range(18 if one.rank == 1 else 1)))
            if how == "in the middle of one":
                one.wait_for_all()

    assert both(pair, do) == [None, None]
    assert min(beats) > 3


def test_who_does_not_come_and_does_not_work_is_named(pair):
    def do(one: Startup) -> None:
        one.timeout_s = 0.3
        if one.rank == 0:
            take(one, {})

    error, _ = both(pair, do)
    assert str(error) == "exit code 1: rank 1 did not come to the end of the step 'step' in 0.3 s"


def test_torchrun_is_told_why_a_command_is_refused(pair, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))

    def do(one: Startup) -> None:
        with one.step("step"):
            if one.rank == 1:
                raise ValueError("no such file")

    assert [type(error) for error in both(pair, do)] == [Refused, Refused]
    assert json.loads((tmp_path / "error.json").read_text())["message"]["message"] == "rank 1: no such file"


def test_a_refusal_is_not_kept_back_by_a_rank_that_never_comes(pair, monkeypatch, capsys):
    monkeypatch.setattr(agreement, "PATIENCE_S", 0.2)

    def do(one: Startup) -> None:
        one.size, one.timeout_s = 3, 5.0  # after which rank 0 would only know that somebody did not come
        with one.step("step"):
            if one.rank == 1:
                raise ValueError("no such file")

    assert [type(error) for error in both(pair, do)] == [Refused, Refused]
    assert capsys.readouterr().err == "dtmega: rank 1: no such file\n"


def test_who_waits_in_a_step_that_another_rank_refuses_gives_up_and_does_not_go_on(pair, capsys):
    went_on: list[int] = []

    def do(one: Startup) -> None:
        with one.step("step"):
            if one.rank == 1:
                raise ValueError("no such file")
            one.wait_for_all()
            went_on.append(one.rank)

    assert [type(error) for error in both(pair, do)] == [Refused, Refused]
    assert (went_on, capsys.readouterr().err) == ([], "dtmega: rank 1: no such file\n")


def test_keys_that_only_one_rank_has_and_long_values_are_shown_too(pair, capsys):
    def do(one: Startup) -> None:
        take(one, {"a": "x" * 500, "b": 1, "same": 2} if one.rank == 0 else {"a": "x" * 499, "same": 2})

    assert [type(error) for error in both(pair, do)] == [Refused, Refused]
    line = capsys.readouterr().err
    assert "; b is 1 on rank 0, not there on rank 1" in line
    assert len(line) < 400
    assert "same is" not in line


class Coded(ValueError):
    exit_code = exit_codes.DAMAGED


TRACEBACK = "Traceback (most recent call last):"


@pytest.mark.parametrize(
    ("raised", "code", "lines"),
    [
        ((ValueError("no such file"), None), 2, ["rank 0: no such file"]),
        ((None, Coded("not intact")), 3, ["rank 1: not intact"]),
        ((Coded("the same"), Coded("the same")), 3, ["the same"]),
        ((Coded("the same"), ValueError("the same")), 3, ["rank 0: the same"]),  # the code of the lowest rank
        ((ValueError("this"), Coded("that")), 2, ["rank 0: this", "rank 1: that"]),
        ((None, OSError(errno.EACCES, "No", "a/file")), 2, ["rank 1: what they do: [Errno 13] No: 'a/file'"]),
        ((None, TypeError("not foreseen")), 1, [f"rank 1: {TRACEBACK}"]),
        ((TypeError("not foreseen"), ValueError("this")), 1, [f"rank 0: {TRACEBACK}", "rank 1: this"]),
    ],
)
def test_why_a_rank_does_not_start_is_said_once_and_all_leave_with_its_code(pair, capsys, raised, code, lines):
    def do(one: Startup) -> None:
        with one.step("what they do") as step:
            if (error := raised[one.rank]) is not None:
                raise error
            step.must_match = {"only": one.rank}  # what a rank that refuses would have had is not compared

    refused = both(pair, do)
    assert [getattr(error, "exit_code", error) for error in refused] == [code, code]
    said = capsys.readouterr().err.splitlines()
    assert [line for line in said if line.startswith("dtmega: ")] == [f"dtmega: {line}" for line in lines]


def test_what_nobody_expected_in_one_process_is_raised_as_it_is(monkeypatch):
    monkeypatch.setattr(mesh, "rendezvous", lambda timeout_s: HashStore())
    with pytest.raises(TypeError, match="not foreseen"), Startup().step("step"):
        raise TypeError("not foreseen")


def test_rank_0_tells_and_the_others_are_told_and_what_a_step_had_is_not_in_the_next_one(pair):
    received: dict[tuple[int, str], Any] = {}

    def do(one: Startup) -> None:
        for name in ("first", "second"):
            with one.step(name) as step:
                assert (step.must_match, step.send, step.received) == ({}, None, None)
                step.send = [name, one.rank]
                step.must_match = {"key": name}
            received[one.rank, name] = step.received

    assert both(pair, do) == [None, None]
    assert received == {(rank, name): [name, 0] for rank in (0, 1) for name in ("first", "second")}


def test_the_order_of_keys_and_what_json_does_not_know_make_no_difference(pair):
    def do(one: Startup) -> None:
        take(one, {"a": 1, "b": Path("c")} if one.rank == 0 else {"b": Path("c"), "a": 1})

    assert both(pair, do) == [None, None]


@pytest.mark.parametrize(("n", "more"), [(8, ""), (9, "; and 1 more"), (20, "; and 12 more")])
def test_the_first_eight_keys_that_differ_are_shown_by_name_and_the_others_counted(pair, capsys, n, more):
    def do(one: Startup) -> None:
        take(one, {f"key {i:02}": one.rank for i in reversed(range(n))})

    both(pair, do)
    shown = "; ".join(f"key {i:02} is 0 on rank 0, 1 on rank 1" for i in range(8))
    assert capsys.readouterr().err == f"dtmega: the ranks do not have the same step: {shown}{more}\n"


@pytest.mark.parametrize(("length", "shown"), [(98, "x" * 98 + '"'), (99, "x" * 99 + "...")])
def test_a_value_is_shown_up_to_100_characters(pair, capsys, length, shown):
    both(pair, lambda one: take(one, {"key": "x" * length if one.rank == 0 else 1}))
    assert f'key is "{shown} on rank 0, 1 on rank 1\n' in capsys.readouterr().err


def test_who_refuses_after_all_have_come_to_a_wait_ends_the_step_and_not_the_wait(pair, monkeypatch):
    looked, refused = threading.Event(), threading.Event()
    went_on: list[int] = []

    class Slow(agreement.PrefixStore):
        """Rank 1 comes, and refuses, while rank 0 has just seen that not all have come."""

        def check(self, keys: list[str]) -> bool:
            found = super().check(keys)
            if keys == ["complete"] and not found:
                looked.set()
                refused.wait(5)
            return found

        def set(self, key: str, value: str) -> None:
            super().set(key, value)
            if key == "failed":
                refused.set()

    def do(one: Startup) -> None:
        with one.step("step"):
            if one.rank == 1:
                looked.wait(5)
            one.wait_for_all()
            if one.rank == 1:
                raise ValueError("no such file")
            went_on.append(one.rank)

    monkeypatch.setattr(agreement, "PrefixStore", Slow)
    assert [type(error) for error in both(pair, do)] == [Refused, Refused]
    assert went_on == [0]


def test_each_wait_in_a_step_waits_for_all(pair):
    came: list[tuple[int, int]] = []

    def do(one: Startup) -> None:
        for name in range(2):
            with one.step(str(name)):
                for i in range(3):
                    if one.rank == (name + i) % 2:
                        time.sleep(0.03)
                    came.append((name, i))
                    one.wait_for_all()

    assert both(pair, do) == [None, None]
    assert came == sorted(came)


def test_who_waits_in_a_step_for_a_rank_that_does_not_come_says_how_long(pair, capsys):
    def do(one: Startup) -> None:
        with one.step("step"):
            if one.rank == 0:
                one.timeout_s = 0.3
                one.wait_for_all()

    assert [type(error) for error in both(pair, do)] == [Refused, Refused]
    assert "RuntimeError: not all ranks came in 0.3 s\n" in capsys.readouterr().err


def test_a_rank_that_rank_0_does_not_come_for_says_so(pair):
    def do(one: Startup) -> None:
        one.timeout_s = 0.3
        if one.rank == 1:
            take(one, {})

    _, error = both(pair, do)
    assert str(error) == "exit code 1: rank 0 did not come to the end of the step 'step' in 0.3 s"


def test_a_rank_that_refuses_and_that_rank_0_does_not_come_for_leaves_with_its_own_code(pair, monkeypatch, capsys):
    monkeypatch.setattr(agreement, "PATIENCE_S", 0.2)

    def do(one: Startup) -> None:
        one.timeout_s = 5.0
        if one.rank == 1:
            with one.step("step"):
                raise Coded("not intact")

    _, refused = both(pair, do)
    assert getattr(refused, "exit_code", refused) == exit_codes.DAMAGED
    assert capsys.readouterr().err == "dtmega: rank 1: not intact\n"


@pytest.mark.parametrize("comes", [True, False])
def test_rank_0_leaves_as_the_last_but_does_not_wait_for_ever(pair, monkeypatch, comes):
    monkeypatch.setattr(agreement, "PATIENCE_S", 60.0 if comes else 0.1)
    rank_0_has_left = threading.Event()
    deeds: list[str] = []

    def do(one: Startup) -> None:
        if one.rank == 1:
            rank_0_has_left.wait(0.1 if comes else 60.0)
            deeds.append("rank 1 comes")
        one.leave()
        if one.rank == 0:
            deeds.append("rank 0 leaves")
            rank_0_has_left.set()

    assert both(pair, do) == [None, None]
    assert (deeds == ["rank 1 comes", "rank 0 leaves"]) == comes


def test_a_rank_at_work_says_so_before_each_item_and_to_the_others_now_and_then(pair, monkeypatch):
    monkeypatch.setattr(agreement, "HEARTBEAT_S", 60.0)
    one, deeds = pair[0], []
    one.on_heartbeat = lambda: deeds.append("beat")
    for item in one.with_heartbeats(["a", "b"]):
        deeds.append(item)
    assert deeds == ["beat", "a", "beat", "b"]
    store = one._meeting
    assert store is not None
    assert store.add("heartbeats", 0) == 1


@pytest.mark.parametrize(("refuses", "others_work"), [(True, False), (True, True), (False, False)])
def test_who_refuses_waits_ten_seconds_for_the_others_and_who_does_not_ten_minutes(monkeypatch, refuses, others_work):
    naps_s: list[float] = []

    def sleep(nap_s: float) -> None:
        naps_s.append(nap_s)
        assert sum(naps_s) < 1000  # by this clock: else one that waits for ever would do so in this test
        assert one._meeting is not None
        one._meeting.add("heartbeats", int(others_work))

    monkeypatch.setattr(mesh, "rendezvous", lambda timeout_s: HashStore())
    monkeypatch.setattr(agreement, "time", SimpleNamespace(monotonic=lambda: sum(naps_s), sleep=sleep))
    one = Startup()
    one.size = 2

    def come() -> None:
        with one.step("step"):
            if refuses:
                raise ValueError("no such file")

    with pytest.raises(Refused, match="exit code 2" if refuses else "exit code 1"):
        come()
    # The second ten are for others to read the verdict.
    limit_s = 20 if refuses else 600
    assert limit_s < sum(naps_s) < limit_s + 1.1
    assert (naps_s[0], max(naps_s)) == (0.002, 0.5)


def test_a_program_may_start_twice_on_one_store(pair):
    both(pair, lambda one: one.leave())
    again = [Startup(60.0), Startup(60.0)]
    for rank, one in enumerate(again):
        one.rank, one.size = rank, 2

    def do(one: Startup) -> None:
        if one.rank == 0:
            time.sleep(0.05)  # so that rank 1 would find what is there from before
        with one.step("step") as step:
            step.send = "anew" if one.rank == 0 else None
        assert step.received == "anew"

    assert both(again, do) == [None, None]


@pytest.mark.parametrize("error", [ValueError("WORLD_SIZE is set"), RuntimeError("ranks [1] of 2 did not come")])
def test_who_meets_nobody_still_says_its_own_reason(monkeypatch, capsys, error):
    def nobody(timeout_s: float) -> None:
        raise error

    monkeypatch.setattr(mesh, "rendezvous", nobody)
    with pytest.raises(Refused, match="exit code 3"), Startup(program="dtmega test").step("step"):
        raise Coded("not intact")
    assert capsys.readouterr().err == "dtmega test: not intact\n"
    with pytest.raises(Refused, match=f"exit code 2: {re.escape(str(error))}"), Startup().step("step"):
        pass
    assert capsys.readouterr().err == f"dtmega: {error}\n"
