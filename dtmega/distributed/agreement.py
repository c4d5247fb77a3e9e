"""The start of a job, by all ranks or by none: what they must share is compared, each refusal is said once.

    startup = Startup()
    with startup.step("configuration") as step:  # on every rank
        cfg = load(argv)                         # a ValueError on any rank ends all of them
        step.same = flat(cfg)                    # and so does another value on any rank
    with startup.step("checkpoints") as step:
        if startup.rank == 0:
            step.tell = find(cfg)                # the others have it afterwards
    paths = step.told

Ranks meet at the end of each step in the store of the rendezvous, so this works before there is a process group, whose
making would hang where the ranks disagree. Rank 0 reads what all of them report, prints, and only then tells the
verdict: a launcher kills the other ranks as soon as one exits, and nothing that is still to be printed must be lost.
"""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any, TypeVar

import torch
import xxhash
from torch.distributed import PrefixStore, Store  # pyright: ignore[reportPrivateImportUsage]  # documented

from dtmega import __version__, config, mesh
from dtmega.distributed import exit_codes, process
from dtmega.distributed.rendezvous import GivenUp
from dtmega.files import console

PATIENCE_S = 10.0  # once a rank has refused: how long the others, who may never come, are waited for
LONGEST_POLL_S = 0.5
WORK_S = 1.0  # how often a rank says that it works
SHOWN_KEYS = 8
SHOWN_CHARACTERS = 100
# Where a node keeps its data; what is in there is compared.
PLACES = ("[data] path", "[data] tokenizer")

T = TypeVar("T")


class Abandoned(Exception):
    """Raised where this rank waits for another one that refuses in this step, and will not come."""


class Refused(Exception):
    """A refusal of some rank to start, which has said why.

    Attributes:
        exit_code: with which every rank leaves.
        reason: as it was printed.
    """

    def __init__(self, exit_code: int, reason: str) -> None:
        super().__init__(f"exit code {exit_code}: {reason}")
        self.exit_code = exit_code
        self.reason = reason


@dataclass
class Step:
    """The things a rank brings to the end of a step, and takes from there.

    Attributes:
        same: by key, what must be equal on all ranks; JSON.
        tell: of rank 0, for the others; JSON.
        told: what rank 0 told, after the end of the step.
    """

    same: Mapping[str, Any] = field(default_factory=dict)
    tell: Any = None
    told: Any = None


@dataclass(frozen=True)
class Refusal:
    """The reason why a rank does not start, and its exit code."""

    reason: str
    exit_code: int


def explained(error: ValueError | OSError, what: str) -> tuple[str, int]:
    """Reason and exit code of what a rank has raised in the step `what`; a disk may be full, or not be written to."""
    if isinstance(error, OSError):
        return f"{what}: {error}", exit_codes.REFUSED
    return str(error), getattr(error, "exit_code", exit_codes.REFUSED)


