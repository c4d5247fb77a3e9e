"""Tools for one process of a job: claim a folder, die with the parent, and exit.

The exit codes are defined in `dtmega/distributed/exit_codes.py`.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import sys
import textwrap
import threading
import time
from datetime import datetime
from pathlib import Path
from typing import NoReturn

from dtmega.files import atomic, console
from dtmega.files.lock import Lock, is_held
from dtmega.files.untrusted_json import read_object

LOCK = ".lock"
# Signals after which a run saves and exits. A SLURM job can ask for SIGUSR1 or SIGUSR2: `--signal=USR1@120`.
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
PR_SET_PDEATHSIG = 1  # linux/prctl.h
# Text for torchrun's summary is wrapped at this width: torchrun frames the summary with lines as long as its longest
# line.
AGENT_COLUMNS = 100


class Claim:
    """The exclusive right to write in a folder, held by one process until it calls `close()` or dies.

    Args:
        folder: folder to claim, created if it does not exist.
        patience_s: seconds to wait for another holder to exit, such as an orphan of a killed job.
        key: configuration key that names the folder, for messages.

    Raises:
        ValueError: another process still holds the folder after patience_s, or the folder is not writable.
    """

    def __init__(self, folder: Path, patience_s: float = 5.0, key: str = "[run] dir") -> None:
        path = folder / LOCK
        try:
            atomic.make_folder(folder)
            self._lock = Lock(path)
        except OSError as error:
            raise ValueError(f"cannot write to {folder}: {error.strerror} ({key})") from None
        try:
            if not self._lock.take(patience_s):
                raise ValueError(f"{folder} is being written by {_holder(path)} ({key})")
            since = datetime.now().astimezone().isoformat(" ", "seconds")
            holder = {"pid": os.getpid(), "host": socket.gethostname(), "since": since}
            self._lock.write(json.dumps(holder))
        except OSError as error:
            self.close()
            raise ValueError(f"cannot write to {folder}: {error.strerror} ({key})") from None
        except ValueError:
            self.close()
            raise

    def close(self) -> None:
        self._lock.close()


def is_claimed(folder: Path) -> bool | None:
    """True if a process claims this folder, False if the process that last claimed the folder is gone.

    None if the answer is unknown: no process ever claimed the folder, the file system has no locks, or the last
    holder ran on another machine.
    """
    path = folder / LOCK
    held = is_held(path)
    if held is not False:
        return held
    try:
        host = read_object(path).get("host")
    except ValueError:
        return None
    return False if host == socket.gethostname() else None


def tell_agent(reason: str) -> None:
    """Write the reason for the exit into the file that torchrun's agent reads when a worker fails.

    The agent prints this reason at the end of its summary. Without the file, the reason would appear only in the
    worker's own messages, far above the end of the agent's traceback
    (`torch/distributed/elastic/multiprocessing/errors`). If the file cannot be written, the error is ignored.
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path is None:
        return
    wrapped = textwrap.fill(reason, AGENT_COLUMNS, break_long_words=False, break_on_hyphens=False)
    extra_info = {"py_callstack": wrapped, "timestamp": str(int(time.time()))}
    # Write under a temporary name, then rename: the agent crashes if it reads a half-written file.
    part = Path(f"{path}.{threading.get_ident()}")
    try:
        part.write_text(json.dumps({"message": {"message": reason, "extraInfo": extra_info}}))
        part.replace(path)
    except OSError:
        return


def die_with_parent() -> None:
    """Ask the kernel to kill this process when torchrun's agent dies. An orphan would keep training and saving.

    The kernel watches the thread that started this process, which in torchrun is the agent's main thread. This function
    does not notice if the agent died before the call. In that case the rendezvous fails, because the agent serves the
    store.
    """
    if sys.platform != "linux" or "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    parent = os.getppid()
    # The result is ignored, because prctl fails here only if its argument is not a valid signal number.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL))
    # If the parent has changed, the old parent died before the call of prctl, so the kernel will not send the signal.
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def leave(code: int) -> NoReturn:
    """End this process at once with the exit code `code`.

    On the main thread, signals are ignored from here on, so that no signal can change the exit code. The interpreter's
    normal shutdown is skipped, because with gloo groups it aborted 5 of 10 finished runs.
    """
    if threading.current_thread() is threading.main_thread():
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)
    with console.guarded():
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def _holder(lock: Path) -> str:
    """Describe the process that holds a lock, using the details in the lock file."""
    try:
        return "process {pid} on {host} since {since}".format(**read_object(lock))
    except (ValueError, LookupError):
        return "another process"
