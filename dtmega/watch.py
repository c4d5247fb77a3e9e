"""A thread that watches the main one: ends what is stuck after a signal, or hangs, and says which rank is behind."""

from __future__ import annotations

import faulthandler
import select
import signal
import socket
import threading
import time
from typing import TYPE_CHECKING, NamedTuple, NoReturn

from dtmega import job, output

if TYPE_CHECKING:
    from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]  # documented, missing in __all__

SIGNALS = (signal.SIGTERM, signal.SIGINT)
SAVING = "checkpoint"  # the phase in which a signal has to wait
POLL_S = 0.2
REPORT_S = 10.0  # for the report of a hang; the store may be what hangs
CLOSE = 0  # no signal has this number


class Beat(NamedTuple):
    """Where a rank is. All ranks beat the same phases in the same order, so (step, nth) says who is ahead.

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


class Watch:
    """A thread that watches the main thread, which may sit in a collective where no Python handler runs.

    From here to `close()` SIGTERM and SIGINT are only added to `signals`, for the loop to look at after each step.
    What the thread does by itself is to end the process: with STUCK when a signal came and the loop did not come to
    SAVING, nor to its end, in grace_s; with HUNG when there was no beat for timeout_s. Main thread only.

    Args:
        grace_s: from the signal, and again from the end of a save; during a save there is no limit but torchrun's
            `--shutdown-timeout` (30 s unless set) and timeout_s.
        timeout_s: longer than anything between two beats, the first step's compilation included; 0 = no limit.
        rank: of this process.
    """

    def __init__(self, grace_s: float, timeout_s: float, rank: int) -> None:
        self.signals: list[int] = []
        self.grace_s, self.timeout_s, self.rank = grace_s, timeout_s, rank
        self._last, self._saves = Beat(0, 0, time.time(), "start"), 0
        self._store: Store | None = None
        self._reader: Store | None = None
        self._size = 1
        self._inbox, self._alarm = socket.socketpair()
        self._alarm.setblocking(False)
        # The C half of a signal handler writes the signal's number here at once, whatever the main thread is doing.
        self._fd_before = signal.set_wakeup_fd(self._alarm.fileno(), warn_on_full_buffer=False)
        self._before = {n: signal.signal(n, lambda number, _: self.signals.append(number)) for n in SIGNALS}
        self._thread = threading.Thread(target=self._watch, name="watch", daemon=True)
        self._thread.start()

    def share(self, store: Store, size: int) -> None:
        """From now on the beats of the `size` ranks are in `store`, a connection that nothing else uses."""
        self._size, self._store, self._reader = size, store, store.clone()  # pyright: ignore[reportAttributeAccessIssue]  # missing in the stub
        self._publish()

    def beat(self, step: int, phase: str) -> None:
        """Say what this rank does from now on ("data", "step", "evaluation", SAVING, ...). Microseconds."""
        last = self._last
        self._saves += last.phase == SAVING
        self._last = Beat(step, last.nth + 1 if step == last.step else 0, time.time(), phase)
        self._publish()

    def who_is_behind(self) -> str:
        """Which ranks did not come as far as the others, and where all of them are; one line per place."""
        last = self._last
        if self._reader is None:
            return f"rank {self.rank}: step {last.step} in {last.phase}, for {last.age_s():.0f} s"
        try:
            begun = [rank for rank in range(self._size) if self._reader.check([f"beat/{rank}"])]
            beats = [_parse(text) for text in self._reader.multi_get([f"beat/{rank}" for rank in begun])]
        except RuntimeError as error:
            return f"the store does not say who is behind: {error}"
        places: dict[tuple[int, int, str], dict[int, float]] = {}
        for rank, beat in zip(begun, beats, strict=True):
            places.setdefault((beat.step, beat.nth, beat.phase), {})[rank] = beat.age_s()
        silent = [rank for rank in range(self._size) if rank not in begun]
        lines = [f"{output.name_ranks(silent)} behind: nothing heard since the start"] if silent else []
        for step, nth, phase in sorted(places):
            behind, ages_s = (step, nth) < max(places)[:2], places[step, nth, phase]
            how = "behind" if behind else "in front" if silent or len(places) > 1 else "together"
            lines.append(
                f"{output.name_ranks(list(ages_s))} {how}: step {step} in {phase}, for {max(ages_s.values()):.0f} s"
            )
        return "\n".join(lines)

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
            output.say(f"rank {self.rank}: beats are no longer shared: {error}")

    def _watch(self) -> None:
        seen, saves, signalled, idle_s, waited_s, before = self._last, self._saves, False, 0.0, 0.0, time.monotonic()
        while True:
            if select.select([self._inbox], [], [], POLL_S)[0]:
                arrived = self._inbox.recv(4096)
                if CLOSE in arrived:
                    return
                signalled = signalled or any(number in SIGNALS for number in arrived)
            # Seconds in which this thread ran too: a process that was stopped (Ctrl-Z, a debugger) did not hang.
            now = time.monotonic()
            passed_s, before = min(now - before, 5 * POLL_S), now
            last = self._last
            idle_s, seen = (idle_s + passed_s if last is seen else 0.0), last
            saved, saves = self._saves > saves, self._saves
            waited_s = waited_s + passed_s if signalled and last.phase != SAVING and not saved else 0.0
            if waited_s > self.grace_s:
                self._end(
                    job.STUCK, f"a signal came, and no step boundary in {self.grace_s:g} s: leaving without a save"
                )
            if 0 < self.timeout_s < idle_s:
                self._end(job.HUNG, f"nothing for {idle_s:.0f} s")

    def _end(self, code: int, why: str) -> NoReturn:
        # A C thread ends the process with code 1 if the report hangs too: in the store, or in a full stdout.
        faulthandler.dump_traceback_later(REPORT_S, exit=True)
        try:
            text = f"rank {self.rank}: {why}, at step {self._last.step} in {self._last.phase} (exit code {code})"
            first = code == job.HUNG and self._is_first()
            output.say(f"{text}\n{self.who_is_behind()}" if first else text)
            if code == job.HUNG:
                faulthandler.dump_traceback(all_threads=True)
        finally:
            job.leave(code)

    def _is_first(self) -> bool:
        """Of all ranks to report a hang: one table is enough."""
        try:
            return self._reader is None or self._reader.add("hung", 1) == 1
        except RuntimeError:
            return True


def _parse(text: bytes) -> Beat:
    step, nth, at_s, phase = text.decode().split(" ", 3)
    return Beat(int(step), int(nth), float(at_s), phase)
