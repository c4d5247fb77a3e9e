"""A function that runs in a process of its own, which ends with an error in words, and at once on Ctrl-C."""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, TypeVar

from dtmega.distributed import exit_codes

PATIENCE_S = 5.0  # for the end of a process that is interrupted

T = TypeVar("T")


def run(function: Callable[..., T], *args: Any, on_start: Callable[[BaseProcess], object] = lambda process: None) -> T:
    """Call a function in a process of its own.

    Args:
        function: function of a module, which is imported before the first call.
        args: arguments, which are pickled, as is the result.
        on_start: function that receives the process, which another thread may then kill.

    Raises:
        ValueError: the function has raised a ValueError.
        ChildProcessError: the process was killed, or the function has raised another error, whose traceback the process
            has printed.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([function.__module__])
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_send_result, args=(theirs, function, *args), daemon=True)
    try:
        with _ctrl_c_blocked():
            process.start()
        theirs.close()
        on_start(process)
        result = ours.recv()
        process.join()
    except EOFError:
        process.join()
        message = f"the process of {function.__name__} has ended with code {process.exitcode} (-9: for lack of memory)"
        raise ChildProcessError(message) from None
    except BaseException:
        process.terminate()
        process.join(PATIENCE_S)
        process.kill()
        raise
    finally:
        ours.close()
    if isinstance(result, Exception):
        raise result
    return result


@contextlib.contextmanager
def _ctrl_c_blocked() -> Iterator[None]:
    """Let Ctrl-C wait until the end of the `with` block, and block it for good in processes that start inside of it.

    The processes inherit the mask. Up to Python 3.11, the start of the resource tracker would unblock SIGINT here.
    """
    resource_tracker.ensure_running()
    received: list[int] = []
    in_main_thread = threading.current_thread() is threading.main_thread()
    handler = signal.getsignal(signal.SIGINT)
    if in_main_thread:
        # The mask holds for this thread only; the signal may reach this process on one of torch's threads.
        signal.signal(signal.SIGINT, lambda number, frame: received.append(number))
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        if in_main_thread:
            signal.signal(signal.SIGINT, handler)
    if received:
        raise KeyboardInterrupt


def _send_result(to: Connection, function: Callable[..., object], *args: Any) -> None:
    """Send the result of a function, or the error that it raises."""
    # Leave by an exception, so that Python frees what is left of torch.compile without a warning.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(exit_codes.FAILED))
    # torch warns about names that it will drop, which concerns no reader of a plan.
    warnings.simplefilter("ignore")
    result: object
    try:
        result = function(*args)
    except ValueError as error:
        result = ValueError(str(error))
    except Exception as error:
        traceback.print_exc()
        summary = exit_codes.error_summary(error)
        result = ChildProcessError(f"{function.__name__} has failed, with the traceback above: {summary}")
    to.send(result)
