"""Make several plans at once, in processes that can be killed at any time.

with Planners(2, 70 * 2**30) as planners:
    planners.begin("first", cfg, sizes, device, finish)
    for name, result in planners.done():        # as they come; a result is a value or a ValueError
        ...
"""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable, Mapping
from multiprocessing.process import BaseProcess
from types import TracebackType
from typing import Any, Generic, TypeVar

import torch

from dtmega import config
from dtmega.distributed import own_process
from dtmega.planning.counting.role import Role, plan_role
from dtmega.planning.plan import Plan, plan_job

Name = TypeVar("Name")
Value = TypeVar("Value")


class TooLarge(ValueError):
    """Raised if a rank's peak exceeds the memory for tensors. The job's remaining ranks are then not planned.

    Args:
        peak_bytes: peak memory of the rank.
        room_bytes: memory that tensors can use.
    """

    def __init__(self, peak_bytes: int, room_bytes: int) -> None:
        self.peak_bytes = peak_bytes
        super().__init__(f"does not fit by counts: {peak_bytes / 2**30:.1f} GiB of {room_bytes / 2**30:.1f} GiB")


class Planners(Generic[Name, Value]):
    """A pool of threads that plan jobs. Leaving the `with` block kills all plans that are still running.

    Args:
        at_once: number of plans to make at once.
        room_bytes: memory that tensors can use.
    """

    def __init__(self, at_once: int, room_bytes: int) -> None:
        self.at_once, self._room_bytes = at_once, room_bytes
        self._threads = concurrent.futures.ThreadPoolExecutor(at_once)
        self._running: dict[concurrent.futures.Future[Value], Name] = {}
        self._processes: list[BaseProcess] = []
        self._stopped = False

    def __enter__(self) -> Planners[Name, Value]:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopped = True
        # The list may contain processes that have ended. Killing an ended process does nothing.
        for process in [*self._processes]:
            process.kill()
        self._threads.shutdown(cancel_futures=True)

    @property
    def n_running(self) -> int:
        """The number of plans that have begun but are not done."""
        return len(self._running)

    def begin(
        self,
        name: Name,
        cfg: config.Config,
        sizes: Mapping[str, int],
        device: torch.device,
        finish: Callable[[Plan], Value],
        imbalance: float = 1.0,
    ) -> None:
        """Begin to plan a job.

        Args:
            name: name of the result.
            cfg, sizes, device, imbalance: arguments of `plan_job`.
            finish: function that computes the result from the plan.
        """

        def work() -> Value:
            return finish(plan_job(cfg, sizes, device, run_role=self._run_role, imbalance=imbalance))

        self._running[self._threads.submit(work)] = name

    def done(self) -> list[tuple[Name, Value | ValueError]]:
        """Wait until at least one plan is done. Return (name, value or error) for each plan that is done.

        The error is `TooLarge` if a rank does not fit, or the ValueError with which `plan_job` refused the job.
        """
        ended, _ = concurrent.futures.wait(self._running, return_when=concurrent.futures.FIRST_COMPLETED)
        results: list[tuple[Name, Value | ValueError]] = []
        for future in ended:
            name = self._running.pop(future)
            try:
                results.append((name, future.result()))
            except ValueError as error:
                results.append((name, error))
        return results

    def _run_role(self, *arguments: Any) -> Role:
        """Run `plan_role` in a separate process."""
        try:
            role = own_process.run(plan_role, *arguments, on_start=self._has_started)
        except ChildProcessError as error:
            raise ValueError(str(error)) from None
        if role.peak.peak_bytes > self._room_bytes:
            raise TooLarge(role.peak.peak_bytes, self._room_bytes)
        return role

    def _has_started(self, process: BaseProcess) -> None:
        """Record a process, because `__exit__` may have to kill it."""
        self._processes.append(process)
        if self._stopped:
            process.kill()
