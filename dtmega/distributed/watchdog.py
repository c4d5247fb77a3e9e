"""A thread that watches the main one: ends what is stuck after a signal, or hangs, and says which rank it is.

    rank 1 behind: step 7 in data, for 600 s, in select (selectors.py:415), called by __next__ (loader.py:141)
    ranks 0, 2, 3 in front: step 7 in forward, for 599 s, in all_reduce (distributed_c10d.py:3081), called by ...

Ranks that came equally far are told apart by the innermost frame of their main threads: one in a collective waits for
the others, one elsewhere has not come to it.
"""

from __future__ import annotations

import faulthandler
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, NamedTuple, NoReturn

from dtmega.distributed import exit_codes, process
from dtmega.files import console

if TYPE_CHECKING:
    from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]  # documented, missing in __all__

SAVING = "checkpoint"  # the phase in which a signal has to wait
POLL_S = 0.2
REPORT_S = 10.0  # for the report of a hang; the store may be what hangs
FAREWELL_S = 10.0  # for what the process has to close before it is ended, should that not end by itself
CLOSE = 0  # no signal has this number
OURS = str(Path(__file__).resolve().parents[1])
STANDARD_LIBRARY = os.path.dirname(os.__file__)


class Beat(NamedTuple):
    """The place of a rank in the run. All beat the same phases in the same order, so (step, nth) says who is ahead.

    Attributes:
        nth: beat of this step.
        at_s: wall-clock time, which the hosts of a job share well enough for a report.
    """

    step: int
    nth: int
    at_s: float
    phase: str

    def age_s(self) -> float:
        return max(0.0, time.time() - self.at_s)


class CodePlace(NamedTuple):
    """The line of code that a main thread is in.

    Attributes:
        waits: in a collective, for other ranks.
        text: its innermost frame, and the innermost one that is not a library's; '' where that is not known.
    """

    waits: bool
    text: str


