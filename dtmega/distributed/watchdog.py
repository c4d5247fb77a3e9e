"""A thread that ends the process and names the rank to blame if the main thread hangs or is stuck after a signal.

    rank 1 behind: step 7 in data, for 600 s, in select (selectors.py:415), called by __next__ (loader.py:141)
    ranks 0, 2, 3 in front: step 7 in counts, for 599 s, in all_reduce (distributed_c10d.py:3081), called by ...

If all ranks are in the same phase, the innermost frames of the main threads show which rank hangs: a rank inside a
collective waits for the other ranks; a rank elsewhere has not reached the collective. A rank whose own watch is silent
is in a process that is stopped. The watch also writes the record of torch's flight recorder
(`dtmega/distributed/flight_recorder.py`), which names that collective.
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
from datetime import datetime, timedelta, timezone
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, NamedTuple, NoReturn

from dtmega.distributed import exit_codes, flight_recorder, process
from dtmega.files import console

if TYPE_CHECKING:
    from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]  # documented, missing in __all__

SAVING = "checkpoint"  # the phase in which a signal does not end the process
POLL_S = 0.2
REPORT_S = 10.0  # time limit for the report of a hang, because the store may hang too
FIRST_S = 2.0  # time limit for the other ranks' wait until the first rank has recorded who hangs
CALLBACK_S = 10.0  # time limit for the callback before the exit
RECORD_S = 10.0  # time limit for writing the flight recorder's record; flight_recorder.PATIENCE_S is shorter
CLOSE = 0  # byte that ends the thread; no signal has this number
OUR_CODE = str(Path(__file__).resolve().parents[1])
STANDARD_LIBRARY = os.path.dirname(os.__file__)


class Beat(NamedTuple):
    """A message that a rank sends when it begins a phase of a step.

    All ranks go through the phases in the same order, so a comparison of (step, nth) shows which rank is ahead.

    Attributes:
        step: step number.
        nth: index of the beat in this step, from 0.
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
    """The point in the code that a rank's main thread has reached.

    Attributes:
        waits: whether the thread waits for other ranks in a collective.
        text: the thread's innermost frame, and its innermost frame outside libraries; '' if the frames are not known.
    """

    waits: bool
    text: str


NO_ANSWER = CodePlace(False, "a process that does not answer: it is stopped, or its machine is gone")


