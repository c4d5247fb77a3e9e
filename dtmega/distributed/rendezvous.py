"""The meeting of the processes of one attempt of a job, before there is a process group: a store of that attempt alone.

torchrun keeps one store over all restarts, in which the next attempt finds the addresses of dead processes; with gloo,
17 of 28 restarts failed. TORCHELASTIC_RESTART_COUNT cannot tell attempts apart: each node counts its own failures. So
rank 0 numbers the attempt, waits until all ranks have come, and opens it. An attempt that was open before a rank came
is an earlier one.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from datetime import timedelta
from typing import Any

from torch.distributed import (  # documented, missing in __all__
    HashStore,  # pyright: ignore[reportPrivateImportUsage]
    PrefixStore,  # pyright: ignore[reportPrivateImportUsage]
    Store,  # pyright: ignore[reportPrivateImportUsage]
    TCPStore,  # pyright: ignore[reportPrivateImportUsage]
)

# How long those that were started by hand wait for the next one to come. torchrun has its workers on all nodes already.
BY_HAND = timedelta(seconds=20)
POLL_S = 0.1
LARGEST_WORLD = 2**20
LARGEST_PORT = 2**16 - 1


class Rank0GaveUp(ValueError):
    """Raised on a rank that rank 0 has told why the ranks do not meet; rank 0 says it."""


def number(name: str, default: int, low: int, high: int) -> int:
    """A variable of the launcher's.

    Raises:
        ValueError: it is no whole number from `low` to `high`.
    """
    text = os.environ.get(name)
    if text is None:
        return default
    if not text.isdecimal() or not low <= int(text) <= high:
        raise ValueError(f"expected {name} to be a whole number from {low} to {high}, got '{text}' (torchrun sets it)")
    return int(text)


def place() -> tuple[int, int]:
    """Rank and number of processes, as the launcher says; (0, 1) without one.

    Raises:
        ValueError: they are no numbers, or the rank is not one of so many.
    """
    size = number("WORLD_SIZE", 1, 1, LARGEST_WORLD)
    try:
        return number("RANK", 0, 0, size - 1), size
    except ValueError as error:
        raise ValueError(f"{error}, WORLD_SIZE={size}") from None


def meet(rank: int, size: int, timeout: timedelta) -> Store:
    """The store of this attempt, once all `size` processes that the launcher started have come.

    Args:
        timeout: of what is read in the store; how long to wait for a next rank to come, unless started `BY_HAND`.

    Raises:
        ValueError: the launcher has told only half of what there is to know, or what cannot be; nobody can be met
            there; not all ranks came: rank 0 names those.
    """
    if "WORLD_SIZE" not in os.environ:
        return HashStore()
    missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise ValueError(f"WORLD_SIZE is set and {', '.join(missing)} not: start with torchrun, or set all four")
    agent_has_it = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    patience = timeout if agent_has_it else min(timeout, BY_HAND)
    tcp = _connect(rank == 0 and not agent_has_it, timeout, patience)
    job = PrefixStore("dtmega", tcp)
    attempt = _open_attempt(job, size, patience, agent_has_it) if rank == 0 else _find_attempt(job, rank, timeout)
    return PrefixStore(str(attempt), job)


def _connect(is_master: bool, timeout: timedelta, patience: timedelta) -> Store:
    """The launcher's store, held by this process or by another one that must come to listen in time.

    Raises:
        ValueError: the address cannot be, the port is taken, nobody listens there, or somebody else does.
    """
    address = os.environ["MASTER_ADDR"]
    port = number("MASTER_PORT", 0, 1, LARGEST_PORT)
    where = f"MASTER_ADDR={address}, MASTER_PORT={port}"
    try:
        socket.getaddrinfo(address, port)
    except (OSError, UnicodeError) as error:
        raise ValueError(f"this machine knows no host MASTER_ADDR={address}: {error}") from None
    if not is_master:
        _wait_for_listener(address, port, patience)

    found: list[Store | RuntimeError] = []

    def connect() -> None:
        try:
            options: dict[str, Any] = {"timeout": timeout, "wait_for_workers": False, "multi_tenant": True}
            found.append(TCPStore(address, port, is_master=is_master, **options))
        except RuntimeError as error:
            found.append(error)

    # In a thread, since torch waits for ever for the answer of a listener that is no store.
    thread = threading.Thread(target=connect, daemon=True)
    thread.start()
    thread.join(patience.total_seconds())
    store = found[0] if found else None
    if store is None:
        raise ValueError(f"no answer in {patience.total_seconds():g} s: another program has that port ({where})")
    if isinstance(store, RuntimeError):
        reason = "the port is taken" if "EADDRINUSE" in str(store) else str(store).partition("\n")[0]
        raise ValueError(f"the ranks cannot meet: {reason} ({where})")
    return store


def _wait_for_listener(address: str, port: int, patience: timedelta) -> None:
    """Wait until somebody listens there; torch would print a page for each attempt.

    Raises:
        ValueError: nobody does in time.
    """
    deadline = time.monotonic() + patience.total_seconds()
    while True:
        try:
            socket.create_connection((address, port), timeout=POLL_S).close()
            return
        except OSError as error:
            reason = error.strerror or str(error)
        if time.monotonic() > deadline:
            raise ValueError(
                f"rank 0 is not there after {patience.total_seconds():g} s: {reason} (MASTER_ADDR={address}, "
                f"MASTER_PORT={port})"
            )
        time.sleep(POLL_S)


def _open_attempt(job: Store, size: int, patience: timedelta, agent_has_it: bool) -> int:
    """The number of the attempt that this rank 0 opens, when all others are there for it.

    Raises:
        ValueError: no other one came for so long.
    """
    attempt = job.add("attempts", 1)
    absent = [*range(1, size)]
    deadline = time.monotonic() + patience.total_seconds()
    while absent:
        still_absent = [other for other in absent if not job.check([f"{attempt}/here/{other}"])]
        if len(still_absent) < len(absent):
            deadline = time.monotonic() + patience.total_seconds()
        absent = still_absent
        if absent and time.monotonic() > deadline:
            why = f"ranks {absent} of {size} did not come in {patience.total_seconds():g} s"
            if not agent_has_it:
                why += ": started by hand, all have to come soon after each other; torchrun waits for all nodes"
            job.set(f"{attempt}/given up", why)
            time.sleep(2 * POLL_S)  # in which the others read it: this process may hold the store
            raise ValueError(why)
        time.sleep(POLL_S if absent else 0)
    job.set(f"{attempt}/open", "")
    return attempt


def _find_attempt(job: Store, rank: int, timeout: timedelta) -> int:
    """The number of the attempt that rank 0 has opened, once this rank has said that it is here for it.

    Raises:
        ValueError: rank 0 opened none that this rank was there for, in time.
    """
    deadline = time.monotonic() + timeout.total_seconds()
    joined = 0
    while time.monotonic() < deadline:
        attempt = job.add("attempts", 0)
        is_open = attempt > 0 and job.check([f"{attempt}/open"])
        if is_open and attempt == joined:
            return attempt
        if attempt > joined and not is_open:
            job.set(f"{attempt}/here/{rank}", "")
            joined = attempt
        if joined and job.check([f"{joined}/given up"]):
            raise Rank0GaveUp(job.get(f"{joined}/given up").decode())
        time.sleep(POLL_S)
    raise ValueError(f"rank {rank}: rank 0 did not bring all ranks together in {timeout.total_seconds():g} s")
