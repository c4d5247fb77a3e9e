"""The meeting of the processes of an attempt: ranks are threads here, and the launcher's store is this process's."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
from torch.distributed import HashStore, PrefixStore, Store, TCPStore

from dtmega import rendezvous

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
    with pytest.raises(RuntimeError, match=r"^ranks \[2, 3\] of 4 did not come in 0.5 s$"):
        met(0, 4, BRIEF)
    with pytest.raises(RuntimeError, match=r"^rank 1: rank 0 did not bring all ranks together in 2 s$"):
        coming.result()


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
    monkeypatch.setattr(rendezvous, "_find_attempt", lambda *_: 1)
    assert isinstance(met(rank, 1), PrefixStore)
    # Others connect while this one waits, and an earlier attempt's server may still be in this process.
    assert asked == [{"is_master": holds, "timeout": PATIENT, "wait_for_workers": False, "multi_tenant": True}]