class Watch:
    """A thread that watches the main thread, because the main thread handles no signals while a collective blocks it.

    Until `close()`, each signal in `process.SIGNALS` only appends its number to the list `signals`. The training loop
    reads this list after each step. A SIGHUP that is already ignored, as under `nohup`, stays ignored.

    The thread ends the process with exit code STUCK if the loop neither begins a save nor ends within grace_s of a
    signal, and with exit code HUNG if there is no beat for timeout_s.

    Only the main thread may create and close a watch, because only the main thread may set signal handlers.

    Args:
        grace_s: seconds that the loop may take after a signal, and again after the end of a save. During a save, only
            timeout_s and torchrun's `--shutdown-timeout` (30 s by default) limit the time.
        timeout_s: longest time between two beats, in seconds; 0 for no limit. A limit must be longer than the
            compilation in the first step.
        rank: rank of this process.
        exit_status: object that records the exit code and the reason if the thread ends the process; None to record
            nothing.
        records: folder for the flight recorder's files, with a subfolder for each attempt; None to write no files.

    Attributes:
        signals: signal numbers received so far.
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
        # The newest beat of this rank at the time when the rank last published its place in the code.
        self._placed: Beat | None = None
        # Two connections to the store: `_store` for the main thread's beats, `_reader` for the watching thread.
        self._store: Store | None = None
        self._reader: Store | None = None
        self._size = 1
        self._records, self._start = records, datetime.now(timezone.utc).strftime("%Y-%m-%dT%H-%M-%S")
        self._inbox, self._alarm = socket.socketpair()
        self._alarm.setblocking(False)
        # Python's C-level signal handler writes the signal's number to this socket at once, even if the main thread is
        # blocked.
        self._fd_before = signal.set_wakeup_fd(self._alarm.fileno(), warn_on_full_buffer=False)
        handled = [n for n in process.SIGNALS if n != signal.SIGHUP or signal.getsignal(n) != signal.SIG_IGN]
        self._handlers_before = {n: signal.signal(n, lambda number, _: self.signals.append(number)) for n in handled}
        self._callback: Callable[[], None] | None = None
        self._thread = threading.Thread(target=self._watch, name="watch", daemon=True)
        self._thread.start()

    def share(self, store: Store, size: int) -> None:
        """Share beats through a store from now on: publish this rank's beats and read the other ranks' beats.

        Args:
            store: connection to the store, used by no other code. The watching thread uses a clone of this
                connection, because the main thread may hang while using the original.
            size: number of ranks.
        """
        self._size, self._store, self._reader = size, store, store.clone()  # pyright: ignore[reportAttributeAccessIssue]  # missing in the stub
        if self._records is not None:
            # The name of this attempt's folder is a time, equal on all ranks. The ranks agree on the time now, because
            # the store may be gone when the folder is needed.
            self._start = store.compare_set("start", "", self._start).decode()
        self._publish()

    def before_exit(self, callback: Callable[[], None]) -> None:
        """Set a function that the watching thread calls before ending the process; CALLBACK_S limits the call."""
        self._callback = callback

    def beat(self, step: int, phase: str) -> None:
        """Report that this rank begins a phase: "data", "reduce", "evaluation", SAVING, ... A call takes microseconds.

        Args:
            step: step number.
            phase: name of the phase.
        """
        last = self._last
        self._saves += last.phase == SAVING
        self._last = Beat(step, last.nth + 1 if step == last.step else 0, time.time(), phase)
        self._publish()

    def who_is_behind(self) -> str:
        """Describe where each rank is and which ranks are behind. Ranks at the same point share a line.

        The place in the code is known only for ranks that have sent no beat for half of timeout_s.
        """
        return "\n".join(self._positions()[0])

    def _positions(self) -> tuple[list[str], str]:
        """The lines of `who_is_behind`, and the first of them about ranks that others wait for; '' if there is none."""
        last = self._last
        if self._reader is None:
            return [f"rank {self.rank}: step {last.step} in {last.phase}, for {last.age_s():.0f} s"], ""
        try:
            last_beats = self._read(self._reader)
        except RuntimeError as error:
            return [f"the store does not say who is behind: {error}"], ""
        groups: dict[tuple[int, int, str, CodePlace], dict[int, float]] = {}
        for rank, (beat, place) in last_beats.items():
            # The thread of a rank that lives has published the rank's place after half of timeout_s.
            if not place.text and 0 < 0.75 * self.timeout_s < beat.age_s():
                place = NO_ANSWER
            groups.setdefault((beat.step, beat.nth, beat.phase, place), {})[rank] = beat.age_s()
        silent = [rank for rank in range(self._size) if rank not in last_beats]
        front = max(groups)[:2] if groups else (0, 0)
        together = not silent and all(group[:2] == front for group in groups)
        waiting = {place.waits for *_, place in groups if place.text}
        lines = [f"{console.name_ranks(silent)} behind: nothing heard since the start"] if silent else []
        named = [*lines]
        for (step, nth, phase, place), ages_s in sorted(groups.items()):
            if not together:
                position = "in front" if (step, nth) == front else "behind"
            # Some ranks wait in a collective. The ranks that have not entered this collective hang.
            elif place is NO_ANSWER or (len(waiting) > 1 and place.text):
                position = "waiting" if place.waits else "hanging"
            else:
                position = "together" if len(groups) == 1 else "as far as others"
            ranks, for_s = console.name_ranks([*ages_s]), max(ages_s.values())
            where = f", in {place.text}" if place.text else ""
            lines.append(f"{ranks} {position}: step {step} in {phase}, for {for_s:.0f} s{where}")
            named += [lines[-1]] if position in ("behind", "hanging") else []
        return lines, next(iter(named), "")

    def report_stuck(self, until: str) -> int:
        """Print and record that this rank exits without saving after a signal.

        Args:
            until: end of the message, after the words "no step boundary", such as "in 20 s" or "before this: ERROR".

        Returns:
            The exit code.
        """
        reason = _stuck_reason(until)
        console.say(self._exit_line(exit_codes.STUCK, reason))
        self.record_exit(exit_codes.STUCK, reason)
        self._write_record()
        return exit_codes.STUCK

    def record_exit(self, code: int, reason: str) -> bool:
        """Record why this rank exits. If another rank exited first, record that rank's reason instead.

        The first exit explains the end of the whole job. The other ranks exit as a consequence: a collective breaks, or
        the launcher kills these ranks.

        Returns:
            False if another rank is known to have exited first.
        """
        self._exit_status.set(code, reason)
        if self._reader is None:
            return True
        mine = f"{code} rank {self.rank}: {reason}"
        try:
            first = self._reader.compare_set("left", "", mine).decode()
        except RuntimeError:
            # The store may be gone, because the rank that exited first may have served the store.
            return True
        if first != mine:
            its_code, its_reason = first.split(" ", 1)
            self._exit_status.set(int(its_code), its_reason)
        return first == mine

    def report_first_exit(self, error: RuntimeError) -> int:
        """Print that this rank exits because another rank exited first. Call this only if `record_exit` returned False.

        Args:
            error: error that the other rank's exit caused on this rank.

        Returns:
            The exit code of the other rank.
        """
        code, reason = self._exit_status.code, self._exit_status.reason
        assert code is not None
        # The reason begins with the name of the other rank: "rank 2: ...".
        first_rank = reason.partition(": ")[0]
        console.say(self._exit_line(code, f"leaving after {first_rank} ({exit_codes.error_summary(error)})"))
        # The flight record of the rank that hung is of little use without the records of the ranks that waited for it.
        if code in (exit_codes.HUNG, exit_codes.STUCK):
            self._write_record()
        return code

    def close(self) -> None:
        """Stop watching and restore the signal handlers."""
        signal.set_wakeup_fd(self._fd_before)
        for number, handler in self._handlers_before.items():
            # None stands for a handler that was not set from Python; Python cannot restore such a handler.
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
        # Beats are only needed for a report, so a broken store does not end the run.
        except RuntimeError as error:
            self._store = None
            console.say(f"rank {self.rank}: beats are no longer shared: {error}")

    def _publish_place(self) -> None:
        """Publish this rank's place in the code, because any rank may print the report."""
        if self._reader is None:
            return
        beat = self._last
        waits, text = _place_of_main_thread()
        # If the store is gone, ignore the error here, because the report will mention that the store is gone.
        with suppress(RuntimeError):
            self._reader.set(f"place/{self.rank}", f"{beat.step} {beat.nth} {int(waits)} {text}")

    def _read(self, store: Store) -> dict[int, tuple[Beat, CodePlace]]:
        """The last beat of each rank that has sent a beat, and the rank's place in the code during that beat.

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
            # Ignore a place that was published during an earlier beat.
            if (beat.step, beat.nth) == (int(step), int(nth)):
                last_beats[rank] = beat, CodePlace(waits == "1", text)
        return last_beats

    def _watch(self) -> None:
        """Watch the main thread until `close()`, or until the process has to end."""
        seen = self._last
        saves = self._saves
        signalled = False
        idle_s = 0.0  # time since the last beat
        waited_s = 0.0  # time since a signal, or since the end of a save that came after the signal
        before = time.monotonic()
        while True:
            if select.select([self._inbox], [], [], POLL_S)[0]:
                arrived = self._inbox.recv(4096)
                if CLOSE in arrived:
                    return
                signalled = signalled or any(number in process.SIGNALS for number in arrived)
            # Count only time in which this thread ran: a process that was stopped (Ctrl-Z, a debugger) did not hang.
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

            # Each rank publishes its place after half the timeout, so all places are known when the first rank reaches
            # its timeout and prints the report.
            if 0 < self.timeout_s / 2 < idle_s and self._placed is not last:
                self._placed = last
                self._publish_place()
            if 0 < self.timeout_s < idle_s:
                self._end(exit_codes.HUNG, f"nothing for {idle_s:.0f} s")

    def _end(self, code: int, reason: str) -> NoReturn:
        """Record the reason, print the report, and end the process."""
        # The report may hang too, in the store or on a blocked stdout. A C thread then ends the process with code 1.
        faulthandler.dump_traceback_later(REPORT_S, exit=True)
        try:
            self._exit_status.set(code, reason)
            self._exit_status.write()  # write before using the store, which may not answer
            self._publish_place()
            lines, named = [self._exit_line(code, reason)], ""
            first = code == exit_codes.HUNG and self._is_first("hung")
            if first:
                positions, named = self._positions()
                lines += positions
                reason += f"; {named}" if named else ""
            elif code == exit_codes.HUNG and self._reader is not None:
                # The first rank records who hangs, and its record counts.
                with suppress(RuntimeError):
                    self._reader.wait(["left"], timedelta(seconds=FIRST_S))
            self.record_exit(code, reason)
            self._exit_status.write()
            console.say("\n".join(lines))
            # A rank that waits for others prints no stacks, unless it is the first and does not know for whom it waits.
            if code == exit_codes.HUNG and (not _place_of_main_thread().waits or (first and not named)):
                faulthandler.dump_traceback(all_threads=True)
            if self._callback is not None:
                faulthandler.dump_traceback_later(CALLBACK_S, exit=True)
                self._callback()
            # Write the flight record last, because nccl's recorder calls CUDA. If CUDA does not answer, no more Python
            # code runs.
            if self._records is not None:
                faulthandler.dump_traceback_later(RECORD_S, exit=True)
                self._write_record()
        finally:
            process.leave(code)

    def _write_record(self) -> None:
        """Write this rank's flight record. The first rank to write prints the command that compares all records."""
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
        """True if this rank is the first to ask for `key`. Only the first rank prints messages about all ranks."""
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
    """Find where in the code a thread is.

    A thread counts as waiting for other ranks if it is in a call to torch.distributed, and all frames inside this call
    belong to torch or Python.

    Args:
        frame: the thread's innermost frame; None if the thread does not exist.
    """
    if frame is None:
        return CodePlace(False, "")
    torch = getattr(sys.modules.get("torch"), "__path__", ["torch is not imported"])[0]
    torch_paths = (torch, STANDARD_LIBRARY, "<frozen")
    innermost, waits, only_torch = frame, False, True
    # Walk from the innermost frame outwards, through all library frames.
    while frame is not None and _is_library(path := frame.f_code.co_filename, torch_paths):
        # torch's pipeline schedule is part of torch.distributed too, but the schedule calls stages, which are not
        # part of torch. Because of `only_torch`, a stage that hangs does not count as waiting.
        only_torch = only_torch and path.startswith(torch_paths)
        waits = waits or (only_torch and path.startswith(os.path.join(torch, "distributed")))
        frame = frame.f_back
    called_by = f", called by {_line(frame)}" if frame is not None and frame is not innermost else ""
    return CodePlace(waits, _line(innermost) + called_by)


def _is_library(path: str, torch_paths: tuple[str, ...]) -> bool:
    """True if a file belongs to a library or to Python. dtmega's own files do not count, even in site-packages."""
    installed = f"{os.sep}site-packages{os.sep}" in path or path.startswith(torch_paths)
    return installed and not path.startswith(OUR_CODE)


def _line(frame: FrameType) -> str:
    """Function, file and line of a frame: "step (train.py:12)"."""
    return f"{frame.f_code.co_name} ({os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno})"
