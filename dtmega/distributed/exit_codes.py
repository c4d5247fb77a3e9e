"""The duties of a process to its machine and its launcher: leave in time, with a code that says why, and alone.

| code | name | why the process left | what to do |
|---|---|---|---|
| 0 | DONE | the run is finished | |
| 1 | FAILED | a Python exception; its message is on stderr | read it |
| 2 | REFUSED | bad input: configuration, data, run directory; nothing was started | correct what the message names |
| 3 | DAMAGED | there are checkpoints and none is intact | restore one, or start in another run directory |
| 75 | PREEMPTED | a signal came; the step was finished and saved | the same command goes on |
| 76 | STUCK | not saved: after a signal no step ended in grace_s; or the save failed | the same command goes on |
| 77 | HUNG | nothing happened for timeout_s; the report names who is behind | look there; the same command goes on |

"The same command" has the default `--checkpoint.resume auto`.
Whatever its workers say, torchrun exits with 1 unless all of them gave 0; it prints their codes, and the reasons that
they gave it, at the end of a traceback of its own. So the first rank also writes the code and the reason into
`exit.json` of the run directory, for whoever started the job; a start that was refused does so, too.
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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path
from typing import NamedTuple, NoReturn

from dtmega.files import atomic, console
from dtmega.files.lock import Lock, is_held
from dtmega.files.untrusted_json import read_object

DONE = 0
FAILED = 1
REFUSED = 2
DAMAGED = 3
PREEMPTED = 75
STUCK = 76
HUNG = 77

NOT_STARTED = (REFUSED, DAMAGED)  # the codes of an attempt that changed nothing of the run

EXIT = "exit.json"
LOCK = ".lock"
# The signals after which a run saves and leaves. SLURM is asked for one of the last two: `--signal=USR1@120`.
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
PR_SET_PDEATHSIG = 1  # linux/prctl.h
MAX_STEP = 2**53  # what a browser counts to
AGENT_COLUMNS = 100  # torchrun draws lines as long as the longest of its summary


class Claim:
    """The right to write in a folder, made if need be, held by one process at a time until `close()` or its death.

    Args:
        key: of the configuration, that names the folder.

    Raises:
        ValueError: another process has it, and still had it after patience_s, in which an orphan may die; or the
            directory cannot be written.
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
    """True if a process has the right to write in this folder, False if the process that last had it is gone.

    None if that cannot be found out: nobody ever had it, the file system has no locks, or the process was on another
    machine.
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


class Ended(NamedTuple):
    """The content of `exit.json`.

        {"code": 75, "reason": "a signal asked for it", "time": "2026-11-23T14:03:20+00:00",
         "step": 180, "checkpoint": "runs/a/checkpoints/step-00000180"}

    Attributes:
        code, reason: why the last attempt to start, or to go on with, the run has ended. It may have been refused.
        step: how many steps of the run are done.
        checkpoint: the path of the run's newest checkpoint; '' while there is none.
        time: when that attempt ended, in UTC, as ISO 8601 writes it; '' in a file of an earlier version.
    """

    code: int
    reason: str
    step: int
    checkpoint: str
    time: str

    @classmethod
    def read(cls, folder: Path) -> Ended | None:
        """The ending in a run directory; None if there is no such file, or it is damaged."""
        try:
            content = read_object(folder / EXIT)
        except ValueError:
            return None
        code = content.get("code")
        step = content.get("step")
        if type(code) is not int or type(step) is not int or not 0 <= step <= MAX_STEP:
            return None
        texts = [str(content.get(key) or "") for key in ("reason", "checkpoint", "time")]
        return cls(code, texts[0], step, texts[1], texts[2])


class Ending:
    """The end of an attempt, as it becomes known, and the file `exit.json` that tells of it (`Ended`).

    The file is there only after the end: a start takes away that of the start before. A run that is still going has
    none, nor has one that was killed.

    Attributes:
        step, checkpoint, code, reason: as in `Ended`; the code is None and the reason '' until they are known.
    """

    def __init__(self) -> None:
        self.step = 0
        self.checkpoint = ""
        self.code: int | None = None
        self.reason = ""
        self._path: Path | None = None

    def go_on_from(self, folder: Path, newest: Callable[[], tuple[int, str]]) -> None:
        """Take step and checkpoint of the run in this folder: an attempt that comes to no step changes neither.

        Args:
            newest: step and path of the run's newest checkpoint, for a run that was killed, which has no file.
        """
        before = Ended.read(folder)
        self.step, self.checkpoint = newest() if before is None else (before.step, before.checkpoint)
        self._path = folder / EXIT

    @contextmanager
    def told_in(self, folder: Path, newest: Callable[[], tuple[int, str]]) -> Iterator[None]:
        """Write the file at the end of this block, which holds the right to write in the folder.

        Whoever does not call it, as all ranks but the first, writes nothing.

        Args:
            newest: as of `go_on_from`.

        Raises:
            OSError: the file of the start before cannot be taken away.
        """
        self.go_on_from(folder, newest)
        (folder / EXIT).unlink(missing_ok=True)
        try:
            yield
        except Exception as error:
            if self.code in (None, DONE, PREEMPTED):  # else this error is known
                self.because(FAILED, described(error))
            raise
        finally:
            self.write()

    def because(self, code: int, reason: str) -> int:
        """Set the code and the reason of leaving, and tell torchrun. Returns the code."""
        self.code = code
        self.reason = reason
        if code != DONE:
            tell_agent(reason)
        return code

    def write(self) -> None:
        """Put the file in its place; a disk that does not take it changes nothing but is said."""
        if self._path is None or self.code is None:
            return
        content = {
            "code": self.code,
            "reason": self.reason,
            "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "step": self.step,
            "checkpoint": self.checkpoint or None,
        }
        try:
            with atomic.replaced(self._path) as file:
                json.dump(content, file)
                file.write("\n")
        except OSError as error:
            console.say(f"{self._path} cannot be written: {error.strerror}")


def tell_agent(reason: str) -> None:
    """Give the reason of leaving to torchrun's agent, whose own traceback buries what a worker has printed before it.

    The agent reads this file of a worker that fails, and ends its summary with it: `torch/distributed/elastic/
    multiprocessing/errors`. A disk that does not take it changes nothing.
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path is None:
        return
    wrapped = textwrap.fill(reason, AGENT_COLUMNS, break_long_words=False, break_on_hyphens=False)
    more = {"py_callstack": wrapped, "timestamp": str(int(time.time()))}
    part = Path(f"{path}.{threading.get_ident()}")  # an agent that reads half a file dies of it
    try:
        part.write_text(json.dumps({"message": {"message": reason, "extraInfo": more}}))
        part.replace(path)
    except OSError:
        return


def described(error: BaseException) -> str:
    """The kind of an error and the first line of its message."""
    return f"{type(error).__name__}: {error}".strip().partition("\n")[0]


def die_with_parent() -> None:
    """Have this process killed when torchrun's agent is: orphans would go on training, and writing checkpoints.

    The kernel looks at the thread that started this process, which in torchrun is the agent's main thread. An agent
    that was gone even before this call is missed at the rendezvous, as it holds the store.
    """
    if sys.platform != "linux" or "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    parent = os.getppid()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL))  # fails only for what is no signal
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def leave(code: int) -> NoReturn:
    """End this process now, without the interpreter's shutdown: with gloo groups it aborted 5 of 10 finished runs.

    No signal changes the code any more.
    """
    if threading.current_thread() is threading.main_thread():
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)
    with console.guarded():
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def _holder(lock: Path) -> str:
    """Who holds a lock, as far as the file tells."""
    try:
        return "process {pid} on {host} since {since}".format(**read_object(lock))
    except (ValueError, LookupError):
        return "another process"