class Startup:
    """The ranks of a job before they train, or of a command.

    Args:
        program: begins each line that is said.
        explain: reason and exit code of an error, as `explained`.

    Attributes:
        rank, size: as the launcher says.
        store: where the ranks meet, from the end of the first step on.
        timeout_s: how long a rank waits for the others while none of them says that it works.
        beat: called when this rank, or one that it waits for, says that it works.

    Raises:
        Refused: what the launcher says of this process cannot be; it has been printed.
    """

    def __init__(
        self,
        timeout_s: float = mesh.TIMEOUT_S,
        program: str = "dtmega",
        explain: Callable[[ValueError | OSError, str], tuple[str, int]] = explained,
    ) -> None:
        self._program, self._explain = program, explain
        try:
            self.rank, self.size, self.timeout_s = mesh.rank(), mesh.world_size(), timeout_s
        except ValueError as error:
            raise self._refuse(exit_codes.REFUSED, str(error)) from None
        self.store: Store | None = None
        self.beat: Callable[[], object] = int
        self._meeting: Store | None = None
        self._n_steps = 0
        self._n_waits = 0
        self._worked_at = 0.0

    @contextmanager
    def step(self, what: str) -> Iterator[Step]:
        """A part of the start that all ranks go through; at its end they wait for each other.

        Args:
            what: must be the same on all ranks, for the message if `Step.same` is not.

        Raises:
            Refused: on every rank, if any raised in this step, or if they differ, or on those that did come, if not all
                did; it has been printed.
        """
        step, refusal = Step(), None
        try:
            yield step
        except (ValueError, OSError) as error:
            refusal = Refusal(*self._explain(error, what))
        except Abandoned:  # the verdict says why
            pass
        except Exception:
            if self.size == 1:
                raise
            refusal = Refusal(traceback.format_exc(), 1)
        store = self._next_meeting(refusal)
        content = json.dumps(step.same, sort_keys=True, default=str)
        digest = _digest(content)
        store.set(f"same/{digest}", content)
        report = {"same": digest, "reason": refusal and refusal.reason, "exit_code": refusal and refusal.exit_code}
        store.set(f"report/{self.rank}", json.dumps(report))
        if refusal is not None:
            store.set("refused", "")
        if store.add("arrived", 1) == self.size:
            store.set("complete", "")
        verdict = self._judge(store, step, what) if self.rank == 0 else self._hear(store, refusal, what)
        if verdict["exit_code"]:
            self._leave(store)
            raise self._refuse(verdict["exit_code"], verdict["reason"], said=True)
        step.told = verdict["told"]

    def at_work(self, items: Iterable[T]) -> Iterator[T]:
        """The items; before each, this rank says that it works. For what may take longer than timeout_s."""
        for item in items:
            self.work()
            yield item

    def work(self) -> None:
        """Say that this rank works."""
        self.beat()
        if self._meeting is not None and time.monotonic() - self._worked_at > WORK_S:
            self._worked_at = time.monotonic()
            self._meeting.add("work", 1)

    def wait_for_all(self) -> None:
        """Wait until every rank has come here. Unlike a collective, this does not time out while others are at work.

        Raises:
            Abandoned: one has refused in this step.
            RuntimeError: not all ranks came.
        """
        assert self._meeting is not None
        self._n_waits += 1
        store = PrefixStore(f"wait/{self._n_waits}", self._meeting)
        this_step = PrefixStore(str(self._n_steps + 1), self._meeting)
        if store.add("arrived", 1) == self.size:
            store.set("complete", "")

        def patient() -> bool:
            # A rank that refused after all had come here has come, too: then nobody waits in vain.
            if this_step.check(["refused"]) and not store.check(["complete"]):
                raise Abandoned
            return True

        if not self._wait(store, "complete", patient):
            raise RuntimeError(f"not all ranks came in {self.timeout_s:g} s")

    def leave(self) -> None:
        """Leave after the last step, where no process group follows; rank 0, which may hold the store, as the last."""
        assert self._meeting is not None
        self._leave(PrefixStore("end", self._meeting))

    def _next_meeting(self, refusal: Refusal | None) -> Store:
        """A part of the store that only this step uses."""
        try:
            if self._meeting is None:
                self.store = mesh.rendezvous(self.timeout_s)
                # A store may see several starts, of a program that calls the trainer twice.
                n_starts = self.store.add(f"startup/{self.rank}", 1)
                self._meeting = PrefixStore(f"startup/{n_starts}", self.store)
        except (ValueError, RuntimeError) as error:  # torch's are of a store that is gone
            if refusal is not None:  # what this rank has to say must not be lost because it meets nobody
                raise self._refuse(refusal.exit_code, refusal.reason) from None
            said = isinstance(error, GivenUp)
            raise self._refuse(exit_codes.REFUSED, str(error).partition("\n")[0], said=said) from None
        self._n_steps += 1
        return PrefixStore(str(self._n_steps), self._meeting)

    def _judge(self, store: Store, step: Step, what: str) -> dict[str, Any]:
        """Rank 0: read all reports, print what is wrong, publish what follows."""
        complete = self._wait(store, "complete", patient=lambda: not store.check(["refused"]))
        refused = complete or store.check(["refused"])
        came = [rank for rank in range(self.size) if complete or store.check([f"report/{rank}"])]
        if not refused:
            absent = [rank for rank in range(self.size) if rank not in came]
            raise self._not_there(store, absent, what)
        texts = store.multi_get([f"report/{rank}" for rank in came])
        reports = {rank: json.loads(text) for rank, text in zip(came, texts, strict=True)}
        refusals: dict[tuple[str, int], list[int]] = {}
        contents: dict[str, list[int]] = {}
        for rank, report in reports.items():
            if report["reason"] is not None:
                refusals.setdefault((report["reason"], report["exit_code"]), []).append(rank)
            else:
                contents.setdefault(report["same"], []).append(rank)
        said = []
        for (reason, _), ranks in refusals.items():
            who = "" if len(ranks) == self.size else f"{console.name_ranks(ranks)}: "
            self._say_once(store, reason, who)
            said.append(who + reason)
        exit_code = next((code for _, code in refusals), 0)
        if len(contents) > 1:
            values = [(json.loads(store.get(f"same/{digest}")), ranks) for digest, ranks in contents.items()]
            differ = f"the ranks do not have the same {what}: {_differences(values)}"
            console.say(f"{self._program}: {differ}")
            exit_code = exit_code or exit_codes.REFUSED
            said.append(differ)
        verdict = {"exit_code": exit_code, "reason": "; ".join(said), "told": step.tell}
        store.set("verdict", json.dumps(verdict))
        return verdict

    def _hear(self, store: Store, refusal: Refusal | None, what: str) -> dict[str, Any]:
        """The other ranks: wait for the verdict."""
        if not self._wait(store, "verdict", patient=lambda: refusal is None):
            if refusal is None:
                raise self._not_there(store, [0], what)
            self._say_once(store, refusal.reason, f"{console.name_ranks([self.rank])}: ")
            return {"exit_code": refusal.exit_code, "reason": refusal.reason}
        return json.loads(store.get("verdict"))

    def _refuse(self, exit_code: int, reason: str, *, said: bool = False) -> Refused:
        """What to raise, once the reason is said to people, unless it is already, and to torchrun."""
        if not said:
            console.say(f"{self._program}: {reason}")
        process.tell_agent(reason)
        return Refused(exit_code, reason)

    def _not_there(self, store: Store, absent: list[int], what: str) -> Refused:
        """What to raise where ranks are waited for in vain, of which the first one that waits tells."""
        reason = f"{console.name_ranks(absent)} did not come to the end of the step '{what}' in {self.timeout_s:g} s"
        self._say_once(store, reason, "")
        return self._refuse(exit_codes.FAILED, reason, said=True)

    def _say_once(self, store: Store, reason: str, who: str) -> None:
        """Rank 0 says all there is; a rank that it does not come for says its own."""
        if store.add(f"said/{_digest(reason)}", 1) == 1:
            console.say(f"{self._program}: {who}{reason}")

    def _leave(self, store: Store) -> None:
        """Rank 0, which may hold the store, leaves after those that have still to read the verdict."""
        with suppress(RuntimeError):  # the store is gone, and with it whoever held it
            if store.add("read", 1) == self.size:
                store.set("all read", "")
            if self.rank == 0:
                self._wait(store, "all read", patient=lambda: False)

    def _wait(self, store: Store, key: str, patient: Callable[[], bool]) -> bool:
        """Wait for `key`; False if it did not come.

        The wait lasts as long as others work, and timeout_s longer; or PATIENCE_S from when `patient` is false.
        """
        assert self._meeting is not None
        work, poll_s = 0, 0.002
        deadline, hurried = time.monotonic() + self.timeout_s, False
        # Not `store.wait`, which tells a timeout in another way for each kind of store, and a TCPStore on stderr too.
        while not store.check([key]):
            now = time.monotonic()
            if not hurried and not patient():
                deadline, hurried = min(deadline, now + PATIENCE_S), True
            if not hurried and self._meeting.add("work", 0) > work:
                work = self._meeting.add("work", 0)
                deadline = now + self.timeout_s
                self.beat()
            if now > deadline:
                return False
            time.sleep(poll_s)
            poll_s = min(2 * poll_s, LONGEST_POLL_S)
        return True