class Watch:
    """A thread that watches the main thread, which may sit in a collective where no Python handler runs.

    From here to `close()` `job.SIGNALS` are only added to `signals`, for the loop to look at after each step; a SIGHUP
    that is ignored already, as `nohup` does it, stays so. What the thread does by itself is to end the process: with
    STUCK when a signal came and the loop did not come to SAVING, nor to its end, in grace_s; with HUNG when there was
    no beat for timeout_s. Main thread only.

    Args:
        grace_s: from the signal, and again from the end of a save; during a save there is no limit but torchrun's
            `--shutdown-timeout` (30 s unless set) and timeout_s.
        timeout_s: longer than anything between two beats, the first step's compilation included; 0 = no limit.
        rank: of this process.
        exit_status: what to tell of the end, if the thread makes it.
    """

    def __init__(
        self, grace_s: float, timeout_s: float, rank: int, exit_status: exit_codes.ExitStatus | None = None
    ) -> None:
        self.signals: list[int] = []
        self._exit_status = exit_codes.ExitStatus() if exit_status is None else exit_status
        self.grace_s, self.timeout_s, self.rank = grace_s, timeout_s, rank
        self._last, self._saves = Beat(0, 0, time.time(), "start"), 0
        self._placed: Beat | None = None  # whose place in the code has been published
        self._store: Store | None = None
        self._reader: Store | None = None
        self._size = 1
        self._inbox, self._alarm = socket.socketpair()
        self._alarm.setblocking(False)
        # The C half of a signal handler writes the signal's number here at once, whatever the main thread is doing.
        self._fd_before = signal.set_wakeup_fd(self._alarm.fileno(), warn_on_full_buffer=False)
        heard = [n for n in process.SIGNALS if n != signal.SIGHUP or signal.getsignal(n) != signal.SIG_IGN]
        self._before = {n: signal.signal(n, lambda number, _: self.signals.append(number)) for n in heard}
        self._farewell: Callable[[], None] | None = None
        self._thread = threading.Thread(target=self._watch, name="watch", daemon=True)
        self._thread.start()

    def share(self, store: Store, size: int) -> None:
        """Keep the beats of the `size` ranks in `store` from now on, a connection that nothing else uses."""
        self._size, self._store, self._reader = size, store, store.clone()  # pyright: ignore[reportAttributeAccessIssue]  # missing in the stub
        self._publish()

    def before_the_end(self, farewell: Callable[[], None]) -> None:
        """Have this called, by another thread than the main one, before the process is ended; it takes seconds."""
        self._farewell = farewell

    def beat(self, step: int, phase: str) -> None:
        """Say what this rank does from now on ("data", "forward", "evaluation", SAVING, ...). Microseconds."""
        last = self._last
        self._saves += last.phase == SAVING
        self._last = Beat(step, last.nth + 1 if step == last.step else 0, time.time(), phase)
        self._publish()

    def enter(self, phase: str) -> None:
        """`beat`, in the step of the last one."""
        self.beat(self._last.step, phase)

    def who_is_behind(self) -> str:
        """Name the ranks that did not come as far as the others, and where all of them are; one line per place.

        Where ranks are in the code is known of those that have been silent for half of timeout_s.
        """
        last = self._last
        if self._reader is None:
            return f"rank {self.rank}: step {last.step} in {last.phase}, for {last.age_s():.0f} s"
        try:
            found = self._read(self._reader)
        except RuntimeError as error:
            return f"the store does not say who is behind: {error}"
        groups: dict[tuple[int, int, str, CodePlace], dict[int, float]] = {}
        for rank, (beat, place) in found.items():
            groups.setdefault((beat.step, beat.nth, beat.phase, place), {})[rank] = beat.age_s()
        silent = [rank for rank in range(self._size) if rank not in found]
        front = max(groups)[:2] if groups else (0, 0)
        together = not silent and all(group[:2] == front for group in groups)
        waiting = {place.waits for *_, place in groups if place.text}
        lines = [f"{console.name_ranks(silent)} behind: nothing heard since the start"] if silent else []
        for (step, nth, phase, place), ages_s in sorted(groups.items()):
            if not together:
                how = "in front" if (step, nth) == front else "behind"
            elif len(waiting) > 1 and place.text:
                how = "waiting" if place.waits else "hanging"
            else:
                how = "together" if len(groups) == 1 else "as far as others"
            for_s, where = max(ages_s.values()), f", in {place.text}" if place.text else ""
            lines.append(f"{console.name_ranks([*ages_s])} {how}: step {step} in {phase}, for {for_s:.0f} s{where}")
        return "\n".join(lines)

    def stuck(self, until: str) -> int:
        """Say that a signal came and no step ended `until` something else ended this process. Returns the exit code."""
        why = _stuck(until)
        console.say(self._leaving(exit_codes.STUCK, why))
        self.leaving_alone(exit_codes.STUCK, why)
        return exit_codes.STUCK

    def leaving_alone(self, code: int, reason: str) -> bool:
        """Set the exit_status of a rank that leaves while others may not know it: the first one's is that of the job.

        What a rank meets later, a broken collective or a launcher that ends it, follows from that.

        Returns:
            False if another rank is known to have left before.
        """
        self._exit_status.set(code, reason)
        if self._reader is None:
            return True
        mine = f"{code} rank {self.rank}: {reason}"
        try:
            first = self._reader.compare_set("left", "", mine).decode()
        except RuntimeError:  # the store may be gone with the first one
            return True
        if first != mine:
            its_code, its_reason = first.split(" ", 1)
            self._exit_status.set(int(its_code), its_reason)
        return first == mine

    def followed(self, error: RuntimeError) -> int:
        """Say that this rank leaves because another one has; returns the exit code, which is that one's."""
        code, why = self._exit_status.code, self._exit_status.reason
        assert code is not None
        console.say(self._leaving(code, f"leaving after {why.partition(': ')[0]} ({exit_codes.error_summary(error)})"))
        return code

    def close(self) -> None:
        """Stop watching; signals do again what they did before."""
        signal.set_wakeup_fd(self._fd_before)
        for number, handler in self._before.items():
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
        except RuntimeError as error:  # beats are for a report: they do not end a run that could go on
            self._store = None
            console.say(f"rank {self.rank}: beats are no longer shared: {error}")

    def _publish_place(self) -> None:
        """Publish where the main thread is, for the report of whichever rank makes it."""
        if self._reader is None:
            return
        beat = self._last
        waits, text = _place_of_main_thread()
        with suppress(RuntimeError):  # the report will say so
            self._reader.set(f"place/{self.rank}", f"{beat.step} {beat.nth} {int(waits)} {text}")

    def _read(self, store: Store) -> dict[int, tuple[Beat, CodePlace]]:
        """The last beat of each rank that has been heard of, and where it was then in the code.

        Raises:
            RuntimeError: the store does not answer.
        """
        begun = [rank for rank in range(self._size) if store.check([f"beat/{rank}"])]
        beats = [_parse(text) for text in store.multi_get([f"beat/{rank}" for rank in begun])]
        found = {rank: (beat, CodePlace(False, "")) for rank, beat in zip(begun, beats, strict=True)}
        placed = [rank for rank in begun if store.check([f"place/{rank}"])]
        for rank, value in zip(placed, store.multi_get([f"place/{rank}" for rank in placed]), strict=True):
            step, nth, waits, text = value.decode().split(" ", 3)
            beat, _ = found[rank]
            if (beat.step, beat.nth) == (int(step), int(nth)):
                found[rank] = beat, CodePlace(waits == "1", text)
        return found

    def _watch(self) -> None:
        seen = self._last
        saves = self._saves
        signalled = False
        idle_s = 0.0  # without a beat
        waited_s = 0.0  # since a signal, or since the end of a save after it
        before = time.monotonic()
        while True:
            if select.select([self._inbox], [], [], POLL_S)[0]:
                arrived = self._inbox.recv(4096)
                if CLOSE in arrived:
                    return
                signalled = signalled or any(number in process.SIGNALS for number in arrived)
            # Seconds in which this thread ran too: a process that was stopped (Ctrl-Z, a debugger) did not hang.
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
                self._end(exit_codes.STUCK, _stuck(f"in {self.grace_s:g} s"))

            if 0 < self.timeout_s / 2 < idle_s and self._placed is not last:
                self._placed = last
                self._publish_place()
            if 0 < self.timeout_s < idle_s:
                self._end(exit_codes.HUNG, f"nothing for {idle_s:.0f} s")

    def _end(self, code: int, why: str) -> NoReturn:
        # A C thread ends the process with code 1 if the report hangs too: in the store, or in a full stdout.
        faulthandler.dump_traceback_later(REPORT_S, exit=True)
        try:
            self._exit_status.set(code, why)
            self._exit_status.write()  # before the store, which may not answer
            self.leaving_alone(code, why)
            self._exit_status.write()
            self._publish_place()
            text = self._leaving(code, why)
            first = code == exit_codes.HUNG and self._is_first()
            console.say(f"{text}\n{self.who_is_behind()}" if first else text)
            # Ranks that only wait for others leave in one line; of the others it matters where they are.
            if code == exit_codes.HUNG and (first or not _place_of_main_thread().waits):
                faulthandler.dump_traceback(all_threads=True)
            if self._farewell is not None:
                faulthandler.dump_traceback_later(FAREWELL_S, exit=True)
                self._farewell()
        finally:
            process.leave(code)

    def _leaving(self, code: int, why: str) -> str:
        return f"rank {self.rank}: {why}, at step {self._last.step} in {self._last.phase} (exit code {code})"

    def _is_first(self) -> bool:
        """Tell whether this rank is the first of all to report a hang: one table is enough."""
        try:
            return self._reader is None or self._reader.add("hung", 1) == 1
        except RuntimeError:
            return True


