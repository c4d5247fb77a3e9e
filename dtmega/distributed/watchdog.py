"""A thread that watches the main one. It ends a process that is stuck after a signal or hangs, and names the rank.

    rank 1 behind: step 7 in data, for 600 s, in select (selectors.py:415), called by __next__ (loader.py:141)
    ranks 0, 2, 3 in front: step 7 in counts, for 599 s, in all_reduce (distributed_c10d.py:3081), called by ...

If all ranks came equally far, the innermost frames of their main threads tell them apart: a rank in a collective waits
for the others, and a rank elsewhere has not come to the collective. The watch also writes the record of torch's flight
recorder (`dtmega/distributed/flight_recorder.py`), which names that collective.
"""

from __future__ import annotations

import faulthandler
import os
import select
import shlex
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, NamedTuple, NoReturn

from dtmega.distributed import exit_codes, flight_recorder, process
from dtmega.files import console

if TYPE_CHECKING:
    from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]  # documented, missing in __all__

SAVING = "checkpoint"  # the phase in which a signal does not end the process
POLL_S = 0.2
REPORT_S = 10.0  # limit for the report of a hang, because the store may hang too
CALLBACK_S = 10.0  # limit for the callback before the exit
RECORD_S = 10.0  # limit for the flight recorder's record, which gives up before
CLOSE = 0  # byte that ends the thread; no signal has this number
OUR_CODE = str(Path(__file__).resolve().parents[1])
STANDARD_LIBRARY = os.path.dirname(os.__file__)


class Beat(NamedTuple):
    """A message of a rank that it begins a phase of a step.

    All ranks go through the same phases in the same order, so (step, nth) tells which rank is ahead.

    Attributes:
        step: number of the step.
        nth: number of the beat in this step, from 0.
        at_s: wall-clock time of the beat. The clocks of a job's hosts agree well enough for a report.
        phase: name of the phase, such as "data" or "reduce".
    """

    step: int
    nth: int
    at_s: float
    phase: str

    def age_s(self) -> float:
        """Seconds since the beat; 0 if the sender's clock is ahead."""
        return max(0.0, time.time() - self.at_s)


class CodePlace(NamedTuple):
    """The place in the code at which a main thread is.

    Attributes:
        waits: True if it waits for other ranks, in a collective.
        text: its innermost frame, and the innermost frame outside libraries; '' if they are not known.
    """

    waits: bool
    text: str


