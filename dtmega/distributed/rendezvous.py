"""The rendezvous: before a process group exists, a job's processes meet in a store. Each attempt has its own keys.

torchrun keeps one store for all restarts of a job. If attempts shared the keys in this store, a new attempt would
find the addresses of dead processes: with gloo, 17 of 28 restarts failed. TORCHELASTIC_RESTART_COUNT does not identify
an attempt, because each node counts only its own failures.

So rank 0 numbers the attempts. Rank 0 starts a new attempt, waits until all ranks have joined the attempt, and then
opens it. An open attempt that a rank has not joined is therefore an earlier attempt.
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

# Longest wait for the next process if processes are started by hand. torchrun waits for all nodes by itself.
BY_HAND_PATIENCE = timedelta(seconds=20)
POLL_S = 0.1
LARGEST_WORLD = 2**20
LARGEST_PORT = 2**16 - 1


class Rank0GaveUp(ValueError):
    """Raised on all ranks except rank 0 once rank 0 gives up waiting; the message is the text that rank 0 prints."""


def launcher_number(name: str, default: int, low: int, high: int) -> int:
    """The number in an environment variable that the launcher sets, or `default` if the variable is not set.

    Raises:
        ValueError: the variable is not a whole number from `low` to `high`.
    """
    text = os.environ.get(name)
    if text is None:
        return default
    if not text.isdecimal() or not low <= int(text) <= high:
        raise ValueError(f"expected {name} to be a whole number from {low} to {high}, got '{text}' (torchrun sets it)")
    return int(text)


def rank_and_size() -> tuple[int, int]:
    """Rank of this process and number of processes, from the launcher; (0, 1) without a launcher.

    Raises:
        ValueError: RANK or WORLD_SIZE is not a number, or the rank is not below the number of processes.
    """
    size = launcher_number("WORLD_SIZE", 1, 1, LARGEST_WORLD)
    try:
        return launcher_number("RANK", 0, 0, size - 1), size
    except ValueError as error:
        raise ValueError(f"{error}, WORLD_SIZE={size}") from None


def meet(rank: int, size: int, timeout: timedelta) -> Store:
    """Wait until all processes of the job have arrived. Returns the store of this attempt.

    Args:
        rank: rank of this process.
        size: number of processes that the launcher has started.
        timeout: timeout of the store's operations, and longest wait for the next rank. If the processes were started by
            hand, this wait is limited to BY_HAND_PATIENCE.

    Raises:
        ValueError: the launcher's variables are missing or wrong; there is no store at the launcher's address; or
            ranks are missing, and rank 0 names the missing ranks.
    """
    if "WORLD_SIZE" not in os.environ:
        return HashStore()
    missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise ValueError(f"WORLD_SIZE is set and {', '.join(missing)} not: start with torchrun, or set all four")
    # torchrun's agent serves the store; without torchrun, rank 0 serves the store.
    agent_has_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    patience = timeout if agent_has_store else min(timeout, BY_HAND_PATIENCE)
    tcp = _connect(rank == 0 and not agent_has_store, timeout, patience)
    job = PrefixStore("dtmega", tcp)
    attempt = _open_attempt(job, size, patience, agent_has_store) if rank == 0 else _join_attempt(job, rank, timeout)
    return PrefixStore(str(attempt), job)


def _connect(is_master: bool, timeout: timedelta, patience: timedelta) -> Store:
    """Connect to the store at the launcher's address.

    Args:
        is_master: whether this process serves the store; if False, the server must listen within `patience`.
        timeout: timeout of the store's operations.
        patience: time to wait for the server, and then for its answer.

    Raises:
        ValueError: the address is unknown, the port is taken, no program listens at the address, or the
            listening program is not a store.
    """
    address = os.environ["MASTER_ADDR"]
    port = launcher_number("MASTER_PORT", 0, 1, LARGEST_PORT)
    where = f"MASTER_ADDR={address}, MASTER_PORT={port}"
    try:
        socket.getaddrinfo(address, port)
    except (OSError, UnicodeError) as error:
        raise ValueError(f"this machine knows no host MASTER_ADDR={address}: {error}") from None
    if not is_master:
        _wait_for_listener(address, port, patience)

    results: list[Store | RuntimeError] = []

    def connect() -> None:
        try:
            options: dict[str, Any] = {"timeout": timeout, "wait_for_workers": False, "multi_tenant": True}
            results.append(TCPStore(address, port, is_master=is_master, **options))
        except RuntimeError as error:
            results.append(error)

    # Connect in a thread, because torch would wait forever for an answer from a program that is not a store.
    thread = threading.Thread(target=connect, daemon=True)
    thread.start()
    thread.join(patience.total_seconds())
    if not results:
        raise ValueError(f"no answer in {patience.total_seconds():g} s: another program has that port ({where})")
    result = results[0]
    if isinstance(result, RuntimeError):
        reason = "the port is taken" if "EADDRINUSE" in str(result) else str(result).partition("\n")[0]
        raise ValueError(f"the ranks cannot meet: {reason} ({where})")
    return result


def _wait_for_listener(address: str, port: int, patience: timedelta) -> None:
    """Wait until a program listens at this address. torch could wait too, but prints a page for each failed attempt.

    Raises:
        ValueError: no program listens at the address within `patience`.
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


def _open_attempt(job: Store, size: int, patience: timedelta, agent_has_store: bool) -> int:
    """Start a new attempt, wait until all ranks have joined it, then open it. Only rank 0 calls this function.

    Args:
        job: store that all attempts of the job share.
        size: number of ranks.
        patience: time to wait for the next rank.
        agent_has_store: whether torchrun started the job; affects only the error message.

    Returns:
        The index of the attempt, from 1.

    Raises:
        ValueError: ranks are missing, and no further rank has joined within `patience`.
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
            if not agent_has_store:
                why += ": started by hand, all have to come soon after each other; torchrun waits for all nodes"
            job.set(f"{attempt}/given up", why)
            # Give the other ranks time to read the message: if this process serves the store, its exit ends the store.
            time.sleep(2 * POLL_S)
            raise ValueError(why)
        if absent:
            time.sleep(POLL_S)
    job.set(f"{attempt}/open", "")
    return attempt


def _join_attempt(job: Store, rank: int, timeout: timedelta) -> int:
    """Join the attempt that rank 0 starts and wait until it is open. All ranks except rank 0 call this function.

    Returns:
        The index of the attempt, from 1.

    Raises:
        Rank0GaveUp: rank 0 gave up waiting for other ranks.
        ValueError: rank 0 did not open the attempt within `timeout`.
    """
    deadline = time.monotonic() + timeout.total_seconds()
    joined = 0
    while time.monotonic() < deadline:
        attempt = job.add("attempts", 0)
        is_open = attempt > 0 and job.check([f"{attempt}/open"])
        # An open attempt that this rank has not joined is an earlier attempt, and its processes are gone.
        if is_open and attempt == joined:
            return attempt
        if attempt > joined and not is_open:
            job.set(f"{attempt}/here/{rank}", "")
            joined = attempt
        if joined and job.check([f"{joined}/given up"]):
            raise Rank0GaveUp(job.get(f"{joined}/given up").decode())
        time.sleep(POLL_S)
    raise ValueError(f"rank {rank}: rank 0 did not bring all ranks together in {timeout.total_seconds():g} s")