def _stuck(until: str) -> str:
    return f"a signal came, and no step boundary {until}: leaving without a save"


def _parse(text: bytes) -> Beat:
    step, nth, at_s, phase = text.decode().split(" ", 3)
    return Beat(int(step), int(nth), float(at_s), phase)


def _place_of_main_thread() -> CodePlace:
    return place_of(sys._current_frames().get(threading.main_thread().ident or 0))


def place_of(frame: FrameType | None) -> CodePlace:
    """The place of a thread whose innermost frame this is; it waits if it came there through torch.distributed."""
    if frame is None:
        return CodePlace(False, "")
    torch = getattr(sys.modules.get("torch"), "__path__", ["torch is not imported"])[0]
    of_torch = (torch, STANDARD_LIBRARY, "<frozen")
    innermost, waits, only_torch = frame, False, True
    while frame is not None and _is_library(path := frame.f_code.co_filename, of_torch):
        # A model that hangs may have been called by torch's pipeline schedule, which is there too, but further out.
        only_torch = only_torch and path.startswith(of_torch)
        waits = waits or (only_torch and path.startswith(os.path.join(torch, "distributed")))
        frame = frame.f_back
    called_by = f", called by {_line(frame)}" if frame is not None and frame is not innermost else ""
    return CodePlace(waits, _line(innermost) + called_by)


def _is_library(path: str, of_torch: tuple[str, ...]) -> bool:
    installed = f"{os.sep}site-packages{os.sep}" in path or path.startswith(of_torch)
    return installed and not path.startswith(OURS)


def _line(frame: FrameType) -> str:
    """step (train.py:12)"""
    return f"{frame.f_code.co_name} ({os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno})"
