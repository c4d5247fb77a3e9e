"""The meeting of the processes of an attempt: ranks are threads here, and the launcher's store is this process's."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
from torch.distributed import HashStore, PrefixStore, Store, TCPStore

from dtmega.__main__ import main
from dtmega.distributed import exit_codes, rendezvous

PATIENT = timedelta(seconds=20)
BRIEF = timedelta(seconds=0.5)


@pytest.fixture
def together(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """`together(fn, *args)` calls in a thread of its own; the environment is that of a worker under torchrun."""
    agent = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    place = {"RANK": "0", "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(agent.port)}
    for name, value in (place | {"TORCHELASTIC_USE_AGENT_STORE": "True"}).items():
        monkeypatch.setenv(name, value)
    with ThreadPoolExecutor(8) as threads:
        yield threads.submit


def met(rank: int, size: int, timeout: timedelta = PATIENT) -> Store:
    return rendezvous.meet(rank, size, timeout)


def test_the_ranks_of_an_attempt_have_one_store_and_those_of_the_next_another(together):
    stores = []
    for attempt in range(3):
        # A rank may come long before rank 0, while all that it can see is the attempt before.
        others = [together(met, rank, 3) for rank in (2, 1)]
        time.sleep(0.15)
        assert not any(future.done() for future in others), attempt
        stores.append([future.result() for future in (together(met, 0, 3), *others)])
    for attempt, same in enumerate(stores):
        same[attempt].set("attempt", str(attempt))
    assert [[store.get("attempt") for store in same] for same in stores] == [[b"0"] * 3, [b"1"] * 3, [b"2"] * 3]


def test_rank_0_names_those_that_did_not_come_in_time(together):
    coming = together(met, 1, 4, timedelta(seconds=2))
    why = r"^ranks \[2, 3\] of 4 did not come in 0.5 s$"
    with pytest.raises(ValueError, match=why):
        met(0, 4, BRIEF)
    with pytest.raises(rendezvous.Rank0GaveUp, match=why):
        coming.result()


def test_ranks_that_come_one_after_the_other_have_as_long_each(together):
    coming = together(met, 0, 4, timedelta(seconds=0.6))
    others = []
    for rank in (1, 2, 3):
        time.sleep(0.4)
        others.append(together(met, rank, 4))
    assert all(isinstance(future.result(), PrefixStore) for future in (coming, *others))


def test_one_rank_meets_nobody_and_its_next_attempt_is_another(together):
    first, second = met(0, 1, BRIEF), met(0, 1, BRIEF)
    first.set("a", "")
    assert not second.check(["a"])


def test_without_a_launcher_there_is_nobody_to_meet(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert isinstance(met(0, 1), HashStore)


@pytest.mark.parametrize("missing", ["RANK", "MASTER_ADDR", "MASTER_PORT"])
def test_a_launcher_that_has_told_only_half_is_refused(together, monkeypatch, missing):
    monkeypatch.delenv(missing)
    with pytest.raises(ValueError, match=f"^WORLD_SIZE is set and {missing} not: start with torchrun, or set all four"):
        met(0, 3)


@pytest.mark.parametrize(
    ("rank", "agent", "holds"), [(0, "True", False), (0, None, True), (0, "False", True), (1, None, False)]
)
def test_rank_0_holds_the_store_unless_the_agent_does(together, monkeypatch, rank, agent, holds):
    if agent is None:
        monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE")
    else:
        monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", agent)
    asked: list[dict[str, Any]] = []

    def connect(*place: Any, **keywords: Any) -> Store:
        asked.append(keywords)
        return HashStore()

    monkeypatch.setattr(rendezvous, "TCPStore", connect)
    monkeypatch.setattr(rendezvous, "_join_attempt", lambda *_: 1)
    assert isinstance(met(rank, 1), PrefixStore)
    # Others connect while this one waits, and an earlier attempt's server may still be in this process.
    assert asked == [{"is_master": holds, "timeout": PATIENT, "wait_for_workers": False, "multi_tenant": True}]


@pytest.fixture
def by_hand(monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """The environment of a process that was started by hand, in little time; its port, bound by another program."""
    monkeypatch.setattr(rendezvous, "BY_HAND_PATIENCE", BRIEF)
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        place = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": taken.getsockname()[1]}
        for name, value in place.items():
            monkeypatch.setenv(name, str(value))
        yield taken


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("RANK", "2", r"expected RANK to be a whole number from 0 to 1, got '2' \(torchrun sets it\), WORLD_SIZE=2"),
        ("RANK", "-1", "got '-1'"),
        ("RANK", "one", "got 'one'"),
        ("WORLD_SIZE", "0", "expected WORLD_SIZE to be a whole number from 1 to 1048576, got '0'"),
        ("MASTER_PORT", "abc", "expected MASTER_PORT to be a whole number from 1 to 65535, got 'abc'"),
        ("MASTER_PORT", "65536", "got '65536'"),
        ("MASTER_ADDR", "no-such-host.invalid", "this machine knows no host MASTER_ADDR=no-such-host.invalid: "),
    ],
)
def test_what_a_launcher_cannot_mean_is_refused_with_the_variable(by_hand, monkeypatch, name, value, message):
    monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=message):
        met(*rendezvous.rank_and_size())


@pytest.mark.parametrize(
    ("rank", "listens", "message"),
    [
        (0, True, "^the ranks cannot meet: the port is taken "),
        (1, True, "^no answer in 0.5 s: another program has that port "),
        (1, False, "^rank 0 is not there after 0.5 s: Connection refused "),
    ],
)
def test_a_port_that_another_program_has_or_nobody_is_named_in_time(by_hand, rank, listens, message):
    if listens:
        by_hand.listen()
    with pytest.raises(ValueError, match=rf"{message}\(MASTER_ADDR=127.0.0.1, MASTER_PORT=\d+\)$"):
        met(rank, 2)


def test_a_process_that_does_not_come_is_not_waited_for_as_long_as_a_collective(by_hand):
    by_hand.close()
    with pytest.raises(ValueError, match=r"^ranks \[1\] of 2 did not come in 0.5 s: started by hand, "):
        met(0, 2)


@pytest.mark.parametrize(
    "command", [["generate", "x", "--prompt", "y"], ["convert", "--from", "hf", "x", "--to", "hf", "y"]]
)
def test_a_command_whose_launcher_is_wrong_says_so_in_one_line_and_torchrun_too(
    by_hand, tmp_path, monkeypatch, capsys, command
):
    monkeypatch.setenv("RANK", "5")
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    assert main(command) == exit_codes.REFUSED
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"dtmega {command[0]}: expected RANK to be a whole number from 0 to 1, got '5'")
    told = json.loads((tmp_path / "error.json").read_text())["message"]["message"]
    assert line == f"dtmega {command[0]}: {told}"
