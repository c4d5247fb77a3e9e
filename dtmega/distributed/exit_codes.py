"""Exit codes of a run, and `exit.json`, the record of the run's last exit.

| code | name | why the process exited | what to do |
|---|---|---|---|
| 0 | DONE | the run is finished | |
| 1 | FAILED | a Python exception; its message is on stderr | read the message |
| 2 | REFUSED | bad input: configuration, data, run directory; nothing was started | correct what the message names |
| 3 | DAMAGED | there are checkpoints, but none is intact | restore a checkpoint, or start in another run directory |
| 4 | DOES_NOT_FIT | a plan or dry run needs over `--memory`; nothing was started | change keys that the plan names |
| 5 | DIFFERS | a replayed step's bits differ from the run's | look at the rank and host that the message names |
| 75 | PREEMPTED | a signal came; the step was finished and saved | run the command again |
| 76 | STUCK | not saved (grace_s ran out after a signal, a save failed), or no data or store | run the command again |
| 77 | HUNG | no progress for timeout_s; the report names the rank | look at that rank; run the command again |

Running the command again resumes the run, because `--checkpoint.resume` is `auto` by default.

torchrun itself exits with 0 if all workers exited with 0, and with 1 otherwise. torchrun prints the workers' codes and
reasons only at the end of its own traceback. Therefore the first rank also writes its code and reason into `exit.json`
in the run directory, even if the run was refused at startup.

A job script must not mistake an earlier job's `exit.json` for its own. The script therefore sets DTMEGA_ATTEMPT to
a name that is unique to this attempt, and `exit.json` holds this name under the key `attempt`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path
from typing import NamedTuple
from uuid import uuid4

from dtmega.distributed.process import tell_agent
from dtmega.files import atomic, console
from dtmega.files.untrusted_json import read_object

DONE = 0
FAILED = 1
REFUSED = 2
DAMAGED = 3
DOES_NOT_FIT = 4
DIFFERS = 5
PREEMPTED = 75
STUCK = 76
HUNG = 77

NOT_STARTED = (REFUSED, DAMAGED)  # exit codes of an attempt that left the run unchanged

EXIT = "exit.json"
ATTEMPT = "DTMEGA_ATTEMPT"
MAX_STEP = 2**53  # largest integer that a browser holds exactly


class ExitRecord(NamedTuple):
    """The content of `exit.json`.

        {"code": 75, "reason": "a signal asked for it", "time": "2026-11-23T14:03:20+00:00",
         "step": 180, "checkpoint": "runs/a/checkpoints/step-00000180", "attempt": "4711-0"}

    `attempt` is for job scripts only, so it is not read here.

    Attributes:
        code: exit code of the newest attempt, even if that attempt was refused.
        reason: reason why the newest attempt ended.
        step: number of steps that the run has completed.
        checkpoint: path of the run's newest checkpoint; '' while the run has no checkpoint.
        time: time of the exit, UTC in ISO 8601; '' if an earlier version wrote the file.
    """

    code: int
    reason: str
    step: int
    checkpoint: str
    time: str

    @classmethod
    def read(cls, folder: Path) -> ExitRecord | None:
        """The record in a run directory; None if the file is missing or damaged."""
        try:
            content = read_object(folder / EXIT)
        except ValueError:
            return None
        code = content.get("code")
        step = content.get("step")
        if type(code) is not int or type(step) is not int or not 0 <= step <= MAX_STEP:
            return None
        reason, checkpoint, time = (str(content.get(key) or "") for key in ("reason", "checkpoint", "time"))
        return cls(code, reason, step, checkpoint, time)


class ExitStatus:
    """Holds the exit code of this attempt and the reason for the exit, and writes them to `exit.json`.

    `exit.json` exists only after an exit, because each attempt removes the file of the previous attempt. A run that is
    still running, or that was killed, has no `exit.json`.

    Attributes:
        step, checkpoint: the same values as in `ExitRecord`.
        code, reason: the same values as in `ExitRecord`; None and '' until code and reason are known.
        attempt: name of this attempt: the value of DTMEGA_ATTEMPT, or a random name if that variable is not set.
    """

    def __init__(self) -> None:
        self.step = 0
        self.checkpoint = ""
        self.code: int | None = None
        self.reason = ""
        self.attempt = os.environ.get(ATTEMPT) or uuid4().hex
        self._path: Path | None = None

    def attach(self, folder: Path, newest: Callable[[], tuple[int, str]]) -> None:
        """Read the last step and the newest checkpoint of the run in `folder`. Later calls to `write` write there.

        If this attempt completes no step, the new `exit.json` holds the step and the checkpoint that this method read.

        Args:
            folder: the run directory.
            newest: function that returns the step and the path of the run's newest checkpoint; called only if there is
                no `exit.json`, for example after a kill.
        """
        before = ExitRecord.read(folder)
        self.step, self.checkpoint = newest() if before is None else (before.step, before.checkpoint)
        self._path = folder / EXIT

    @contextmanager
    def recorded_in(self, folder: Path, newest: Callable[[], tuple[int, str]]) -> Iterator[None]:
        """Write `exit.json` at the end of the `with` block. The caller must have claimed the folder.

        Only the first rank calls this method. The status of the other ranks is not written.

        Args:
            folder: the run directory.
            newest: the same function as in `attach`.

        Raises:
            OSError: the previous attempt's `exit.json` cannot be removed.
        """
        self.attach(folder, newest)
        (folder / EXIT).unlink(missing_ok=True)
        try:
            yield
        except Exception as error:
            # If another exit code is already set, this error is only a consequence of that exit, so keep that code.
            if self.code in (None, DONE, PREEMPTED):
                self.set(FAILED, error_summary(error))
            raise
        finally:
            self.write()

    def set(self, code: int, reason: str) -> int:
        """Set the exit code and the reason, pass the reason to torchrun, and return the code."""
        self.code = code
        self.reason = reason
        if code != DONE:
            tell_agent(reason)
        return code

    def write(self) -> None:
        """Write `exit.json` if the folder and the exit code are known. Print a warning if the write fails."""
        if self._path is None or self.code is None:
            return
        content = {
            "code": self.code,
            "reason": self.reason,
            "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "step": self.step,
            "checkpoint": self.checkpoint or None,
            "attempt": self.attempt,
        }
        try:
            with atomic.replaced(self._path) as file:
                json.dump(content, file)
                file.write("\n")
        except OSError as error:
            console.say(f"{self._path} cannot be written: {error.strerror}")


def error_summary(error: BaseException) -> str:
    """The error's class, and the first line of its message."""
    return f"{type(error).__name__}: {error}".strip().partition("\n")[0]