def same_job(cfg: config.Config, device: torch.device, libraries: Sequence[str]) -> dict[str, Any]:
    """The things, by key, that the ranks of one job share beside their data: configuration, kind of device, versions.

    Args:
        libraries: that the model needs, beside torch.
    """
    sections: dict[str, dict[str, Any]] = cfg.model_dump()
    keys = {f"[{section}] {k}": value for section, values in sections.items() for k, value in values.items()}
    versions = {"dtmega": __version__, "torch": torch.__version__}
    versions |= {library: version(library) for library in libraries}
    return {k: value for k, value in keys.items() if k not in PLACES} | {"device": device.type} | versions


def _differences(contents: Iterable[tuple[Mapping[str, Any], list[int]]]) -> str:
    """`[optim] lr is 0.01 on ranks 0, 2; 0.02 on rank 1`, for each key that differs."""
    contents = list(contents)
    found: list[str] = []
    for key in sorted({key for values, _ in contents for key in values}):
        places: dict[str, list[int]] = {}
        for values, ranks in contents:
            shown = json.dumps(values[key]) if key in values else "not there"
            places.setdefault(shown, []).extend(ranks)
        if len(places) > 1:
            parts = [f"{_short(shown)} on {console.name_ranks(sorted(ranks))}" for shown, ranks in places.items()]
            found.append(f"{key} is {', '.join(parts)}")
    more = f"; and {len(found) - SHOWN_KEYS} more" if len(found) > SHOWN_KEYS else ""
    return "; ".join(found[:SHOWN_KEYS]) + more


def _digest(text: str) -> str:
    return xxhash.xxh3_128_hexdigest(text.encode())


def _short(text: str) -> str:
    return text if len(text) <= SHOWN_CHARACTERS else text[:SHOWN_CHARACTERS] + "..."
