"""Run a function on n processes that form a gloo group: `results = ranks.run(4, fn, *args)`.

`fn` is a module-level function (it travels by name); what it returns, and its arguments, are pickled. On each rank the
default process group is there, torch has one thread, and warnings are errors. `results[i]` is what rank i returned.
The processes are forked from a server that has imported torch already, so a run of little work takes about a second.
"""

from __future__ import annotations

import gc
import multiprocessing
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

_processes = multiprocessing.get_context("forkserver")
_processes.set_forkserver_preload(
    ["torch", "torch.distributed.fsdp", "torch.distributed.pipelining", "torch.distributed.tensor.parallel"]
)
GRACE_S = 5.0
FROM_INSIDE_COMPILE = (
    "`torch.jit.script_method` is deprecated",
    "The .grad attribute of a Tensor that is not a leaf",
    "<class 'torch.autograd.function.Function'> should not be instantiated",
)


def run(n: int, fn: Callable[..., Any], *args: Any, timeout_s: float = 120.0) -> list[Any]:
    """fn(*args) on each of n ranks; their results in order.

    Raises:
        AssertionError: with the traceback of each rank that raised, or which ranks were not done after timeout_s.
    """
    with tempfile.TemporaryDirectory() as folder:
        children = [
            _processes.Process(target=_rank, args=(rank, n, folder, timeout_s, fn, args), daemon=True)
            for rank in range(n)
        ]
        for child in children:
            child.start()
        deadline = time.monotonic() + timeout_s
        alive = {child.sentinel: child for child in children}
        while alive and time.monotonic() < deadline:
            for sentinel in wait(list(alive), timeout=max(0.0, deadline - time.monotonic())):
                if alive.pop(sentinel).exitcode != 0:
                    deadline = min(deadline, time.monotonic() + GRACE_S)  # the others wait for it in vain
        unfinished = [rank for rank, child in enumerate(children) if child.is_alive()]
        for child in children:
            child.kill()
            child.join()
        errors = [path.read_text() for path in sorted(Path(folder).glob("*.error"))]
        codes = [child.exitcode for child in children]
        if errors or unfinished or any(codes):
            raise AssertionError("\n".join([f"exit codes {codes}, killed: ranks {unfinished}", *errors]))
        return [torch.load(Path(folder, f"{rank}.result"), weights_only=False) for rank in range(n)]


def _rank(rank: int, n: int, folder: str, timeout_s: float, fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    for message in FROM_INSIDE_COMPILE:
        warnings.filterwarnings("ignore", message)
    try:
        store = dist.FileStore(str(Path(folder, "store")), n)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=n, timeout=timedelta(seconds=timeout_s))
        torch.save(fn(*args), Path(folder, f"{rank}.result"))
        gc.collect()  # gloo aborts at exit if a tensor with pending work outlives the group
        if dist.is_initialized():
            dist.barrier()
            dist.destroy_process_group()
    except BaseException:
        Path(folder, f"{rank}.error").write_text(f"rank {rank}: {traceback.format_exc()}")
        raise SystemExit(1) from None