class Watch:
    """A thread that watches the main thread, which may sit in a collective where no Python handler runs.

    From here to `close()`, the signals of `process.SIGNALS` are only appended to `signals`, which the loop reads after
    each step. A SIGHUP that is already ignored, as under `nohup`, stays ignored. The thread ends the process in two
    cases: with STUCK if a signal came, and within grace_s the loop has neither begun a save nor ended; with HUNG if
    there was no beat for timeout_s.

    Only the main thread may make and close a watch, because only the main thread may set signal handlers.

    Args:
        grace_s: seconds from the signal, and again from the end of a save. During a save only timeout_s and torchrun's
            `--shutdown-timeout` (30 s unless set) are limits.
        timeout_s: limit between two beats, 0 for none. It has to be longer than the compilation in the first step.
        rank: rank of this process.
        exit_status: takes exit code and reason if the thread ends the process; None: they are not recorded.
        records: folder for the records of the flight recorder, in which each start has a folder; None: not written.

    Attributes:
        signals: numbers of the signals that have come.
    """

    def __init__(
        self,
        grace_s: float,
        timeout_s: float,
        rank: int,
        exit_status: exit_codes.ExitStatus | None = None,
        records: Path | None = None,
    ) -> None:
        self.signals: list[int] = []
        self._exit_status = exit_codes.ExitStatus() if exit_status is None else exit_status
        self.grace_s, self.timeout_s, self.rank = grace_s, timeout_s, rank
        self._last, self._saves = Beat(0, 0, time.time(), "start"), 0
        # The beat during which the place in the code was published last.
        self._placed: Beat | None = None
        # Two connections: one for the beats of the main thread, one for this thread. See `share`.
        self._store: Store | None = None
        self._reader: Store | None = None
        self._size = 1
        self._records, self._start = records, datetime.now(timezone.utc).strftime("%Y-%m-%dT%H-%M-%S")
        self._inbox, self._alarm = socket.socketpair()
        self._alarm.setblocking(False)
        # The C half of a signal handler writes the signal's number here at once, whatever the main thread is doing.
        self._fd_before = signal.set_wakeup_fd(self._alarm.fileno(), warn_on_full_buffer=False)
        handled = [n for n in process.SIGNALS if n != signal.SIGHUP or signal.getsignal(n) != signal.SIG_IGN]
        self._handlers_before = {n: signal.signal(n, lambda number, _: self.signals.append(number)) for n in handled}
        self._callback: Callable[[], None] | None = None
        self._thread = threading.Thread(target=self._watch, name="watch", daemon=True)
        self._thread.start()

    def share(self, store: Store, size: int) -> None:
        """Publish the beats of this rank in a store from now on, and read there those of the others.

        Args:
            store: a connection to the store that nothing else uses. The thread uses a copy of it, because the main
                thread may hang in the first one.
            size: number of ranks.
        """
        self._size, self._store, self._reader = size, store, store.clone()  # pyright: ignore[reportAttributeAccessIssue]  # missing in the stub
        if self._records is not None:
            # All ranks name the folder of this start by the same time. At the end, the store may be gone.
            self._start = store.compare_set("start", "", self._start).decode()
        self._publish()

    def before_exit(self, callback: Callable[[], None]) -> None:
        """Have `callback` called before the thread ends the process. It runs in that thread, for CALLBACK_S at most."""
        self._callback = callback

    def beat(self, step: int, phase: str) -> None:
        """Report that this rank begins a phase: "data", "reduce", "evaluation", SAVING, ... This takes microseconds.

        Args:
            step: number of the step.
            phase: name of the phase.
        """
        last = self._last
        self._saves += last.phase == SAVING
        self._last = Beat(step, last.nth + 1 if step == last.step else 0, time.time(), phase)
        self._publish()

    def who_is_behind(self) -> str:
        """The ranks that are behind the others, and the places of all ranks; a line for each place.

        The place in the code is known only for ranks that have sent no beat for half of timeout_s.
        """
        last = self._last
        if self._reader is None:
            return f"rank {self.rank}: step {last.step} in {last.phase}, for {last.age_s():.0f} s"
        try:
            last_beats = self._read(self._reader)
        except RuntimeError as error:
            return f"the store does not say who is behind: {error}"
        groups: dict[tuple[int, int, str, CodePlace], dict[int, float]] = {}
        for rank, (beat, place) in last_beats.items():
            groups.setdefault((beat.step, beat.nth, beat.phase, place), {})[rank] = beat.age_s()
        silent = [rank for rank in range(self._size) if rank not in last_beats]
        front = max(groups)[:2] if groups else (0, 0)
        together = not silent and all(group[:2] == front for group in groups)
        waiting = {place.waits for *_, place in groups if place.text}
        lines = [f"{console.name_ranks(silent)} behind: nothing heard since the start"] if silent else []
        for (step, nth, phase, place), ages_s in sorted(groups.items()):
            if not together:
                position = "in front" if (step, nth) == front else "behind"
            # Some ranks wait in a collective that the other ranks have not entered: those are the ones that hang.
            elif len(waiting) > 1 and place.text:
                position = "waiting" if place.waits else "hanging"
            else:
                position = "together" if len(groups) == 1 else "as far as others"
            ranks, for_s = console.name_ranks([*ages_s]), max(ages_s.values())
            where = f", in {place.text}" if place.text else ""
            lines.append(f"{ranks} {position}: step {step} in {phase}, for {for_s:.0f} s{where}")
        return "\n".join(lines)

    def report_stuck(self, until: str) -> int:
        """Print that this rank leaves without a save after a signal, and record it.

        Args:
            until: limit before which no step ended, in words: "in 20 s", or what ended the process.

        Returns:
            The exit code.
        """
        reason = _stuck_reason(until)
        console.say(self._exit_line(exit_codes.STUCK, reason))
        self.record_exit(exit_codes.STUCK, reason)
        self._write_record()
        return exit_codes.STUCK

    def record_exit(self, code: int, reason: str) -> bool:
        """Record why this rank leaves, or why another one left first: that is the reason of the whole job.

        Whatever ends a later rank, a broken collective or the launcher, is a consequence of the first exit.

        Returns:
            False if another rank is known to have left first.
        """
        self._exit_status.set(code, reason)
        if self._reader is None:
            return True
        mine = f"{code} rank {self.rank}: {reason}"
        try:
            first = self._reader.compare_set("left", "", mine).decode()
        except RuntimeError:
            # The store may have gone with the first rank.
            return True
        if first != mine:
            its_code, its_reason = first.split(" ", 1)
            self._exit_status.set(int(its_code), its_reason)
        return first == mine

    def report_first_exit(self, error: RuntimeError) -> int:
        """Print that this rank leaves because another rank left first, as `record_exit` found.

        Args:
            error: error with which the exit of the other rank has reached this one.

        Returns:
            The exit code, which is that of the other rank.
        """
        code, reason = self._exit_status.code, self._exit_status.reason
        assert code is not None
        # The reason begins with the other rank: "rank 2: ...".
        first_rank = reason.partition(": ")[0]
        console.say(self._exit_line(code, f"leaving after {first_rank} ({exit_codes.error_summary(error)})"))
        # The record of the rank that hung says little without those of the ranks that waited for it.
        if code in (exit_codes.HUNG, exit_codes.STUCK):
            self._write_record()
        return code

    def close(self) -> None:
        """Stop watching, and restore the signal handlers."""
        signal.set_wakeup_fd(self._fd_before)
        for number, handler in self._handlers_before.items():
            # None: the handler was not set by Python, and Python cannot set it again.
            signal.signal(number, handler or signal.SIG_DFL)
        self._alarm.send(bytes([CLOSE]))
        self._thread.join()
        self._inbox.close()
        self._alarm.close()

    def _publish(self) -> None:
        if self._store is None:
            return
        step, nth, at_s, phase = self._last
        try:
            self._store.set(f"beat/{self.rank}", f"{step} {nth} {at_s:.3f} {phase}")
        # The beats only serve a report, so a broken store does not end the run.
        except RuntimeError as error:
            self._store = None
            console.say(f"rank {self.rank}: beats are no longer shared: {error}")

    def _publish_place(self) -> None:
        """Publish where the main thread is. Any rank may be the one that makes the report."""
        if self._reader is None:
            return
        beat = self._last
        waits, text = _place_of_main_thread()
        # If the store is gone, the report will say so.
        with suppress(RuntimeError):
            self._reader.set(f"place/{self.rank}", f"{beat.step} {beat.nth} {int(waits)} {text}")

    def _read(self, store: Store) -> dict[int, tuple[Beat, CodePlace]]:
        """The last beat of each rank that has sent one, and its place in the code during that beat.

        Raises:
            RuntimeError: the store does not answer.
        """
        heard = [rank for rank in range(self._size) if store.check([f"beat/{rank}"])]
        beats = [_parse(text) for text in store.multi_get([f"beat/{rank}" for rank in heard])]
        last_beats = {rank: (beat, CodePlace(False, "")) for rank, beat in zip(heard, beats, strict=True)}
        placed = [rank for rank in heard if store.check([f"place/{rank}"])]
        for rank, value in zip(placed, store.multi_get([f"place/{rank}" for rank in placed]), strict=True):
            step, nth, waits, text = value.decode().split(" ", 3)
            beat, _ = last_beats[rank]
            # A place that was published during an earlier beat says nothing about this one.
            if (beat.step, beat.nth) == (int(step), int(nth)):
                last_beats[rank] = beat, CodePlace(waits == "1", text)
        return last_beats

    def _watch(self) -> None:
        """Watch the main thread until `close()`, or until the process has to end."""
        seen = self._last
        saves = self._saves
        signalled = False
        idle_s = 0.0  # since the last beat
        waited_s = 0.0  # since a signal, or since the end of a save after it
        before = time.monotonic()
        while True:
            if select.select([self._inbox], [], [], POLL_S)[0]:
                arrived = self._inbox.recv(4096)
                if CLOSE in arrived:
                    return
                signalled = signalled or any(number in process.SIGNALS for number in arrived)
            # Only time in which this thread ran counts: a process that was stopped (Ctrl-Z, a debugger) did not hang.
            now = time.monotonic()
            passed_s = min(now - before, 5 * POLL_S)
            before = now

            last = self._last
            idle_s = idle_s + passed_s if last is seen else 0.0
            seen = last

            saved = self._saves > saves
            saves = self._saves
            waited_s = waited_s + passed_s if signalled and last.phase != SAVING and not saved else 0.0
            if waited_s > self.grace_s:
                self._end(exit_codes.STUCK, _stuck_reason(f"in {self.grace_s:g} s"))

            # All ranks publish their places in time for the report of the first rank whose timeout is over.
            if 0 < self.timeout_s / 2 < idle_s and self._placed is not last:
                self._placed = last
                self._publish_place()
            if 0 < self.timeout_s < idle_s:
                self._end(exit_codes.HUNG, f"nothing for {idle_s:.0f} s")

    def _end(self, code: int, reason: str) -> NoReturn:
        """Record the reason, print the report, and end the process."""
        # A C thread ends the process with code 1 if the report hangs too: in the store, or in a full stdout.
        faulthandler.dump_traceback_later(REPORT_S, exit=True)
        try:
            self._exit_status.set(code, reason)
            self._exit_status.write()  # before the store, which may not answer
            self.record_exit(code, reason)
            self._exit_status.write()
            self._publish_place()
            line = self._exit_line(code, reason)
            first = code == exit_codes.HUNG and self._is_first("hung")
            console.say(f"{line}\n{self.who_is_behind()}" if first else line)
            # Ranks that only wait for others print one line. The others also print where they are.
            if code == exit_codes.HUNG and (first or not _place_of_main_thread().waits):
                faulthandler.dump_traceback(all_threads=True)
            if self._callback is not None:
                faulthandler.dump_traceback_later(CALLBACK_S, exit=True)
                self._callback()
            # Last, because nccl's recorder asks CUDA, whose answer may not come, and then no Python runs any more.
            if self._records is not None:
                faulthandler.dump_traceback_later(RECORD_S, exit=True)
                self._write_record()
        finally:
            process.leave(code)

    def _write_record(self) -> None:
        """Write the flight recorder's record. The first rank that has one prints how to read those of all ranks."""
        if self._records is None:
            return
        folder = self._records / self._start
        path = flight_recorder.dump(folder, self.rank)
        if path and self._is_first("recorded"):
            read = f"torchfrtrace {shlex.quote(str(folder))}"
            console.say(f"rank {self.rank}: last collectives in {path}; to compare those of all ranks: {read}")

    def _exit_line(self, code: int, reason: str) -> str:
        return f"rank {self.rank}: {reason}, at step {self._last.step} in {self._last.phase} (exit code {code})"

    def _is_first(self, key: str) -> bool:
        """True if this rank is the first of all to ask this. Only the first one prints what concerns all ranks."""
        try:
            return self._reader is None or self._reader.add(key, 1) == 1
        except RuntimeError:
            return True


