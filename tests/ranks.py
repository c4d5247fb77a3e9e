"""Run a function on n processes that form a gloo group: `results = ranks.run(4, fn, *args)`.

`fn` is a module-level function (it travels by name); what it returns, and its arguments, are pickled. On each rank the
default process group is there, torch has one thread, and warnings are errors. `results[i]` is what rank i returned.

The processes are forked from a server that has imported what they need, so a group of little work takes tenths of a
second. The server does nothing but import and fork: it has one thread, no group, and calls no `fn`. Pytest forks it
when all tests are imported and none has run (`conftest.py`), so that it imports nothing once more.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import functools
import gc
import importlib
import json
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist

from dtmega.distributed.process import PR_SET_PDEATHSIG

# How the server starts: clean, whatever this process has done. `conftest.py` and `planted.py` fork it, from a process
# that has done nothing yet.
start_method = "spawn"
FROM_INSIDE_COMPILE = (
    "`torch.jit.script(_method)?` is deprecated",
    "The .grad attribute of a Tensor that is not a leaf",
    "<class 'torch.autograd.function.Function'> should not be instantiated",
)
# What torch imports when an optimizer steps or a graph is compiled: once here, not on each rank of the first groups.
LATE = ("torch._dynamo", "torch._dynamo.repro.after_dynamo", "torch._inductor.pattern_matcher", "torch._inductor.debug")


class Ended(NamedTuple):
    """The end of a rank.

    Attributes:
        code: of its exit; -9 if it was killed.
        error: the traceback of what it raised; if it was ended by a fault (SIGSEGV, SIGABRT), of each of its threads.
        late: it was killed by the server, because time was up.
    """

    code: int
    error: str
    late: bool


class Group(NamedTuple):
    """A request to the server: n ranks that call what is pickled in folder/call.

    Attributes:
        module: where the called function is; the server imports it once for all ranks.
        grace_s: how long the other ranks may go on after one that did not end with 0, which they may wait for in vain.
    """

    n: int
    folder: str
    module: str
    timeout_s: float
    grace_s: float


def run(n: int, fn: Callable[..., Any], *args: Any, timeout_s: float = 120.0) -> list[Any]:
    """fn(*args) on each of n ranks; their results in order.

    Raises:
        AssertionError: with the traceback of each rank that raised, or which ranks were not done after timeout_s.
    """
    with tempfile.TemporaryDirectory() as folder:
        ended = forks().fork(n, folder, fn, args, timeout_s, grace_s=5.0)
        if any(rank.code for rank in ended):
            unfinished = [i for i, rank in enumerate(ended) if rank.late]
            heading = f"exit codes {[rank.code for rank in ended]}, killed: ranks {unfinished}"
            errors = [f"rank {i}: {rank.error}" for i, rank in enumerate(ended) if rank.error]
            raise AssertionError("\n".join([heading, *errors]))
        return [torch.load(Path(folder, f"{rank}.result"), weights_only=False) for rank in range(n)]


def message(fn: Callable[..., Any], *args: Any, error: type[Exception] = ValueError) -> str:
    """The words that fn(*args) raises `error` with: a rank returns them, as raising would end the others with it."""
    try:
        fn(*args)
    except error as raised:
        return str(raised)
    return "nothing was raised"


class Forks:
    """A server, and the groups that are forked from it."""

    def __init__(self) -> None:
        self._pipe, theirs = multiprocessing.Pipe()
        # A forked server has both ends, and would wait for ever if it did not close ours.
        ours = self._pipe if start_method == "fork" else None
        context = multiprocessing.get_context(start_method)
        self._process = context.Process(target=_serve, args=(theirs, ours), daemon=True)
        with patch.dict(os.environ, OMP_NUM_THREADS="1"):  # else numpy starts threads when it is imported
            self._process.start()
        theirs.close()

    def run(self, n: int, fn: Callable[..., Any], *args: Any) -> list[Ended]:
        """The ends of n ranks that were to call fn(*args), and may have been killed."""
        with tempfile.TemporaryDirectory() as folder:
            return self.fork(n, folder, fn, args, timeout_s=300.0, grace_s=60.0)

    def fork(
        self, n: int, folder: str, fn: Callable[..., Any], args: tuple[Any, ...], timeout_s: float, grace_s: float
    ) -> list[Ended]:
        """The same; what fn returned is torch.saved in folder/RANK.result."""
        Path(folder, "call").write_bytes(pickle.dumps((fn, args)))
        self._pipe.send(Group(n, folder, fn.__module__, timeout_s, grace_s))
        return self._pipe.recv()

    def __enter__(self) -> Forks:
        return self

    def __exit__(self, *exception: object) -> None:
        self._pipe.close()
        self._process.join()


@functools.cache
def forks() -> Forks:
    """The server that all tests share; it ends with this process."""
    return Forks()


def _serve(pipe: Connection, other_end: Connection | None) -> None:
    _die_with_parent()
    if other_end is not None:
        other_end.close()
    torch.set_num_threads(1)
    gc.disable()  # what is imported is no garbage
    _import([*LATE])
    multiprocessing.set_start_method("fork", force=True)  # whose locks leave nothing behind when a rank is killed
    with contextlib.suppress(EOFError):
        while True:
            group: Group = pipe.recv()
            _import([group.module])
            pids = [_fork(rank, group) for rank in range(group.n)]
            ended = _wait(pids, group)
            late = Path(group.folder, "modules")
            modules = json.loads(late.read_text()) if late.exists() else []
            pipe.send(ended)
            _import(modules)  # while the test goes on: they are there in every later rank


def _import(names: list[str]) -> None:
    """Import what ranks may need. What fails here fails in the ranks too, if they need it, and says so there."""
    if new := [name for name in names if name not in sys.modules]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # in a rank they have been errors already
            for name in new:
                with contextlib.suppress(Exception):
                    importlib.import_module(name)
        gc.collect()
        gc.freeze()  # no rank looks through what is imported
    threads = os.listdir("/proc/self/task")
    assert len(threads) == 1, f"the server has {len(threads)} threads, which a fork would lose, after importing {new}"


def _fork(rank: int, group: Group) -> int:
    before, pid = set(sys.modules), os.fork()
    if pid:
        return pid
    folder, code = Path(group.folder), 1
    error = folder / f"{rank}.error"
    try:
        _die_with_parent()
        faulthandler.enable(error.open("w"))
        gc.enable()
        _remake_thread_pool()
        # Unlike the server, a rank may have children: data workers.
        multiprocessing.current_process()._config["daemon"] = False  # pyright: ignore[reportAttributeAccessIssue]
        fn, args = pickle.loads((folder / "call").read_bytes())
        warnings.simplefilter("error")
        for message in FROM_INSIDE_COMPILE:
            warnings.filterwarnings("ignore", message)
        store, timeout = dist.FileStore(str(folder / "store"), group.n), timedelta(seconds=group.timeout_s)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=group.n, timeout=timeout)
        dist.barrier()  # a rank that leaves the group at once would end those that are still connecting to each other
        torch.save(fn(*args), folder / f"{rank}.result")
        gc.collect()  # gloo aborts at exit if a tensor with pending work outlives the group
        if dist.is_initialized():
            dist.barrier()
            dist.destroy_process_group()
        if rank == 0:
            (folder / "modules").write_text(json.dumps([name for name in [*sys.modules] if name not in before]))
        code = 0
    except BaseException:
        error.write_text(traceback.format_exc())
    finally:
        sys.stdout.flush()
        os._exit(code)


def _remake_thread_pool() -> None:
    """Let torch replace the thread pool that it lost in the fork, while this process has one thread.

    Otherwise the first thread that asks for the pool replaces it, without a lock, and another one that asks meanwhile
    finds none: "Invalid thread pool!" (`caffe2::pthreadpool`). gloo's threads ask for it when they copy tensors.
    """
    torch.set_num_threads(1)


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL))


def _wait(pids: list[int], group: Group) -> list[Ended]:
    running = {os.pidfd_open(pid): rank for rank, pid in enumerate(pids)}
    codes: dict[int, int] = {}
    late: set[int] = set()
    deadline = time.monotonic() + group.timeout_s
    while running:
        ready = wait([*running], timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            late |= set(running.values())
            for rank in running.values():
                os.kill(pids[rank], signal.SIGKILL)
            ready = [*running]
        for fd in ready:
            rank = running.pop(fd)
            os.close(fd)
            codes[rank] = os.waitstatus_to_exitcode(os.waitpid(pids[rank], 0)[1])
            if codes[rank] != 0:
                deadline = min(deadline, time.monotonic() + group.grace_s)
    errors = [path.read_text() if (path := Path(group.folder, f"{i}.error")).exists() else "" for i in range(group.n)]
    return [Ended(codes[rank], errors[rank], rank in late) for rank in range(group.n)]
