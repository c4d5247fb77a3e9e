"""Several plans at once, each in processes that can be ended at any time.

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
    """A rank's peak that exceeds the room for tensors, so that the job's other ranks are not planned.

    Args:
        peak_bytes: the peak.
        room_bytes: memory for tensors.
    """

    def __init__(self, peak_bytes: int, room_bytes: int) -> None:
        self.peak_bytes = peak_bytes
        super().__init__(f"does not fit by counts: {peak_bytes / 2**30:.1f} GiB of {room_bytes / 2**30:.1f} GiB")


class Planners(Generic[Name, Value]):
    """A number of threads that plan jobs. Leaving the `with` block early ends what is still being planned.

    Args:
        at_once: number of plans at once.
        room_bytes: memory for tensors.
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
        # Processes that have ended are still in the list; to kill one of them does nothing.
        for process in [*self._processes]:
            process.kill()
        self._threads.shutdown(cancel_futures=True)

    @property
    def n_running(self) -> int:
        """Number of plans that have begun and are not done."""
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
            finish: function that makes the result from the plan.
        """

        def work() -> Value:
            return finish(plan_job(cfg, sizes, device, run_role=self._run_role, imbalance=imbalance))

        self._running[self._threads.submit(work)] = name

    def done(self) -> list[tuple[Name, Value | ValueError]]:
        """Wait until a plan is done, and return all plans that are: name, and value or error.

        The error is TooLarge as soon as one rank does not fit, or what `plan_job` refused.
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
        """Run `plan_role` in a process of its own."""
        try:
            role = own_process.run(plan_role, *arguments, on_start=self._has_started)
        except ChildProcessError as error:
            raise ValueError(str(error)) from None
        if role.peak.peak_bytes > self._room_bytes:
            raise TooLarge(role.peak.peak_bytes, self._room_bytes)
        return role

    def _has_started(self, process: BaseProcess) -> None:
        """Take note of a process, which `__exit__` may have to kill."""
        self._processes.append(process)
        if self._stopped:
            process.kill()