def _stuck_reason(until: str) -> str:
    return f"a signal came, and no step boundary {until}: leaving without a save"


def _parse(text: bytes) -> Beat:
    step, nth, at_s, phase = text.decode().split(" ", 3)
    return Beat(int(step), int(nth), float(at_s), phase)


def _place_of_main_thread() -> CodePlace:
    return place_of(sys._current_frames().get(threading.main_thread().ident or 0))


def place_of(frame: FrameType | None) -> CodePlace:
    """The place of a thread in the code. It waits if only frames of torch are inside the call of torch.distributed.

    Args:
        frame: the thread's innermost frame; None if there is no such thread.
    """
    if frame is None:
        return CodePlace(False, "")
    torch = getattr(sys.modules.get("torch"), "__path__", ["torch is not imported"])[0]
    torch_paths = (torch, STANDARD_LIBRARY, "<frozen")
    innermost, waits, only_torch = frame, False, True
    # From the innermost frame outwards, through all frames of libraries.
    while frame is not None and _is_library(path := frame.f_code.co_filename, torch_paths):
        # torch's pipeline schedule is in torch.distributed as well, but further out than the frames of the stage that
        # it runs. A stage that hangs does not wait.
        only_torch = only_torch and path.startswith(torch_paths)
        waits = waits or (only_torch and path.startswith(os.path.join(torch, "distributed")))
        frame = frame.f_back
    called_by = f", called by {_line(frame)}" if frame is not None and frame is not innermost else ""
    return CodePlace(waits, _line(innermost) + called_by)


def _is_library(path: str, torch_paths: tuple[str, ...]) -> bool:
    """True for a file of a library or of Python. dtmega's own files may be in site-packages too."""
    installed = f"{os.sep}site-packages{os.sep}" in path or path.startswith(torch_paths)
    return installed and not path.startswith(OUR_CODE)


def _line(frame: FrameType) -> str:
    """Function, file and line of a frame: "step (train.py:12)"."""
    return f"{frame.f_code.co_name} ({os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno})"
