"""The meeting of the processes of one attempt of a job, before there is a process group: a store of that attempt alone.

torchrun keeps one store over all restarts, in which the next attempt finds the addresses of dead processes; with gloo,
17 of 28 restarts failed. TORCHELASTIC_RESTART_COUNT cannot tell attempts apart: each node counts its own failures. So
rank 0 numbers the attempt, waits until all ranks have come, and opens it. An attempt that was open before a rank came
is an earlier one.
"""

from __future__ import annotations

import os
import time
from datetime import timedelta

from torch.distributed import (  # documented, missing in __all__
    DistStoreError,
    HashStore,  # pyright: ignore[reportPrivateImportUsage]
    PrefixStore,  # pyright: ignore[reportPrivateImportUsage]
    Store,  # pyright: ignore[reportPrivateImportUsage]
    TCPStore,  # pyright: ignore[reportPrivateImportUsage]
)


def meet(rank: int, size: int, timeout: timedelta) -> Store:
    """The store of this attempt, once all `size` processes that the launcher started have come.

    Raises:
        ValueError: the launcher has told only half of what there is to know.
        RuntimeError: not all ranks came within `timeout`; rank 0 names those that did not.
    """
    if "WORLD_SIZE" not in os.environ:
        return HashStore()
    missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise ValueError(f"WORLD_SIZE is set and {', '.join(missing)} not: start with torchrun, or set all four")
    agent_has_it = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    tcp = TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=rank == 0 and not agent_has_it,
        timeout=timeout,
        wait_for_workers=False,
        multi_tenant=True,
    )
    job = PrefixStore("dtmega", tcp)
    attempt = _open_attempt(job, size, timeout) if rank == 0 else _find_attempt(job, rank, timeout)
    return PrefixStore(str(attempt), job)


def _open_attempt(job: Store, size: int, timeout: timedelta) -> int:
    attempt = job.add("attempts", 1)
    here = {other: f"{attempt}/here/{other}" for other in range(1, size)}
    try:
        if here:
            job.wait(list(here.values()), timeout)
    except DistStoreError:
        absent = [other for other, key in here.items() if not job.check([key])]
        raise RuntimeError(f"ranks {absent} of {size} did not come in {timeout.total_seconds():g} s") from None
    job.set(f"{attempt}/open", "")
    return attempt


def _find_attempt(job: Store, rank: int, timeout: timedelta) -> int:
    """The number of the attempt that rank 0 has opened, once this rank has said that it is here for it.

    Raises:
        RuntimeError: rank 0 opened none that this rank was there for, in time.
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
        time.sleep(0.1)
    raise RuntimeError(f"rank {rank}: rank 0 did not bring all ranks together in {timeout.total_seconds():g} s")
