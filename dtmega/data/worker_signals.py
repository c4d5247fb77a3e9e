"""Signals in the processes that make batches: the trainer alone decides when a worker ends.

Terminals, torchrun and SLURM send a signal to all processes of a job. The trainer then finishes the current step, and
still needs its workers for that step.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from multiprocessing import resource_tracker, util

LEFT_TO_THE_TRAINER = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2}
IGNORED_BY_THE_TRACKER = {signal.SIGINT, signal.SIGTERM}  # multiprocessing/resource_tracker.py
# Flag that is True if a process can find out which process sent a signal. macOS lacks this feature, so on macOS the
# signals end our workers, just as they end torch's own workers.
CAN_TELL_SENDER = hasattr(signal, "sigwaitinfo")


@contextlib.contextmanager
def signals_blocked() -> Iterator[None]:
    """Block signals for the processes that start inside this context.

    The processes inherit the signal mask, so these signals cannot end the processes while they start.
    """
    blocked = LEFT_TO_THE_TRAINER if CAN_TELL_SENDER else set()
    # The workers share a resource tracker, which ignores two of the signals by itself. Up to Python 3.11, starting
    # the tracker unblocks these two signals in this process. So the tracker starts first, and the two signals are
    # blocked afterwards.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, blocked - IGNORED_BY_THE_TRACKER)
    resource_tracker.ensure_running()
    signal.pthread_sigmask(signal.SIG_BLOCK, blocked)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def hear_only_the_trainer(worker: int) -> None:
    """Make SIGTERM end a worker only if the trainer sent this signal. Runs when the worker starts.

    When the trainer exits, multiprocessing sends SIGTERM to the workers and waits for them to end.
    """
    # The trainer may have died before this line runs. torch's watchdog would then mistake the new parent (init) for
    # the trainer, and the worker would never end.
    trainer = multiprocessing.parent_process()
    if trainer is not None and os.getppid() != trainer.pid:
        os._exit(0)

    # `wait` has no timeout, because a thread that wakes up while Python shuts down aborts the process.
    def wait() -> None:
        while signal.sigwaitinfo({signal.SIGTERM}).si_pid != os.getppid():
            pass
        os._exit(0)

    if CAN_TELL_SENDER:
        threading.Thread(target=wait, daemon=True).start()
    # While this thread or one of torch's threads is running, the interpreter's shutdown sometimes aborts ("terminate
    # called ..."). So the process ends before that shutdown, but after multiprocessing's own finalizers. These
    # finalizers have priorities of -5 or higher, and a finalizer with a lower priority runs later.
    util.Finalize(None, os._exit, args=(0,), exitpriority=-10)
