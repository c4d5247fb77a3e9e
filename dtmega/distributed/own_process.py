"""Run a function in a separate process. Errors reach the caller as exceptions, and Ctrl-C ends the process at once."""

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

PATIENCE_S = 5.0  # time allowed for an interrupted process to exit

T = TypeVar("T")


def run(function: Callable[..., T], *args: Any, on_start: Callable[[BaseProcess], object] = lambda process: None) -> T:
    """Call a function in a separate process and return its result.

    Args:
        function: module-level function. The fork server imports the module of this function before the first call.
        args: arguments of the function. The arguments and the result are pickled.
        on_start: function that is called with the started process, so that another thread can kill the process.

    Raises:
        ValueError: the function raised a ValueError.
        ChildProcessError: the process was killed, or the function raised an error that is not a ValueError. The process
            has printed the traceback of such an error.
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
    """Delay Ctrl-C until the end of the `with` block. Processes that start in the block keep SIGINT blocked for good.

    These processes inherit the signal mask. The resource tracker is started first, because up to Python 3.11 starting
    the tracker would unblock SIGINT inside the block.
    """
    resource_tracker.ensure_running()
    received: list[int] = []
    in_main_thread = threading.current_thread() is threading.main_thread()
    handler = signal.getsignal(signal.SIGINT)
    if in_main_thread:
        # The mask applies to this thread only. Another thread, such as a torch thread, may still receive the signal.
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
    """Call a function and send its result or its error through a pipe."""
    # On SIGTERM, exit through an exception, so that Python frees torch.compile's objects without a warning.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(exit_codes.FAILED))
    # Users who read a plan do not need torch's deprecation warnings.
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
